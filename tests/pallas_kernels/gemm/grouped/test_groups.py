"""The order of a mixture's rows, for even, skewed and empty routings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gemm.grouped.groups import HeldExperts, list_groups
from pallas_kernels.gemm.grouped.routings import draw_routing


def check(chosen: np.ndarray, num_experts: int, rows: int, align: int) -> None:
    """Check every field of the groups of a routing [T, e]."""
    groups = jax.tree.map(
        np.asarray,
        jax.jit(list_groups, static_argnums=(1, 2, 3))(jnp.asarray(chosen), num_experts, rows, align),
    )
    flat, places = chosen.ravel(), groups.places.ravel()
    assert len(set(places.tolist())) == len(places)
    assert (groups.pairs[places] == np.arange(len(places))).all()
    unused = np.ones(len(groups.pairs), bool)
    unused[places] = False
    assert (groups.pairs[unused] == 0).all()
    sizes = -(-np.bincount(flat, minlength=num_experts) // align) * align
    assert groups.sizes.tolist() == sizes.tolist()
    firsts, tiles = np.cumsum(sizes) - sizes, []
    for expert in range(num_experts):  # in the tokens' order, so that equal batches give equal bits
        own = places[flat == expert]
        assert own.tolist() == list(range(firsts[expert], firsts[expert] + len(own)))
        for start in range(firsts[expert], firsts[expert] + sizes[expert], rows):
            tiles.append((expert, start, min(start + rows, firsts[expert] + sizes[expert])))
    count = int(groups.count[0])
    listed = zip(groups.experts.tolist(), groups.starts.tolist(), groups.ends.tolist(), strict=True)
    assert list(listed)[:count] == tiles and count == len(tiles)
    # A copy of a full tile stays within the rows, from the start of every tile.
    assert all(start + rows <= len(groups.pairs) for _, start, _ in tiles)
    assert groups.rows == rows and len(groups.pairs) % align == 0


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    tokens=st.sampled_from([1, 2, 9]),
    form=st.sampled_from([(1, 1), (8, 8), (16, 8), (32, 8), (128, 128)]),
    experts=st.sampled_from([2, 7]),
)
def test_every_pair_has_a_row_in_a_tile_of_its_expert(data, tokens, form, experts):
    choices = st.permutations(range(experts)).map(lambda order: order[:2])
    check(np.array(data.draw(st.lists(choices, min_size=tokens, max_size=tokens))), experts, *form)


@pytest.mark.parametrize("tokens", [1, 3, 700])  # one token, pairs compared each with each, and blocks
@pytest.mark.parametrize("routing", ["even", "one", "zipf"])
def test_one_few_and_many_pairs_of_every_skew(tokens, routing):
    """One: every token chooses the same experts. Zipf: expert i is chosen with weight (i + 1) ** -1.2."""
    rng, experts, chosen = np.random.default_rng(tokens), 33, 4
    if routing == "one":
        picked = np.tile(np.array([32, 0, 5, 9], np.int32), (tokens, 1))
    else:
        picked = draw_routing(rng, tokens, experts, chosen, 1.2 if routing == "zipf" else 0.0)
    check(picked, experts, 16, 8)


@functools.cache
def share_of(num_experts: int, rows: int, align: int, count: int):
    return jax.jit(
        lambda picked, first: list_groups(picked, num_experts, rows, align, HeldExperts(first, count))
    )


def check_shares(chosen: np.ndarray, num_experts: int, rows: int, align: int, count: int) -> None:
    """Check that the devices' groups together are the groups of one device:
    each row once, in the same order.
    """
    listed = share_of(num_experts, rows, align, count)
    pairs, flat = [], chosen.ravel()
    for first in range(0, num_experts, count):
        groups = jax.tree.map(np.asarray, listed(jnp.asarray(chosen), jnp.int32(first)))
        own = (flat >= first) & (flat < first + count)
        places, used = groups.places.ravel(), int(groups.count[0])
        assert (places[own] < len(groups.pairs)).all() and (places[~own] >= len(groups.pairs)).all()
        assert len(set(places.tolist())) == len(places)
        assert (groups.pairs[places[own]] == np.flatnonzero(own)).all()
        sizes = -(-np.bincount(flat[own] - first, minlength=count) // align) * align
        assert groups.sizes.tolist() == sizes.tolist() and groups.partial
        tiles = list(
            zip(*(getattr(groups, name)[:used] for name in ("experts", "starts", "ends")), strict=True)
        )
        firsts = np.cumsum(sizes) - sizes
        assert [tuple(map(int, tile)) for tile in tiles] == [
            (expert, start, min(start + rows, firsts[expert] + sizes[expert]))
            for expert in range(count)
            for start in range(firsts[expert], firsts[expert] + sizes[expert], rows)
        ]
        assert all(start + rows <= len(groups.pairs) for _, start, _ in tiles)
        pairs += [pair for place, pair in sorted(zip(places[own], np.flatnonzero(own), strict=True))]
    assert pairs == np.argsort(flat, kind="stable").tolist()


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    tokens=st.sampled_from([1, 9]),
    form=st.sampled_from([(1, 1), (16, 8)]),
    count=st.sampled_from([1, 3]),
)
def test_the_devices_of_a_mixture_share_its_rows(data, tokens, form, count):
    """With one expert a device a token has a row on some devices only."""
    choices = st.permutations(range(6)).map(lambda order: order[:4])
    chosen = np.array(data.draw(st.lists(choices, min_size=tokens, max_size=tokens)))
    check_shares(chosen, 6, *form, count)


@pytest.mark.parametrize("tokens", [1, 700])
def test_a_device_without_a_token_has_no_tile(tokens):
    check_shares(np.tile(np.array([32, 0, 5, 9], np.int32), (tokens, 1)), 33, 16, 8, 11)
    check_shares(np.tile(np.array([3, 0, 1], np.int32), (tokens, 1)), 32, 16, 8, 4)


def test_a_skewed_routing_prefers_the_first_experts():
    """Choices of a token differ; Zipf's first expert is in nearly all, and its last in few."""
    picked = draw_routing(np.random.default_rng(0), 400, 64, 4, 1.2)
    assert all(len(set(row)) == 4 for row in picked.tolist())
    loads = np.bincount(picked.ravel(), minlength=64)
    assert loads[0] > 250 > 10 * loads[-1]
    even = np.bincount(draw_routing(np.random.default_rng(0), 400, 64, 4).ravel(), minlength=64)
    assert even.max() < 60

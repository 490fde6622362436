"""The sort of a mixture's rows: the kernel in the interpreter, its fallback, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped.groups import HeldExperts
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.sorted_rows import api, reference
from pallas_kernels.gemm.sorted_rows.gpu_check import used
from pallas_kernels.pointwise.quantize.reference import quantize_blocks, quantize_rows

interpreted = functools.partial(api.sort_rows, interpret=plgpu.InterpretGPUParams())


def given(tokens: int, experts: int, chosen: int, columns: int = 128, zipf: float = 0.0):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.normal(size=(tokens, columns)), jnp.bfloat16)
    return x, jnp.asarray(draw_routing(rng, tokens, experts, chosen, zipf))


by_xla = jax.jit(api.sort_by_xla, static_argnums=2)


# NumPy takes parts of arrays: JAX would compile a program for each shape.
def used_of(sorted_rows) -> list[np.ndarray]:
    return used(*jax.tree.map(np.asarray, sorted_rows))


def rows_of(x, groups, chosen: int, quantize: bool):
    """Return the row of each place of the groups, as the reference quantizes it."""
    every = jax.tree.map(np.asarray, jax.jit(quantize_rows)(x) if quantize else x)
    return jax.tree.map(lambda part: part[np.asarray(groups.pairs) // chosen], every)


def by_pair(sorted_rows) -> list[np.ndarray]:
    """Return each pair's row, or its numbers and its scale, in the tokens' order."""
    groups, rows = jax.tree.map(np.asarray, sorted_rows)
    return [part[groups.places].astype(np.float32) for part in jax.tree.leaves(rows)]


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "zipf"), [(1, 128, 8, 0.0), (9, 130, 4, 1.2), (35, 6, 2, 1.2)]
)
@pytest.mark.parametrize("quantize", [False, True])
def test_the_kernel_gives_the_groups_and_the_bits_of_the_reference(tokens, experts, chosen, zipf, quantize):
    """Test one token, experts that do not fill the threads, and experts with several tiles, on few CTAs."""
    x, picked = given(tokens, experts, chosen, 320 if tokens == 9 else 128, zipf)
    got = interpreted(x, picked, experts, quantize=quantize, sms=1)
    groups = by_xla(x, picked, experts)[0]
    for one, other in zip(used_of(got), used_of((groups, rows_of(x, groups, chosen, quantize))), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (got[0].rows, got[0].align, got[0].partial) == (groups.rows, groups.align, False)
    assert got[0].pairs.shape == groups.pairs.shape
    for one, other in zip(
        by_pair(got), by_pair(reference.sort_rows(x, picked, experts, quantize=quantize)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "zipf", "kept", "held"),
    [(1, 128, 8, 0, None, None), (9, 130, 4, 1.2, 7, None), (35, 6, 2, 1.2, None, 2), (8, 24, 3, 0, 0, None)],
)
def test_the_kernel_that_adds_sorts_as_xla(tokens, experts, chosen, zipf, kept, held):
    x, picked = given(tokens, experts, chosen, zipf=zipf)
    how = {} if kept is None else {"used": jnp.int32(kept)}
    how |= {} if held is None else {"held": HeldExperts(jnp.int32(held), 3), "held_max_tokens": 128}
    quantize = tokens != 9
    got = interpreted(x, picked, experts, quantize=quantize, sms=3, **how)
    sort = jax.jit(functools.partial(api.sort_by_xla, held=how.get("held")), static_argnums=2)
    groups, _ = sort(x, picked, experts, used=how.get("used"))
    for one, other in zip(used_of(got), used_of((groups, rows_of(x, groups, chosen, quantize))), strict=True):
        np.testing.assert_array_equal(one, other)
    missing = np.asarray(groups.places) >= len(groups.pairs)
    np.testing.assert_array_equal(np.asarray(got[0].places) >= len(groups.pairs), missing)
    assert not np.asarray(got[0].arrived).any()


@pytest.mark.parametrize(("tokens", "columns", "used"), [(8, 128, 1), (8, 128, 0), (11, 64, 5), (1, 128, 0)])
def test_padding_gets_no_rows_and_changes_none(tokens, columns, used):
    """XLA sorts rows of 64 columns. The other tokens' rows are those of a step without padding."""
    x, picked = given(tokens, 6, 2, columns)
    groups, rows = interpreted(x, picked, 6, used=jnp.int32(used))
    assert groups.partial and (np.asarray(groups.places)[used:] >= len(groups.pairs)).all()
    assert int(groups.sizes.sum()) == 8 * len(np.unique(np.asarray(picked)[:used]))
    if not used:
        assert int(groups.count[0]) == 0
        return
    alone = interpreted(x[:used], picked[:used], 6)
    tiles = int(groups.count[0])
    assert tiles == int(alone[0].count[0])
    for name in ("experts", "starts", "ends"):
        listed = (np.asarray(getattr(one, name))[:tiles] for one in (groups, alone[0]))
        np.testing.assert_array_equal(*listed)
    np.testing.assert_array_equal(groups.places[:used], alone[0].places)
    np.testing.assert_array_equal(rows[groups.places[:used]], by_pair(alone)[0])


def test_a_tokens_row_does_not_depend_on_the_batch():
    x, picked = given(13, 6, 2)
    together = by_pair(interpreted(x, picked, 6, quantize=True))
    alone = by_pair(interpreted(x[5:6], picked[5:6], 6, quantize=True))
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one[5:6], other)


@pytest.mark.parametrize("columns", [256, 192])
def test_rows_have_the_scales_of_blocks_whether_the_kernel_or_xla_sorts(columns):
    x, picked = given(9, 6, 2, columns)
    assert api.supports(9, 2, 6, columns, blocks=True) == (columns == 256)
    values = jax.tree.map(lambda part: np.asarray(part, np.float32), quantize_blocks(x))
    for sort in (interpreted, reference.sort_rows):
        for one, of_tokens in zip(by_pair(sort(x, picked, 6, blocks=True)), values, strict=True):
            np.testing.assert_array_equal(one, np.repeat(of_tokens[:, None], 2, 1))


def test_xla_sorts_other_sizes_and_where_the_limits_say_so():
    assert api.supports(api.MOST_TOKENS, 8, 128, 2048) and not api.supports(api.MOST_TOKENS + 1, 8, 128, 2048)
    assert not api.supports(8, 2, 6, 64) and not api.supports(200, 2, 2, 128)
    x, picked = given(5, 6, 2, 64)
    groups, rows = api.sort_rows(x, picked, 6)
    assert isinstance(rows, jax.Array)
    np.testing.assert_array_equal(rows[groups.places], jnp.repeat(x[:, None], 2, 1))
    x, picked = given(5, 6, 2)
    for held in (None, HeldExperts(jnp.int32(2), 2)):
        groups, _ = api.sort_rows(x, picked, 6, held=held, max_tokens=4, held_max_tokens=4)
        assert groups.arrived is None  # no kernel sorted
    groups, rows = api.sort_rows(x, picked, 6, held=HeldExperts(jnp.int32(2), 2))
    assert groups.partial and isinstance(rows, jax.Array)
    own = np.asarray((picked >= 2) & (picked < 4))
    places = np.asarray(groups.places)[own]
    np.testing.assert_array_equal(rows[places], x[np.nonzero(own)[0]])


def test_unsupported_arguments_are_named():
    x, picked = given(5, 6, 2)
    for rows, experts in ((x.astype(jnp.float32), picked), (x[1:], picked)):
        with pytest.raises(ValueError, match="accepted are bfloat16"):
            api.sort_rows(rows, experts, 6)
    with pytest.raises(ValueError, match="sms=0: accepted are 1 to 132"):
        api.sort_rows(x, picked, 6, sms=0)


@pytest.mark.parametrize(("quantize", "padded"), [(False, False), (True, False), (True, True)])
def test_for_the_h200_it_is_one_kernel_that_spills_nothing(quantize, padded, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shapes = jax.ShapeDtypeStruct((64, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((64, 8), jnp.int32)
    if padded:
        shapes = *shapes, jax.ShapeDtypeStruct((), jnp.int32)

    def one(x, experts, used=None):
        return api.sort_rows(x, experts, 128, quantize=quantize, used=used)

    compiled = compile_for_h200(one, *abstract(h200_mesh(), shapes))
    assert [thunk.kind for thunk in compiled.thunks] == ["kCustomCall"]
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.glob("sort_rows*.ptxas"))
    assert set(re.findall(r"(\d+) bytes spill", logs)) == {"0"}

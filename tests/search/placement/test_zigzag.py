"""Theorem 4.1: the zig-zag schedule moves at most twice the bytes of any schedule."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zigzag import Sizes, Square, largest_block, least_weight_loads, row_by_row, traffic, zigzag

small = st.integers(1, 6)


@given(small, small, small, small)
def test_every_square_once_and_after_its_left_neighbour(batches, layers, tokens, block):
    order = list(zigzag(batches, layers, tokens, block))
    assert sorted(order) == sorted(
        itertools.starmap(Square, itertools.product(range(tokens), range(layers), range(batches)))
    )
    traffic(order, Sizes(1, 1, 1, 4), layers, tokens)  # raises for a wrong order


@given(small, st.integers(2, 6), small, st.integers(1, 9))
def test_the_io_of_a_block_is_that_of_appendix_a2(block, layers, n, s):
    """Weights move n times. The other terms are Appendix A.2's.

    KV: 4 h1 bls l (s n + n (n - 1) / 2). Activations: 2 (2 h1 s bls l + 2 h1 bls l (n - 1)).
    """
    h1, w = 8, 1000
    found = traffic(zigzag(block, layers, n, block), Sizes(w, 4 * h1, 2 * h1, s), layers, n)
    assert found.weights == n * layers * w
    assert found.kv == 4 * h1 * block * layers * (s * n + n * (n - 1) / 2)
    assert found.activations == 2 * (2 * h1 * s * block * layers + 2 * h1 * block * layers * (n - 1))


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 12), st.integers(1, 40), st.integers(1, 4))
def test_theorem_4_1(block, layers, tokens, prompt, blocks):
    sizes = Sizes(1.0, 1.0, 1.0, prompt)
    capacity = block * layers * (prompt + tokens - 1) * sizes.kv
    assert largest_block(sizes, layers, tokens, capacity) == block
    batches = block * blocks
    found = traffic(zigzag(batches, layers, tokens, block), sizes, layers, tokens)
    assert found.peak_kv <= capacity
    least = least_weight_loads(batches, sizes, layers, tokens, capacity)
    assert least <= found.weight_loads <= 2 * least
    assert (
        found.weight_loads <= traffic(row_by_row(batches, layers, tokens), sizes, layers, tokens).weight_loads
    )


def test_opt_30b_as_the_paper_ran_it():
    """Blocks of three batches fetch a layer a third as often. KV and activations move equally often."""
    sizes = Sizes(weights=24 * 7168**2, kv=48 * 4 * 7168, activation=48 * 2 * 7168, prompt_tokens=512)
    blocks, rows = (traffic(order, sizes, 48, 32) for order in (zigzag(3, 48, 32, 3), row_by_row(3, 48, 32)))
    assert 3 * blocks.weights == rows.weights
    assert (blocks.kv, blocks.activations) == (rows.kv, rows.activations)
    # The ratio is (s + n) / (s + n / 2): prompts dominate.
    assert blocks.weight_loads <= 1.1 * least_weight_loads(3, sizes, 48, 32, blocks.peak_kv)


def test_a_wrong_order_is_refused():
    sizes = Sizes(1, 1, 1, 4)
    order = list(zigzag(2, 2, 2, 2))
    for wrong in (order[::-1], order[:-1], [*order, order[-1]]):
        with pytest.raises(ValueError, match="squares"):
            traffic(wrong, sizes, 2, 2)

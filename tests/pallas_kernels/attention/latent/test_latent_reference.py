"""Attention over latent pages is attention over the keys and values that the latent vectors stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.latent import reference

HEADS, RANK, ROTARY, PAGE, SCALE = 3, 10, 4, 8, 0.3
PAGES, MOST = 90, 40  # pages of the cache, and of a sequence


def cache(
    rng: np.random.Generator, ends: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return (rotary pages, latent pages, page table, [tokens, R + Hr] of each
    sequence) with scattered pages.
    """
    pages = [np.full((PAGES, 1, PAGE, width), 1e9, np.float32) for width in (ROTARY, RANK)]
    table, free, texts = np.full((len(ends), MOST), PAGES + 7, np.int32), iter(rng.permutation(PAGES)), []
    for row, end in enumerate(ends):
        texts.append(rng.normal(size=(end, RANK + ROTARY)).astype(np.float32))
        for token in range(end):
            if token % PAGE == 0:
                table[row, token // PAGE] = next(free)
            at = table[row, token // PAGE], 0, token % PAGE
            pages[0][at], pages[1][at] = texts[-1][token, RANK:], texts[-1][token, :RANK]
    return pages[0], pages[1], table, texts


def attention(q: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Return [N, R]: softmax attention of one query over the keys of a sequence."""
    scores = q @ text.T * SCALE
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ text[:, :RANK]


def test_a_decode_reads_its_sequence() -> None:
    rng, lengths = np.random.default_rng(0), [1, PAGE, 0, 300]
    *arrays, texts = cache(rng, lengths)
    q = rng.normal(size=(6, HEADS, RANK + ROTARY)).astype(np.float32)
    run = jax.jit(reference.decode_attention, static_argnames="scale")
    found = run(q, *arrays, jnp.asarray(lengths), scale=SCALE)
    into = run(q, *arrays, jnp.asarray(lengths), scale=SCALE, into=jnp.full((6, HEADS, RANK), 5.0))
    for row, length in enumerate(lengths):
        wanted = attention(q[row], texts[row]) if length else 0.0
        np.testing.assert_allclose(found[row], np.broadcast_to(wanted, found[row].shape), atol=2e-5)
    np.testing.assert_array_equal(found[4:], 0)
    np.testing.assert_array_equal(into[jnp.asarray([2, 4, 5])], 5.0)
    np.testing.assert_array_equal(into[jnp.asarray([0, 1, 3])], found[jnp.asarray([0, 1, 3])])


@pytest.mark.parametrize(
    "chunks", [[(0, 150, 0, 0), (150, 5, 1, 290)], [(3, 1, 1, 0), (0, 0, 0, 9), (4, 9, 0, 7)]]
)
def test_a_chunk_is_causal(chunks: list[tuple[int, int, int, int]]) -> None:
    rng, tokens = np.random.default_rng(1), 160
    *arrays, texts = cache(rng, [150, 295])
    q = rng.normal(size=(tokens, HEADS, RANK + ROTARY)).astype(np.float32)
    run = jax.jit(reference.chunk_attention, static_argnames="scale")
    found = run(q, *arrays, jnp.asarray(chunks), scale=SCALE)
    wanted = np.zeros((tokens, HEADS, RANK), np.float32)
    for first, count, row, position in chunks:
        for i in range(count):
            wanted[first + i] = attention(q[first + i], texts[row][: position + i + 1])
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_tokens_of_padding_are_not_written() -> None:
    pages = jnp.zeros((2, 1, PAGE, ROTARY)), jnp.zeros((2, 1, PAGE, RANK))
    slots = jnp.asarray([PAGE + 1, -1, 2 * PAGE])
    written = reference.append(*pages, jnp.ones((3, 1, ROTARY)), jnp.ones((3, 1, RANK)), slots)
    for array in written:
        assert array.sum() == array[1, 0, 1].sum() == array.shape[-1]

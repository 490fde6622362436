"""Random inputs of the kernel checks, with NaN at unwritten cache positions and in reused memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PAGE = 64


def ragged(rows: int, mean: int) -> tuple[int, ...]:
    """Return lengths of half the mean plus an exponential with the other half as its mean, from a fixed
    seed.
    """
    return tuple(
        np.clip(np.random.default_rng(7).exponential(mean / 2, rows) + mean / 2, 1, 4 * mean)
        .astype(int)
        .tolist()
    )


def page_tables(rng, ends) -> tuple[np.ndarray, int]:
    """Return (page table [R, MP] int32, number of pages) with scattered pages for sequences of `ends` tokens.

    Entries beyond a sequence's end are invalid page numbers.
    """
    needed = [-(-int(e) // PAGE) for e in ends]
    total, width = sum(needed) + 2, max([1, *needed]) + 1
    table = rng.integers(-(2**31), 2**31 - 1, (len(needed), width)).astype(np.int32)
    order = rng.permutation(total)
    at = 0
    for row, n in enumerate(needed):
        table[row, :n] = order[at : at + n]
        at += n
    return table, total


def random_pages(key, pages: int, kv_heads: int, width: int) -> jax.Array:
    """Return [P, K, 64, H] bfloat16 of normal random numbers, made on the device."""
    return jax.jit(lambda key: jax.random.normal(key, (pages, kv_heads, PAGE, width), jnp.bfloat16))(key)


def poison(pages: jax.Array, table: np.ndarray, ends) -> jax.Array:
    """Return the pages with NaN at every position except the sequences' first `ends` tokens."""
    written = np.zeros((pages.shape[0], PAGE), bool)
    for row, end in enumerate(ends):
        for j in range(-(-int(end) // PAGE)):
            written[table[row, j], : int(end) - j * PAGE] = True
    return jnp.where(jnp.asarray(written)[:, None, :, None], pages, jnp.nan)


def quantized(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (int8, scales [P, K, S] float32) of pages [P, K, S, H].

    Unwritten positions, which hold NaN, get arbitrary numbers and a scale of NaN.
    """
    unwritten = jnp.isnan(pages[..., 0])
    pages = jnp.where(unwritten[..., None], 1.0, pages.astype(jnp.float32))
    scale = jnp.maximum(jnp.abs(pages).max(-1), 1e-20) / 127
    return jnp.round(pages / scale[..., None]).astype(jnp.int8), jnp.where(unwritten, jnp.nan, scale)


def poison_memory(results: Any) -> None:
    """Fill the memory that the next arrays like `results` will reuse with NaN, or with 99 for integers.

    The fill makes elements visible that a kernel does not write. results: a tree of arrays or shapes;
    `jax.eval_shape` gives the shapes of a program's results. New arrays reuse memory that was just freed.
    """

    def spoilt(like: Any) -> jax.Array:
        return jnp.full(like.shape, jnp.nan if jnp.issubdtype(like.dtype, jnp.inexact) else 99, like.dtype)

    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(results))
    jax.block_until_ready([jax.tree.map(spoilt, results) for _ in range(4 if size < 2**30 else 1)])


def error(got, want) -> float:
    """Return ‖got − want‖ / ‖want‖, or NaN if either has a NaN."""
    return float(_error(got, want))


@jax.jit
def _error(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.maximum(jnp.linalg.norm(want), 1e-30)

"""What the checks give kernels: fresh random inputs, pages that are NaN wherever no token was written, and
memory that held NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PAGE = 64


def ragged(rows: int, mean: int) -> tuple[int, ...]:
    """Lengths of half the mean plus an exponential of the other half, the same every time."""
    return tuple(
        np.clip(np.random.default_rng(7).exponential(mean / 2, rows) + mean / 2, 1, 4 * mean)
        .astype(int)
        .tolist()
    )


def page_tables(rng, ends) -> tuple[np.ndarray, int]:
    """Scattered pages for sequences of `ends` tokens: (page table [R, MP] int32, pages in all). Entries past
    a sequence are wild.
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
    """[P, K, 64, H] bfloat16 of normal random numbers, made on the device."""
    return jax.jit(lambda key: jax.random.normal(key, (pages, kv_heads, PAGE, width), jnp.bfloat16))(key)


def poison(pages: jax.Array, table: np.ndarray, ends) -> jax.Array:
    """The pages with NaN at every place that holds none of the sequences' first `ends` tokens."""
    written = np.zeros((pages.shape[0], PAGE), bool)
    for row, end in enumerate(ends):
        for j in range(-(-int(end) // PAGE)):
            written[table[row, j], : int(end) - j * PAGE] = True
    return jnp.where(jnp.asarray(written)[:, None, :, None], pages, jnp.nan)


def quantized(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int8, scales [P, K, S] float32) of pages [P, K, S, H]; where no token wrote, which is NaN, any numbers
    and a scale of NaN.
    """
    unwritten = jnp.isnan(pages[..., 0])
    pages = jnp.where(unwritten[..., None], 1.0, pages.astype(jnp.float32))
    scale = jnp.maximum(jnp.abs(pages).max(-1), 1e-20) / 127
    return jnp.round(pages / scale[..., None]).astype(jnp.int8), jnp.where(unwritten, jnp.nan, scale)


def poison_memory(results: Any) -> None:
    """Leaves NaN, or 99 in integers, in the memory that the next arrays like `results` take, a tree of arrays
    or shapes.

    What a kernel does not write is then seen. `jax.eval_shape` says what a program's results are; they take
    memory that was just freed.
    """

    def spoilt(like: Any) -> jax.Array:
        return jnp.full(like.shape, jnp.nan if jnp.issubdtype(like.dtype, jnp.inexact) else 99, like.dtype)

    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(results))
    jax.block_until_ready([jax.tree.map(spoilt, results) for _ in range(4 if size < 2**30 else 1)])


def error(got, want) -> float:
    """‖got − want‖ / ‖want‖, NaN where either has one."""
    return float(_error(got, want))


@jax.jit
def _error(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.maximum(jnp.linalg.norm(want), 1e-30)

"""Small random batches over scattered pages for tests of attention kernels,
with NaN at unwritten positions.
"""

import jax.numpy as jnp
import numpy as np

PAGE = 64
WILD = 2**31 - 1  # the entries of page tables after a sequence's end and before its window


def paged(seed: int, ends, kv_heads: int, width: int, seen=None):
    """Return (k pages, v pages [P, K, 64, H] bfloat16, page table [R, MP] int32) of sequences with `ends`
    tokens.

    seen: the first token of each sequence that a window shows; earlier pages are freed.
    """
    rng = np.random.default_rng(seed)
    needed = [-(-end // PAGE) for end in ends]
    pages = sum(needed) + 2
    table = np.full((len(ends), max([1, *needed]) + 1), WILD, np.int32)
    free = iter(rng.permutation(pages))
    written = np.zeros((pages, PAGE), bool)
    for row, end in enumerate(ends):
        for j in range(0 if seen is None else max(seen[row], 0) // PAGE, needed[row]):
            table[row, j] = next(free)
            written[table[row, j], : end - j * PAGE] = True
    k, v = rng.normal(size=(2, pages, kv_heads, PAGE, width)).astype(np.float32)
    k, v = (np.where(written[:, None, :, None], x, np.nan) for x in (k, v))
    return jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16), jnp.asarray(table)


def queries(seed: int, rows: int, heads: int, width: int):
    """Return [rows, heads, width] bfloat16, large enough for a peaked softmax."""
    return jnp.asarray(np.random.default_rng(seed + 1).normal(size=(rows, heads, width)) * 2, jnp.bfloat16)


def exact(reference, q, k, v, *rest, **settings):
    """Return the reference result in float32, with 0 for NaN at unwritten
    positions, because 0 · NaN is NaN.
    """
    wide = (jnp.asarray(np.nan_to_num(np.asarray(x, np.float32))) for x in (q, k, v))
    return np.asarray(reference(*wide, *rest, **settings))


def error(got, want) -> float:
    """Return ‖got − want‖ / ‖want‖, or NaN if either has a NaN."""
    got = np.asarray(got, np.float32)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))

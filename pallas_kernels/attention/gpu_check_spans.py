"""Check attention with a span for each KV head against its float32 reference on a GPU.

    python -m pallas_kernels.attention.gpu_check_spans [--only decode,chunk] [--share 0/4] [--json FILE]

Prints one line per case: the error ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs. All
pages without visible keys hold NaN. With `own_pages` each KV head has its own pages and page table.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.chunk import reference as chunk_reference
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.chunk.gpu_check import TOLERANCE as CHUNK_TOLERANCE
from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.gpu_check import TOLERANCE, cached, exact
from pallas_kernels.attention.decode.work_list import PAGE
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory, random_pages
from pallas_kernels.measure.script import record

HEADS = (32, 8, 128)  # query heads, KV heads, head width


def of_heads(table: np.ndarray, kv: int) -> jax.Array:
    """Return [K, R, MP]: for each head the page numbers in pages of one head, from those of all heads."""
    return jnp.asarray(table[None] * kv + np.arange(kv, dtype=np.int32)[:, None, None])


def freed(table: np.ndarray, pages: int, ends, first, spans: np.ndarray, sinks: int) -> np.ndarray:
    """Return the page table with a page of NaN in place of pages that no head sees.

    ends: keys of each row. first: the keys of each row's first query, itself included. spans: [R, K].
    """
    page = np.arange(table.shape[1])
    used = page < -(-np.asarray(ends) // PAGE)[:, None]
    unwritten = np.setdiff1d(np.arange(pages), table[used])[0]
    since = np.maximum(np.asarray(first) - spans.max(1), 0) // PAGE
    unseen = (page < since[:, None]) & (page >= -(-sinks // PAGE))
    return np.where(unseen, np.int32(unwritten), table)


def pages_of(rng, table: np.ndarray, pages: int, ends, kv: int, h: int, dtype):
    """Return (k, v, scales) with NaN at unwritten positions."""
    k, v = (
        poison(random_pages(jax.random.key(int(rng.integers(2**31))), pages, kv, h), table, ends)
        for _ in range(2)
    )
    return cached(rng, k, v, dtype)


def by_head(x: jax.Array) -> jax.Array:
    """Return pages [P, K, ...] as pages of one head, [P * K, 1, ...]."""
    return x.reshape(-1, 1, *x.shape[2:])


def check(rows, rng, what, ends, first, extra, heads, dtype, spans, sinks, own_pages, tokens, **settings):
    """Run one case of `decode` or `chunk`. extra: lengths or chunks. ends: keys of each row of the table."""
    (n, kv, h), spans = heads, np.broadcast_to(np.asarray(spans, np.int32), (len(ends), heads[1]))
    table, pages = page_tables(rng, ends)
    k, v, scales = pages_of(rng, table, pages, ends, kv, h, dtype)
    table = freed(table, pages, ends, first, spans, sinks)
    q = jnp.asarray(rng.normal(size=(tokens, n, h)), jnp.bfloat16)
    listed, shared = np.asarray(extra), (q, k, v, jnp.asarray(table))
    extra = jnp.asarray(extra, jnp.int32)
    if what == "chunk":  # a chunk's tokens have the spans of its row, the earlier ones shorter spans
        rows_of = np.concatenate([np.full(c[1], c[2]) for c in listed])
        grown = np.concatenate([np.arange(c[1]) - c[1] for c in listed]) // 3
        spans = np.maximum(spans[rows_of] + grown[:, None], 1)
    settings |= {"spans": jnp.asarray(spans), "sinks": sinks, "scale": h**-0.5}
    kernel, plain = {
        "decode": (decode_attention, decode_reference.decode_attention),
        "chunk": (chunk_attention, chunk_reference.chunk_attention),
    }[what]
    run, given = jax.jit(functools.partial(kernel, **settings)), (shared, scales)
    if own_pages:
        tokens_of_head = {name: by_head(x) if x.ndim == 3 else x for name, x in scales.items()}
        given = (q, by_head(k), by_head(v), of_heads(table, kv)), tokens_of_head
    poison_memory(q)
    got = run(*given[0], extra, **given[1])
    want = exact(plain, *shared, extra, **scales, **settings)
    same = bool((got == run(*given[0], extra, **given[1])).all())
    err, least = error(got, want), TOLERANCE if what == "decode" else CHUNK_TOLERANCE[jnp.dtype(dtype).name]
    about = {"heads": heads, "cache": jnp.dtype(dtype).name, "sinks": sinks, "own_pages": own_pages}
    ok = err < least and same
    record(rows, what=f"check {what}", ok=ok, error=err, same_bits=same, b=len(ends), **about)


def decodes(rows, share) -> None:
    rng = np.random.default_rng(time.time_ns())
    cases = []
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8):
        for heads, b, top, sinks, own in (
            (HEADS, 37, 3000, 64, False),
            (HEADS, 256, 2000, 4, True),
            ((9, 3, 64), 20, 900, 0, False),
            ((8, 4, 256), 9, 900, 70, True),
            (HEADS, 1, 100_000, 64, False),
        ):
            lengths = rng.integers(1, top, b) * (rng.random(b) > 0.1)
            spans = rng.integers(1, top, (b, heads[1]))
            cases.append((lengths, heads, dtype, spans, sinks, own))
        cases.append((np.full(3, 200), HEADS, dtype, [1, 5000, 64, 65, 128, 199, 200, 7], 0, False))
    for lengths, heads, dtype, spans, sinks, own in cases[share[0] :: share[1]]:
        check(rows, rng, "decode", lengths, lengths, lengths, heads, dtype, spans, sinks, own, len(lengths))


def chunks(rows, share) -> None:
    rng = np.random.default_rng(time.time_ns())
    cases = []
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8):
        for heads, sinks, own in (
            (HEADS, 64, False),
            (HEADS, 4, True),
            ((9, 3, 64), 0, False),
            ((8, 4, 128), 200, True),
        ):
            sizes, before = rng.integers(1, 500, 4), rng.integers(0, 4000, 4)
            firsts = np.cumsum(sizes) - sizes
            listed = [tuple(map(int, x)) for x in zip(firsts, sizes, range(4), before, strict=True)]
            cases.append((listed, heads, dtype, rng.integers(1, 3000, (4, heads[1])), sinks, own))
    for listed, heads, dtype, spans, sinks, own in cases[share[0] :: share[1]]:
        ends, first = [c[1] + c[3] for c in listed], [c[3] + 1 for c in listed]
        tokens = listed[-1][0] + listed[-1][1]
        check(rows, rng, "chunk", ends, first, listed, heads, dtype, spans, sinks, own, tokens)


if __name__ == "__main__":
    parts: dict[str, script.Part] = {
        "decode": lambda rows, share, _: decodes(rows, share),
        "chunk": lambda rows, share, _: chunks(rows, share),
    }
    script.main(__doc__, parts)

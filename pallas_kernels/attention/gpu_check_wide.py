"""Check attention of heads of 512 columns (Gemma 4) on a GPU, and time it next to XLA's.

    python -m pallas_kernels.attention.gpu_check_wide [--seconds 0.6] [--only check,time] [--json FILE]

Prints one line per case, as `pallas_kernels.attention.decode.gpu_check` does.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.chunk import gpu_check as chunk_check
from pallas_kernels.attention.chunk.api import chunk_attention, list_chunk_work
from pallas_kernels.attention.decode import gpu_check as decode_check
from pallas_kernels.attention.decode.api import decode_attention, list_decode_work
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import PAGE, page_tables, random_pages
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved

HEADS, KV_HEADS, WIDTH = 16, 2, 512  # of a layer of Gemma 4 without a window
SCALE = WIDTH**-0.5
CALLS = 8  # of a timed program
DECODES = {"64 x 4096": (64, 4096), "256 x 1024": (256, 1024)}  # rows, and keys of each
CHUNKS = {"2048 new": (2048, 0), "2048 new after 8192": (2048, 8192)}  # tokens, and tokens before them


def checks(rows, share, _) -> None:
    """Run all correctness cases, or every n-th from case i for the share (i, n)."""
    rng = np.random.default_rng(time.time_ns())
    decode = functools.partial(decode_check.check_decode, rows, rng)
    chunk, some = functools.partial(chunk_check.check, rows, rng), chunk_check.random_chunks
    heads = HEADS, KV_HEADS, WIDTH
    cases = [
        functools.partial(chunk, some(rng, 700, 5, 900), 700, heads, size=4),
        functools.partial(decode, [0, 1, 64, 65, 900, 0, 3000], *heads),
        functools.partial(chunk, [[0, 2048, 0, 0]], 2048, heads),
        functools.partial(decode, [130] * 70, 32, 4, WIDTH, unified_max=(0.0, 8.0)),
        functools.partial(chunk, some(rng, 500, 4, 900), 500, (8, 1, WIDTH), window=100, soft_cap=50.0),
        functools.partial(decode, [20_000, 3], 8, 1, WIDTH, sms=100),
        functools.partial(chunk, [[5, 640, 0, 5000]], 700, heads, sms=28),
    ]
    for case in cases[share[0] :: share[1]]:
        case()


def _gathered(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Return the keys or values [R, K, S, 512] of sequences that fill their rows of the page table."""
    return jnp.swapaxes(pages[table], 1, 2).reshape(table.shape[0], pages.shape[1], -1, WIDTH)


def xla_decode(q, k, v, table) -> jax.Array:
    """Return attention of rows with full pages: pages gathered, two batched products, and a softmax."""
    k, v = (_gathered(x, table) for x in (k, v))
    rows = q.reshape(q.shape[0], k.shape[1], -1, WIDTH)
    scores = jnp.einsum("bkgh,bksh->bkgs", rows, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * SCALE, axis=-1).astype(q.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, v).reshape(q.shape)


def xla_chunk(q, k, v, table, position: int) -> jax.Array:
    """Return attention of one chunk that ends with its sequence, as `xla_decode` does for rows."""
    k, v = (_gathered(x, table)[0] for x in (k, v))
    rows = q.reshape(q.shape[0], k.shape[0], -1, WIDTH)
    scores = jnp.einsum("tkgh,ksh->kgts", rows, k, preferred_element_type=jnp.float32) * SCALE
    seen = jnp.arange(k.shape[1]) <= position + jnp.arange(q.shape[0])[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("kgts,ksh->tkgh", weights, v).reshape(q.shape)


def _inputs(tokens: int, ends: list[int]) -> tuple[list[tuple[jax.Array, ...]], jax.Array]:
    """Return (queries, keys and values of each call, the page table) of sequences with `ends` tokens.

    The calls read two caches in turn.
    """
    table, pages = page_tables(np.random.default_rng(3), ends)
    key = jax.random.key
    caches = [tuple(random_pages(key(2 * i + j), pages, KV_HEADS, WIDTH) for j in range(2)) for i in range(2)]
    shape = tokens, HEADS, WIDTH
    calls = [(jax.random.normal(key(i), shape, jnp.bfloat16), *caches[i % 2]) for i in range(CALLS)]
    return calls, jnp.asarray(table[:, : max(ends) // PAGE])


def decode_programs(case: str) -> dict[str, Callable]:
    """Return programs of `CALLS` calls by name for decodes."""
    batch, keys = DECODES[case]
    lengths = jnp.full(batch, keys, jnp.int32)
    arguments = _inputs(batch, [keys] * batch)

    def ours(calls, table, lengths):
        group = HEADS // KV_HEADS
        work = list_decode_work(lengths, kv_heads=KV_HEADS, group=group, head_dim=WIDTH, itemsize=2)
        return [decode_attention(q, k, v, table, lengths, scale=SCALE, work=work) for q, k, v in calls]

    def by_xla(calls, table, lengths):
        return [xla_decode(q, k, v, table) for q, k, v in calls]

    ways = {"mosaic": ours, "xla": by_xla}
    return {name: functools.partial(jax.jit(f), *arguments, lengths) for name, f in ways.items()}


def chunk_programs(case: str) -> dict[str, Callable]:
    """Return programs of `CALLS` calls by name for a chunk."""
    tokens, position = CHUNKS[case]
    chunks = jnp.asarray([[0, tokens, 0, position]], jnp.int32)
    arguments = _inputs(tokens, [tokens + position])

    def ours(calls, table, chunks):
        work = list_chunk_work(chunks, tokens, head_dim=WIDTH, itemsize=2)
        return [chunk_attention(q, k, v, table, chunks, scale=SCALE, work=work) for q, k, v in calls]

    def by_xla(calls, table, chunks):
        return [xla_chunk(q, k, v, table, position) for q, k, v in calls]

    ways = {"mosaic": ours, "xla": by_xla}
    return {name: functools.partial(jax.jit(f), *arguments, chunks) for name, f in ways.items()}


def read_bytes(case: str) -> float:
    """Return the bytes of keys and values that a case of decodes reads."""
    batch, keys = DECODES[case]
    return 4.0 * batch * keys * KV_HEADS * WIDTH


def flop(case: str) -> float:
    """Return the FLOP of a case of chunks under the causal mask."""
    tokens, position = CHUNKS[case]
    return 4.0 * (tokens * position + tokens * (tokens + 1) // 2) * HEADS * WIDTH


def times(rows, _, seconds) -> None:
    """Time the kernels and XLA's products."""
    for cases, programs, amount, unit in (
        (DECODES, decode_programs, read_bytes, "tbs"),
        (CHUNKS, chunk_programs, flop, "tflops"),
    ):
        for case in cases:
            for way, t in interleaved(programs(case), calls=CALLS, seconds=seconds).items():
                rate = {unit: amount(case) / t.us / 1e6}
                record(rows, what="time", case=case, way=way, **rate, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(__doc__, {"check": checks, "time": times})

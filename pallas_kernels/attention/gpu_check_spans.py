"""Check attention with a span for each KV head against its float32 reference on a GPU.

    python -m pallas_kernels.attention.gpu_check_spans [--only decode,chunk] [--share 0/6] [--json FILE]
    python -m pallas_kernels.attention.gpu_check_spans --toy

Prints one line per case: the error ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs. All
pages without visible keys hold NaN. With `own_pages` each KV head has its own pages and page table. Spans of
the whole text are also compared with the kernel without spans. With --toy the kernels run on small inputs on
the CPU, in the Mosaic interpreter.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk import reference as chunk_reference
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.chunk.gpu_check import TOLERANCE as CHUNK_TOLERANCE
from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.gpu_check import TOLERANCE, cached, exact
from pallas_kernels.attention.paged import PAGE
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory, random_pages
from pallas_kernels.measure.script import record

HEADS = (32, 8, 128)  # query heads, KV heads, head width
TOY_HEADS = (4, 2, 64)
TOY = {"interpret": plgpu.InterpretGPUParams(), "sms": 2}
DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)
FULL = 10**6  # a span over every text
EDGES = (0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 0, 200)
EDGE_SPANS = (1, 5, PAGE - 1, PAGE, PAGE + 1, 100, 2 * PAGE, FULL)
KERNELS = {
    "decode": (decode_attention, decode_reference.decode_attention),
    "chunk": (chunk_attention, chunk_reference.chunk_attention),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The inputs of one check.

    Attributes:
      work: int [B], the keys of each row of a decode step; or [C, 2], tokens and position of each chunk.
      heads: query heads, KV heads, head width.
      spans: int [rows, K] or [K], of each row's last token.
      sinks: the first keys that every head sees.
      own_pages: each KV head has its own pages and page table.
    """

    work: np.ndarray
    heads: tuple[int, int, int]
    spans: Any
    sinks: int
    own_pages: bool

    @property
    def chunks(self) -> list[tuple[int, int, int, int]]:
        """Return `chunks` of `chunk_attention`: one after the other in q, each with a row of the table."""
        firsts = np.cumsum(self.work[:, 0]) - self.work[:, 0]
        return [
            (int(at), int(c), i, int(p)) for i, (at, (c, p)) in enumerate(zip(firsts, self.work, strict=True))
        ]


def freed(table: np.ndarray, unwritten: int, ends, first, spans: np.ndarray, sinks: int) -> np.ndarray:
    """Return a head's page table with the page `unwritten` in place of pages that the head does not see.

    ends: keys of each row. first: the keys of each row's first query, itself included. spans: [R].
    """
    page = np.arange(table.shape[1])
    since = np.maximum(np.asarray(first) - spans, 0) // PAGE
    unseen = (page < since[:, None]) & (page >= -(-sinks // PAGE))
    return np.where(unseen & (page < -(-np.asarray(ends) // PAGE)[:, None]), np.int32(unwritten), table)


def by_head(x: jax.Array) -> jax.Array:
    """Return pages [P, K, ...] as pages of one head, [P * K, 1, ...]."""
    return x.reshape(-1, 1, *x.shape[2:])


def tokens_of(case: Case, spans: np.ndarray):
    """Return (rows of q, chunks, spans of each token) of a chunk case. Three tokens belong to no chunk.

    A chunk's last token has the span of its row, and the earlier ones have shorter spans.
    """
    counts = case.work[:, 0]
    rows = np.repeat(np.arange(len(counts)), counts)
    grown = np.concatenate([np.arange(-count, 0) // 3 for count in counts])
    own = np.maximum(spans[rows] + grown[:, None], 1).astype(np.int32)
    return len(rows) + 3, case.chunks, np.pad(own, ((0, 3), (0, 0)), constant_values=1)


def check(rows, rng, what: str, case: Case, dtype, **how) -> None:
    """Run one case of `decode` or `chunk` twice, and its reference. how: more settings of the kernel."""
    n, kv, h = case.heads
    spans = np.broadcast_to(np.asarray(case.spans, np.int32), (len(case.work), kv))
    if what == "chunk":
        tokens, listed, token_spans = tokens_of(case, spans)
        ends, first = case.work.sum(1), case.work[:, 1] + 1
    else:
        tokens, listed, token_spans = len(case.work), case.work, spans
        ends = first = case.work
    table, pages = page_tables(rng, ends)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))))
    k, v = (poison(random_pages(key, pages, kv, h), table, ends) for key in keys)
    k, v, scales = cached(rng, k, v, dtype)
    used = np.arange(table.shape[1]) < -(-np.asarray(ends) // PAGE)[:, None]
    unwritten = int(np.setdiff1d(np.arange(pages), table[used])[0])
    seen = functools.partial(freed, table, unwritten, ends, first, sinks=case.sinks)
    shared = jnp.asarray(seen(spans=spans.max(1)))
    extra = jnp.asarray(listed, jnp.int32)
    q = jnp.asarray(rng.normal(size=(tokens, n, h)), jnp.bfloat16)
    settings = {"spans": jnp.asarray(token_spans), "sinks": case.sinks, "scale": h**-0.5}
    kernel, plain = KERNELS[what]
    inputs, own = (q, k, v, shared), scales
    if case.own_pages:
        tables = np.stack([seen(spans=spans[:, head]) * np.int32(kv) + np.int32(head) for head in range(kv)])
        inputs = q, by_head(k), by_head(v), jnp.asarray(tables)
        own = {name: by_head(x) if x.ndim == 3 else x for name, x in scales.items()}
    run = jax.jit(functools.partial(kernel, **settings, **how))
    poison_memory(q)
    got = run(*inputs, extra, **own)
    same = bool((got == run(*inputs, extra, **own)).all())
    err = error(got, exact(plain, q, k, v, shared, extra, **scales, **settings))
    least = TOLERANCE if what == "decode" else CHUNK_TOLERANCE[jnp.dtype(dtype).name]
    about = {"b": len(case.work), "heads": case.heads, "cache": jnp.dtype(dtype).name}
    about |= {"sinks": case.sinks, "own_pages": case.own_pages}
    ok = err < least and same
    if spans.min() >= FULL:
        dense = jax.jit(functools.partial(kernel, scale=h**-0.5, **how))(*inputs, extra, **own)
        about["from_dense"] = error(got, dense)
        ok &= about["from_dense"] < TOLERANCE / 2
    record(rows, what=f"check {what}", ok=ok, error=err, same_bits=same, **about)


def edge_cases(rng, heads, work: np.ndarray, empty: np.ndarray) -> list[Case]:
    """Return the cases at the edges of pages, of rows without work, and of spans over the whole text."""
    spans = rng.choice(EDGE_SPANS, (len(work), heads[1]))
    return [
        Case(work, heads, spans, 0, False),
        Case(work, heads, np.minimum(spans, 100), 130, True),  # sinks of three pages, above all spans
        Case(work, heads, np.full(heads[1], FULL), 0, False),
        Case(empty, heads, spans[: len(empty)], 4, True),
    ]


def decodes(rng, toy: bool) -> list[Case]:
    """Return the cases of a decode step."""
    cases = edge_cases(rng, TOY_HEADS if toy else HEADS, np.array(EDGES), np.zeros(3, int))
    for heads, b, top, sinks, own in (
        ()
        if toy
        else (
            (HEADS, 37, 3000, 64, False),
            (HEADS, 256, 2000, 4, True),
            ((9, 3, 64), 20, 900, 0, False),
            ((8, 4, 256), 9, 900, 70, True),
            (HEADS, 1, 100_000, 64, False),
        )
    ):
        lengths = rng.integers(1, top, b) * (rng.random(b) > 0.1)
        cases.append(Case(lengths, heads, rng.integers(1, top, (b, heads[1])), sinks, own))
    return cases


def chunks(rng, toy: bool) -> list[Case]:
    """Return the cases of a prefill step."""
    edges = [(1, 0), (0, 5), (PAGE - 1, 0), (1, PAGE - 1), (PAGE + 1, PAGE), (7, 2 * PAGE - 3), (40, 300)]
    cases = edge_cases(rng, TOY_HEADS if toy else HEADS, np.array(edges), np.zeros((2, 2), int))
    for heads, sinks, own in (
        ()
        if toy
        else (
            (HEADS, 64, False),
            (HEADS, 4, True),
            ((9, 3, 64), 0, False),
            ((8, 4, 128), 200, True),
        )
    ):
        work = np.stack([rng.integers(1, 500, 4), rng.integers(0, 4000, 4)], axis=1)
        cases.append(Case(work, heads, rng.integers(1, 3000, (4, heads[1])), sinks, own))
    return cases


def checks(what: str, toy: bool) -> script.Part:
    """Return the part of the script that checks `decode` or `chunk`, on a GPU or in the interpreter."""

    def part(rows, share, _):
        rng = np.random.default_rng(time.time_ns())
        listed = {"decode": decodes, "chunk": chunks}[what](rng, toy)
        for case, dtype in [(case, dtype) for case in listed for dtype in DTYPES][share[0] :: share[1]]:
            check(rows, rng, what, case, dtype, **TOY if toy else {})

    return part


if __name__ == "__main__":
    real, small = ({what: checks(what, toy) for what in KERNELS} for toy in (False, True))
    script.main(__doc__, real, toy=small)

"""Check latent chunk attention against its float32 reference on a GPU, and time it next to XLA's.

    python -m pallas_kernels.attention.latent.gpu_check_chunks [--seconds 0.6] [--only check,time]
        [--json FILE]

Prints one line per case: the error ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs; the
time of a call, and the FLOP under the causal mask as a share of the datasheet's rate.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.latent import reference
from pallas_kernels.attention.latent.api import chunk_attention, list_chunk_work
from pallas_kernels.attention.latent.gpu_check import (
    FLOPS_PER_S,
    RANK,
    ROTARY,
    SCALE,
    TOLERANCE,
    flop,
    pages_of,
)
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved

CALLS = 4  # of a timed program
# Query heads, and the chunks of a step: (new tokens, tokens before them).
CASES = {
    "128 heads 2048 new": (128, ((2048, 0),)),
    "128 heads 2048 new after 8192": (128, ((2048, 8192),)),
    "16 heads 2048 new after 2048": (16, ((2048, 2048),)),
    "16 heads 8 x 256 new after 1024": (16, ((256, 1024),) * 8),
}
CHECKS = (  # heads, tokens, and chunks: first token, tokens, position of the first
    (128, 130, ((0, 1, 0), (3, 64, 63), (70, 60, 900))),
    (16, 300, ((5, 290, 129),)),
    (64, 200, ((0, 65, 0), (65, 0, 7), (65, 130, 2000))),
    (8, 700, ((0, 300, 64), (310, 390, 0))),
)


def xla_attention(q, rope_pages, latent_pages, page_table, chunks, *, scale: float) -> jax.Array:
    """Return the same products by XLA for chunks of one length after equal contexts, without gaps: pages
    gathered as bfloat16, two batched products, and a softmax in float32.
    """
    c, (t, n, _) = chunks.shape[0], q.shape
    table = jnp.clip(page_table, 0, latent_pages.shape[0] - 1)
    rotary, latent = (x[:, 0][table].reshape(c, -1, x.shape[-1]) for x in (rope_pages, latent_pages))
    keys, rows = jnp.concatenate([latent, rotary], axis=-1), q.reshape(c, t // c, n, -1)
    scores = jnp.einsum("ctna,csa->cnts", rows, keys, preferred_element_type=jnp.float32) * scale
    seen = chunks[:, 3:] + jnp.arange(t // c) + 1
    valid = jnp.arange(keys.shape[1]) < seen[:, None, :, None]
    weights = jax.nn.softmax(jnp.where(valid, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("cnts,csr->ctnr", weights, latent).reshape(t, n, -1)


def listed(chunks) -> np.ndarray:
    """Return the chunks' array [C, 4], each with a row of the page table of its own."""
    return np.asarray([(first, n, row, at) for row, (first, n, at) in enumerate(chunks)], np.int32)


def check(rows, rng, heads: int, tokens: int, chunks, **how) -> None:
    """Run one case twice, and its reference."""
    ends = [n + at for _, n, at in chunks]
    table, pages = page_tables(rng, ends)
    cache = [poison(x, table, ends) for x in pages_of(jax.random.key(int(rng.integers(2**31))), pages)]
    q = jnp.asarray(rng.normal(size=(tokens, heads, RANK + ROTARY)) * rng.choice([1, 4]), jnp.bfloat16)
    outside = np.ones(tokens, bool)
    for first, n, _ in chunks:
        outside[first : first + n] = False
    given = q, *cache, jnp.asarray(table), jnp.asarray(listed(chunks))
    run = jax.jit(functools.partial(chunk_attention, scale=SCALE, **how))
    poison_memory(jax.ShapeDtypeStruct((tokens, heads, RANK), q.dtype))
    got = run(*given)
    same = bool((got == run(*given)).all())
    known = [jnp.where(jnp.isnan(x), jnp.zeros_like(x), x) for x in cache]
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(functools.partial(reference.chunk_attention, scale=SCALE))
        want = plain(q.astype(jnp.float32), *known, *given[3:])
    err, silent = error(got, want), not np.asarray(got, np.float32)[outside].any()
    ok = err < TOLERANCE and same and silent
    about = {"t": tokens, "chunks": len(chunks), "heads": heads, **how}
    record(rows, what="check chunk", ok=ok, error=err, same_bits=same, zero_outside=silent, **about)


def checks(rows, share, _) -> None:
    """Run all correctness cases, or every n-th from case i for the share (i, n)."""
    rng = np.random.default_rng(time.time_ns())
    cases = [*((case, {}) for case in CHECKS), (CHECKS[1], {"sms": 24})]
    for case, how in cases[share[0] :: share[1]]:
        check(rows, rng, *case, **how)


def work_of(case: str) -> float:
    """Return the FLOP of a case under the causal mask."""
    heads, chunks = CASES[case]
    return flop([at + i + 1 for n, at in chunks for i in range(n)], heads)


def programs(case: str) -> tuple[dict[str, Callable], int]:
    """Return programs of the kernel and of XLA by name, and the calls in a program, which share a list."""
    heads, chunks = CASES[case]
    tokens = sum(n for n, _ in chunks)
    table, pages = page_tables(np.random.default_rng(3), [n + at for n, at in chunks])
    firsts = np.cumsum([0, *(n for n, _ in chunks)])[:-1]
    rows = listed([(first, n, at) for first, (n, at) in zip(firsts, chunks, strict=True)])
    cache, shape = pages_of(jax.random.key(1), pages), (tokens, heads, RANK + ROTARY)
    qs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(CALLS)]
    arguments = qs, *cache, jnp.asarray(table[:, : max(-(-(n + at) // 64) for n, at in chunks)])

    def ours(qs, rotary, latent, table, rows):
        work = list_chunk_work(rows, tokens, heads=heads)
        return [chunk_attention(q, rotary, latent, table, rows, scale=SCALE, work=work) for q in qs]

    def by_xla(qs, *rest):
        return [xla_attention(q, *rest, scale=SCALE) for q in qs]

    ways = {"mosaic": ours, "xla": by_xla}
    return {name: functools.partial(jax.jit(f), *arguments, rows) for name, f in ways.items()}, CALLS


def times(rows, _, seconds) -> None:
    """Time the kernel and XLA's products."""
    for case in CASES:
        ways, calls = programs(case)
        for way, t in interleaved(ways, calls=calls, seconds=seconds).items():
            share = work_of(case) / FLOPS_PER_S * 1e6 / t.us
            record(rows, what="time", case=case, way=way, flops=share, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(__doc__, {"check": checks, "time": times})

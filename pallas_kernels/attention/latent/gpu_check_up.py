"""Check latent chunk attention with keys and values by head against its float32 reference on a GPU, and time
it next to the absorbed form and to XLA.

    python -m pallas_kernels.attention.latent.gpu_check_up [--seconds 0.6] [--only check,time] [--share 0/1]
        [--json FILE]

Prints one line per case: the error ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs; the
time of a call with the products before and after attention, and the FLOP of the form as a share of the
datasheet's rate. The absorbed form includes its products of queries and of outputs.
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
from pallas_kernels.attention.latent.gpu_check import FLOPS_PER_S, RANK, ROTARY, SCALE, TOLERANCE, pages_of
from pallas_kernels.attention.latent.gpu_check_chunks import CHECKS, listed
from pallas_kernels.attention.latent.up_chunks import list_up_chunk_work, up_chunk_attention
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved

PLAIN = 128  # columns of a head's own part of a key, and of its value
CALLS = 2  # of a timed program
# Query heads, and the chunks of a step: (new tokens, tokens before them).
CASES = {
    "128 heads 2048 new": (128, ((2048, 0),)),
    "128 heads 2048 new after 8192": (128, ((2048, 8192),)),
    "128 heads 512 new": (128, ((512, 0),)),
    "128 heads 8192 new": (128, ((8192, 0),)),
    "16 heads 2048 new": (16, ((2048, 0),)),
    "16 heads 2048 new after 8192": (16, ((2048, 8192),)),
    "16 heads 512 new": (16, ((512, 0),)),
    "16 heads 8192 new": (16, ((8192, 0),)),
}
XLA_SCORES = 2**29  # XLA's form runs for up to this number of scores


def ups_of(key: jax.Array, heads: int) -> list[jax.Array]:
    """Return random matrices [N, 128, R] of keys and of values."""
    shape = (heads, PLAIN, RANK)
    return [jax.random.normal(k, shape, jnp.bfloat16) * RANK**-0.5 for k in jax.random.split(key)]


def check(rows, rng, heads: int, tokens: int, chunks, **how) -> None:
    """Run one case twice, and its reference."""
    ends = [n + at for _, n, at in chunks]
    table, pages = page_tables(rng, ends)
    key = jax.random.key(int(rng.integers(2**31)))
    cache, ups = [poison(x, table, ends) for x in pages_of(key, pages)], ups_of(key, heads)
    q = jnp.asarray(rng.normal(size=(tokens, heads, PLAIN + ROTARY)) * rng.choice([1, 4]), jnp.bfloat16)
    outside = np.ones(tokens, bool)
    for first, n, _ in chunks:
        outside[first : first + n] = False
    given = q, *cache, *ups, jnp.asarray(table), jnp.asarray(listed(chunks))
    run = jax.jit(functools.partial(up_chunk_attention, scale=SCALE, **how))
    poison_memory(jax.ShapeDtypeStruct((tokens, heads, PLAIN), q.dtype))
    got = run(*given)
    same = bool((got == run(*given)).all())
    known = [jnp.where(jnp.isnan(x), jnp.zeros_like(x), x) for x in cache]
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(functools.partial(reference.up_chunk_attention, scale=SCALE))
        want = plain(q.astype(jnp.float32), *known, *ups, *given[5:])
    err, silent = error(got, want), not np.asarray(got, np.float32)[outside].any()
    ok = err < TOLERANCE and same and silent
    about = {"t": tokens, "chunks": len(chunks), "heads": heads, **how}
    record(rows, what="check up", ok=ok, error=err, same_bits=same, zero_outside=silent, **about)


def checks(rows, share, _) -> None:
    """Run all correctness cases, or every n-th from case i for the share (i, n)."""
    rng = np.random.default_rng(time.time_ns())
    cases = [(CHECKS[1], {}), (CHECKS[0], {}), (CHECKS[2], {"pairs": 3}), (CHECKS[3], {"sms": 24})]
    for case, how in cases[share[0] :: share[1]]:
        check(rows, rng, *case, **how)


def pairs_of(case: str) -> int:
    """Return the pairs of a query and a key under the causal mask."""
    return sum(n * at + n * (n + 1) // 2 for n, at in CASES[case][1])


def flop(case: str) -> dict[str, float]:
    """Return the FLOP of a case in each form, with the products of queries, keys, values and outputs."""
    heads, chunks = CASES[case]
    new, keys = sum(n for n, _ in chunks), sum(n + at for n, at in chunks)
    pairs, product = pairs_of(case), 2.0 * RANK * 2 * PLAIN
    up = heads * (pairs * 2.0 * (2 * PLAIN + ROTARY) + keys * product)
    absorbed = heads * (pairs * 2.0 * (2 * RANK + ROTARY) + new * product)
    return {"mosaic": up, "absorbed": absorbed, "xla": up}


def by_head(qs, *given) -> list[jax.Array]:
    """Return the attention of each call by the kernel. The calls share the work list."""
    work = list_up_chunk_work(given[-1], qs[0].shape[0])
    return [up_chunk_attention(q, *given, scale=SCALE, work=work) for q in qs]


def absorbed(qs, rope_pages, latent_pages, key_up, value_up, table, chunks) -> list[jax.Array]:
    """Return the same attention in the absorbed form."""
    work = list_chunk_work(chunks, qs[0].shape[0], heads=qs[0].shape[1])

    def one(q):
        plain = jnp.einsum("tnh,nhr->tnr", q[..., :PLAIN], key_up)
        queries = jnp.concatenate([plain, q[..., PLAIN:]], axis=-1)
        out = chunk_attention(queries, rope_pages, latent_pages, table, chunks, scale=SCALE, work=work)
        return jnp.einsum("tnr,nhr->tnh", out, value_up)

    return [one(q) for q in qs]


def by_xla(qs, *given) -> list[jax.Array]:
    """Return the same attention of one chunk by XLA."""
    return [_xla_attention(q, *given) for q in qs]


def _xla_attention(q, rope_pages, latent_pages, key_up, value_up, table, chunks) -> jax.Array:
    """Return the attention of one chunk: keys and values of all heads, two products and a softmax."""
    rotary, latent = (x[:, 0][jnp.clip(table[0], 0, x.shape[0] - 1)] for x in (rope_pages, latent_pages))
    rotary, latent = rotary.reshape(-1, ROTARY), latent.reshape(-1, RANK)
    keys, values = (jnp.einsum("sr,nhr->nsh", latent, up) for up in (key_up, value_up))
    shared = jnp.broadcast_to(rotary, (keys.shape[0], *rotary.shape))
    keys = jnp.concatenate([keys, shared], axis=-1)
    scores = jnp.einsum("tnh,nsh->nts", q, keys, preferred_element_type=jnp.float32) * SCALE
    seen = jnp.arange(keys.shape[1]) <= chunks[0, 3] + jnp.arange(q.shape[0])[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("nts,nsh->tnh", weights, values)


def programs(case: str) -> dict[str, Callable]:
    """Return programs of `CALLS` calls by name."""
    heads, chunks = CASES[case]
    tokens = sum(n for n, _ in chunks)
    table, pages = page_tables(np.random.default_rng(3), [n + at for n, at in chunks])
    firsts = np.cumsum([0, *(n for n, _ in chunks)])[:-1]
    rows = listed([(first, n, at) for first, (n, at) in zip(firsts, chunks, strict=True)])
    cache, shape = pages_of(jax.random.key(1), pages), (tokens, heads, PLAIN + ROTARY)
    qs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(CALLS)]
    table = jnp.asarray(table[:, : max(-(-(n + at) // 64) for n, at in chunks)])
    arguments = qs, *cache, *ups_of(jax.random.key(2), heads), table, jnp.asarray(rows)
    ways: dict[str, Callable] = {
        "mosaic": by_head,
        "absorbed": absorbed,
    }
    if tokens * table.shape[1] * 64 * heads <= XLA_SCORES:
        ways["xla"] = by_xla

    def program(way: Callable) -> Callable:
        return functools.partial(jax.jit(way), *arguments)

    return {name: program(way) for name, way in ways.items()}


def times(rows, share, seconds) -> None:
    """Time both forms and XLA's, for all cases, or every n-th from case i for the share (i, n)."""
    for case in list(CASES)[share[0] :: share[1]]:
        for way, t in interleaved(programs(case), calls=CALLS, seconds=seconds).items():
            part = flop(case)[way] / FLOPS_PER_S * 1e6 / t.us
            record(rows, what="time", case=case, way=way, flops=part, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(__doc__, {"check": checks, "time": times})

"""Check latent decode attention against its float32 reference on a GPU, and time it next to XLA's.

    python -m pallas_kernels.attention.latent.gpu_check [--seconds 0.6] [--only check,time] [--json FILE]

Prints one line per case: the error ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs;
the time of a call, the bytes of latent pages as a share of a stream of 4.5 TB/s, and the FLOP as a
share of the datasheet's rate.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.latent import reference
from pallas_kernels.attention.latent.api import decode_attention
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory, ragged, random_pages
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved

TOLERANCE = 8e-3  # bfloat16 operands, weights and parts compared with float32
RANK, ROTARY = 512, 64
SCALE = (128 + 64) ** -0.5  # DeepSeek-V3's, without its factor of YaRN
STREAM_BYTES_PER_S = 4.5e12  # of an H200
FLOPS_PER_S = 989e12  # of the datasheet
HEADS, BATCHES, MEANS = (128, 16), (1, 64, 128), (1024, 8192)


def pages_of(key: jax.Array, pages: int) -> tuple[jax.Array, jax.Array]:
    """Return random rotary pages [P, 1, 64, 64] and latent pages [P, 1, 64, 512]."""
    rotary, latent = jax.random.split(key)
    return random_pages(rotary, pages, 1, ROTARY), random_pages(latent, pages, 1, RANK)


def lengths_of(batch: int, mean: int) -> tuple[int, ...]:
    """Return ragged lengths, or the mean itself for one row."""
    return (mean,) if batch == 1 else ragged(batch, mean)


def flop(lengths, heads: int) -> float:
    """Return the FLOP of a call."""
    return 2.0 * sum(lengths) * heads * (2 * RANK + ROTARY)


def read_bytes(lengths) -> float:
    """Return the bytes of latent pages that a call reads."""
    return 2.0 * sum(lengths) * (RANK + ROTARY)


def xla_attention(q, rope_pages, latent_pages, page_table, lengths, *, scale: float) -> jax.Array:
    """Return the same product by XLA: pages gathered as bfloat16, two batched
    products, a softmax in float32.
    """
    b, table = lengths.shape[0], jnp.clip(page_table, 0, latent_pages.shape[0] - 1)
    rotary, latent = (x[:, 0][table].reshape(b, -1, x.shape[-1]) for x in (rope_pages, latent_pages))
    keys = jnp.concatenate([latent, rotary], axis=-1)
    scores = jnp.einsum("bna,bsa->bns", q[:b], keys, preferred_element_type=jnp.float32) * scale
    valid = jnp.arange(keys.shape[1])[None, :] < lengths[:, None]
    weights = jax.nn.softmax(jnp.where(valid[:, None], scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("bns,bsr->bnr", weights, latent)


def check(rows, rng, lengths, heads: int, **how) -> None:
    """Run one case twice, and its reference."""
    lengths = np.asarray(lengths)
    table, pages = page_tables(rng, lengths)
    cache = [poison(x, table, lengths) for x in pages_of(jax.random.key(int(rng.integers(2**31))), pages)]
    b, more = len(lengths), int(rng.choice([0, 43]))
    q = jnp.asarray(rng.normal(size=(b + more, heads, RANK + ROTARY)) * rng.choice([1, 4]), jnp.bfloat16)
    into = jnp.asarray(rng.normal(size=(b + more, heads, RANK)), jnp.bfloat16) if more else None
    nobody = np.append(lengths == 0, np.ones(more, bool))
    given = q, *cache, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
    run = jax.jit(functools.partial(decode_attention, scale=SCALE, **how))
    poison_memory(jax.ShapeDtypeStruct((b + more, heads, RANK), q.dtype))
    got = run(*given, into=into)
    same = bool((got == run(*given, into=into)).all())
    kept = bool((got[nobody] == (jnp.zeros_like(got) if into is None else into)[nobody]).all())
    known = [jnp.where(jnp.isnan(x), jnp.zeros_like(x), x) for x in cache]
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(functools.partial(reference.decode_attention, scale=SCALE))
        want = plain(q.astype(jnp.float32), *known, *given[3:])
    err = error(got[~nobody], want[~nobody])
    about = {"b": b, "keys": int(lengths.sum()), "heads": heads, "into": more > 0, **how}
    record(
        rows,
        what="check",
        ok=err < TOLERANCE and same and kept,
        error=err,
        same_bits=same,
        kept=kept,
        **about,
    )


def checks(rows, share, _) -> None:
    """Run all correctness cases, or every n-th from case i for the share (i, n)."""
    rng = np.random.default_rng(time.time_ns())
    many = lambda b, top: rng.integers(1, top, b) * (rng.random(b) > 0.1)
    batches = [[1], [64], [65], [5000], [0, 1, 63, 64, 65, 128, 0], many(37, 900), many(130, 3000)]
    cases = [(lengths, heads, {}) for lengths in batches for heads in (8, 16, 64, 128)]
    cases += [(many(64, 2000), heads, {"sms": sms}) for heads in (16, 128) for sms in (24, 131)]
    for lengths, heads, how in cases[share[0] :: share[1]]:
        check(rows, rng, lengths, heads, **how)


def programs(batch: int, mean: int, heads: int) -> tuple[dict[str, Callable], int]:
    """Return programs of the kernel and of XLA by name, and the calls in a program.

    The calls have queries of their own, and read caches in turn that the L2 does not hold together.
    """
    lengths = lengths_of(batch, mean)
    table, pages = page_tables(np.random.default_rng(3), lengths)
    caches = [
        pages_of(jax.random.key(i), pages)
        for i in range(max(1, min(8, int(240e6 / read_bytes(lengths)) + 1)))
    ]
    calls, shape = 64 if batch == 1 else 16 if mean < 4096 else 8, (batch, heads, RANK + ROTARY)
    qs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(calls)]
    arguments = qs, caches, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)

    def program(kernel: Callable) -> Callable:
        one = jax.jit(functools.partial(kernel, scale=SCALE))
        run = jax.jit(
            lambda qs, caches, *rest: [one(q, *caches[i % len(caches)], *rest) for i, q in enumerate(qs)]
        )
        return functools.partial(run, *arguments)

    return {"mosaic": program(decode_attention), "xla": program(xla_attention)}, calls


def times(rows, _, seconds) -> None:
    """Time the kernel and XLA's products for 128 heads and for the 16 of a device with eight in all."""
    for heads in HEADS:
        for batch in BATCHES:
            for mean in MEANS:
                lengths = lengths_of(batch, mean)
                ways, calls = programs(batch, mean, heads)
                for way, t in interleaved(ways, calls=calls, seconds=seconds).items():
                    shares = {
                        "stream": read_bytes(lengths) / STREAM_BYTES_PER_S * 1e6 / t.us,
                        "flops": flop(lengths, heads) / FLOPS_PER_S * 1e6 / t.us,
                    }
                    case = {"heads": heads, "batch": batch, "mean": mean, "way": way}
                    record(rows, what="time", **case, **shares, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(__doc__, {"check": checks, "time": times})

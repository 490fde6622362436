"""Benchmark cases of latent decode attention: DeepSeek-V3's 128 heads on one device, and 16 of them on each of eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from pallas_kernels.attention.latent import gpu_check as latent
from pallas_kernels.attention.latent.api import decode_attention
from pallas_kernels.measure.inputs import page_tables

# Of the bound that binds: 55 % of the datasheet's FLOP with 128 heads, 70 % of the stream with 16.
_FLOPS_PER_S, _BYTES_PER_S = 0.55 * latent.FLOPS_PER_S, 0.7 * latent.STREAM_BYTES_PER_S


def _decode(batch: int, mean: int, heads: int, unit: str) -> dict[str, Implementation]:
    lengths = latent.lengths_of(batch, mean)
    table, pages = page_tables(np.random.default_rng(3), lengths)
    read = latent.read_bytes(lengths)
    caches = [latent.pages_of(jax.random.key(i), pages) for i in range(max(1, min(8, int(240e6 / read) + 1)))]
    shape = batch, heads, latent.RANK + latent.ROTARY
    qs = [
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
        for i in range(64 if batch == 1 else 16 if mean < 4096 else 8)
    ]
    amount = read if unit == "TB/s" else latent.flop(lengths, heads)
    arguments = qs, caches, jnp.asarray(table), jnp.asarray(lengths, jnp.int32)

    def implementation(kernel) -> Implementation:
        one = jax.jit(functools.partial(kernel, scale=latent.SCALE))
        program = jax.jit(
            lambda qs, caches, *rest: [one(q, *caches[i % len(caches)], *rest) for i, q in enumerate(qs)]
        )
        return Implementation(lambda: program(*arguments), len(qs), amount)

    return {"mosaic": implementation(decode_attention), "xla": implementation(latent.xla_attention)}


def _group(name: str, heads: int, unit: str, rate: float) -> KernelGroup:
    return KernelGroup(
        name,
        unit,
        tuple(
            KernelCase(
                f"{batch} x mean {mean}",
                functools.partial(_decode, batch, mean, heads, unit),
                rate=rate if batch > 1 else None,  # one row is bound by latency
            )
            for batch in latent.BATCHES
            for mean in latent.MEANS
        ),
        on_request=True,
    )


GROUPS = (
    _group("latent_decode_128", 128, "TFLOP/s", _FLOPS_PER_S),
    _group("latent_decode_16", 16, "TB/s", _BYTES_PER_S),
)

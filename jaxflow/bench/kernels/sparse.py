"""Benchmark cases of decode attention with a span for each KV head (FlashDecoding++Next §III, Fig. 17).

The heads of a row see 1/9 to 8/9 of its keys, half on average. Three orders of the work are compared with
dense attention over the same rows: the kernel's equal pieces of pages, whole (row, head) pairs with the
longest first, and whole pairs in the order of heads, which is the paper's baseline. Ratios are ratios of
times.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.bench.kernels.attention import SCALE, H, K, N, random_cache, random_queries
from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from jaxflow.bench.kernels.whole_pairs import whole_pairs
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.work_list import decode_work
from pallas_kernels.attention.tiles import decode_tile
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure.inputs import page_tables, ragged

SINKS = 64  # first keys that every head sees
NINTHS = np.array([3, 8, 1, 6, 2, 7, 4, 5])  # of a row's keys, for each KV head


def half_spans(lengths: Sequence[int]) -> np.ndarray:
    """Return spans [B, K] int32 that show each head its ninths of a row's keys, the sinks included."""
    keys = np.round(np.asarray(lengths)[:, None] * NINTHS / 9).astype(np.int32)
    return np.maximum(keys - SINKS, 1)


def seen_keys(lengths: Sequence[int], spans: np.ndarray) -> float:
    """Return the keys that all heads of all rows see, divided by the KV heads."""
    return float(np.minimum(spans + SINKS, np.asarray(lengths)[:, None]).sum()) / K


def _decode(lengths: Sequence[int], dtype, full: bool):
    """Prepare attention with spans over rows of `lengths` keys, and dense attention over the same rows.

    full: spans as long as the rows, in equal pieces only.
    """
    table, pages = page_tables(np.random.default_rng(len(lengths)), lengths)
    spans = np.repeat(np.asarray(lengths, np.int32)[:, None], K, 1) if full else half_spans(lengths)
    keys, itemsize = float(sum(lengths)), jnp.dtype(dtype).itemsize
    of_key = 2.0 * K * H * itemsize  # bytes of a key and its value in all heads
    caches = 2
    calls = 32 if keys * of_key < 2e9 else 8
    qs = random_queries(calls, len(lengths))
    cache = [random_cache(i, pages, dtype) for i in range(caches)]
    sized, seen = jnp.asarray(lengths, jnp.int32), jnp.asarray(spans)
    workers = SMS * decode_tile(H, N // K, itemsize).workers
    one = functools.partial(decode_attention, scale=SCALE)
    sparse = functools.partial(one, spans=seen, sinks=SINKS)

    def prepared(kernel, read: float, work=None) -> Implementation:
        layer = jax.jit(kernel)  # one lowering serves all calls

        def calls_of(qs, cache, table, lengths, spans, work):
            if work is None:
                work = decode_work(lengths, K, workers, None, spans, 0 if spans is None else SINKS)
            return [layer(q, *cache[i % caches], table, lengths, work=work) for i, q in enumerate(qs)]

        program = jax.jit(calls_of)
        arguments = qs, cache, jnp.asarray(table), sized, None if kernel is one else seen, work
        return Implementation(
            lambda: program(*arguments), calls, read * of_key, keys, dtype=jnp.dtype(dtype).name
        )

    made = {
        "spans": prepared(sparse, seen_keys(lengths, spans)),
        "dense": prepared(one, keys),
    }
    if not full:
        for name, longest_first in (("longest first", True), ("head order", False)):
            work = whole_pairs(lengths, spans, SINKS, workers, longest_first)
            made[name] = prepared(sparse, seen_keys(lengths, spans), work)
    return made


_BATCHES = {
    f"{rows} x mean {mean}": ragged(rows, mean)
    for rows, mean in ((256, 4096), (64, 4096), (256, 1024), (64, 1024), (64, 32768))
}


def _case(name: str, dtype, full: bool, ratio: float) -> KernelCase:
    kind = "fp8 " * (dtype == jnp.float8_e4m3fn) + ("full spans" if full else "half the keys")
    return KernelCase(f"{name} {kind}", functools.partial(_decode, _BATCHES[name], dtype, full), ratio=ratio)


_CASES = (
    *(_case(name, jnp.bfloat16, False, 1.8) for name in _BATCHES),
    *(_case(name, jnp.bfloat16, True, 0.98) for name in ("256 x mean 4096", "64 x mean 1024")),
    _case("256 x mean 4096", jnp.float8_e4m3fn, False, 1.8),
)
GROUPS = (KernelGroup("sparse_attention", "TB/s", _CASES),)

"""Benchmark cases of the attention kernels: 32 query heads, 8 KV heads, head size 128, 64-token pages at
random."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.gpu_check import cudnn_paged, jax_paged
from pallas_kernels.measure.inputs import page_tables, ragged, random_pages

N, K, H = 32, 8, 128
SCALE = H**-0.5
INT8_SCALE = 4 / 127  # normal random numbers are clipped at ±4
PHI = (0.0, 60.0)  # unified max value and range for normal random queries and keys, with scores within ±6


BATCHES: dict[str, tuple[int, ...]] = {
    "256 x mean 1024": ragged(256, 1024),
    "256 x mean 4096": ragged(256, 4096),
    "1 x 131072": (131072,),
    "131072 + 200 x 512": (131072, *[512] * 200),
    "64 x 1100": (1100,) * 64,
}
CHUNKS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    **{f"2048 over {context}": ((0, 2048, 0, context),) for context in (0, 2048, 8192, 32768)},
    "8 x 256 over 0": tuple((256 * i, 256, i, 0) for i in range(8)),
}


def random_cache(seed: int, pages: int, dtype) -> tuple[jax.Array, ...]:
    """Return random keys and values.

    8-bit values are stored with contiguous keys. An int8 cache also has scales, all equal here.
    """
    k, v = (random_pages(jax.random.key(2 * seed + i), pages, K, H) for i in range(2))
    if dtype == jnp.int8:
        k, v = (jnp.clip(jnp.round(x * (1 / INT8_SCALE)), -127, 127).astype(jnp.int8) for x in (k, v))
        return (
            k,
            jnp.swapaxes(v, 2, 3),
            *(jnp.full((pages, K, 64), INT8_SCALE, jnp.float32) for _ in range(2)),
        )
    return (k, v) if dtype == jnp.bfloat16 else (k.astype(dtype), jnp.swapaxes(v, 2, 3).astype(dtype))


def random_queries(calls: int, rows: int) -> list[jax.Array]:
    """Return different queries for each call, because XLA would run equal calls only once."""
    return [jax.random.normal(jax.random.key(i), (rows, N, H), jnp.bfloat16) for i in range(calls)]


def _paged(
    kernel, table, counts, qs, caches, amount: float, work: float | None = None, **settings: Any
) -> Implementation:
    """Return a program with one call per element of `qs`, over the caches in turn."""
    one = jax.jit(functools.partial(kernel, scale=SCALE, **settings))  # one lowering serves all calls
    program = jax.jit(
        lambda qs, caches, table, counts: [
            one(q, *caches[i % len(caches)], table, counts) for i, q in enumerate(qs)
        ]
    )
    arguments = qs, caches, jnp.asarray(table), jnp.asarray(counts, jnp.int32)
    dtype = (
        "float8_e4m3fn" if caches[0][0].dtype == jnp.float8_e4m3fn else "bfloat16"
    )  # int8 is multiplied as bfloat16
    return Implementation(lambda: program(*arguments), len(qs), amount, work, dtype=dtype)


def _decode(lengths: Sequence[int], kinds: Sequence[str]):
    """Prepare the implementations `kinds` for reading `lengths` keys.

    Kinds: bf16, unified, fp8, fp8 unified, int8, triton, jax, cudnn.
    """
    table, pages = page_tables(np.random.default_rng(len(lengths)), lengths)
    keys = float(sum(lengths))
    read = keys * K * H * 4  # bytes of a bfloat16 cache
    caches = max(2, min(8, int(480e6 / read) + 1))
    calls = (
        64 if read < 4e8 else 32 if read < 4e9 else 8
    )  # as many calls as model layers, sharing one work list; at least 2 ms per program
    calls += -calls % caches
    qs = random_queries(calls, len(lengths))
    made = {
        dtype: [random_cache(i, pages, dtype) for i in range(caches)]
        for dtype in {_dtype(kind) for kind in kinds}
    }
    implementations = {}
    for kind in kinds:
        cache = made[_dtype(kind)]
        if kind in ("jax", "cudnn"):
            rival = {"jax": jax_paged, "cudnn": cudnn_paged}[kind](table, np.asarray(lengths), H)
            implementations[kind] = Implementation(functools.partial(rival, qs, cache), calls, read, keys)
            continue
        settings: dict[str, Any] = {"unified_max": jnp.asarray(PHI, jnp.float32)} if "unified" in kind else {}
        if "fp8" in kind:
            settings |= {"k_scale": jnp.ones(K, jnp.float32), "v_scale": jnp.ones(K, jnp.float32)}
        kernel = {"triton": _before_hopper, "int8": lambda: _int8(decode_attention)}.get(
            kind, lambda: decode_attention
        )()
        size = {"int8": read / 2 + keys * K * 8}.get(kind, read / 2 if "fp8" in kind else read)
        implementations[kind] = _paged(kernel, table, lengths, qs, cache, size, keys, **settings)
    return implementations


def _int8(attention: Callable) -> Callable:
    """Return the same function with each scale array placed after its page array."""
    return lambda q, k, v, k_scale, v_scale, *rest, **settings: attention(
        q, k, v, *rest, k_scale=k_scale, v_scale=v_scale, **settings
    )


def _before_hopper():
    """Return the decode kernel for GPUs before Hopper, which needs the extra `triton`."""
    from pallas_kernels.triton import decode_attention as before

    return before.decode_attention


def _dtype(kind: str):
    return jnp.float8_e4m3fn if "fp8" in kind else jnp.int8 if kind == "int8" else jnp.bfloat16


def _pairs(chunks) -> float:
    """Return the number of (query, key) pairs under the causal mask."""
    return sum(c[1] * c[3] + c[1] * (c[1] + 1) // 2 for c in chunks)


def _chunk(chunks, kinds: Sequence[str]):
    """Prepare the implementations of chunk attention: bf16, unified, fp8, int8 and cudnn.

    cudnn is causal and square without previous context, and unmasked otherwise.
    """
    tokens = sum(c[1] for c in chunks)
    table, pages = page_tables(np.random.default_rng(3), [c[3] + c[1] for c in chunks])
    flop = 4.0 * _pairs(chunks) * N * H
    qs = random_queries(
        max(3, min(64, int(1.2e12 / flop) + 1)), tokens
    )  # at least 2 ms per program: eight calls with 8 chunks of 256 tokens measured the host instead
    implementations = {}
    for kind in kinds:
        if kind == "cudnn":
            implementations[kind] = _cudnn(len(chunks), chunks[0][1], chunks[0][3], len(qs))
            continue
        settings: dict[str, Any] = {"unified_max": jnp.asarray(PHI, jnp.float32)} if kind == "unified" else {}
        if kind == "fp8":
            settings |= {"k_scale": jnp.ones(K, jnp.float32), "v_scale": jnp.ones(K, jnp.float32)}
        kernel = _int8(chunk_attention) if kind == "int8" else chunk_attention
        implementations[kind] = _paged(
            kernel,
            table,
            chunks,
            qs,
            [random_cache(i, pages, _dtype(kind)) for i in range(2)],
            flop,
            **settings,
        )
    return implementations


def _cudnn(chunks: int, tokens: int, context: int, calls: int) -> Implementation:
    """Return cuDNN's attention, which has no causal mask at an offset.

    Without context the attention is square and causal; otherwise it is unmasked over all keys.
    """
    keys, causal = context + tokens, context == 0
    k, v = (jax.random.normal(jax.random.key(i), (chunks, keys, K, H), jnp.bfloat16) for i in range(2))
    qs = [q.reshape(chunks, tokens, N, H) for q in random_queries(calls, chunks * tokens)]
    program = jax.jit(
        lambda qs, k, v: [
            jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn") for q in qs
        ]
    )
    pairs = chunks * (tokens * (tokens + 1) // 2 if causal else tokens * keys)
    return Implementation(lambda: program(qs, k, v), calls, 4.0 * pairs * N * H)


def _cases(batches, make, kinds, **targets) -> tuple[KernelCase, ...]:
    return tuple(
        KernelCase(name, functools.partial(make, batch, kinds), **targets) for name, batch in batches.items()
    )


_CUDNN = (
    "256 x mean 1024",
    "1 x 131072",
    "64 x 1100",
)  # cuDNN needs as many pages in every row as the longest row has, which exceeds memory in other cases
_TARGETS = {"1 x 131072": 3.7e12, "64 x 1100": None}
GROUPS = (
    KernelGroup(
        "decode_attention",
        "TB/s",
        tuple(
            KernelCase(
                name,
                functools.partial(_decode, batch, ("bf16", "jax", *["cudnn"] * (name in _CUDNN))),
                rate=_TARGETS.get(name, 4.2e12),
            )
            for name, batch in BATCHES.items()
        ),
    ),
    KernelGroup("decode_attention_fp8", "TB/s", _cases(BATCHES, _decode, ("fp8", "bf16"), ratio=1.8)),
    KernelGroup("decode_unified", "TB/s", _cases(BATCHES, _decode, ("unified", "bf16"), ratio=1.0)),
    KernelGroup("decode_fp8_unified", "TB/s", _cases(BATCHES, _decode, ("fp8 unified", "fp8"), ratio=1.0)),
    KernelGroup("decode_attention_int8", "TB/s", _cases(BATCHES, _decode, ("int8", "bf16", "fp8"))),
    KernelGroup(
        "decode_attention_triton",
        "TB/s",
        _cases(BATCHES, _decode, ("triton", "jax", "bf16")),
        on_request=True,
    ),
    KernelGroup("chunk_attention", "TFLOP/s", _cases(CHUNKS, _chunk, ("bf16", "cudnn"), ratio=1.0)),
    KernelGroup("chunk_unified", "TFLOP/s", _cases(CHUNKS, _chunk, ("unified", "bf16"), ratio=1.0)),
    KernelGroup("chunk_attention_fp8", "TFLOP/s", _cases(CHUNKS, _chunk, ("fp8", "bf16"))),
    KernelGroup("chunk_attention_int8", "TFLOP/s", _cases(CHUNKS, _chunk, ("int8", "bf16"))),
)

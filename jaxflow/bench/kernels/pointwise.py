"""Benchmark cases of a GPU's two peak rates, of the kernels that only move memory, and of sampling.

The sampling cases have 1,024 rows of Llama 3's vocabulary, with plain sampling and with every setting. One
read of the logits serves as their comparison.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from jaxflow.model import sampling, slot_params
from pallas_kernels.measure.peaks import Least
from pallas_kernels.measure.timing import looped
from pallas_kernels.pointwise.draw.api import draw
from pallas_kernels.pointwise.norm import reference as norm_reference
from pallas_kernels.pointwise.norm.api import add_norm
from pallas_kernels.pointwise.rope_append import reference as rope_reference
from pallas_kernels.pointwise.rope_append.api import rope_append
from pallas_kernels.pointwise.sample.api import draw_filtered
from pallas_kernels.pointwise.sample.reference import draw_filtered as draw_filtered_reference

ELEMENTS = 1 << 30  # bfloat16, 2 GiB
TOKENS, LAYERS = 2048, 32
# One program has the calls of all layers. With fewer calls, or with results at new addresses each time, the
# host limits the measured time.
ROUNDS = 8
D, N, K, H = 4096, 32, 8, 128


def _normal(i: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)


def _read():
    x = _normal(0, ELEMENTS // 8192, 8192)
    program = looped(lambda x, _: jnp.max(x, axis=1), ROUNDS)
    return {"read": Implementation(lambda: program([x], [None]), ROUNDS, 2.0 * ELEMENTS)}


def _copy():
    return {"copy": _copied(2.0 * ELEMENTS, 1)}


def _multiply():
    a, b = _normal(0, 8192, 8192), _normal(1, 8192, 8192)
    program = jax.jit(lambda a, b: a @ b)
    return {
        "cuBLAS": Implementation(
            lambda: program(a, b), 1, 2.0 * 8192**3, least=Least(flop=2.0 * 8192**3), tuned=True
        )
    }


def _copied(size: float, calls: int) -> Implementation:
    """Return copies of distinct arrays of `size` bytes. The amount counts the bytes read and the bytes
    written."""
    xs = [_normal(i, int(size) // 2 // 4096, 4096) for i in range(calls)]
    program = looped(lambda x, _: x + 1, ROUNDS)
    return Implementation(lambda: program(xs, [None] * calls), calls * ROUNDS, 2.0 * size)


def _norm(quantize: bool):
    """Prepare the norm kernel: it reads x, y and the weight, and writes x + y and its norm."""
    xs, ys = ([_normal(2 * i + j, TOKENS, D) for i in range(LAYERS)] for j in range(2))
    weight = _normal(7, D)
    moved = TOKENS * D * (7.0 if quantize else 8.0)

    def implementation(norm: Callable) -> Implementation:
        one = jax.jit(functools.partial(norm, eps=1e-5, quantize=quantize))
        program = looped(lambda x, y: one(x, y, weight), ROUNDS)
        return Implementation(lambda: program(xs, ys), LAYERS * ROUNDS, moved)

    return {
        "add_norm": implementation(add_norm),
        "copy": _copied(moved / 2, LAYERS),
        "xla": implementation(norm_reference.add_norm),
    }


def _rope(fp8: bool):
    """Prepare the RoPE kernel: it reads the projection, and writes queries and the KV at scattered pages."""
    fused = [_normal(i, TOKENS, K * (N // K + 2) * H) for i in range(LAYERS)]
    rng = np.random.default_rng(0)
    slots = jnp.asarray((rng.permutation(TOKENS // 64)[:, None] * 64 + np.arange(64)).reshape(-1), jnp.int32)
    positions = jnp.arange(TOKENS, dtype=jnp.int32)
    moved = TOKENS * H * (2.0 * (2 * N + 2 * K) + 2 * K * (1 if fp8 else 2))
    scales = {"k_scale": jnp.ones(K), "v_scale": jnp.ones(K)} if fp8 else {}
    shapes = ((TOKENS // 64, K, 64, H), (TOKENS // 64, K, H, 64) if fp8 else (TOKENS // 64, K, 64, H))

    def implementation(rope: Callable) -> Implementation:
        inv_freq = jnp.asarray(500000.0 ** -(np.arange(H // 2) / (H // 2)), jnp.float32)
        one = functools.partial(rope, head_dim=H, inv_freq=inv_freq, **scales)

        def run(fused, pages):
            def body(i, state):
                each = [
                    (lax.optimization_barrier((x, i))[0], kv) for x, kv in zip(fused, state[1], strict=True)
                ]
                outs = [one(x, *kv, positions, slots) for x, kv in each]
                return [q for q, *_ in outs], [(k, v) for _, k, v in outs]

            return lax.fori_loop(
                0, ROUNDS, body, ([jnp.zeros((TOKENS, N, H), x.dtype) for x in fused], pages)
            )

        program = jax.jit(run, donate_argnums=(1,))
        kept = [
            [
                tuple(jnp.zeros(shape, jnp.float8_e4m3fn if fp8 else jnp.bfloat16) for shape in shapes)
                for _ in range(LAYERS)
            ]
        ]

        def step():
            qs, kept[0] = program(fused, kept[0])
            return qs

        return Implementation(step, LAYERS * ROUNDS, moved)

    return {
        "rope_append": implementation(rope_append),
        "copy": _copied(moved / 2, LAYERS),
        "xla": implementation(rope_reference.rope_append),
    }


CEILINGS = (
    KernelGroup(
        "ceilings",
        "TB/s",
        (KernelCase("read 2 GiB", _read), KernelCase("copy 2 GiB both implementations", _copy)),
    ),
    KernelGroup("ceiling_gemm", "TFLOP/s", (KernelCase("8192 x 8192 x 8192 bf16", _multiply),)),
)
MOVING = tuple(
    KernelGroup(
        name,
        "TB/s",
        tuple(
            KernelCase(f"2048 tokens {form}", functools.partial(make, form == "fp8"), ratio=0.8)
            for form in ("bf16", "fp8")
        ),
    )
    for name, make in (("add_norm", _norm), ("rope_append", _rope))
)


ROWS, VOCABULARY = 1024, 128256
FILTERED_ROWS = ((1, 128256), (64, 128256), (256, 128256), (640, 128256), (640, 151936))
LOGITS = 4.0 * ROWS * VOCABULARY  # bytes
PLAIN_SECONDS, FULL_SECONDS = 0.6e-3, 2e-3  # upper limits of the sampling times, in seconds


def _rows(count: int = ROWS, vocabulary: int = VOCABULARY):
    """Return logits with a softmax that is neither flat nor peaked, and a quarter of the rows greedy."""
    logits = 2.0 * jax.random.normal(jax.random.key(0), (count, vocabulary), jnp.float32)
    temperature = jnp.where(jnp.arange(count) % 4 == 3, 0.0, 0.8)
    seed = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (count, 2)), jnp.uint32)
    return logits, temperature, seed, jnp.arange(count, dtype=jnp.int32)


def _with_reading(name: str, run: Callable, logits: jax.Array) -> dict[str, Implementation]:
    read = looped(lambda x, _: x.max(-1), 8)
    amount = 4.0 * logits.size
    return {
        name: Implementation(run, 1, amount),
        "one reading": Implementation(lambda: read([logits], [None]), 8, amount),
    }


def _plain():
    rows = _rows()
    program = jax.jit(functools.partial(sampling.plain, draw=draw))
    return _with_reading("plain", lambda: program(*rows), rows[0])


def _full(top_k: int, top_p: float, penalty: float, count: int = ROWS, vocabulary: int = VOCABULARY):
    rows = _rows(count, vocabulary)
    params, counts = slot_params.empty_slots(count, vocabulary)
    settings = {
        "top_k": jnp.int32(top_k),
        "top_p": jnp.float32(top_p),
        "repetition_penalty": jnp.float32(penalty),
    }
    params = dataclasses.replace(
        params, **{name: jnp.full((count,), value) for name, value in settings.items()}
    )
    kept, asked = [counts], jnp.zeros((count,), bool)
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    most = sampling.rows_at_once(memory, vocabulary)

    def implementation(of_filtered: Callable) -> Callable:
        sampler = functools.partial(sampling.full_by_rows, draw_filtered=of_filtered, most=most)
        program = jax.jit(sampler, donate_argnums=(6,))

        def run():
            tokens, kept[0], logprobs = program(*rows, rows[3], params, kept[0], asked)
            return tokens, logprobs

        return run

    amount = 4.0 * count * vocabulary
    return _with_reading("full", implementation(draw_filtered), rows[0]) | {
        "XLA": Implementation(implementation(draw_filtered_reference), 1, amount)
    }


GROUPS = (
    *MOVING,
    KernelGroup(
        "sampling",
        "TB/s",
        (
            KernelCase("1024 rows plain", _plain, rate=LOGITS / PLAIN_SECONDS),
            KernelCase(
                "1024 rows top-k 50 top-p 0.9 penalties",
                functools.partial(_full, 50, 0.9, 1.1),
                rate=LOGITS / FULL_SECONDS,
            ),
            KernelCase("1024 rows top-p 0.9 of a flat softmax", functools.partial(_full, 0, 0.9, 1.0)),
            KernelCase("1024 rows top-k 5000 top-p 0.9", functools.partial(_full, 5000, 0.9, 1.0)),
        ),
    ),
    KernelGroup(
        "sampling_filters",
        "TB/s",
        tuple(
            KernelCase(
                f"{rows} rows of {vocabulary} {name}",
                functools.partial(_full, top_k, 0.9, 1.0, rows, vocabulary),
            )
            for rows, vocabulary in FILTERED_ROWS
            for name, top_k in (("top-k 50 top-p 0.9", 50), ("top-p 0.9 of a flat softmax", 0))
        ),
        on_request=True,
    ),
)

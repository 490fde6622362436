"""Benchmark cases of a GPU's two ceilings, and of the kernels that only move memory."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflow.bench.kernels.case import Case, Group, Way
from pallas_kernels.measure.peaks import Least
from pallas_kernels.measure.timing import looped
from pallas_kernels.pointwise.norm import reference as norm_reference
from pallas_kernels.pointwise.norm.api import add_norm
from pallas_kernels.pointwise.rope_append import reference as rope_reference
from pallas_kernels.pointwise.rope_append.api import rope_append

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
    return {"read": Way(lambda: program([x], [None]), ROUNDS, 2.0 * ELEMENTS)}


def _copy():
    return {"copy": _copied(2.0 * ELEMENTS, 1)}


def _multiply():
    a, b = _normal(0, 8192, 8192), _normal(1, 8192, 8192)
    program = jax.jit(lambda a, b: a @ b)
    return {
        "cuBLAS": Way(lambda: program(a, b), 1, 2.0 * 8192**3, least=Least(flop=2.0 * 8192**3), tuned=True)
    }


def _copied(size: float, calls: int) -> Way:
    """Return copies of distinct arrays of `size` bytes. The amount counts the bytes read and the bytes
    written."""
    xs = [_normal(i, int(size) // 2 // 4096, 4096) for i in range(calls)]
    program = looped(lambda x, _: x + 1, ROUNDS)
    return Way(lambda: program(xs, [None] * calls), calls * ROUNDS, 2.0 * size)


def _norm(quantize: bool):
    """Prepare the norm kernel: it reads x, y and the weight, and writes x + y and its norm."""
    xs, ys = ([_normal(2 * i + j, TOKENS, D) for i in range(LAYERS)] for j in range(2))
    weight = _normal(7, D)
    moved = TOKENS * D * (7.0 if quantize else 8.0)

    def way(norm: Callable) -> Way:
        one = jax.jit(functools.partial(norm, eps=1e-5, quantize=quantize))
        program = looped(lambda x, y: one(x, y, weight), ROUNDS)
        return Way(lambda: program(xs, ys), LAYERS * ROUNDS, moved)

    return {
        "add_norm": way(add_norm),
        "copy": _copied(moved / 2, LAYERS),
        "xla": way(norm_reference.add_norm),
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

    def way(rope: Callable) -> Way:
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

        return Way(step, LAYERS * ROUNDS, moved)

    return {
        "rope_append": way(rope_append),
        "copy": _copied(moved / 2, LAYERS),
        "xla": way(rope_reference.rope_append),
    }


CEILINGS = (
    Group("ceilings", "TB/s", (Case("read 2 GiB", _read), Case("copy 2 GiB both ways", _copy))),
    Group("ceiling_gemm", "TFLOP/s", (Case("8192 x 8192 x 8192 bf16", _multiply),)),
)
GROUPS = tuple(
    Group(
        name,
        "TB/s",
        tuple(
            Case(f"2048 tokens {form}", functools.partial(make, form == "fp8"), ratio=0.8)
            for form in ("bf16", "fp8")
        ),
    )
    for name, make in (("add_norm", _norm), ("rope_append", _rope))
)

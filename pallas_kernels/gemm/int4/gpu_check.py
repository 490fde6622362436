"""Check int4 GEMM against a float32 product on a GPU, and time it next to flat GEMM.

    python -m pallas_kernels.gemm.int4.gpu_check [--only check,int4] [--share 0/3] [--json FILE]

Errors and times are measured as in `pallas_kernels.gemm.flat.gpu_check`.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gemm.flat.api import flat_gemm
from pallas_kernels.gemm.flat.gpu_check import (
    GATED,
    SHAPES,
    bf16_weight,
    check,
    exact,
    geomean,
    normal,
    timed,
)
from pallas_kernels.gemm.int4.api import int4_gemm
from pallas_kernels.gemm.int4.reference import (
    dequantize_int4,
    nearest_levels,
    nearest_to_zero_point,
    quantize_int4,
)
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.quantized import Int4


def quantized(w, nearest=nearest_levels):
    """Return (int4 weight, the 16-bit weight that it stands for)."""
    w = jax.jit(quantize_int4, static_argnames="nearest")(w, nearest=nearest)
    return w, dequantize_int4(w)


def check_far(rows, rng, m=8, n=2**20 + 8, k=4096, last=4096):
    """Check that the last rows of a weight of more than 2**31 bytes give the results of a small weight."""
    keys = jax.random.split(jax.random.key(rng.integers(2**31)))
    tail = jax.jit(quantize_int4)(normal(keys[1], last, k, scale=k**-0.5))
    x, w = (
        normal(keys[0], m, k),
        Int4(*(jnp.concatenate([jnp.ones((n - last, part.shape[1]), part.dtype), part]) for part in tail)),
    )
    run = jax.jit(int4_gemm)
    poison_memory(jax.eval_shape(run, x, w))
    got, want = run(x, w)[:, n - last :].astype(jnp.float32), exact(x, dequantize_int4(tail), None, None)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    record(rows, what="check int4_gemm, far offsets", ok=error < 3e-3, error=error, m=m, n=n, k=k)


def checks(rows, share):
    rng = np.random.default_rng(time.time_ns())
    one = functools.partial(check, rows, rng, int4_gemm, quantize=quantized)
    with_zero_points = functools.partial(quantized, nearest=nearest_to_zero_point)
    other = functools.partial(check, rows, rng, int4_gemm, quantize=with_zero_points)
    some = [(1, "qkv"), (8, "down"), (16, "out_proj"), (27, "qkv"), (64, "down")]
    cases = [functools.partial(one, m, *SHAPES["8B"][op]) for m, op in some]
    cases += [
        functools.partial(one, 5, 2568, 8192, residual=True),
        functools.partial(one, 16, 28672, 4096, bias=True, **GATED),
        functools.partial(one, 33, 200, 512, activation="relu", out_dtype=jnp.float32),
        functools.partial(one, 8, 4096, 14336, sms=28),
        functools.partial(other, 3, 2568, 8192, residual=True),
        functools.partial(other, 40, 28672, 4096, **GATED),
        functools.partial(check_far, rows, rng),
    ]
    for case in cases[share[0] :: share[1]]:
        case()


@functools.partial(jax.jit, static_argnums=(1, 2))
def int4_weight(key, n, k):
    return quantize_int4(jax.random.normal(key, (n, k), jnp.bfloat16) * k**-0.5)


def times(rows, share, seconds):
    cases = [
        (model, op, m) for m in (1, 8, 16) for model, ops in SHAPES.items() for op in ops if op != "lm_head"
    ]
    ratios = []
    for model, op, m in cases[share[0] :: share[1]]:
        n, k = SHAPES[model][op]
        run = functools.partial(timed, rows, m=m, n=n, k=k, seconds=seconds, model=model, op=op)
        flat = run(kernel=flat_gemm, make=bf16_weight, bytes_read=2.0 * n * k, what="flat")
        ratios.append(
            flat / run(kernel=int4_gemm, make=int4_weight, bytes_read=(0.5 + 4 / 64) * n * k, what="int4")
        )
        record(rows, what="int4 / flat", model=model, op=op, m=m, ratio=ratios[-1])
    record(rows, what="int4 / flat, geometric mean", ratio=geomean(ratios), least=min(ratios))


if __name__ == "__main__":
    script.main(__doc__, {"check": lambda rows, share, _: checks(rows, share), "int4": times})

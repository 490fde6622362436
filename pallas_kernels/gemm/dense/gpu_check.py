"""Check the dense GEMM against a float32 product on a GPU, and time it next to XLA's (cuBLAS).

  python -m pallas_kernels.gemm.dense.gpu_check [--only check,shapes,bounded,layer] [--share 0/3]
      [--json FILE]

Errors are ‖kernel − exact‖ / ‖exact‖ on fresh random operands. Weights rotate, so that no weight is in the
L2 cache when the kernel reads it.
"""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gemm import reference
from pallas_kernels.gemm.dense.api import dense_gemm
from pallas_kernels.gemm.model_shapes import SHAPES
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, poison_memory
from pallas_kernels.measure.script import L2_BYTES, record
from pallas_kernels.measure.timing import interleaved

MLP = {"gate_block": 64, "activation": "silu"}


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape, scale):
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return _normal(jax.random.key(seed), shape, scale)


def xla_gemm(x, w, gate_block=None, activation=None):
    """Return XLA's product, followed by the gate (one fused pass over the product's output)."""
    y = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
    return y if gate_block is None else reference.gate_mul(y, gate_block, activation)


def check(rows, rng, m, n, k, bias=False, residual=False, **kw):
    """Check one random product against the exact product.

    The output buffer holds NaN before the run, and four runs must give the same bits.
    """
    columns = n // 2 if "gate_block" in kw else n
    shapes = [(m, k), (n, k), (n,) if bias else None, (m, columns) if residual else None]
    scales = [1.0, k**-0.5, 1.0, 1.0]
    seeds = rng.integers(2**31, size=4)
    made = [
        None if s is None else normal(int(seed), *s, scale=f)
        for seed, s, f in zip(seeds, shapes, scales, strict=True)
    ]
    run = jax.jit(lambda x, w, bias, residual: dense_gemm(x, w, bias, residual=residual, **kw))
    poison_memory(jax.eval_shape(run, *made))
    got = run(*made)
    exact = [None if v is None else v.astype(jnp.float32) for v in made]
    settings = {key: value for key, value in kw.items() if key in ("gate_block", "activation")}
    with jax.default_matmul_precision("highest"):
        want = jax.jit(
            lambda x, w, bias, residual: reference.gemm(x, w, bias, residual=residual, **settings)
        )(*exact)
    err = error(got, want)
    same = all(bool((got == run(*made)).all()) for _ in range(3))
    ok = same and err < (1e-4 if got.dtype == jnp.float32 else 3e-3)
    record(
        rows,
        what="check",
        ok=ok,
        error=err,
        same_bits=same,
        m=m,
        n=n,
        k=k,
        bias=bias,
        residual=residual,
        **kw,
    )


def checks(rows, share):
    rng = np.random.default_rng(time.time_ns())
    one = functools.partial(check, rows, rng)
    cases = [functools.partial(one, m, *weight) for m in (256, 2048) for weight in SHAPES["8B"].values()]
    cases += [
        functools.partial(one, m, 2560, 8192, sms=sms)
        for m, sms in [(1000, 104), (8, 132), (1, 20), (333, 112)]
    ]
    cases += [functools.partial(one, m, 28672, 4096, **MLP) for m in (256, 1000, 2048)]
    cases += [
        functools.partial(one, 1000, 14336, 8192, sms=104, **MLP),
        functools.partial(one, 512, 59136, 8192, gate_block=16, activation="silu"),  # Qwen2-72B
        functools.partial(one, 777, 9728, 896, gate_block=32, activation="gelu_tanh", bias=True),
        functools.partial(one, 1024, 4096, 4096, bias=True, residual=True),
        functools.partial(one, 640, 4096, 1024, activation="relu", residual=True, sms=28),
        functools.partial(one, 300, 128256, 2048, out_dtype=jnp.float32),
        functools.partial(one, 1500, 1152, 576),
        functools.partial(one, 13, 576, 1536, bias=True),
        functools.partial(one, 280000, 8192, 128),  # 2.3e9 elements
    ]
    for case in cases[share[0] :: share[1]]:
        case()


def chained(fn, calls):
    """Return one program with `calls` dependent products, so that XLA merges none and launches cost
    nothing.
    """
    fn = jax.jit(fn)  # traced and lowered once

    def run(xs, ws):
        outs = []
        for i in range(calls):
            x = xs[i % len(xs)]
            if outs:
                x, outs[-1] = lax.optimization_barrier((x, outs[-1]))
            outs.append(fn(x, ws[i % len(ws)]))
        return outs

    return jax.jit(run)


def in_turn(rows, ways, m, n, k, seconds, **labels) -> dict[str, float]:
    """Time several implementations of the products [m, k] x [n, k] in turn and return their TFLOP/s."""
    weights = min(max(2, math.ceil(4 * L2_BYTES / (n * k * 2))), 10)
    xs, ws = (
        [normal(seed, *shape, scale=k**-0.5) for seed in range(many)]
        for many, shape in ((2, (m, k)), (weights, (n, k)))
    )
    calls = max(weights, min(24, int(1.2e12 / (2 * m * n * k)) + 1))
    programs = {name: functools.partial(chained(fn, calls), xs, ws) for name, fn in ways.items()}
    rates = {}
    for name, t in interleaved(programs, calls=calls, seconds=seconds).items():
        rates[name] = 2.0 * m * n * k / t.us / 1e6
        record(rows, what=name, **labels, m=m, n=n, k=k, tflops=rates[name], **dataclasses.asdict(t))
    return rates


def times_of_shapes(rows, share, seconds, rows_of_x=(256, 512, 1024, 2048)):
    cases = [(model, op, m) for m in rows_of_x for model, ops in SHAPES.items() for op in ops]
    ratios = []
    for model, op, m in cases[share[0] :: share[1]]:
        got = in_turn(
            rows,
            {"xla": xla_gemm, "dense_gemm": dense_gemm},
            m,
            *SHAPES[model][op],
            seconds,
            model=model,
            op=op,
        )
        ratios.append(got["dense_gemm"] / got["xla"])
        record(rows, what="ratio", model=model, op=op, m=m, ratio=ratios[-1])
    record(
        rows, what="geomean", of=len(ratios), ratio=float(np.exp(np.mean(np.log(ratios)))), least=min(ratios)
    )


def bounded(rows, share, seconds):
    cases = [(op, m) for m in (832, 1024, 1664, 2048) for op in SHAPES["8B"]]
    for op, m in cases[share[0] :: share[1]]:
        ways = {f"{sms} SMs": functools.partial(dense_gemm, sms=sms) for sms in (132, 104, 112, 120)}
        got = in_turn(rows, ways, m, *SHAPES["8B"][op], seconds, op=op)
        record(
            rows,
            what="share of 132",
            op=op,
            m=m,
            **{name: rate / got["132 SMs"] for name, rate in got.items()},
        )


def layers(gemm, count=3):
    """Return a program with the products and the gate of `count` decoder layers of Llama-3.1-8B.

    The program maps (x [M, D], o [M, D], weights) to outputs.
    """
    gemm = jax.jit(gemm, static_argnames=("gate_block", "activation"))  # traced and lowered once

    def run(x, o, weights):
        outs = []
        for w in weights[:count]:
            qkv = gemm(x, w["qkv"])
            o, qkv = lax.optimization_barrier((o, qkv))  # attention separates the two products
            outs.append(qkv)
            x = gemm(gemm(gemm(o, w["out_proj"]), w["up_gate"], **MLP), w["down"])
        return x, outs

    return jax.jit(run)


def layer(rows, share, seconds):
    ops, count = SHAPES["8B"], 3
    gain = {"down": 2.8}  # compensates for the scale that the gate removes
    weights = [
        {op: normal(10 * i, n, k, scale=gain.get(op, 1.0) * k**-0.5) for op, (n, k) in ops.items()}
        for i in range(count)
    ]
    flop = sum(2.0 * n * k for n, k in ops.values())
    for m in (512, 1024, 2048, 4096)[share[0] :: share[1]]:
        x, o = normal(1, m, 4096), normal(2, m, 4096)
        ways = {
            name: functools.partial(layers(gemm, count), x, o, weights)
            for name, gemm in (("xla", xla_gemm), ("dense_gemm", dense_gemm))
        }
        got = interleaved(ways, calls=count, seconds=seconds)
        for name, t in got.items():
            record(rows, what="layer", name=name, m=m, tflops=m * flop / t.us / 1e6, **dataclasses.asdict(t))
        record(rows, what="layer ratio", m=m, ratio=got["xla"].us / got["dense_gemm"].us)


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, share, _: checks(rows, share),
            "shapes": times_of_shapes,
            "bounded": bounded,
            "layer": layer,
        },
    )

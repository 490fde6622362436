"""Check flat GEMM against a float32 product on a GPU, and time it next to XLA's (cuBLAS).

    python -m pallas_kernels.gemm.flat.gpu_check [--only check,flat,clusters,biased] [--share 0/3]

Errors are ‖kernel − exact‖ / ‖exact‖ on fresh random operands. Weights rotate over four times the L2 cache,
in a loop on the device. The loop's buffers keep their addresses, so a CUDA graph is recorded once instead of
once per program.

`clusters` checks and times 8 rows on weights of few columns, whose tiles 1 to 8 CTAs split along K. `biased`
times 8 and 64 rows on gpt-oss-20b's qkv and out_proj with their biases, which XLA adds in a second kernel.
"""

import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gemm import model_shapes, reference
from pallas_kernels.gemm.flat.api import flat_gemm
from pallas_kernels.gemm.flat.tiles import filled
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import L2_BYTES, record
from pallas_kernels.measure.timing import interleaved, sustained
from pallas_kernels.measure.timing import looped as in_loop

HEADS = {"8B": {"lm_head": (128256, 4096)}, "70B/tp4": {"lm_head": (32064, 8192)}}
SHAPES = {
    model: ops | HEADS[model] for model, ops in model_shapes.SHAPES.items()
}  # [N, K] of a layer's products and of the output head
GATED = {"gate_block": 64, "activation": "silu"}


def normal(key, *shape, scale=1.0) -> jax.Array:
    return jax.jit(lambda key: (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16))(key)


@functools.partial(jax.jit, static_argnames=("activation", "gate_block"))
def exact(x, w, bias, residual, **kw):
    with jax.default_matmul_precision("highest"):
        return reference.gemm(x.astype(jnp.float32), w.astype(jnp.float32), bias, residual=residual, **kw)


def check(rows, rng, kernel, m, n, k, bias=False, residual=False, quantize=None, **kw):
    """Check one random product against the exact product.

    The output buffer holds NaN before the run, and a second run must give the same bits.

    quantize: a weight -> (the form that the kernel takes, the 16-bit weight that it stands for).
    """
    keys = jax.random.split(jax.random.key(rng.integers(2**31)), 4)
    columns = n // 2 if "gate_block" in kw else n
    x, w = normal(keys[0], m, k), normal(keys[1], n, k, scale=k**-0.5)
    b = normal(keys[2], n) if bias else None
    r = normal(keys[3], m, columns) if residual else None
    w, plain = quantize(w) if quantize else (w, w)
    run = jax.jit(lambda x, w, b, r: kernel(x, w, b, residual=r, **kw))
    dtype = kw.get("out_dtype", jnp.bfloat16)
    poison_memory(jax.eval_shape(run, x, w, b, r))
    got = run(x, w, b, r)
    settings = {name: value for name, value in kw.items() if name in ("gate_block", "activation")}
    want = exact(x, plain, b, r, **settings)
    error = float(jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want))
    same = bool((got == run(x, w, b, r)).all())
    ok = same and error < (1e-4 if dtype == jnp.float32 else 3e-3)
    record(
        rows,
        what=f"check {kernel.__name__}",
        ok=ok,
        error=error,
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
    flat = functools.partial(check, rows, rng, flat_gemm)
    cases = [functools.partial(flat, int(rng.integers(1, 65)), *weight) for weight in SHAPES["8B"].values()]
    cases += [
        functools.partial(flat, m, *weight) for m in (1, 8, 64) for weight in SHAPES["70B/tp4"].values()
    ]
    cases += [functools.partial(flat, m, 28672, 4096, **GATED) for m in (1, 13, 16, 33, 64)]
    cases += [
        functools.partial(flat, 7, 4096, 4096, bias=True, residual=True),
        functools.partial(flat, 64, 4096, 14336, residual=True, sms=28),
        functools.partial(flat, 21, 2560, 960, activation="relu", bias=True),
        functools.partial(flat, 5, 200, 64, activation="gelu_tanh"),
        functools.partial(flat, 40, 1032, 192, out_dtype=jnp.float32),
        functools.partial(
            flat, 3, 9728, 896, gate_block=64, activation="gelu_tanh", bias=True, residual=True
        ),
        functools.partial(flat, 16, 2**19 + 8, 4224),  # 2.2e9 elements
    ]
    for case in cases[share[0] :: share[1]]:
        case()


def xla_gemm(x, w):
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)


def looped(kernel, calls: int, rounds: int):
    """Return a program of `rounds` times `calls` products in sequence, each with its own x and weight.

    XLA merges products that share an operand.
    """
    one = jax.jit(kernel)

    def run(xs, ws):
        def body(i, _):
            return tuple(one(lax.optimization_barrier((x, i))[0], w) for x, w in zip(xs, ws, strict=True))

        return lax.fori_loop(
            0,
            rounds,
            body,
            tuple(jnp.zeros((x.shape[0], w.shape[0]), x.dtype) for x, w in zip(xs, ws, strict=True)),
        )

    return jax.jit(run)


def timed(rows, kernel, make, m, n, k, bytes_read, seconds, **labels) -> float:
    calls = max(6, math.ceil(4 * L2_BYTES / bytes_read))
    rounds = max(1, round(10e-3 / (calls * (bytes_read / 4e12 + 2e-6))))
    xs = [normal(jax.random.key(1000 + i), m, k) for i in range(calls)]
    ws = [make(jax.random.key(i), n, k) for i in range(calls)]
    t = sustained(looped(kernel, calls, rounds), xs, ws, calls=calls * rounds, seconds=seconds)
    record(rows, **labels, m=m, n=n, k=k, tbs=bytes_read / t["us"] / 1e6, **t)
    return t["us"]


def bf16_weight(key, n, k):
    return normal(key, n, k, scale=k**-0.5)


def geomean(ratios) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan


def times_of_flat(rows, share, seconds):
    cases = [(model, op, m) for m in (1, 8, 16, 32, 64) for model, ops in SHAPES.items() for op in ops]
    ratios = []
    for model, op, m in cases[share[0] :: share[1]]:
        n, k = SHAPES[model][op]
        run = functools.partial(
            timed,
            rows,
            m=m,
            n=n,
            k=k,
            bytes_read=2.0 * n * k,
            seconds=seconds,
            model=model,
            op=op,
            make=bf16_weight,
        )
        ratios.append(run(kernel=xla_gemm, what="xla") / run(kernel=flat_gemm, what="flat"))
        record(rows, what="flat / xla", model=model, op=op, m=m, ratio=ratios[-1])
    record(rows, what="flat / xla, geometric mean", ratio=geomean(ratios), least=min(ratios))


# Rows, warpgroups, depth and cluster of flat GEMM's tiles.
TILES = (
    (64, 1, 128, 1), (64, 1, 128, 2), (64, 2, 128, 2), (64, 2, 128, 4), (128, 1, 128, 2), (128, 1, 64, 4),
)  # fmt: skip
FEW_COLUMNS = {"qkv": (5120, 2048), "out_proj": (2048, 4096), "router": (128, 2048)}  # Qwen3-30B-A3B's [N, K]


def clusters(rows, share, seconds):
    rng = np.random.default_rng(time.time_ns())
    for op, (n, k) in list(FEW_COLUMNS.items())[share[0] :: share[1]]:
        run = functools.partial(
            timed, rows, m=8, n=n, k=k, bytes_read=2.0 * n * k, seconds=seconds, op=op, make=bf16_weight
        )
        run(kernel=xla_gemm, what="xla")
        run(kernel=flat_gemm, what="flat")
        for cluster in (1, 2, 4, 8):
            if cluster * -(-n // 64) <= SMS:
                tile = filled(8, 64, 1, 128, cluster, 16)
                split = functools.update_wrapper(functools.partial(flat_gemm, tile=tile), flat_gemm)
                check(rows, rng, split, 8, n, k)
                run(kernel=split, what="flat", cluster=cluster)


def biased(rows, share, seconds):
    """Time flat GEMM's own tile, marked 0, and others beside XLA's product and sum, in turn."""
    for n, k in ((5120, 2880), (2880, 4096))[share[0] :: share[1]]:
        calls = -(-4 * L2_BYTES // (2 * n * k))
        ws = [bf16_weight(jax.random.key(i), n, k) for i in range(calls)]
        bias = normal(jax.random.key(99), n)
        for m in (8, 64):
            xs = [normal(jax.random.key(i), m, k) for i in range(calls)]
            made = [filled(m, *shape, 16) for shape in TILES]
            made = [tile for tile in made if tile.stages > 1 and tile.cluster * -(-n // tile.columns) <= SMS]
            ways = {"xla": functools.partial(reference.gemm, bias=bias)} | {
                f"flat {tile and (tile.rows, tile.warpgroups, tile.depth, tile.cluster, tile.stages)}": (
                    functools.partial(flat_gemm, bias=bias, tile=tile)
                )
                for tile in (None, *made)
            }
            bound_us = 2 * n * k / 4.5e6
            rounds = max(1, round(4e3 / calls / bound_us))
            programs = {
                name: in_loop(jax.jit(functools.partial(_called, way)), rounds).lower(xs, ws)
                for name, way in ways.items()
            }
            compiled = {name: program.compile() for name, program in programs.items()}
            runs = {name: functools.partial(program, xs, ws) for name, program in compiled.items()}
            wanted, *found = (np.asarray(run()[0], np.float32) for run in runs.values())
            for name, y in zip(list(ways)[1:], found, strict=True):
                err = float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))
                record(rows, what="check biased", ok=err < 5e-3, error=err, shape=(m, n, k), tile=name)
            times = interleaved(runs, calls=calls * rounds, seconds=seconds, rounds=5)
            rows += [{"what": "biased", "shape": (m, n, k), "tile": a, "us": t.us} for a, t in times.items()]
            cells = [f"{name} {t.us:.2f} {bound_us / t.us:.2f}" for name, t in times.items()]
            print("TABLE biased", m, n, k, f"bound {bound_us:.2f} |", " | ".join(cells), flush=True)


def _called(way, x, w):
    return way(x, w)


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, share, _: checks(rows, share),
            "flat": times_of_flat,
            "clusters": clusters,
            "biased": biased,
        },
    )

"""Check the fp8 products against float32 on a GPU, and time them next to XLA's products with the same
scaling.

    python -m pallas_kernels.gemm.fp8.gpu_check [--seconds 0.6] [--only NAMES] [--share 0/6] [--json FILE]

The names are `check`, `shapes`, `flat`, `layer` and `tiles`, which times other tiles of few rows.
`check_blocks` and `blocks` check and time weights with a scale for each 64 rows and 128 columns, next to
weights with a scale for each row and to bfloat16.

Prints one line per case. Errors are ‖kernel − exact‖ / ‖exact‖ for the same e4m3 operands, summed in float32.
"""

import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gemm import reference
from pallas_kernels.gemm.block_fp8_format import dequantize_block_fp8, quantize_block_fp8
from pallas_kernels.gemm.fp8.api import fp8_gemm
from pallas_kernels.gemm.fp8.epilogue import Epilogue
from pallas_kernels.gemm.fp8.flat import Fp8FlatTile, fp8_flat_gemm, fp8_flat_tile
from pallas_kernels.gemm.model_shapes import SHAPES
from pallas_kernels.gemm.reference import activate, gate_mul
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, poison_memory
from pallas_kernels.measure.script import L2_BYTES, record
from pallas_kernels.measure.timing import interleaved
from pallas_kernels.pointwise.quantize.reference import (
    E4M3_MAX,
    dequantize,
    quantize_blocks,
    quantize_rows,
    to_e4m3,
)
from pallas_kernels.quantized import BlockFp8, Quantized

E4M3, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
GATE = {"activation": "silu", "gate_block": 64}


def quantized(x: jax.Array, scales: str) -> Quantized:
    """Return x [M, K] in e4m3 with scales per 128 columns ("block"), per row
    ("row"), or one scale ("one").
    """
    if scales == "one":
        scale = jnp.abs(x.astype(F32)).max() / E4M3_MAX
        return Quantized(to_e4m3(x, scale), scale)
    return quantize_blocks(x) if scales == "block" else quantize_rows(x)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random(key, rows: int, columns: int, scales: str) -> Quantized:
    return quantized(jax.random.normal(key, (rows, columns), F32) * columns**-0.25, scales)


def xla(
    x: Quantized,
    w: Quantized,
    bias=None,
    *,
    residual=None,
    quantize=False,
    activation=None,
    gate_block=None,
    sums=BF16,
):
    """Return XLA's version of the product: an e4m3 GEMM with output dtype `sums`, and fusions around it.

    The result is quantized by rows, because XLA's GEMM cannot use scales per 128 columns.
    """
    y = lax.dot_general(x.values, w.values, (((1,), (1,)), ((), ())), preferred_element_type=sums).astype(F32)
    y = y * w.scale * x.scale[:, None] + (0.0 if bias is None else bias)
    y = gate_mul(y, gate_block, activation) if gate_block else activate(y, activation)
    y = y if residual is None else y + residual.astype(F32)
    return quantize_rows(y) if quantize else y.astype(BF16)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_blocks(key, n: int, k: int, gate_block: int | None) -> BlockFp8:
    """Return a weight whose blocks differ in size by up to a hundred times."""
    w = quantize_block_fp8(jax.random.normal(key, (n, k), F32) * k**-0.25, gate_block)
    return w._replace(scale=w.scale * jax.random.uniform(key, w.scale.shape, minval=0.1, maxval=10.0))


def check(rows, rng, m, n, k, scales="row", bias=False, residual=False, blocks=False, **kw):
    """Compare one product. blocks: the weight and x have the scales of blocks."""
    keys = jax.random.split(jax.random.key(rng.integers(2**31)), 4)
    x, w, columns = (
        random(keys[0], m, k, scales),
        random(keys[1], n, k, "row"),
        n // 2 if "gate_block" in kw else n,
    )
    if blocks:
        x, w = random(keys[0], m, k, "block"), random_blocks(keys[1], n, k, kw.get("gate_block"))
    bias = jax.random.normal(keys[2], (n,), BF16) if bias else None
    residual = jax.random.normal(keys[3], (m, columns), BF16) if residual else None
    kernel = fp8_flat_gemm if m <= 64 else fp8_gemm
    run = jax.jit(lambda x, w, bias, residual: kernel(x, w, bias, residual=residual, **kw))
    poison_memory(jax.eval_shape(run, x, w, bias, residual))
    got = run(x, w, bias, residual)
    with jax.default_matmul_precision("highest"):
        reference_gemm = functools.partial(
            reference.gemm,
            out_dtype=F32,
            **{key: v for key, v in kw.items() if key in ("activation", "gate_block")},
        )
        want = jax.jit(lambda x, w, bias, residual: reference_gemm(x, w, bias, residual=residual))(
            *((x, w) if not blocks else (dequantize(x), dequantize_block_fp8(w, kw.get("gate_block")))),
            bias,
            residual,
        )
    again = [jax.tree.leaves(run(x, w, bias, residual)) for _ in range(4)]
    same = all(
        bool((a == b).all()) for other in again for a, b in zip(jax.tree.leaves(got), other, strict=True)
    )
    best = error(dequantize(quantize_blocks(want)), want) if kw.get("quantize") else 0.0
    err = error(dequantize(got) if isinstance(got, Quantized) else got, want)
    ok = same and err < (1.02 * best if best else 4e-3)
    record(
        rows,
        what="check blocks" if blocks else "check",
        ok=ok,
        error=err,
        best=best,
        same_bits=same,
        m=m,
        n=n,
        k=k,
        scales=scales,
        bias=bias is not None,
        residual=residual is not None,
        **kw,
    )


def checks(rows, share):
    rng = np.random.default_rng(time.time_ns())
    one, mlp = functools.partial(check, rows, rng), {**GATE, "quantize": True}
    cases = [
        *(
            functools.partial(one, m, *SHAPES[model][op])
            for m, model, op in [(2048, "8B", "qkv"), (256, "70B/tp4", "qkv"), (64, "8B", "out_proj")]
        ),
        *(functools.partial(one, m, *SHAPES["8B"]["up_gate"], **mlp) for m in (2048, 256, 64, 8)),
        *(
            functools.partial(one, m, *SHAPES["8B"]["down"], scales="block", residual=True)
            for m in (2048, 256, 64, 8)
        ),
        functools.partial(
            one, 1536, *SHAPES["8B"]["down"], scales="block"
        ),  # split tiles after full tiles, on all SMs and on some
        functools.partial(one, 1024, *SHAPES["8B"]["down"], scales="block", residual=True, sms=100),
        functools.partial(one, 1000, 4096, 4096, bias=True, residual=True),
        functools.partial(one, 1000, 4096, 4096, scales="one", sms=104),
        functools.partial(one, 392, 4096, 7168, scales="block", sms=28),
        functools.partial(one, 136, 640, 512, bias=True, activation="relu"),
        # Five blocks of scales per row.
        *(
            functools.partial(one, m, 640, 512, bias=True, activation="relu", quantize=True)
            for m in (40, 136)
        ),
        functools.partial(one, 77, 1280, 896, **GATE, bias=True),
        functools.partial(one, 300, 14336, 2048, activation="gelu_tanh", gate_block=32),
        functools.partial(one, 40, 640, 768, scales="one", bias=True, sms=20),
        functools.partial(one, 5, 28672, 4096, **mlp),
        functools.partial(one, 280000, 8192, 128),  # 2.3e9 elements
        functools.partial(one, 8, 2**19 + 128, 4224),  # 2.2e9 elements of the weight
    ]
    for case in cases[share[0] :: share[1]]:
        case()


# Products of Qwen3-8B and DeepSeek-V3, and those of Qwen3-30B-A3B's attention: (N, K, gates).
BLOCKS = {
    "up_gate 8B": (24576, 4096, True),
    "down 8B": (4096, 12288, False),
    "qkv 30B": (5120, 2048, False),
    "out_proj 30B": (2048, 4096, False),
    "shared_up_gate V3": (4096, 7168, True),
}


def checks_of_blocks(rows, share):
    rng = np.random.default_rng(time.time_ns())
    one, mlp = functools.partial(check, rows, rng, blocks=True), {**GATE, "quantize": True}
    cases = [
        functools.partial(one, m, n, k, **(mlp if gated else {}))
        for n, k, gated in BLOCKS.values()
        for m in (1, 8, 32, 64, 256, 2048)
    ]
    cases += [
        functools.partial(one, 1536, 4096, 12288, residual=True),  # split tiles after full tiles
        functools.partial(one, 1024, 4096, 14336, sms=100),
        functools.partial(one, 77, 1280, 896, **GATE, bias=True),
        functools.partial(one, 40, 640, 768, bias=True, residual=True, sms=20),
        functools.partial(one, 136, 640, 512, bias=True, activation="relu", quantize=True),
        functools.partial(one, 64, 3072, 512, **GATE),
    ]
    for case in cases[share[0] :: share[1]]:
        case()


def times_of_blocks(rows, share, seconds):
    """Time products of x with scales of blocks, by the form of the weight, and those of bfloat16 by XLA."""
    cases = [(m, op) for m in (8, 64, 256, 2048) for op in BLOCKS][share[0] :: share[1]]
    for m, op in cases:
        n, k, gated = BLOCKS[op]
        settings: dict = {**GATE, "quantize": True} if gated else {}
        weights = min(max(2, math.ceil(4 * L2_BYTES / (n * k))), 16)
        keys = jax.random.split(jax.random.key(m), weights + 1)
        kernel = fp8_flat_gemm if m <= 64 else fp8_gemm
        xs = [random(keys[-1], m, k, "block")] * 2
        of_blocks = [random_blocks(key, n, k, 64 if gated else None) for key in keys[:-1]]
        of_rows = [random(key, n, k, "row") for key in keys[:-1]]
        wide = [dequantize(w).astype(BF16) for w in of_rows]
        calls = max(weights, 8)
        plain = functools.partial(reference.gemm, **{**settings, "quantize": False})
        runs = {
            "blocks": functools.partial(chained(functools.partial(kernel, **settings), calls), xs, of_blocks),
            "rows": functools.partial(chained(functools.partial(kernel, **settings), calls), xs, of_rows),
            "bfloat16": functools.partial(chained(plain, calls), [dequantize(xs[0]).astype(BF16)] * 2, wide),
        }
        times = interleaved(runs, calls=calls, seconds=seconds)
        for name, t in times.items():
            tbs = n * k * (2 if name == "bfloat16" else 1) / t.us / 1e6
            own = {"tflops": 2.0 * m * n * k / t.us / 1e6, "tbs": tbs, "mhz": t.mhz, "watts": t.watts}
            record(rows, what=name, m=m, op=op, us=t.us, **own, spread=t.spread)
        ratios = {f"over_{name}": times[name].us / times["blocks"].us for name in ("rows", "bfloat16")}
        record(rows, what="blocks ratio", m=m, op=op, **ratios)


def chained(fn, calls):
    """Return one program with `calls` dependent products, so that XLA merges none and launches cost
    nothing.
    """

    def run(xs, ws, *rest):
        outs = []
        for i in range(calls):
            x = xs[i % len(xs)]
            if outs:
                x, outs[-1] = lax.optimization_barrier((x, outs[-1]))
            outs.append(fn(x, ws[i % len(ws)], *rest))
        return outs

    return jax.jit(run)


def versus(rows, m, model, op, seconds, ways: dict, **labels):
    """Time the `ways_of` one product and return the speedups of the first over each other implementation."""
    n, k = SHAPES[model][op]
    weights = min(max(2, math.ceil(4 * L2_BYTES / (n * k))), 16)
    calls, keys = (
        max(weights, min(24, int(2e12 / (2 * m * n * k)) + 1)),
        jax.random.split(jax.random.key(time.time_ns() % 2**31), 20),
    )
    ws = [random(keys[i], n, k, "row") for i in range(weights)]
    residual = jax.random.normal(keys[17], (m, n), BF16)
    runs = {}
    for name, (fn, scales, add) in ways.items():
        xs, program = [random(keys[18 + i], m, k, scales) for i in range(2)], chained(jax.jit(fn), calls)
        runs[name] = functools.partial(program, xs, ws, *([residual] if add else []))
    times, flop = interleaved(runs, calls=calls, seconds=seconds), 2.0 * m * n * k
    for name, t in times.items():
        record(
            rows,
            what=name,
            m=m,
            model=model,
            op=op,
            us=t.us,
            tflops=flop / t.us / 1e6,
            tbs=n * k / t.us / 1e6,
            mhz=t.mhz,
            watts=t.watts,
            spread=t.spread,
            **labels,
        )
    own, *rivals = (t.us for t in times.values())
    return [rival / own for rival in rivals]


def ways_of(op, kernel) -> dict:
    """Return our product, as the layer calls it, and XLA's products.

    Each is (function, form of x's scales, True if it takes a residual).
    """
    settings = {**GATE, "quantize": True} if op == "up_gate" else {}
    add = op in ("down", "out_proj")
    scales = "block" if add else "row"

    def way(gemm):
        return lambda x, w, *residual: gemm(
            x, w, **settings, **({"residual": residual[0]} if residual else {})
        )

    return {"fp8": (way(kernel), scales, add), "xla": (way(xla), "row", add)}


def times_of_shapes(rows, share, seconds, rows_of_x=(2048, 256, 1024, 512), kernel=fp8_gemm):
    ratios = []
    for m, model, op in [(m, model, op) for m in rows_of_x for model, ops in SHAPES.items() for op in ops][
        share[0] :: share[1]
    ]:
        ratios += versus(rows, m, model, op, seconds, ways_of(op, kernel))
        record(rows, what="ratio", m=m, model=model, op=op, ratio=ratios[-1])
    record(
        rows, what="geomean", of=len(ratios), ratio=float(np.exp(np.mean(np.log(ratios)))), least=min(ratios)
    )


def normed(x) -> Quantized:
    """Return a norm's result with one scale per token, as one fusion of XLA."""
    x = x.astype(F32)
    return quantize_rows(x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5))


def layers(gemm, count):
    """Return a program of `count` decoder layers of Llama-3.1-8B without attention: norms, products,
    quantization."""

    def run(h, o, weights):
        outs = []
        for w in weights[:count]:
            qkv = gemm(normed(h), w["qkv"])
            o, qkv = lax.optimization_barrier((o, qkv))  # attention separates the two products
            outs.append(qkv)
            h = gemm(o, w["out_proj"], residual=h)
            h = gemm(gemm(normed(h), w["up_gate"], **GATE, quantize=True), w["down"], residual=h)
        return h, outs

    return jax.jit(run)


def layer(rows, share, seconds):
    ops, count = SHAPES["8B"], 3
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4 * count)
    weights = [
        {op: random(keys[4 * i + j], *shape, "row") for j, (op, shape) in enumerate(ops.items())}
        for i in range(count)
    ]
    flop = sum(2.0 * n * k for n, k in ops.values())
    for m in (2048, 1024)[share[0] :: share[1]]:
        h = jax.random.normal(keys[0], (m, 4096), BF16)
        both = {"fp8": fp8_gemm, "xla": xla}
        heads = {name: random(keys[1], m, 4096, "block" if name == "fp8" else "row") for name in both}
        runs = {
            name: functools.partial(layers(gemm, count), h, heads[name], weights)
            for name, gemm in both.items()
        }
        times = interleaved(runs, calls=count, seconds=seconds)
        for name, t in times.items():
            record(
                rows,
                what=f"layer {name}",
                m=m,
                us=t.us,
                tflops=m * flop / t.us / 1e6,
                mhz=t.mhz,
                watts=t.watts,
                spread=t.spread,
            )
        record(rows, what="layer ratio", m=m, ratio=times["xla"].us / times["fp8"].us)


def times_of_tiles(rows, share, seconds):
    """Time few rows times the projections of Qwen3-30B-A3B's attention, with other tiles, too."""
    del share
    for n, k in ((2048, 4096), (5120, 2048)):
        ws = [random(jax.random.key(i), n, k, "row") for i in range(16)]  # more than the L2 holds
        for m in (64, 8):
            x = random(jax.random.key(99), m, k, "row")
            tiles: dict[str, Fp8FlatTile | None] = {"chosen": None}
            chosen: dict[str, Any]
            for chosen in (
                {"cluster": cluster, "depth": depth, "rows": high}
                for high, cluster in ((64, 2), (64, 4), (128, 2), (128, 4), (64, 8))
                for depth in (128, 256)
                if n // high * cluster <= 160 and high * m * (cluster - 1) <= 3 * 64 * 64
            ):
                tiles[str(chosen)] = fp8_flat_tile(
                    m, n, k, SMS, Epilogue(None, None, False, slots=1), **chosen
                )

            def calls(tile, x, ws):
                one = jax.jit(functools.partial(fp8_flat_gemm, tile=tile))
                return [one(x, w) for w in ws]

            ways = {
                name: functools.partial(jax.jit(functools.partial(calls, tile)), x, ws)
                for name, tile in tiles.items()
            }
            want = ways["chosen"]()[-1]
            off = {name: error(way()[-1], want) for name, way in ways.items()}
            for name, t in interleaved(ways, calls=len(ws), seconds=seconds).items():
                case = {"m": m, "n": n, "k": k, "tile": name, "error": off[name]}
                record(rows, what="tile", ok=off[name] < 4e-3, us=t.us, spread=t.spread, **case)


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, share, _: checks(rows, share),
            "shapes": times_of_shapes,
            "flat": functools.partial(times_of_shapes, rows_of_x=(64, 16), kernel=fp8_flat_gemm),
            "layer": layer,
            "tiles": times_of_tiles,
            "check_blocks": lambda rows, share, _: checks_of_blocks(rows, share),
            "blocks": times_of_blocks,
        },
    )

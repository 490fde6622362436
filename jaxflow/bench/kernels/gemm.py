"""Benchmark cases of the matrix products: a Llama 8B layer, and a Llama 70B layer on one of four GPUs."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from pallas_kernels.gemm import model_shapes
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.block_fp8_format import quantize_block_fp8
from pallas_kernels.gemm.dense.api import dense_gemm
from pallas_kernels.gemm.flat.api import flat_gemm
from pallas_kernels.gemm.flat.fma import ROWS, fma_gemm
from pallas_kernels.gemm.fp8.api import fp8_gemm
from pallas_kernels.gemm.fp8.flat import fp8_flat_gemm
from pallas_kernels.gemm.fp8.gpu_check import GATE, xla
from pallas_kernels.gemm.fp8.tile_schedule import fp8_plan, fp8_plans
from pallas_kernels.gemm.int4.api import int4_gemm
from pallas_kernels.gemm.int4.reference import quantize_int4
from pallas_kernels.gemm.tile_schedule import GemmPlan, cost_us, plans
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure.peaks import Least
from pallas_kernels.measure.timing import looped
from pallas_kernels.pointwise.quantize import reference as quantize_reference

SHAPES: dict[str, tuple[int, int]] = {  # [K, N]; the largest products first
    f"{model} {op}": (k, n)
    for op in ("up_gate", "down", "qkv", "out_proj")
    for model, ops in model_shapes.SHAPES.items()
    for n, k in [ops[op]]
}
ROTATED = 240 << 20  # bytes of weights per program: four times the L2


def _normal(i: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)


def _program(
    gemm: Callable, xs: list, ws: list, rounds: int, amount: float, least: Least, **settings
) -> Implementation:
    """Return a program that multiplies each x with its own weight, repeated `rounds` times."""
    program = looped(jax.jit(functools.partial(gemm, **settings)), rounds)
    return Implementation(
        lambda: program(xs, ws),
        rounds * len(xs),
        amount,
        least=least,
        tuned=gemm in (xla, gemm_reference.gemm, _xla_gated),
    )


def _operands(m: int, k: int, n: int, bytes_a_weight: float = 2) -> tuple[int, int]:
    """Return the number of weights to rotate over and the number of rounds, for a program of several
    milliseconds."""
    weights = max(4, -(-ROTATED // int(k * n * bytes_a_weight)))
    return weights, max(1, round(5e-3 / weights / max(2 * m * k * n / 700e12, k * n * bytes_a_weight / 4e12)))


def _bf16(
    m: int, shape: tuple[int, int], flop: bool, implementations: dict[str, Callable]
) -> dict[str, Implementation]:
    k, n = shape
    weights, rounds = _operands(m, k, n)
    ws, xs = [_normal(i, n, k) * k**-0.5 for i in range(weights)], [_normal(i, m, k) for i in range(weights)]
    amount, least = 2.0 * m * k * n if flop else 2.0 * k * n, Least(2.0 * k * n, 2.0 * m * k * n)
    return {name: _program(gemm, xs, ws, rounds, amount, least) for name, gemm in implementations.items()}


def _fp8(
    m: int, shape: tuple[int, int], name: str, forms: dict[str, Callable] | None = None
) -> dict[str, Implementation]:
    """Return the FP8 products of our kernels and of XLA.

    Our kernels take the layer's own inputs: `down` has scales per 128 columns, and the others have scales per
    token. `up_gate` also gates and quantizes. XLA uses scales per token in all products. For `down` our
    kernel with scales per token runs for comparison.

    forms: implementations to time instead of the kernel selected for `m` rows.
    """
    k, n = shape
    weights, rounds = _operands(m, k, n, 1)
    quantized = jax.jit(quantize_reference.quantize_rows)
    ws, plain = (
        [quantized(_normal(i, n, k)) for i in range(weights)],
        [_normal(i, m, k) for i in range(weights)],
    )
    xs = [quantized(x) for x in plain]
    flop, settings = 2.0 * m * k * n, (GATE | {"quantize": True} if "up_gate" in name else {})
    least = Least(1.0 * k * n, flop, "float8_e4m3fn")
    ours = list(map(jax.jit(quantize_reference.quantize_blocks), plain)) if "down" in name else xs
    kernels = forms or {"fp8": fp8_flat_gemm if m <= 64 else fp8_gemm}
    found = {
        label: _program(kernel, ours, ws, rounds, flop, least, **settings)
        for label, kernel in kernels.items()
    }
    found["xla"] = _program(xla, xs, ws, rounds, flop, least, **settings)
    if "down" in name:  # XLA's equivalent of the kernel, which also rescales its sums after every 128 columns
        found["xla, scales of 128"] = _program(gemm_reference.gemm, ours, ws, rounds, flop, least)
    return found


def _fp8_blocks(m: int, shape: tuple[int, int], name: str) -> dict[str, Implementation]:
    """Prepare the product of an e4m3 weight with a scale for each 64 rows and 128 columns.

    The rivals are our kernel with a scale for each row of the weight, and XLA's product in bfloat16.
    `up_gate` also gates, and quantizes in e4m3.
    """
    k, n = shape
    weights, rounds = _operands(m, k, n, 1)
    gates = GATE if "up_gate" in name else {}
    in_blocks = jax.jit(quantize_block_fp8, static_argnums=1)
    plain = [_normal(i, m, k) for i in range(weights)]
    xs = list(map(jax.jit(quantize_reference.quantize_blocks), plain))
    wide = [_normal(i, n, k) * k**-0.5 for i in range(weights)]
    kernel, e4m3 = fp8_flat_gemm if m <= 64 else fp8_gemm, {**gates, **({"quantize": True} if gates else {})}
    flop = 2.0 * m * k * n

    def one(gemm, given, ws, **settings):
        return _program(gemm, given, ws, rounds, flop, Least(1.0 * k * n, flop, "float8_e4m3fn"), **settings)

    of_rows = list(map(jax.jit(quantize_reference.quantize_rows), wide))
    return {
        "blocks": one(kernel, xs, [in_blocks(w, gates.get("gate_block")) for w in wide], **e4m3),
        "rows": one(kernel, xs, of_rows, **e4m3),
        "xla, bfloat16": one(_xla_gated if gates else gemm_reference.gemm, plain, wide),
    }


def _products(rows, make: Callable, **targets) -> tuple[KernelCase, ...]:
    """Return cases for every shape and number of rows. make(m, shape, name) prepares one case."""
    return tuple(
        KernelCase(f"{name} M {m}", functools.partial(make, m, shape, name), **targets)
        for m in rows
        for name, shape in SHAPES.items()
    )


def _dense(m, shape, _):
    return _bf16(m, shape, True, {"dense": dense_gemm, "xla": gemm_reference.gemm})


def _gated(m, shape, _):
    return _bf16(m, shape, True, {"dense": functools.partial(dense_gemm, **GATE), "xla": _xla_gated})


def _xla_gated(x, w):
    return gemm_reference.gemm(x, w, **GATE)


def _flat(m, shape, _):
    """Prepare the flat product, and the CUDA-core implementation where it supports `m`.

    An engine uses the CUDA-core implementation for some one-row products.
    """
    fma = {"fma": fma_gemm} if m <= ROWS else {}
    return _bf16(m, shape, False, {"flat": flat_gemm, "xla": gemm_reference.gemm, **fma})


def _flat_triton(m, shape, _):
    """Prepare the product kernel for GPUs before Hopper, which needs the extra `triton`."""
    from pallas_kernels.triton import flat_gemm as before

    return _bf16(m, shape, False, {"triton": before.flat_gemm, "xla": gemm_reference.gemm, "flat": flat_gemm})


def _int4(m, shape, _):
    """Prepare the int4 product. Each rate counts the bytes that its kernel reads, and the ratio compares
    times."""
    k, n = shape
    implementations = _flat(m, shape, _)
    weights, rounds = _operands(m, k, n, 0.5)
    ws = [jax.jit(quantize_int4)(_normal(i, n, k) * k**-0.5) for i in range(weights)]
    read = (0.5 + 4 / 64) * k * n
    four = _program(
        int4_gemm, [_normal(i, m, k) for i in range(weights)], ws, rounds, read, Least(read, 2.0 * m * k * n)
    )
    return {
        "int4": dataclasses.replace(four, work=1.0),
        "flat": dataclasses.replace(implementations["flat"], work=1.0),
    }


def _bounded(sms: int, m, shape, _):
    return _bf16(
        m,
        shape,
        True,
        {f"dense, {sms} SMs": functools.partial(dense_gemm, sms=sms), "dense, 132": dense_gemm},
    )


def _large(case: KernelCase) -> KernelCase:
    """Return the case with a target of 4.0 TB/s if the flat product has more than 100 MB of weights."""
    k, n = next(shape for name, shape in SHAPES.items() if case.name.startswith(f"{name} "))
    return KernelCase(case.name, case.prepare, rate=4.0e12 if 2 * k * n > 100e6 else None, ratio=case.ratio)


def _only(cases: tuple[KernelCase, ...], part: str) -> tuple[KernelCase, ...]:
    return tuple(case for case in cases if part in case.name)


def _tiles(m, shape, name):
    """Prepare the chosen tile plan, the next cheapest plans by the estimate, and XLA.

    The plans include the cheapest split plan of 256 columns.
    """
    k, n = shape
    gates = GATE if "up_gate" in name else {}
    by_cost: dict[str, GemmPlan] = {}
    for plan in sorted(plans(m, n, k, SMS, gates.get("gate_block")), key=cost_us):
        by_cost.setdefault(f"{plan.tile.cols} {'cut' if plan.schedule.slots else 'whole'}", plan)
    own, *others = by_cost
    kept = dict.fromkeys([*others[:2], *(other for other in others if other == "256 cut")])
    ours = {
        f"{label}{', chosen' * (label == own)}": functools.partial(dense_gemm, plan=by_cost[label], **gates)
        for label in (own, *kept)
    }
    return _bf16(m, shape, True, ours | {"xla": _xla_gated if gates else gemm_reference.gemm})


def _fp8_tiles(m: int, sms: int) -> dict[str, Implementation]:
    """Return the chosen tile plan and the other plans for 8B's `down` on `sms` SMs."""
    k, n = SHAPES["8B down"]
    fixed = {"blocked": True, "gate_block": None, "quantize": False}
    chosen, found = fp8_plan(m, n, k, sms, **fixed), {}
    for tile, work in fp8_plans(m, n, k, sms, **fixed):
        own = tile == chosen[0] and work.parts == chosen[1].parts
        label = f"{tile.columns}, {tile.cluster} CTAs, {work.parts} parts{', chosen' * own}"
        found[label] = functools.partial(fp8_gemm, sms=sms, plan=(tile, work))
    return _fp8(m, (k, n), "8B down", found)


DENSE_ROWS = (2048, 1024, 512, 256)
GROUPS = (
    KernelGroup("dense_gemm", "TFLOP/s", _products(DENSE_ROWS, _dense, ratio=0.95), geomean=1.0),
    KernelGroup(
        "dense_gemm_gated",
        "TFLOP/s",
        _only(_products(DENSE_ROWS, _gated, ratio=0.95), "8B up_gate"),
        geomean=1.0,
    ),
    *(
        KernelGroup(
            f"dense_gemm_{sms}",
            "TFLOP/s",
            _only(_products((2048, 832), functools.partial(_bounded, sms), ratio=least), "8B"),
        )
        for sms, least in ((104, 0.87), (112, 0.90), (120, 0.93))
    ),
    KernelGroup("fp8_gemm", "TFLOP/s", _products(DENSE_ROWS, _fp8), geomean=1.0),
    KernelGroup("fp8_flat_gemm", "TFLOP/s", _products((64, 1), _fp8), geomean=1.0),
    KernelGroup(
        "fp8_gemm_blocks",
        "TFLOP/s",
        _only(_products((2048, 256, 64, 8), _fp8_blocks), "8B"),
        on_request=True,
    ),
    KernelGroup("int4_gemm", "TB/s", _products((16, 1), _int4), geomean=2.5),
    KernelGroup(
        "flat_gemm", "TB/s", tuple(map(_large, _products((64, 16, 1), _flat, ratio=0.97))), geomean=1.1
    ),
    KernelGroup(
        "flat_gemm_triton", "TB/s", _only(_products((64, 16, 1), _flat_triton), "8B"), on_request=True
    ),
    KernelGroup(
        "dense_tiles", "TFLOP/s", _only(_products((512, 256, 1024, 768, 384), _tiles), "8B"), on_request=True
    ),
    KernelGroup(
        "fp8_tiles",
        "TFLOP/s",
        tuple(
            KernelCase(f"8B down M {m} on {sms}", functools.partial(_fp8_tiles, m, sms))
            for m, sms in (
                (1024, 100),
                (768, 84),
                (1024, 108),
                (2048, 108),
                (1280, 132),
                (512, 132),
                (256, 132),
            )
        ),
        on_request=True,
    ),
)

"""Time bfloat16 products with a stage left out, next to the full kernel and cuBLAS through XLA, to get each
stage's cost.

    python -m pallas_kernels.gemm.dense.gpu_stages [--only dense,bounded,flat] [--share 0/6] [--seconds 0.3]
        [--json FILE]

The kernels are the production kernels. A changed copy address leaves
out a stage of a product. Beyond an array's end, TMA writes nothing, and fills reads with zeros without
reading memory. Products of zeros draw less power, so each time has its clock. Repeated rows of a weight stay
in the L2. In all other cases weights rotate over four times the L2.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gemm import model_shapes, reference
from pallas_kernels.gemm.dense import api as dense
from pallas_kernels.gemm.flat import api as flat
from pallas_kernels.gemm.tile_schedule import GemmPlan, Schedule, gemm_plan, plan_of
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure import script
from pallas_kernels.measure.script import L2_BYTES, record
from pallas_kernels.measure.timing import interleaved, looped

Move = Callable[
    [tuple[int, ...], Any, Any], tuple[Any, Any]
]  # an array's shape, a slice's first row and column -> the first row and column to use

DENSE = [(m, "8B", op) for op in ("qkv", "down") for m in (256, 512)]
DENSE += [(512, "70B/tp4", "qkv"), (2048, "70B/tp4", "qkv"), (2048, "8B", "down")]
FEW_SMS = 104
ON_FEW = [(m, "8B", op) for m in (832, 2048) for op in ("qkv", "out_proj", "up_gate", "down")]
FLAT = [(64, "70B/tp4", "out_proj"), (64, "8B", "qkv"), (64, "8B", "up_gate"), (64, "8B", "down")]


def below(shape, row, column):
    return row + shape[0], column


def behind(shape, row, column):
    return row, column + shape[1]


def again(shape, row, column):
    """Return a position within rows that together fill a quarter of the L2."""
    return lax.rem(row, jnp.int32(L2_BYTES // 4 // (2 * shape[1]))), column


LEFT_OUT: dict[str, dict[str, Move]] = {
    "nothing stored": {"o": behind},
    "weight in the L2": {"w": again},
    "x not read": {"x": below},
    "nothing read": {"x": below, "w": below},
}


@dataclasses.dataclass(frozen=True)
class Moved:
    """A Ref for a kernel's copies, which moves each slice as `move` defines."""

    ref: Any
    move: Move

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    @property
    def at(self) -> "Moved":
        return self

    def __getitem__(self, index):
        rows, columns = index
        row, column = self.move(self.shape, rows.start, columns.start)
        return self.ref.at[pl.ds(row, rows.size), pl.ds(column, columns.size)]


def without(module: ModuleType, moves: dict[str, Move], gemm: Callable) -> Callable:
    """Return gemm(x, w) of `module` with moved copies in its kernel (`multiply`).

    moves: how to move the kernel's last arrays: x, w and the output o.
    """
    whole = module.multiply

    def multiply(*refs, **kw):
        arrays = dict(zip("xwo", refs[-3:], strict=True))
        arrays |= {name: Moved(arrays[name], move) for name, move in moves.items()}
        whole(*refs[:-3], *arrays.values(), **kw)

    def product(x, w):
        with mock.patch.object(module, "multiply", multiply):  # active during tracing
            return gemm(x, w)

    return product


def dense_ways(m: int, n: int, k: int, sms: int = SMS) -> dict[str, Callable]:
    """Return the full kernel, kernels with stages left out, and kernels with other tile splits, on `sms` SMs.

    The other tile splits are present only if the full kernel splits tiles.
    """
    gemm, own = functools.partial(dense.dense_gemm, sms=sms), gemm_plan(m, n, k, sms)
    ways = {name: without(dense, moves, gemm) for name, moves in LEFT_OUT.items() if name != "x not read"}
    if own.schedule.slots:
        ways["tiles not cut"] = functools.partial(gemm, plan=plan_of(own.tile, m, n, k, sms))
        ways["parts not added up"] = functools.partial(gemm, plan=unsummed(own))
    return {"whole": gemm, **ways}


def unsummed(plan: GemmPlan) -> GemmPlan:
    """Return a plan with the same splits that stores each part as if it were the tile's sum.

    The plan has no transfer of partial sums, no wait and no zeroing.
    """
    table = plan.schedule.table.copy()
    table[:, :, 4], table[:, :, 5:] = -1, 0
    return dataclasses.replace(plan, schedule=Schedule(table, 0))


def flat_ways(*_: int) -> dict[str, Callable]:
    """Return the full kernel and kernels with stages left out."""
    gemm = flat.flat_gemm
    return {"whole": gemm, **{name: without(flat, moves, gemm) for name, moves in LEFT_OUT.items()}}


def operands(m: int, n: int, k: int) -> tuple[list, list]:
    """Return each x with its own weight."""
    weights = max(4, -(-4 * L2_BYTES // (2 * n * k)))
    normal = jax.jit(
        lambda i, shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16), static_argnums=1
    )
    return [normal(i, (m, k)) for i in range(weights)], [
        normal(i + weights, (n, k)) * k**-0.5 for i in range(weights)
    ]


def times(kernel: str, ways_of: Callable, cases, rows, share, seconds) -> None:
    for m, model, op in cases[share[0] :: share[1]]:
        n, k = model_shapes.SHAPES[model][op]
        xs, ws = operands(m, n, k)
        rounds = max(1, round(5e-3 / len(ws) / max(2 * m * k * n / 700e12, 2 * k * n / 4e12)))
        lowered = {
            name: looped(jax.jit(gemm), rounds).lower(xs, ws) for name, gemm in ways_of(m, n, k).items()
        }
        with ThreadPoolExecutor() as pool:
            compiled = dict(
                zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True)
            )
        # Runs without concurrent work, because XLA times its candidates. The candidates are cuBLAS'; timing
        # Triton's would take XLA 5 to 20 s per shape.
        compiled["xla"] = (
            looped(reference.gemm, rounds)
            .lower(xs, ws)
            .compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
        )
        runs = {name: functools.partial(program, xs, ws) for name, program in compiled.items()}
        timings = interleaved(runs, calls=rounds * len(xs), seconds=seconds)
        for name, t in timings.items():
            labels = {"what": name, "kernel": kernel, "model": model, "op": op, "m": m, "n": n, "k": k}
            record(
                rows,
                **labels,
                of_whole=t.us / timings["whole"].us,
                tflops=2 * m * n * k / t.us / 1e6,
                **dataclasses.asdict(t),
            )


if __name__ == "__main__":
    parts: dict[str, script.Part] = {
        "dense": functools.partial(times, "dense_gemm", dense_ways, DENSE),
        "bounded": functools.partial(
            times, f"dense_gemm_{FEW_SMS}", functools.partial(dense_ways, sms=FEW_SMS), ON_FEW
        ),
        "flat": functools.partial(times, "flat_gemm", flat_ways, FLAT),
    }
    script.main(__doc__, parts)

"""Measure the fastest kernel of each GEMM on this GPU, and write the table from which kernel sets choose.

    python -m pallas_kernels.tune
        every shape of tables/shapes.json, bfloat16 weights
    python -m pallas_kernels.tune --models 'llama-3.1-8b tp 1' --weights float8_e4m3fn
    python -m pallas_kernels.tune --shapes 4096x6144 4096x28672g64
        K x N; g64: gates and ups in blocks of 64
    python -m pallas_kernels.tune --weights float8_e4m3fn --shapes 14336x4096b
        b: the input has a scale for every 128 columns
    python -m pallas_kernels.tune --tiles
        also tiles that the kernels would not choose
    python -m pallas_kernels.tune --time_limit_s 300
        stop after 300 s; the same command continues
    python -m pallas_kernels.tune --objective energy --rows 2048
        keep the kernel with the fewest joules; tokens: the fastest at the power cap
    python -m pallas_kernels.tune --share 0/4 --output a.json
        every fourth shape, for a process on each of four GPUs
    python -m pallas_kernels.tune --share 0/8 --lock gpu0 --output a.json
        one of eight processes that compile concurrently for one GPU
    python -m pallas_kernels.tune --merge a.json b.json --output t.json
        merge tables, without measuring

For each [K, N] the command times every eligible kernel, and XLA's product, at 1, 2, 4, 8, ..., 256 rows and
more. Data is random, weights rotate past the L2, and the kernels run in turns. The fastest kernel of each
number of rows is kept, and equal neighbors are merged: the inflection points remain (FlashDecoding++Next
§4).

With --objective tokens or energy each kernel runs in windows of at least 2 s, in which the card settles at
its power cap. Joules are the sensor's mean watts times the time.

All programs of a shape are compiled before the first is timed, because XLA times its candidates on the GPU.
Mosaic compiles one kernel at a time in a process, so several processes can share a GPU with --lock. A
process holds the lock while XLA's programs compile and while it times. Set
XLA_PYTHON_CLIENT_PREALLOCATE=false then, so that memory suffices.

The table records the kind of XLA's product: `cublas` if XLA_FLAGS has --xla_gpu_enable_triton_gemm=false,
else `cublas or triton`. A time below the card's limits ends the run with an error. The table is written
after every shape. A shape is skipped if the table has it at all these numbers of rows, unless --again is
given. Shapes beyond --time_limit_s, compilation included, are skipped and named.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from pallas_kernels.gemm import tuned_table as table
from pallas_kernels.gemm.api import Product, eligible_kernels, kernel, product_of
from pallas_kernels.gemm.flat.tiles import filled
from pallas_kernels.gemm.int4.reference import quantize_int4
from pallas_kernels.gemm.tuned_table import Choice, Shape
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure.peaks import ImpossibleTime, Least, refuse_impossible
from pallas_kernels.measure.script import check_file, parse_share
from pallas_kernels.measure.timing import interleaved, looped
from pallas_kernels.quantized import BLOCK, Quantized
from pallas_kernels.tune.rules import (
    OBJECTIVES,
    label,
    merge,
    merged,
    missing,
    read,
    rival,
    rule_of,
    write,
)
from pallas_kernels.tune.shapes import format_shape, parse_shape, shapes_of

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ROTATED = 240 << 20  # bytes of weights in a program: four times the L2
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "int4": 0.5}  # bytes of a number
WINDOWS = 3  # of a kernel, in turns
SETTLED_S = 2.0  # seconds of a window in which the card settles at its power cap
FLAT_TILES = {
    "flat": (128, 16),
    "int4": (512, 4.5),
}  # K of a stage, and bits of a number, of the tiles of --tiles


def tiles(name: str, p: Product, others: bool) -> list[tuple[tuple[str, int], ...]]:
    """Return the tiles to try: () is the kernel's choice; `others`: also those of `FLAT_TILES`, with filled
    rings.
    """
    if name not in FLAT_TILES or not others:
        return [()]
    depth, bits = FLAT_TILES[name]
    rows = (128,) if p.shape.gate_block else (64, 128)  # gates and ups are in one warpgroup's rows
    shapes = [
        (r, warpgroups, cluster)
        for r in rows
        for warpgroups in (1, 2)
        for cluster in (1, 2, 4)
        if r * warpgroups <= 128 and (cluster < 4 or cluster * -(-p.shape.n // (r * warpgroups)) <= SMS)
    ]
    made = (filled(p.rows, r, warpgroups, depth, cluster, bits) for r, warpgroups, cluster in shapes)
    return [(), *(tuple(sorted(dataclasses.asdict(tile).items())) for tile in made)]


class NoJoules(ValueError):
    """A device without a power sensor, for an objective that needs joules."""


class NoProgram(ValueError):
    """A product for which no program compiles, because memory is short or the shape is wrong."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a program: one x [M, K] for each weight [N, K], and the rounds over the weights."""

    xs: list
    ws: list
    rounds: int


def rotated(shape: Shape) -> int:
    """Return the number of weights in a program: more than the L2 holds."""
    return max(4, -(-ROTATED // int(shape.n * shape.k * BYTES[shape.weights])))


def make_weights(shape: Shape) -> list:
    """Return `rotated` random weights."""
    draw = jax.jit(lambda key: jax.random.normal(key, (shape.n, shape.k), jnp.bfloat16) * shape.k**-0.5)
    form: Callable = {
        "bfloat16": lambda w: w,
        "float8_e4m3fn": lambda w: Quantized(
            (w * shape.k**0.5).astype(jnp.float8_e4m3fn), jnp.full(shape.n, shape.k**-0.5, jnp.float32)
        ),
        "int4": jax.jit(quantize_int4),
    }[shape.weights]
    return [form(draw(jax.random.key(i))) for i in range(rotated(shape))]


def make_inputs(p: Product, ws: list) -> Inputs:
    """Return inputs with rounds that last a few milliseconds."""
    once = len(ws) * max(
        2 * p.rows * p.shape.n * p.shape.k / 600e12, p.shape.n * p.shape.k * BYTES[p.shape.weights] / 4e12
    )
    xs: list = [
        jax.random.normal(jax.random.key(i), (p.rows, p.shape.k), jnp.bfloat16) for i in range(len(ws))
    ]
    if p.activations == "float8_e4m3fn":
        scale = jnp.ones((p.rows, p.shape.k // BLOCK) if p.shape.scales == "blocks" else p.rows, jnp.float32)
        xs = [Quantized(x.astype(jnp.float8_e4m3fn), scale) for x in xs]
    return Inputs(xs, ws, max(1, round(5e-3 / once)))


def compiled(choice: Choice, p: Product, inputs: Inputs) -> Callable[[], Any] | str:
    """Return a compiled program of the products, or the error text."""
    epilogue: dict[str, Any] = (
        {"activation": "silu", "gate_block": p.shape.gate_block} if p.shape.gate_block else {}
    )
    epilogue |= {"quantize": True} if p.out_dtype == "float8_e4m3fn" else {}
    program = looped(jax.jit(functools.partial(kernel(choice), **epilogue)), inputs.rounds)
    try:
        ready = program.lower(inputs.xs, inputs.ws).compile()
    except Exception as error:  # for example a tile that does not fit
        return f"{type(error).__name__}: {error}"[:200]
    return lambda: ready(inputs.xs, inputs.ws)


@contextlib.contextmanager
def exclusive(lock: str | None) -> Iterator[None]:
    """Hold the lock file while the block runs, so that no other process uses the GPU.

    Do nothing without a lock.
    """
    if lock is None:
        yield
        return
    with open(lock, "a") as file:  # closing releases the lock
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(
    shape: Shape,
    rows: Iterable[int],
    *,
    seconds: float,
    others: bool,
    pool,
    progress: Callable[[str], None],
    lock: str | None = None,
    objective: str = "time",
) -> dict[str, Any]:
    """Return the JSON of a shape's rule, with its measurements."""
    products, ws = [product_of(shape, m) for m in rows], make_weights(shape)
    inputs = {p.rows: make_inputs(p, ws) for p in products}
    wanted = [
        (p, Choice(p.rows, name, tile))
        for p in products
        for name in eligible_kernels(p)
        for tile in tiles(name, p, others)
    ]

    def compile_all(rivals: bool) -> dict[tuple[Product, Choice], Callable | str]:
        mine = [one for one in wanted if (one[1].kernel == "xla") is rivals]
        return dict(
            zip(mine, pool.map(lambda one: compiled(one[1], one[0], inputs[one[0].rows]), mine), strict=True)
        )

    jax.block_until_ready([inputs, ws])
    ours = compile_all(rivals=False)
    with exclusive(lock):
        return _measured(
            shape, products, ours | compile_all(rivals=True), inputs, seconds, progress, objective
        )


def _measured(
    shape: Shape,
    products: Iterable[Product],
    made: Mapping[tuple[Product, Choice], Callable | str],
    inputs: Mapping[int, Inputs],
    seconds: float,
    progress: Callable[[str], None],
    objective: str,
) -> dict[str, Any]:
    """Return the rule from timings. made: the program of every (product, choice), or its error text."""
    measured = []
    for p in products:
        progress(f"{shape.k} x {shape.n} M {p.rows}")
        programs = {choice: program for (of, choice), program in made.items() if of == p}
        ways = {label(choice): program for choice, program in programs.items() if callable(program)}
        calls = inputs[p.rows].rounds * len(inputs[p.rows].ws)
        timings = interleaved(ways, calls=calls, seconds=seconds, rounds=WINDOWS)
        us = {name: timing.us for name, timing in timings.items()}
        for name, took in us.items():
            refuse_impossible(
                f"{shape.k} x {shape.n} M {p.rows} {name}", took, least(p), jax.devices()[0].device_kind
            )
        failed = {label(choice): program for choice, program in programs.items() if isinstance(program, str)}
        if not us:
            raise NoProgram(
                f"{format_shape(shape)}, {p.rows} rows: no program compiles ({next(iter(failed.values()))})"
            )
        joules = {name: timing.joules for name, timing in timings.items() if timing.joules is not None}
        if objective == "energy" and joules.keys() != us.keys():
            raise NoJoules("--objective energy: accepted is a GPU whose driver has a power sensor")
        settled = {} if objective == "time" else {"objective": objective, "joules": joules}
        measured.append(
            {"rows": p.rows, "us": us, "xla": rival(os.environ.get("XLA_FLAGS", ""))}
            | settled
            | ({"failed": failed} if failed else {})
        )
    return rule_of(dataclasses.asdict(shape), measured)


def least(p: Product) -> Least:
    """Return the minimum work of a product: read the weight, which is in no cache, and multiply."""
    shape = p.shape
    return Least(shape.n * shape.k * BYTES[shape.weights], 2.0 * p.rows * shape.n * shape.k, p.activations)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], help="names in tables/shapes.json; default: all")
    parser.add_argument("--shapes", nargs="*", default=[], help="KxN shapes, instead of models")
    parser.add_argument("--weights", default="bfloat16", choices=["bfloat16", "float8_e4m3fn", "int4"])
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument(
        "--tiles", action="store_true", help="also try tiles that the kernels would not choose"
    )
    parser.add_argument(
        "--objective",
        default="time",
        choices=OBJECTIVES,
        help="what the best kernel has least of: time, time at the power cap (tokens), joules (energy)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"seconds of measured work for each time; default: 0.1, and {WINDOWS * SETTLED_S:g} for tokens "
        "and energy",
    )
    parser.add_argument(
        "--time_limit_s", type=float, help="skip shapes that would end more than this after the start"
    )
    parser.add_argument("--again", action="store_true", help="also measure shapes that the table has")
    parser.add_argument("--output", help="file of the table; default: this GPU's file in the package")
    parser.add_argument(
        "--share",
        default="0/1",
        help="i/n: measure every n-th shape from shape i, to divide the shapes among processes",
    )
    parser.add_argument("--lock", metavar="FILE", help="lock file that processes on one GPU share")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="only merge these tables into --output")
    args = parser.parse_args()
    if args.merge:
        if not args.output:
            parser.error("--merge needs --output")
        try:
            check_file("--output", args.output)
            absent = merge(args.merge, args.output)
        except (ValueError, OSError) as error:
            parser.exit(2, f"error: {error}\n")
        if absent:  # for example a share without shapes
            print(
                f"these files do not exist and are not in {args.output}: {' '.join(absent)}", file=sys.stderr
            )
        return
    if jax.default_backend() != "gpu":
        parser.exit(1, f"error: tuning needs a GPU; JAX's backend is {jax.default_backend()!r}\n")
    device = jax.devices()[0].device_kind
    path = Path(args.output) if args.output else table.file_of(device)
    try:
        check_file("--output", path)
        if args.lock:
            check_file("--lock", args.lock)
        least_s = 0.0 if args.objective == "time" else WINDOWS * SETTLED_S
        args.seconds = (least_s or 0.1) if args.seconds is None else args.seconds
        if not args.seconds > 0 or args.seconds < least_s:
            accepted = f"from {least_s:g}, for --objective {args.objective}" if least_s else "above 0"
            raise ValueError(f"--seconds {args.seconds:g}: accepted are numbers {accepted}")
        share, args.rows = parse_share(args.share), sorted(set(args.rows))
        if not args.rows or args.rows[0] < 1:
            raise ValueError(
                f"--rows {' '.join(map(str, args.rows)) or '(none)'}: accepted are numbers from 1"
            )
        shapes = [parse_shape(text, args.weights) for text in args.shapes] or shapes_of(
            args.models, args.weights
        )
        old = read(path) if path.exists() else None
        if old is not None and old["device"] != device:
            raise ValueError(
                f"--output {path} is a table of {old['device']}: accepted is a table of this device, {device}"
            )
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    shapes = shapes[share[0] :: share[1]]
    shapes = shapes if args.again else missing(shapes, args.rows, old, args.objective)
    start, took, left_out = time.monotonic(), 0.0, []
    command = shlex.join(["python", "-m", "pallas_kernels.tune", *sys.argv[1:]])
    with (
        concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool,
        tqdm(total=len(shapes) * len(args.rows), unit="product") as bar,
    ):

        def progress(what: str) -> None:
            bar.set_description(what)
            bar.update()

        for shape in shapes:
            began = time.monotonic()
            if (
                args.time_limit_s is not None and began - start + took > args.time_limit_s
            ):  # assume the longest time so far
                left_out.append(format_shape(shape))
                continue
            try:
                rule = measure(
                    shape,
                    args.rows,
                    seconds=args.seconds,
                    others=args.tiles,
                    pool=pool,
                    progress=progress,
                    lock=args.lock,
                    objective=args.objective,
                )
            except (ImpossibleTime, NoProgram, NoJoules) as error:
                parser.exit(1, f"error: {error}\n")
            bar.write(f"{shape}: " + ", ".join(f"{c['kernel']} to {c['rows']}" for c in rule["choices"]))
            new = {
                "schema": table.SCHEMA,
                "device": device,
                "jax": jax.__version__,
                "command": command,
                "rules": [rule],
            }
            old = merged(old, new)
            write(path, old)  # after each shape, to keep its measurements
            took = max(took, time.monotonic() - began)
    if left_out:
        print(f"left out after {args.time_limit_s:g} s: --shapes {' '.join(left_out)}")


if __name__ == "__main__":
    main()

"""Measures which kernel is fastest for which product on this GPU, and writes the table that kernel sets
choose by.

    python -m pallas_kernels.tune                            every shape of tables/shapes.json, bfloat16
    weights python -m pallas_kernels.tune --models 'llama-3.1-8b tp 1' --weights float8_e4m3fn python -m
    pallas_kernels.tune --shapes 4096x6144 4096x28672g64     K x N; g64: gates and ups in blocks of 64 python
    -m pallas_kernels.tune --weights float8_e4m3fn --shapes 14336x4096b     b: the input has a scale for every
    128 columns python -m pallas_kernels.tune --tiles                    also other tiles than the kernels'
    own choice python -m pallas_kernels.tune --time_limit_s 300         what fits; the same command goes on
    from there python -m pallas_kernels.tune --share 0/4 --output a.json             every fourth shape, for a
    process on each of four GPUs python -m pallas_kernels.tune --share 0/8 --lock gpu0 --output a.json one of
    eight that compile beside each other for one GPU python -m pallas_kernels.tune --merge a.json b.json
    --output t.json   what they wrote, in one table; measures nothing

For each [K, N] it times every kernel that takes it, and XLA's own product, at 1, 2, 4, 8, ..., 256 rows and
more, on random data, the weights rotated past the L2 and the rivals in turn; keeps the fastest, and merges
neighbours that agree: what is left are the inflection points (FlashDecoding++Next §4). All programs of a
shape are compiled before the first is timed: XLA times its own candidates on the GPU. Mosaic compiles one
kernel at a time in a process, so several may share a GPU: with --lock each compiles ours as it likes, and has
the GPU to itself while XLA's are compiled and all are timed (XLA_PYTHON_CLIENT_PREALLOCATE=false, so that
memory suffices). Beside its times stands what XLA's product was: `cublas` where XLA_FLAGS has
--xla_gpu_enable_triton_gemm=false, else `cublas or triton`. A time that the card cannot have met ends the run
with an error. The table is written after every shape. A shape that it has at all these numbers of rows is not
measured again unless --again says so; what it has at others stays. What does not fit --time_limit_s,
compilation included, is left out and named.
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
from pallas_kernels.measure.peaks import ImpossibleTime, Least, refuse_impossible
from pallas_kernels.measure.script import check_file, parse_share
from pallas_kernels.measure.timing import interleaved, looped
from pallas_kernels.quantized import BLOCK, Quantized
from pallas_kernels.tune.rules import label, merge, merged, missing, read, rival, rule_of, write
from pallas_kernels.tune.shapes import format_shape, parse_shape, shapes_of

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
ROTATED = 240 << 20  # bytes of weights that a program walks through: four times the L2
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "int4": 0.5}  # of a weight's number
FLAT_TILES = {
    "flat": (128, 16),
    "int4": (512, 4.5),
}  # depth along K, and bits a weight, of the tiles that --tiles tries


def tiles(name: str, p: Product, others: bool) -> list[tuple[tuple[str, int], ...]]:
    """The tiles to try: () stands for the kernel's own; `others`: also those of `FLAT_TILES`, their rings
    filled.
    """
    if name not in FLAT_TILES or not others:
        return [()]
    depth, bits = FLAT_TILES[name]
    rows = (128,) if p.shape.gate_block else (64, 128)  # gates and ups of 64 lie in one warpgroup's rows
    shapes = [
        (r, warpgroups, cluster)
        for r in rows
        for warpgroups in (1, 2)
        for cluster in (1, 2)
        if r * warpgroups <= 128
    ]
    made = (filled(p.rows, r, warpgroups, depth, cluster, bits) for r, warpgroups, cluster in shapes)
    return [(), *(tuple(sorted(dataclasses.asdict(tile).items())) for tile in made)]


class NoWay(ValueError):
    """A product that neither a kernel nor XLA could be compiled for: memory is short, or the shape is wrong."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """An x [M, K] for each of the weights [N, K], and how often a program walks through them."""

    xs: list
    ws: list
    rounds: int


def rotated(shape: Shape) -> int:
    """How many weights a program walks through: more than the L2 holds."""
    return max(4, -(-ROTATED // int(shape.n * shape.k * BYTES[shape.weights])))


def make_weights(shape: Shape) -> list:
    """Random weights, as many as `rotated` says."""
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
    """Rounds that last some milliseconds."""
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
    """A program of the products, or why there is none."""
    behind: dict[str, Any] = (
        {"activation": "silu", "gate_block": p.shape.gate_block} if p.shape.gate_block else {}
    )
    behind |= {"quantize": True} if p.out_dtype == "float8_e4m3fn" else {}
    program = looped(jax.jit(functools.partial(kernel(choice), **behind)), inputs.rounds)
    try:
        ready = program.lower(inputs.xs, inputs.ws).compile()
    except Exception as error:  # a tile that does not fit
        return f"{type(error).__name__}: {error}"[:200]
    return lambda: ready(inputs.xs, inputs.ws)


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """While no other process holds the lock, a file that is made; at once without one."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:  # closing gives it back
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
) -> dict[str, Any]:
    """A shape's rule, as it stands in the table's JSON, with what was measured."""
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
    with alone(lock):
        return _measured(shape, products, ours | compile_all(rivals=True), inputs, seconds, progress)


def _measured(
    shape: Shape,
    products: Iterable[Product],
    made: Mapping[tuple[Product, Choice], Callable | str],
    inputs: Mapping[int, Inputs],
    seconds: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Times what was compiled: made has a program of every (product, choice), or why there is none."""
    measured = []
    for p in products:
        progress(f"{shape.k} x {shape.n} M {p.rows}")
        programs = {choice: program for (of, choice), program in made.items() if of == p}
        ways = {label(choice): program for choice, program in programs.items() if callable(program)}
        timings = interleaved(ways, calls=inputs[p.rows].rounds * len(inputs[p.rows].ws), seconds=seconds)
        us = {name: timing.us for name, timing in timings.items()}
        for name, took in us.items():
            refuse_impossible(
                f"{shape.k} x {shape.n} M {p.rows} {name}", took, least(p), jax.devices()[0].device_kind
            )
        failed = {label(choice): program for choice, program in programs.items() if isinstance(program, str)}
        if not us:
            raise NoWay(
                f"{format_shape(shape)}, {p.rows} rows: no kernel's program could be made, nor XLA's "
                f"({next(iter(failed.values()))})"
            )
        measured.append(
            {"rows": p.rows, "us": us, "xla": rival(os.environ.get("XLA_FLAGS", ""))}
            | ({"failed": failed} if failed else {})
        )
    return rule_of(dataclasses.asdict(shape), measured)


def least(p: Product) -> Least:
    """What any kernel must do for a product: read the weight, which is in no cache, and multiply."""
    shape = p.shape
    return Least(shape.n * shape.k * BYTES[shape.weights], 2.0 * p.rows * shape.n * shape.k, p.activations)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], help="names in tables/shapes.json; default: all")
    parser.add_argument("--shapes", nargs="*", default=[], help="KxN, instead of models")
    parser.add_argument("--weights", default="bfloat16", choices=["bfloat16", "float8_e4m3fn", "int4"])
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--tiles", action="store_true", help="try other tiles than the kernels' own choice")
    parser.add_argument("--seconds", type=float, default=0.1, help="measured work a figure")
    parser.add_argument(
        "--time_limit_s", type=float, help="leave out shapes that would end later than this after the start"
    )
    parser.add_argument("--again", action="store_true", help="measure also what the table has")
    parser.add_argument("--output", help="the table's file; default: this GPU's own in the package")
    parser.add_argument(
        "--share",
        default="0/1",
        help="i/n: every n-th shape from the i-th on, for several processes with a file each",
    )
    parser.add_argument(
        "--lock", metavar="FILE", help="held while the GPU is used, by all processes that share it"
    )
    parser.add_argument(
        "--merge", nargs="+", metavar="FILE", help="only join the tables of several shares in --output"
    )
    args = parser.parse_args()
    if args.merge:
        if not args.output:
            parser.error("--merge needs --output")
        try:
            check_file("--output", args.output)
            absent = merge(args.merge, args.output)
        except (ValueError, OSError) as error:
            parser.exit(2, f"error: {error}\n")
        if absent:  # a share that was left no shape, or a name that was written otherwise
            print(f"no such file, so not in {args.output}: {' '.join(absent)}", file=sys.stderr)
        return
    if jax.default_backend() != "gpu":
        parser.exit(1, f"error: tuning needs a GPU: JAX's backend here is {jax.default_backend()!r}\n")
    device = jax.devices()[0].device_kind
    path = Path(args.output) if args.output else table.file_of(device)
    try:
        check_file("--output", path)
        if args.lock:
            check_file("--lock", args.lock)
        if not args.seconds > 0:
            raise ValueError(f"--seconds {args.seconds:g}: more than 0")
        share, args.rows = parse_share(args.share), sorted(set(args.rows))
        if not args.rows or args.rows[0] < 1:
            raise ValueError(f"--rows {' '.join(map(str, args.rows)) or '(none)'}: numbers of 1 and more")
        shapes = [parse_shape(text, args.weights) for text in args.shapes] or shapes_of(
            args.models, args.weights
        )
        old = read(path) if path.exists() else None
        if old is not None and old["device"] != device:
            raise ValueError(f"--output {path}: a table of this device, {device}, not of {old['device']}")
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    shapes = shapes[share[0] :: share[1]]
    shapes = shapes if args.again else missing(shapes, args.rows, old)
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
            ):  # as long as the longest so far
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
                )
            except (ImpossibleTime, NoWay) as error:
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
            write(path, old)  # a shape at a time: what is measured is kept
            took = max(took, time.monotonic() - began)
    if left_out:
        print(f"left out after {args.time_limit_s:g} s: --shapes {' '.join(left_out)}")


if __name__ == "__main__":
    main()

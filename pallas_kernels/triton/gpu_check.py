"""Check the Triton kernels against their references on a GPU, and time them next to XLA's and JAX's paged
attention.

    python -m pallas_kernels.triton.gpu_check [--only NAMES] [--json FILE]

The names are check, decode, gemm, check_grouped, grouped and grouped_tiles. `grouped` times the products of
Qwen3-30B-A3B's experts beside XLA's `ragged_dot` and, on Hopper, beside the kernels for Hopper.
`grouped_tiles` times other tiles.

Prints one line per case. Errors are ‖kernel − reference‖ / ‖reference‖ with a float32 reference, on fresh
random inputs.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.attention.decode.gpu_check import exact, queries
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.grouped import api as hopper_experts
from pallas_kernels.gemm.grouped import gpu_check as grouped_check
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference as grouped_reference
from pallas_kernels.kernel_set import HOPPER
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory, random_pages
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved, sustained
from pallas_kernels.this_device import this_device
from pallas_kernels.triton import grouped_gemm
from pallas_kernels.triton.decode_attention import decode_attention
from pallas_kernels.triton.flat_gemm import Tile, flat_gemm

TOLERANCE = 6e-3  # bfloat16 operands and weights compared with float32


def check_decode(rows, rng, lengths, n, kv, h, **kw):
    table, pages = page_tables(rng, lengths)
    k, v = (
        poison(random_pages(jax.random.key(rng.integers(2**31)), pages, kv, h), table, lengths)
        for _ in range(2)
    )
    q = jnp.asarray(rng.normal(size=(len(lengths), n, h)) * rng.choice([1, 4]), jnp.bfloat16)
    table, lengths = jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
    run = jax.jit(functools.partial(decode_attention, scale=h**-0.5, **kw))
    poison_memory(q)
    got, again = run(q, k, v, table, lengths), run(q, k, v, table, lengths)
    err = error(got, exact(decode_reference.decode_attention, q, k, v, table, lengths, scale=h**-0.5, **kw))
    same = bool((got == again).all())
    record(
        rows,
        what="check decode",
        ok=err < TOLERANCE and same,
        error=err,
        same_bits=same,
        b=len(lengths),
        n=n,
        kv=kv,
        h=h,
        **kw,
    )


def check_gemm(rows, rng, m, n, k, **tile):
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((m, k), (n, k)))
    run = jax.jit(functools.partial(flat_gemm, tile=Tile(**tile) if tile else None))
    with jax.default_matmul_precision("highest"):
        want = x.astype(jnp.float32) @ w.astype(jnp.float32).T
    poison_memory(jax.eval_shape(run, x, w))
    got = run(x, w)
    err, same = error(got, want), bool((got == run(x, w)).all())
    record(
        rows, what="check gemm", ok=err < TOLERANCE and same, error=err, same_bits=same, m=m, n=n, k=k, **tile
    )


def checks(rows):
    rng = np.random.default_rng(time.time_ns())

    def ragged(b, top):
        return rng.integers(1, top, b) * (rng.random(b) > 0.1)

    for n, kv, h in ((32, 8, 128), (8, 8, 64), (16, 1, 128), (9, 3, 64), (8, 4, 256)):
        check_decode(rows, rng, ragged(37, 900), n, kv, h)
    check_decode(rows, rng, ragged(200, 3000), 32, 8, 128, window=300)
    check_decode(rows, rng, ragged(9, 900), 8, 4, 256, window=64, soft_cap=50.0)
    check_decode(rows, rng, [0, 0, 65, 0], 32, 8, 128)
    check_decode(rows, rng, [20000, *[200] * 40], 32, 8, 128)
    for m, n, k in (
        (1, 6144, 4096),
        (7, 1000, 777),
        (16, 4096, 14336),
        (33, 28672, 4096),
        (64, 128256, 4096),
    ):
        check_gemm(rows, rng, m, n, k)


def time_decode(rows, name, lengths, n=32, kv=8, h=128, caches=3, layers=16, seconds=0.6):
    rng = np.random.default_rng(len(name))
    table, pages = page_tables(rng, lengths)
    cache = [
        tuple(random_pages(jax.random.key(2 * i + j), pages, kv, h) for j in range(2)) for i in range(caches)
    ]
    qs = queries(layers, len(lengths), n, h)
    layer = jax.jit(functools.partial(decode_attention, scale=h**-0.5))

    def run(qs, cache, table, lengths):
        return [layer(q, *cache[i % caches], table, lengths) for i, q in enumerate(qs)]

    t = sustained(
        jax.jit(run),
        qs,
        cache,
        jnp.asarray(table),
        jnp.asarray(lengths, jnp.int32),
        calls=layers,
        seconds=seconds,
    )
    record(rows, what="decode", case=name, tbs=float(sum(lengths)) * kv * h * 4 / t["us"] / 1e6, **t)


def time_gemm(rows, m, n, k, tiles, seconds=0.5):
    copies = max(4, -(-(240 << 20) // (n * k * 2)))  # copies of the weights, to exceed the L2
    ws = [jax.random.normal(jax.random.key(i), (n, k), jnp.bfloat16) for i in range(copies)]
    xs = [jax.random.normal(jax.random.key(i), (m, k), jnp.bfloat16) for i in range(copies)]
    ways = {"xla": gemm_reference.gemm} | {
        str(tile or "own"): functools.partial(flat_gemm, tile=tile) for tile in tiles
    }
    for name, way in ways.items():
        one = jax.jit(way)
        t = sustained(
            jax.jit(lambda xs, ws, one=one: [one(x, w) for x, w in zip(xs, ws, strict=True)]),
            xs,
            ws,
            calls=copies,
            seconds=seconds,
        )
        record(rows, what="gemm", m=m, n=n, k=k, way=name, tbs=n * k * 2 / t["us"] / 1e6, **t)


def decodes(rows, _, seconds):
    rng = np.random.default_rng(7)
    ragged = np.clip(rng.exponential(1024, 256) * 0.5 + 512, 1, 4096).astype(int)
    time_decode(rows, "256 x 1024 ragged", ragged, seconds=seconds)
    time_decode(rows, "1 x 131072", [131072], caches=6, seconds=seconds)


def gemms(rows, _, seconds):
    for m in (1, 16, 64):
        time_gemm(
            rows, m, 28672, 4096, (None, Tile(128, 64, 1), Tile(32, 128, 1), Tile(64, 128, 1, 4, 3)), seconds
        )
        time_gemm(rows, m, 4096, 4096, (None, Tile(32, 128, 4), Tile(32, 256, 2)), seconds)


EXPERTS, CHOSEN, PRODUCTS = grouped_check.MODELS["qwen3-30b-a3b"]


def grouped_checks(rows):
    rng = np.random.default_rng(time.time_ns())
    case = functools.partial(grouped_check.check, rows, rng, "triton", module=grouped_gemm)
    up_gate, down = (
        (EXPERTS, CHOSEN, *PRODUCTS["expert_up_gate"]),
        (EXPERTS, CHOSEN, *PRODUCTS["expert_down"]),
    )
    for tokens, product in ((1, up_gate), (64, down), (512, up_gate), (1024, down), (2048, up_gate)):
        case(tokens, *product)
    case(512, *up_gate, zipf=3.0)  # most experts have no row
    case(77, 5, 1, 336, 200, 24, zipf=3.0)
    for tokens, product in ((8, up_gate), (2048, down)):
        case(tokens, *product, stored="e4m3")
    for tokens, product, stored in ((8, up_gate, "int4-64"), (1024, down, "int4-zero-128")):
        case(tokens, *product, stored=stored)


def time_grouped(rows, op, tokens, ways, seconds):
    """Time products of equal routings. The sort is not in the times.

    ways: name -> (`list_groups`, `grouped_gemm`).
    """
    n, k, block = PRODUCTS[op]
    calls = 8 if tokens <= 64 else 2
    w = grouped_check.normal(jax.random.key(1), (EXPERTS, n, k), k**-0.5)
    xs = [grouped_check.normal(jax.random.key(2 + i), (tokens, k)) for i in range(calls)]
    picked = grouped_check.routing(np.random.default_rng(0), tokens, EXPERTS, CHOSEN)
    programs = {}
    for name, (list_groups, product) in ways.items():
        groups = jax.jit(list_groups, static_argnums=1)(picked, EXPERTS)
        sorted_rows = [x[groups.pairs // CHOSEN] for x in xs]

        def run(sorted_rows, w, groups, product=product):
            return [product(x, w, groups, **grouped_check.gates_of(block)) for x in sorted_rows]

        programs[name] = functools.partial(jax.jit(run), sorted_rows, w, groups)
    touched, work = len(np.unique(np.asarray(picked))), 2.0 * picked.size * n * k
    for name, t in interleaved(programs, calls=calls, seconds=seconds).items():
        rates = {"tb_per_s": touched * n * k * 2 / t.us / 1e6, "tflops": work / t.us / 1e6}
        about = {"op": op, "t": tokens, "touched": touched, "way": name}
        record(rows, what="grouped", **about, **rates, **dataclasses.asdict(t))


def grouped(rows, share, seconds):
    for tokens in (8, 64, 512, 2048)[share[0] :: share[1]]:
        ways = {
            "triton": (grouped_gemm.list_groups, grouped_gemm.grouped_gemm),
            "xla": (expert_groups.list_groups, grouped_reference.grouped_gemm),
        }
        if this_device().capability == HOPPER:
            ways["mosaic"] = hopper_experts.list_groups, hopper_experts.grouped_gemm
        for op in PRODUCTS:
            time_grouped(rows, op, tokens, ways, seconds)


# tokens -> (rows of a tile, the tile)
TILES = {
    8: [(16, grouped_gemm.Tile(*tile)) for tile in ((32, 128, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4))],
    64: [(16, grouped_gemm.Tile(*tile)) for tile in ((32, 128, 4, 4), (64, 64, 4, 5), (128, 64, 4, 4))],
    512: [
        *((32, grouped_gemm.Tile(*tile)) for tile in ((64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3))),
        *((64, grouped_gemm.Tile(*tile)) for tile in ((64, 64, 4, 4), (128, 64, 8, 3), (128, 64, 4, 4))),
    ],
    2048: [
        *((64, grouped_gemm.Tile(*tile)) for tile in ((128, 64, 4, 3), (256, 32, 8, 3))),
        *((128, grouped_gemm.Tile(*tile)) for tile in ((128, 32, 4, 4), (128, 64, 8, 3), (64, 64, 4, 3))),
    ],
}


def grouped_tiles(rows, share, seconds):
    for tokens in list(TILES)[share[0] :: share[1]]:
        ways = {"chosen": (grouped_gemm.list_groups, grouped_gemm.grouped_gemm)}
        for height, tile in TILES[tokens]:
            ways[f"{height} {dataclasses.astuple(tile)}"] = (
                functools.partial(grouped_gemm.list_groups, rows=height),
                functools.partial(grouped_gemm.grouped_gemm, tile=tile),
            )
        for op in PRODUCTS:
            time_grouped(rows, op, tokens, ways, seconds)


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, *_: checks(rows),
            "decode": decodes,
            "gemm": gemms,
            "check_grouped": lambda rows, *_: grouped_checks(rows),
            "grouped": grouped,
            "grouped_tiles": grouped_tiles,
        },
    )

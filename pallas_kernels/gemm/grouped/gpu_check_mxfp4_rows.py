"""Check and time products of few rows with gpt-oss-20b's experts in MXFP4, in blocks and as published.

    python -m pallas_kernels.gemm.grouped.gpu_check_mxfp4_rows [--only check,time_1,time_64,parts_64]

The checks hold the kernel of few rows against the one that takes any number of rows, and two runs against
each other. The times compare tiles of the kernel. A line has all tiles of a case: the median of five windows
in microseconds, half the spread of the windows in percent, and the share of 4.5 TB/s at which the experts are
read. b, c, g and s are the tile's blocks, chunks, warpgroups and stages. An asterisk marks tiles whose rings
have copying warps. w and d are the warpgroups and the depth of the kernel of any rows with the same weight.
`check_warps` checks only these. `parts_64` times the kernel without its copies of the weight, and without its
products.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped import mxfp4_rows, swapped
from pallas_kernels.gemm.grouped.gpu_check import routing
from pallas_kernels.gemm.grouped.mxfp4_blocks import to_blocks
from pallas_kernels.gemm.grouped.mxfp4_rows import RowsTile, multiply_rows, rows_tile
from pallas_kernels.gemm.grouped.tiles import blocks_tile
from pallas_kernels.measure import script
from pallas_kernels.measure.timing import interleaved
from pallas_kernels.quantized import Mxfp4

EXPERTS, CHOSEN, K = 32, 4, 2880
WIDTHS = {"expert_up_gate": 5760, "expert_down": 2880}
# Blocks, chunks, warpgroups, and whether each ring has a copying warp.
TILES = {
    8: (
        (2, 3, 3, False),
        (1, 5, 3, False),
        (2, 3, 3, True),
        (1, 3, 3, True),
        (1, 5, 3, True),
        (2, 5, 3, True),
        (1, 3, 4, True),
    ),
    16: (
        (2, 3, 3, False),
        (2, 3, 3, True),
        (1, 3, 3, True),
        (1, 5, 3, True),
        (2, 3, 2, True),
        (1, 3, 4, True),
    ),
}


def products(rows: int) -> dict[str, Callable]:
    """Return the ways to multiply tiles of so many rows with a weight in blocks, by name."""
    if rows <= 16:
        return {name: functools.partial(multiply_rows, tile=tile) for name, tile in tiles(rows).items()}
    made = {}
    for warpgroups, depth in ((2, 128), (2, 256), (3, 128))[: 3 if rows <= 48 else 2]:
        tile = blocks_tile(rows, warpgroups, depth)
        if tile.stages > 1:
            product = functools.partial(swapped.grouped_gemm, tile=tile)
            made[f"w{warpgroups} d{depth} s{tile.stages}"] = product
    return made


def tiles(rows: int) -> dict[str, RowsTile]:
    made = {}
    for blocks, chunks, warpgroups, by_warps in TILES[rows]:
        tile = rows_tile(rows, K, blocks, chunks, warpgroups, by_warps)
        made[f"b{blocks} c{chunks} g{warpgroups} s{tile.stages}" + "*" * by_warps] = tile
    return made


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_weight(experts: int, n: int, k: int) -> Mxfp4:
    """Return random numbers, with scales from 2 ** -10 to 2 ** -4."""
    keys = jax.random.split(jax.random.key(n))
    packed = jax.random.bits(keys[0], (experts, n, k // 2), jnp.uint8)
    return Mxfp4(packed, jax.random.randint(keys[1], (experts, n, k // 32), 117, 124).astype(jnp.uint8))


def operands(rng, tokens: int, experts: int, chosen: int, k: int, rows: int, zipf: float = 0.0):
    picked = routing(rng, tokens, experts, chosen, zipf)
    groups = jax.jit(swapped.list_groups, static_argnums=(1, 2))(picked, experts, rows)
    x = jax.random.normal(jax.random.key(tokens), (tokens, k), jnp.bfloat16)
    return x[groups.pairs // chosen], groups


def checks(rows, *_, by_warps: bool = False) -> None:
    rng, gpt_oss = np.random.default_rng(0), (EXPERTS, CHOSEN)
    every = {height: list(tiles(height).values()) for height in TILES}
    cases = [
        (1, *gpt_oss, 2880, K, None, every[8]),
        (64, *gpt_oss, 2880, K, None, every[16]),
        (1, *gpt_oss, 5760, K, None, every[8][:1]),
        (8, *gpt_oss, 5760, K, 100, every[8][1:3]),
        (64, *gpt_oss, 5760, K, None, every[16][:2]),
        (200, *gpt_oss, 2880, K, None, every[16][2:3]),
        (33, 5, 2, 320, 448, 7, [RowsTile(16, 2, 2, 3, 2)]),
        (33, 5, 2, 320, 448, 7, [RowsTile(16, 2, 2, 3, 2, by_warps=True)]),
        (9, 5, 1, 64, 128, None, [RowsTile(8, 1, 1, 2, 3), RowsTile(8, 1, 1, 2, 3, by_warps=True)]),
        (40, 4, 2, 192, 4096, 20, [rows_tile(16, 4096, 1, 2, 2)]),
        (1, *gpt_oss, 5760, K, None, [blocks_tile(8)]),
        (64, *gpt_oss, 5760, K, None, [blocks_tile(32), blocks_tile(32, 3)]),
        (256, *gpt_oss, 2880, K, 100, [blocks_tile(48), blocks_tile(48, 2, 256)]),
        (1024, *gpt_oss, 5760, K, None, [blocks_tile(144)]),
        (33, 5, 2, 320, 192, 7, [blocks_tile(16)]),
    ]
    if by_warps:
        of_case = lambda case: [tile for tile in case[-1] if isinstance(tile, RowsTile) and tile.by_warps]
        cases = [(*case[:-1], of_case(case)) for case in cases if of_case(case)]
    prepared = []
    for tokens, experts, chosen, n, k, sms, chosen_tiles in cases:
        height = chosen_tiles[0].rows
        x, groups = operands(rng, tokens, experts, chosen, k, height, 1.2 if tokens == 200 else 0.0)
        w = random_weight(experts, n, k)
        programs = [jax.jit(swapped.grouped_gemm).lower(x, w, groups)]
        for tile in chosen_tiles:
            way = multiply_rows if isinstance(tile, RowsTile) else swapped.grouped_gemm
            product = functools.partial(way, tile=tile, sms=sms)
            programs.append(jax.jit(product).lower(x, to_blocks_of(w), groups))
        prepared.append((programs, x, w, groups))
    with ThreadPoolExecutor() as pool:
        every_program = [program for programs, *_ in prepared for program in programs]
        compiled = iter(list(pool.map(lambda program: program.compile(), every_program)))
    for case, (_, x, w, groups) in zip(cases, prepared, strict=True):
        *about, chosen_tiles = case
        wanted = next(compiled)(x, w, groups)[groups.places].astype(jnp.float32)
        for tile in chosen_tiles:
            few, given = next(compiled), (x, to_blocks_of(w), groups)
            found, again = (few(*given)[groups.places].astype(jnp.float32) for _ in range(2))
            error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
            same = bool((found == again).all())
            ok = error < 3e-3 and same
            script.record(rows, what="check", ok=ok, error=error, same_bits=same, case=about, tile=str(tile))


to_blocks_of = jax.jit(to_blocks)


def _repeat(product, rounds: int, x, w, turned):
    """Return the products with each of the groups, after `rounds` rounds on the device."""

    def body(i, _):
        held = lax.optimization_barrier((x, i))[0]  # else XLA takes the products out of the loop
        return [product(held, w, groups) for groups in turned]

    return lax.fori_loop(0, rounds, body, [jnp.zeros((x.shape[0], w.shape[1]), x.dtype)] * len(turned))


def parts_of(rows: int) -> dict[str, Callable]:
    """Return the first two ways of `products`, whole, and without one of their parts, with wrong results."""

    def without(name: str, stand_in: Callable, tile: RowsTile):
        def run(*given):
            with mock.patch.object(mxfp4_rows, name, stand_in):
                return multiply_rows(*given, tile=tile)

        return run

    def arrive(_, __, full, ___, ____, tile: RowsTile) -> None:
        for _ in range(1 if tile.by_warps else tile.blocks):
            plgpu.barrier_arrive(full)

    made = {}
    for name, tile in list(tiles(rows).items())[:2]:
        made |= {
            name: functools.partial(multiply_rows, tile=tile),
            f"{name} no copies": without("copy_stage", arrive, tile),
            f"{name} no products": without("multiply_stage", lambda total, *_: total, tile),
        }
    return made


def times(rows, share, seconds, tokens: int, height: int, made=None) -> None:
    rng = np.random.default_rng(1)
    calls = 4 if tokens <= 8 else 1  # each is compiled
    for op, n in list(WIDTHS.items())[share[0] :: share[1]]:
        x, groups = operands(rng, tokens, EXPERTS, CHOSEN, K, height)
        w = random_weight(EXPERTS, n, K)
        blocks = to_blocks_of(w)
        touched = len(np.unique(np.asarray(groups.experts)[: int(groups.count[0])]))
        bound_us = touched * n * K * 17 / 32 / 4.5e6
        rounds = max(1, round(4e3 / calls / max(5.0, bound_us)))
        # The calls read other experts, so that few experts do not stay in the L2.
        turned = [
            dataclasses.replace(groups, experts=(groups.experts + 8 * i) % EXPERTS) for i in range(calls)
        ]
        ways = {} if made else {"any rows": (jax.jit(swapped.grouped_gemm), w)}
        for name, product in (made or products)(height).items():
            ways[name] = jax.jit(product), blocks
        lowered = {
            name: jax.jit(_repeat, static_argnums=(0, 1)).lower(product, rounds, x, held, turned)
            for name, (product, held) in ways.items()
        }
        with ThreadPoolExecutor() as pool:
            compiled = dict(zip(lowered, pool.map(lambda one: one.compile(), lowered.values()), strict=True))
        runs = {name: functools.partial(one, x, ways[name][1], turned) for name, one in compiled.items()}
        timed = interleaved(runs, calls=rounds * calls, seconds=seconds, rounds=5)
        for name, t in timed.items():
            about = {"op": op, "tokens": tokens, "touched": touched, "tile": name}
            rows.append({"what": "time", **about, "of_stream": bound_us / t.us, **dataclasses.asdict(t)})
        cells = [f"{key} {t.us:.1f} ±{50 * t.spread:.1f}% {bound_us / t.us:.2f}" for key, t in timed.items()]
        print("TABLE", op, tokens, touched, "|", " | ".join(cells), flush=True)


if __name__ == "__main__":
    timed = {
        f"time_{tokens}": functools.partial(times, tokens=tokens, height=height)
        for tokens, height in ((1, 8), (64, 16), (8, 8), (128, 32), (256, 48), (1024, 144))
    }
    timed["parts_64"] = functools.partial(times, tokens=64, height=16, made=parts_of)
    of_warps = functools.partial(checks, by_warps=True)
    script.main(__doc__, {"check": checks, "check_warps": of_warps, **timed})

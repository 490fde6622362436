"""Time decode attention over an e4m3 cache with a stage left out, next to the full kernel, to get each
stage's cost.

    python -m pallas_kernels.attention.decode.gpu_stages [--share 0/5] [--seconds 0.3] [--json FILE]

The kernel is the production kernel. During tracing, a replacement substitutes the function of one stage. A
stage is left out for every page or pair alike, so the results are meaningless. The page table sets the
locations of pages: a table that repeats a small set of pages keeps them in the L2.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.attention import operand_pairs as pairs
from pallas_kernels.attention.decode import join as decode_join
from pallas_kernels.attention.decode import kernel as decode_kernel
from pallas_kernels.attention.decode import products as decode_parts
from pallas_kernels.attention.decode import softmax as decode_softmax
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.work_list import PAGE, decode_work
from pallas_kernels.attention.tiles import decode_tile
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import page_tables, ragged, random_pages
from pallas_kernels.measure.script import L2_BYTES, record
from pallas_kernels.measure.timing import interleaved, looped

N, K, H = 32, 8, 128  # query heads, KV heads, head width
BATCHES: dict[str, tuple[int, ...]] = {  # lengths of rows, as in `bench kernels`
    **{f"256 x mean {mean}": ragged(256, mean) for mean in (1024, 4096)},
    "1 x 131072": (131072,),
    "131072 + 200 x 512": (131072, *[512] * 200),
    "64 x 1100": (1100,) * 64,
}
CALLS = 4  # calls in one round of a program's loop
PAGE_BYTES = 2 * K * PAGE * H  # bytes of keys and values in a page
IN_L2 = L2_BYTES // 4 // PAGE_BYTES  # pages that fit in a quarter of the L2


def a_word(operands, shape):
    """Return a replacement for a product: each page's first byte and numbers that differ by row.

    The later stages then have the same amount of work.
    """
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    first = functools.reduce(lambda a, b: a + b, (_first_byte(page) for page, _ in operands))
    return (row + first).astype(jnp.float32) * 2.0**-8


def _first_byte(page):
    """Return the first byte of an e4m3 page [rows, columns] in shared memory, as a number from 0 to 255."""
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(pairs.E4M3, min(page.shape[1], 128))),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar),
    )
    def read(_, page):
        byte = llvm.load(ir.IntegerType.get_signless(8), mgpu.utils.memref_ptr(page))
        return mgpu.FragmentedArray.splat(
            arith.extui(ir.IntegerType.get_signless(32), byte), (), is_signed=True
        )

    return read(page)  # pyright: ignore[reportCallIssue]


def scores_as_weights(scores, seen, bounds, begun, put, across, top, total, out, **_):
    """Store the scores as weights, in place of the softmax: no mask, maximum, exponential, vote or sum."""
    for page, weights in enumerate(scores):
        put(page, weights)
    plgpu.commit_smem()
    return top, total, out


def no_weights(scores, seen, bounds, begun, put, across, top, total, out, **_):
    """Do nothing in place of the softmax, so that the product of queries and keys is unused."""
    return top, total, out


def never_last(arrived, place, others, one_fence):
    """Skip the count of finished parts: the parts are written, but no worker adds them up."""
    return jnp.bool_(False)


def one_group(parts, h, cols):
    """Put all parts of a pair into one group, so that the last worker adds up all parts."""
    return parts, jnp.int32(1)


Stage = tuple[ModuleType, str, Callable]  # the module of a stage's function, its name, and its replacement

MULTIPLIES: Stage = decode_parts, "product", a_word
SOFTENS: Stage = decode_softmax, "soften", scores_as_weights
JOINS: Stage = decode_join, "is_last", never_last
GROUPS: Stage = decode_join, "_groups", one_group
LOOKS: tuple[Stage, ...] = (  # before a part is written
    (decode_kernel, "peek", lambda arrived, ender, requested: jnp.int32(0)),
    (decode_kernel, "is_there", lambda seen, arrived, ender, one_fence: seen < 0),
)
LEFT_OUT: dict[str, tuple[Stage, ...]] = {
    "nothing multiplied": (MULTIPLIES,),
    "scores as weights": (SOFTENS,),
    "every part written and counted": LOOKS,  # same results
    "added up by one worker": (GROUPS,),  # nearly the same results
    "parts not added up": (JOINS, *LOOKS),
    "pages only copied": (MULTIPLIES, (decode_softmax, "soften", no_weights), JOINS, *LOOKS),
}


@contextlib.contextmanager
def _without(stages: Sequence[Stage]) -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for module, name, other in stages:
            patches.enter_context(mock.patch.object(module, name, other))
        yield


def one_call(q, cache, stages: Sequence[Stage] = ()):
    """Run decode_attention of q [B, 32, 128], with `stages` left out.

    cache: pages, page table, lengths, work list and scales.
    """
    k, v, table, lengths, work, scale = cache
    with _without(stages):  # active during tracing
        return decode_attention(
            q, k, v, table, lengths, scale=H**-0.5, k_scale=scale, v_scale=scale, work=work
        )


def ways() -> dict[str, Callable]:
    """Return the full kernel and the kernels with stages left out, as functions of (q, cache)."""
    return {"whole": one_call} | {
        name: functools.partial(one_call, stages=stages) for name, stages in LEFT_OUT.items()
    }


def operands(lengths: Sequence[int]) -> tuple[list, list]:
    """Return queries for each call, and for each call one of two alternating caches in the form of
    `one_call`."""
    table, pages = page_tables(np.random.default_rng(len(lengths)), lengths)
    workers = SMS * decode_tile(H, N // K, 1).workers
    work = jax.jit(functools.partial(decode_work, kv_heads=K, workers=workers))(
        jnp.asarray(lengths, jnp.int32)
    )
    shared = jnp.asarray(table), jnp.asarray(lengths, jnp.int32), work, jnp.ones(K, jnp.float32)
    e4m3 = jax.jit(lambda x: x.astype(jnp.float8_e4m3fn))
    caches = []
    for i in range(2):
        k, v = (e4m3(random_pages(jax.random.key(2 * i + j), pages, K, H)) for j in range(2))
        caches.append(
            (k, v.reshape(pages, K, H, PAGE), *shared)
        )  # values have contiguous keys; random numbers need no transpose
    qs = [jax.random.normal(jax.random.key(i), (len(lengths), N, H), jnp.bfloat16) for i in range(CALLS)]
    return qs, [caches[i % 2] for i in range(CALLS)]


def in_the_l2(caches: Sequence[tuple]) -> list[tuple]:
    """Return the same caches with page tables that repeat a small set of pages."""
    small_table = caches[0][2] % IN_L2
    return [(k, v, small_table, *shared) for k, v, _, *shared in caches]


def times(rows, share: tuple[int, int], seconds: float) -> None:
    """Time every batch of `BATCHES`."""
    for case, lengths in list(BATCHES.items())[share[0] :: share[1]]:
        qs, caches = operands(lengths)
        read = float(sum(lengths)) * K * H * 2  # bytes of keys and values
        rounds = max(1, round(5e-3 / CALLS / (read / 4e12)))
        lowered = {name: looped(jax.jit(way), rounds).lower(qs, caches) for name, way in ways().items()}
        with ThreadPoolExecutor() as pool:
            compiled = dict(
                zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True)
            )
        runs: dict[str, Callable[[], Any]] = {
            name: functools.partial(program, qs, caches) for name, program in compiled.items()
        }
        runs["pages in the L2"] = functools.partial(compiled["whole"], qs, in_the_l2(caches))
        timings: Mapping[str, Any] = interleaved(runs, calls=rounds * CALLS, seconds=seconds)
        for name, t in timings.items():
            labels = {"what": name, "kernel": "decode_attention", "cache": "float8_e4m3fn", "case": case}
            record(
                rows,
                **labels,
                of_whole=t.us / timings["whole"].us,
                tbs=read / t.us / 1e6,
                **dataclasses.asdict(t),
            )


if __name__ == "__main__":
    script.main(__doc__, {"decode": times})

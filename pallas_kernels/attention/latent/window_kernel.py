"""Attention of prefill chunks over a window of keys and values by head, for Hopper.

The keys and values are products of latent vectors (`pallas_kernels.attention.latent.up_chunks`). A head's key
has columns of its own and the rotary columns that all heads share. Its value has as many columns as its own
part of the key. The steps of a tile are those of the plain chunk kernel (`pallas_kernels.attention.chunk`).
The items are ordered by groups of heads, so that the keys and values in use fit in the L2.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk.items import (
    clear_marks,
    item_at,
    visit_items,
    visit_marked,
    wait_for_all,
)
from pallas_kernels.attention.chunk.rows import (
    HALF,
    MARKS,
    MOST,
    WIDTH,
    RowConstants,
    attend_rows,
    store_rows,
)
from pallas_kernels.attention.chunk.work_list import ChunkWork
from pallas_kernels.attention.latent.windows import TILE
from pallas_kernels.attention.paged import PAGE
from pallas_kernels.hopper.layouts import LANE, pad_rows, swizzled
from pallas_kernels.hopper.limits import sms_of

PLAIN, ROTARY = 128, 64  # columns of a head's own part of a key, and of the part that heads share
TOGETHER = 8  # heads whose tiles run at the same time


def attend_window(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rotary: jax.Array,
    work: ChunkWork,
    *,
    scale: float,
    sms: int | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention of the tiles of a work list over a window, and the level of each row.

    Args:
      q: [T, N, 192] bfloat16, N a multiple of 8; the last 64 columns are rotary.
      keys, values: [S, N * 128] bfloat16. rotary: [S, 64] bfloat16.
      work: the list of one window of `windows.WindowWork`. Field 3 of a tile is the page of the window that
        holds the first key of its chunk.
    Returns:
      (outputs [T, N, 128] bfloat16, levels [M, N, 128] float32). An output is divided by its row's sum of
      weights. The level is log2 of the sum of exp2(scores), for each row of a tile. Rows of no tile are not
      written.
    """
    t, n, width = q.shape
    if width != PLAIN + ROTARY or n % TOGETHER:
        accepted = f"{PLAIN + ROTARY} columns, and multiples of {TOGETHER} heads"
        raise ValueError(f"queries {list(q.shape)}: accepted are {accepted}")
    sms = sms_of(sms)
    rows = RowConstants(
        group=1,
        tile=TILE,
        scale=scale,
        window=None,
        soft_cap=None,
        e4m3=False,
        int8=False,
        unified_max=False,
        interpret=interpret is not None,
        levels=True,
        rotary=True,
    )
    tiles = work.tiles.shape[0]
    rounds = -(-tiles * n // sms)
    kernel = plgpu.kernel(
        functools.partial(_attend, sms=sms, heads=n, rows=rows),
        out_type=(
            jax.ShapeDtypeStruct((t, n * PLAIN // WIDTH, WIDTH), q.dtype),
            jax.ShapeDtypeStruct((tiles, n, TILE.rows), jnp.float32),
        ),
        grid=(sms,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="wg",
        scratch_types=_scratch(rounds),
        compiler_params=dataclasses.replace(LANE, reduction_scratch_bytes=0),
        kernel_name=f"latent_window_attention_{sms}",
        interpret=interpret,
    )
    bound = np.asarray([0.0, MOST], np.float32)
    out, levels = kernel(pad_rows(q), keys, values, rotary, work.tiles, work.count, bound)
    return out.reshape(t, n, PLAIN), levels


def _scratch(rounds: int) -> dict:
    """Return the kernel's shared memory and barriers."""
    tiled = swizzled(jnp.bfloat16)
    return {
        "q_s": plgpu.SMEM((TILE.queries, 2, HALF, PLAIN), jnp.bfloat16, transforms=tiled),
        "q_rope_s": plgpu.SMEM((TILE.queries, 2, HALF, ROTARY), jnp.bfloat16, transforms=tiled),
        "k_s": plgpu.SMEM((TILE.stages, TILE.keys, PLAIN), jnp.bfloat16, transforms=tiled),
        "k_rope_s": plgpu.SMEM((TILE.stages, TILE.keys, ROTARY), jnp.bfloat16, transforms=tiled),
        "v_s": plgpu.SMEM((TILE.stages, TILE.keys, PLAIN), jnp.bfloat16, transforms=tiled),
        "o_s": plgpu.SMEM((2, 1, HALF, WIDTH), jnp.bfloat16),  # plain rows, to store a chunk's end row by row
        "again": plgpu.SMEM((2, min(rounds, MARKS)), jnp.int32),
        "q_full": plgpu.Barrier(num_arrivals=4, num_barriers=TILE.queries),
        "q_empty": plgpu.Barrier(num_arrivals=2, num_barriers=TILE.queries),
        "k_full": plgpu.Barrier(num_arrivals=2, num_barriers=TILE.stages),
        "v_full": plgpu.Barrier(num_barriers=TILE.stages),
        "k_empty": plgpu.Barrier(num_arrivals=2, num_barriers=TILE.stages),
        "v_empty": plgpu.Barrier(num_arrivals=2, num_barriers=TILE.stages),
        "blanked": plgpu.Barrier(num_arrivals=2),
        "decided": plgpu.Barrier(num_arrivals=2),
    }


def _attend(
    q_ref, k_ref, v_ref, rotary_ref, tiles_ref, count_ref, bound_ref, o_ref, levels_ref, *, sms, heads, rows,
    **scratch,
):  # fmt: skip
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    count, again = count_ref[0], scratch["again"]
    items = count * heads
    rounds = lax.div(items + sms - 1, jnp.int32(sms))
    item_of = functools.partial(item_at, cta=cta, sms=sms)

    def tile_of(i):
        """Return (item, head, tile, fields of the tile) of round i, or any tile if the round has no item."""
        which, of_group = item_of(i), jnp.maximum(count, 1) * TOGETHER
        within = lax.rem(which, of_group)
        index = lax.div(within, jnp.int32(TOGETHER))
        head = lax.div(which, of_group) * TOGETHER + lax.rem(within, jnp.int32(TOGETHER))
        return which, head, index, *(tiles_ref[index, j] for j in range(7))

    for_items = functools.partial(visit_items, rounds, items, item_of, tile_of)
    for_marked = functools.partial(visit_marked, rounds, items, item_of, tile_of, again)

    @pl.when(wg == 2)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")  # 40 + 2 · 232 = 3 · 168, what the CTA was given
        visit = functools.partial(_copy_item, q_ref, k_ref, v_ref, rotary_ref, scratch)
        done, steps = for_items(visit, (jnp.int32(0), jnp.int32(0)))
        plgpu.barrier_wait(scratch["decided"])
        done, steps = for_marked(visit, (done, steps))
        wait_for_all(done, TILE.queries, scratch["q_empty"])
        wait_for_all(steps, TILE.stages, scratch["k_empty"], scratch["v_empty"])

    @pl.when(wg < 2)
    def _compute():
        plgpu.set_max_registers(232, action="increase")

        def visit(carry, i, head, index, first, begin, end, _, position, block, block_end, running):
            place = (first + wg * HALF, begin - wg * HALF, end - wg * HALF)
            at, scales = (position, block, block_end), (None, None, bound_ref)
            out, level, carry = attend_rows(rows, scratch, scales, wg, i, head, at, place, carry, running)
            levels_ref.at[index, head, pl.ds(wg * HALF, HALF)][...] = level
            store_rows(out, scratch["o_s"].at[wg], o_ref, head, *place)
            return carry

        clear_marks(again, wg, jnp.minimum(rounds, MARKS))
        plgpu.commit_smem()  # No warp marks what another has yet to clear.
        carry = for_items(functools.partial(visit, running=False), (jnp.int32(0), jnp.int32(0)))
        plgpu.barrier_arrive(scratch["decided"])
        plgpu.barrier_wait(scratch["decided"])
        for_marked(functools.partial(visit, running=True), carry)
        plgpu.wait_smem_to_gmem(0)


def _copy_item(
    q_ref, k_ref, v_ref, rotary_ref, scratch, carry, _, head, index, first, begin, end, page, position,
    block, block_end,
):  # fmt: skip
    """Copy queries, then blocks of keys and values, each as soon as its slot is free."""
    done, step = carry
    pl.when(done > 0)(lambda: plgpu.barrier_wait(scratch["q_empty"].at[0]))
    for half in range(2):
        at, full = pl.ds(pl.multiple_of(first, 8) + half * HALF, HALF), scratch["q_full"].at[0]
        for name, columns in (("q_s", pl.ds(0, PLAIN)), ("q_rope_s", pl.ds(PLAIN, ROTARY))):
            plgpu.copy_gmem_to_smem(q_ref.at[at, head, columns], scratch[name].at[0, half], full)

    def slot_of(step, empty):
        slot = lax.rem(step, jnp.int32(TILE.stages))
        pl.when(step >= TILE.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
        return slot

    own = pl.ds(pl.multiple_of(head * PLAIN, PLAIN), PLAIN)

    def rows_of(block):
        return pl.ds(pl.multiple_of(page * PAGE + block * TILE.keys, PAGE), TILE.keys)

    def bring_keys(block, step):
        slot = slot_of(step, scratch["k_empty"])
        full = scratch["k_full"].at[slot]
        plgpu.copy_gmem_to_smem(k_ref.at[rows_of(block), own], scratch["k_s"].at[slot], full)
        plgpu.copy_gmem_to_smem(rotary_ref.at[rows_of(block)], scratch["k_rope_s"].at[slot], full)

    def copy(i, step):
        # In the order in which slots become free, as in the plain chunk kernel.
        pl.when(i + 1 < block_end)(lambda: bring_keys(i + 1, step + 1))
        slot = slot_of(step, scratch["v_empty"])
        full = scratch["v_full"].at[slot]
        plgpu.copy_gmem_to_smem(v_ref.at[rows_of(i), own], scratch["v_s"].at[slot], full)
        return step + 1

    bring_keys(block, step)
    return done + 1, lax.fori_loop(block, block_end, copy, step)

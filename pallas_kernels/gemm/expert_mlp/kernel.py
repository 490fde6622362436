"""The kernel for both products of a mixture's experts: one warpgroup copies, the other multiplies and stores.

Each worker takes every n-th tile of the first product, and then of the second one. The ring of stages goes on
from one product to the next, so weights of the second product arrive before their rows exist.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.expert_mlp import bf16_products, fp8_products
from pallas_kernels.gemm.expert_mlp.arrivals import leave, wait_for
from pallas_kernels.gemm.expert_mlp.form import MlpForm
from pallas_kernels.gemm.expert_mlp.touched import FewTokens, Touched, touched
from pallas_kernels.gemm.expert_mlp.work import Work
from pallas_kernels.gemm.grouped.kernel import GroupedForm, strip_item
from pallas_kernels.gemm.grouped.tiles import ALIGN, PART


def multiply(*refs, form: MlpForm, w_s, x_s, full, empty, **pieces):
    """Run the kernel. refs: the groups, the operands of the products, and their results."""
    of = _named(refs, form)
    up: Any = form.up  # None in a kernel of the other product
    down: Any = form.down
    wg, worker, workers = lax.axis_index("wg"), lax.axis_index("worker"), lax.axis_size("worker")
    tile, groups = form.tile, _groups(of, form)
    tiles = groups.count
    stages = jnp.int32(tile.stages)
    number = {name: pl.cdiv(one.n, PART) if one else 0 for name, one in (("up", up), ("down", down))}
    steps = {
        "up": pl.cdiv(of["x"].shape[1], tile.depth) if up else 0,
        "down": pl.cdiv(of["a"].shape[1], tile.depth) if down else 0,
    }
    ups, all_items = tiles * number["up"], tiles * (number["up"] + number["down"])

    def until(items):
        """Return the number of this worker's items among the first `items`."""
        return lax.div(items - worker + workers - 1, jnp.int32(workers))

    mine = {"up": until(ups), "down": until(all_items) - until(ups)}

    def for_items(name: str, visit):
        """Call visit(steps before the item, *item) for each item of a product. The next item is read during
        the current one."""
        first = jnp.int32(0) if name == "up" else mine["up"]
        before = jnp.int32(0) if name == "up" else mine["up"] * steps["up"]

        def item(i):
            which = worker + (first + i) * workers - (0 if name == "up" else ups)
            at, column = strip_item(jnp.clip(which, 0, tiles * number[name] - 1), tiles, number[name])
            return at, *groups.tile(at), column

        def one(i, own):
            following = item(i + 1)
            visit(before + i * steps[name], *own)
            return following

        @pl.when(mine[name] > 0)
        def _():
            lax.fori_loop(0, mine[name], one, item(jnp.int32(0)))

    @pl.when(wg == 1)
    def _copy():
        def slot_of(step):
            """Return the stage of a step, after it is free."""
            slot = lax.rem(step, stages)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            return slot

        def copy_weight(own: GroupedForm, ref, base, slot, step):
            size, at = PART // form.copies, pl.ds(step * tile.depth, tile.depth)
            last = ref.shape[0] - size
            pieces = own.copies() if own.gate_block else [(row, row) for row in range(0, PART, size)]
            for row, to in pieces:
                rows = pl.ds(jnp.minimum(base + row, last), size)  # rows past the last expert are not stored
                plgpu.copy_gmem_to_smem(ref.at[rows, at], w_s.at[slot, pl.ds(to, size)], full.at[slot])

        def copy_up(before, at, expert, start, end, column):
            rows = jnp.int32(0) if form.few else start  # Pallas refuses a static slice past the end

            @pl.loop(0, steps["up"])
            def _(step):
                slot = slot_of(before + step)
                copy_weight(up, of["w_up"], expert * up.n + column * PART, slot, step)
                plgpu.copy_gmem_to_smem(
                    of["x"].at[pl.ds(rows, tile.rows), pl.ds(step * tile.depth, tile.depth)],
                    x_s.at[slot, pl.ds(0, tile.rows)],
                    full.at[slot],
                )

        def copy_down(before, at, expert, start, end, column):
            base, ahead = expert * down.n + column * PART, min(steps["down"], tile.stages)
            rows = pl.ds(form.inner_rows * start, form.inner_rows * tile.rows)

            def copy_rows(step):
                plgpu.copy_gmem_to_smem(
                    of["a"].at[rows, pl.ds(step * tile.depth, tile.depth)],
                    x_s.at[lax.rem(before + step, stages)],
                    full.at[lax.rem(before + step, stages)],
                )

            @pl.loop(0, ahead)
            def _(step):
                copy_weight(down, of["w_down"], base, slot_of(before + step), step)

            if form.waits:
                wait_for(of["arrived"], at, number["up"])
                if form.few:
                    leave(of["arrived"], at, number["up"] + number["down"])
            pl.loop(0, ahead)(copy_rows)

            @pl.loop(ahead, steps["down"])
            def _(step):
                copy_weight(down, of["w_down"], base, slot_of(before + step), step)
                copy_rows(step)

        if up is not None:
            for_items("up", copy_up)
        if down is not None:
            for_items("down", copy_down)
        total = sum(mine[name] * steps[name] for name in ("up", "down"))

        @pl.loop(jnp.maximum(total - stages, 0), total)
        def _(step):  # the interpreter reports an arrival without a wait
            plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

    @pl.when(wg == 0)
    def _compute():
        products: ModuleType = fp8_products if form.quantized else bf16_products
        work = Work(form, of, steps, w_s, x_s, full, empty, pieces)
        products.begin(work)
        if isinstance(groups, _Few) and down is not None:
            write = functools.partial(groups.write_places, of["places"])
            pl.when(worker == workers - 1)(write)
        if up is not None:
            for_items("up", lambda *item: products.up(work, *item))
        if down is not None:
            for_items("down", lambda *item: products.down(work, *item))
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Listed:
    """The tiles that a sort listed."""

    of: Mapping[str, Any]

    @property
    def count(self):
        """Return the number of tiles."""
        return self.of["count"][0]

    def tile(self, at):
        """Return (expert, first row, row after the last) of a tile."""
        return self.of["experts"][at], self.of["starts"][at], self.of["ends"][at]


@dataclasses.dataclass(frozen=True)
class _Few:
    """A tile for each expert that a few tokens choose, with a row for each token."""

    form: FewTokens
    experts: Any
    used: Any
    touched: Touched
    count: Any

    def tile(self, at):
        """Return (expert, first row, row after the last) of a tile."""
        return self.touched.expert(at), at * ALIGN, at * ALIGN + ALIGN

    def write_places(self, places) -> None:
        """Write the row of each pair. Pairs of padding have a row past the last one."""

        @pl.loop(0, self.form.tokens)
        def _(token):
            for choice in range(self.form.chosen):
                place = self.touched.before(self.experts[token, choice]) * ALIGN + token
                places[token, choice] = jnp.where(token < self.used, place, self.form.most * ALIGN)


def _groups(of: Mapping[str, Any], form: MlpForm) -> _Listed | _Few:
    """Return the tiles of rows."""
    if form.few is None:
        return _Listed(of)
    used = of["used"][0] if form.few.padded else jnp.int32(form.few.tokens)
    found = touched(form.few, of["experts"], used)
    return _Few(form.few, of["experts"], used, found, found.count())


def _named(refs, form: MlpForm) -> dict[str, Any]:
    """Return the references by name."""
    listed = ["experts", "starts", "ends", "count"]
    if form.few is not None:
        listed = ["experts"] + ["used"] * form.few.padded
    listed += ["arrived"] * form.waits
    up, down = ["x", "x_scale", "w_up", "up_scale"], ["w_down", "down_scale"]
    inner = ["a", "a_scale"]
    if form.waits:
        names = [*up, *down, *inner, "y"]
    else:
        names = [*up, *inner] if form.up is not None else [*inner, *down, "y"]
    if not form.quantized:
        names = [name for name in names if not name.endswith("_scale")]
    names += ["places"] * (form.few is not None and form.down is not None)
    return dict(zip([*listed, *names], refs, strict=True))

"""The sizes and the tiles that the kernels of the sort share."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts, most_rows_and_tiles
from pallas_kernels.gemm.grouped.tiles import ALIGN, tile_rows
from pallas_kernels.hopper.row_parts import row_parts

LANES = 128  # threads of a CTA
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)
AT_ONCE = 8  # tokens or experts that are read before the first of them is used


@dataclasses.dataclass(frozen=True)
class Form:
    """The sizes that a kernel is compiled for.

    experts: those that get rows. rows: the rows of a tile. padded: some of the tokens may be padding. held:
    pairs may have other experts.
    """

    tokens: int
    chosen: int
    experts: int
    rows: int
    padded: bool
    held: bool

    @property
    def limits(self) -> int:
        """Return the number of arrays of `limits_of`."""
        return self.padded + self.held

    @property
    def wide(self) -> int:
        """Return the experts, rounded up to equal numbers in each thread."""
        return pl.cdiv(self.experts, LANES) * LANES

    @property
    def length(self) -> int:
        """Return M, the upper bound of rows."""
        return most_rows_and_tiles(self.tokens, self.chosen, self.experts, self.rows, ALIGN)[0]

    @property
    def tile_items(self) -> int:
        """Return the number of items of 128 tiles."""
        tiles = most_rows_and_tiles(self.tokens, self.chosen, self.experts, self.rows, ALIGN)[1]
        return pl.cdiv(tiles, LANES)

    @property
    def listed(self) -> list[tuple[int, ...]]:
        """Return the shapes of places, pairs, experts, starts, ends, count, sizes and arrived."""
        tiles = (self.tile_items * LANES,)
        return [(self.tokens, self.chosen), (self.length,), tiles, tiles, tiles, (1,), (self.wide,), tiles]


def form_of(
    tokens: int, chosen: int, num_experts: int, held: HeldExperts | None, used: jax.Array | None
) -> Form:
    """Return the form of a sort. The arguments are those of `sort_rows`."""
    own = num_experts if held is None else held.count
    rows = tile_rows(tokens, chosen, num_experts)
    return Form(tokens, chosen, own, rows, padded=used is not None, held=held is not None)


def limits_of(held: HeldExperts | None, used: jax.Array | None) -> list[jax.Array]:
    """Return the first arguments of a kernel, [1] int32 each: the number of tokens that get rows, and the
    first expert that gets rows, where they are given.
    """
    given = [used, None if held is None else held.first]
    return [jnp.asarray(one, jnp.int32).reshape(1) for one in given if one is not None]


def read_limits(form: Form, refs) -> tuple[jax.Array | None, jax.Array | None]:
    """Return (used, first) from the references of `limits_of`; None for what is not given."""
    return refs[0][0] if form.padded else None, refs[form.padded][0] if form.held else None


def own_expert(form: Form, expert, first):
    """Return the number of an expert among those that get rows, and -1 for other experts.

    first: the first expert that gets rows; None: all experts get rows.
    """
    if first is None:
        return expert
    own = expert - first
    return jnp.where((own >= 0) & (own < form.experts), own, -1)


def results_of(form: Form, x: jax.Array, quantize: bool) -> list[jax.ShapeDtypeStruct]:
    """Return the results of a sort: those of `Form.listed`, the sorted rows, and with `quantize` their
    scales.
    """
    listed = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in form.listed]
    rows = (form.length, x.shape[1])
    if not quantize:
        return [*listed, jax.ShapeDtypeStruct(rows, x.dtype)]
    scales = jax.ShapeDtypeStruct((form.length,), jnp.float32)
    return [*listed, jax.ShapeDtypeStruct(rows, jnp.float8_e4m3fn), scales]


def groups_of(form: Form, listed) -> Groups:
    """Return the groups. listed: arrays of the shapes `Form.listed`."""
    places, pairs, experts, starts, ends, count, sizes, arrived = listed
    return Groups(
        places=places,
        pairs=pairs,
        experts=experts,
        starts=starts,
        ends=ends,
        count=count,
        sizes=sizes[: form.experts],
        rows=form.rows,
        align=ALIGN,
        partial=form.padded or form.held,
        arrived=arrived,
    )


def read_row(ref):
    """Return the parts of a row [D] in a warpgroup's registers (`pallas_kernels.hopper.row_parts`)."""
    return [plgpu.load(ref.at[part.columns], layout=part.layout) for part in row_parts(ref.shape[0])]


def write_parts(ref, parts) -> None:
    """Write the parts of a row [D] in the dtype of ref."""
    for part, values in zip(row_parts(ref.shape[0]), parts, strict=True):
        ref.at[part.columns][...] = values.astype(ref.dtype)


def numbers(width: int, first=0):
    """Return `width` integers from `first`, as many in each thread."""
    layout = plgpu.Layout.WG_STRIDED((width,), width // LANES)
    return plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout) + first


def sizes_of(counts):
    """Return the rows of each expert, padding included."""
    return (counts + (ALIGN - 1)) & -ALIGN


def tiles_from(form: Form, first, sizes_s):
    """Return (experts, starts, ends) of 128 tiles from tile `first`, and the number of all tiles.

    sizes_s: the rows of each expert.
    """
    tile = numbers(LANES, first)

    def past(at, state, number: int = AT_ONCE):
        expert, start, end, row, tiles = state  # row, tiles: of the experts before this one
        for size in [sizes_s[at + i] for i in range(number)]:
            after = tiles + lax.div(size + (form.rows - 1), jnp.int32(form.rows))
            begin = (tile - tiles) * form.rows + row
            here = tile >= tiles  # True for the tile's expert and for all experts before it.
            start = jnp.where(here, begin, start)
            end = jnp.where(here, jnp.minimum(begin + form.rows, row + size), end)
            expert = jnp.where(tile >= after, expert + 1, expert)
            row, tiles = row + size, after
        return expert, start, end, row, tiles

    whole, none = form.experts // AT_ONCE, tile * 0
    state = none, none, none, jnp.int32(0), jnp.int32(0)
    state = lax.fori_loop(0, whole, lambda block, state: past(block * AT_ONCE, state), state)
    rest = form.experts % AT_ONCE
    *found, _, count = past(jnp.int32(whole * AT_ONCE), state, rest) if rest else state
    return *found, count

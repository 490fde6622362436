"""The sort of a decode step's rows by expert for Hopper, in one kernel: the
groups of a routing, and their rows.

XLA needs five kernels for the groups of few tokens, and one or two for the gather of the rows. With experts
in e4m3 another kernel quantizes the rows first. Here a CTA has a token. The CTA counts the pairs of all
experts itself, so that no CTA waits for another. Then it quantizes the token's row, and writes the row to the
token's places. Other CTAs have 128 tiles each.

Padding after the last token gets no rows, because its experts' weights would be read for nothing. A step of
one token has a size of 8, and would read up to twice the experts.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.grouped import api as grouped
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts, most_rows_and_tiles
from pallas_kernels.gemm.grouped.tiles import ALIGN, TALLEST, tile_rows
from pallas_kernels.gemm.sorted_rows import reference
from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.pointwise.quantize import api as quantize_api
from pallas_kernels.pointwise.quantize.reference import quantize_blocks
from pallas_kernels.quantized import Quantized

MOST_TOKENS = 128  # a CTA counts the pairs of all tokens; XLA was faster for 256 tokens of Mixtral-8x7B
MOST_EXPERTS = 512  # 4 counts in a thread's registers
_LANES = 128  # threads of a CTA
_PER_SM = 4  # CTAs for each SM
_AT_ONCE = 8  # tokens or experts that are read before the first of them is used


def supports(tokens: int, chosen: int, num_experts: int, columns: int) -> bool:
    """Return whether the kernel sorts rows of so many columns. A tile has at most `TALLEST` rows."""
    few = 0 < tokens <= MOST_TOKENS and 0 < chosen <= num_experts <= MOST_EXPERTS
    low = tokens * chosen <= TALLEST * num_experts
    return few and low and columns % _LANES == 0 and 0 < columns <= quantize_api.WIDEST


def sort_rows(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    quantize: bool = False,
    blocks: bool = False,
    held: HeldExperts | None = None,
    used: jax.Array | None = None,
    sms: int | None = None,
    interpret=None,
) -> tuple[Groups, jax.Array | Quantized]:
    """Return the groups of a routing, and the row of x for each row of the groups.

    The reference implementation is `pallas_kernels.gemm.sorted_rows.reference.sort_rows`. The groups suit
    `pallas_kernels.gemm.grouped.api.grouped_gemm`. XLA lists the groups and gathers the rows where `supports`
    is False, and where a device holds some of the experts. Unused rows, pairs and tiles are undefined.

    Args:
      x: [T, D] bfloat16, D a multiple of 128 up to 16,384 with `quantize`.
      experts: [T, e] int32, the chosen experts of each token, all different. num_experts: of the model.
      quantize: return the rows in e4m3 with a scale [M] for each row.
      blocks: return the rows in e4m3 with a scale [M, D / 128] for each 128 columns; not with `quantize`. XLA
        quantizes them, after the sort where the kernel sorts.
      held: the experts that get rows; None: all.
      used: int32, the number of tokens that get rows, from the first one; None: all.
      sms: the number of CTAs as a number of SMs, 1 to 132; default: all.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    (tokens, columns), chosen, full = x.shape, experts.shape[1], sms_of(sms)
    if x.dtype != jnp.bfloat16 or experts.shape[0] != tokens:
        given = f"x {x.dtype}{list(x.shape)}, experts {list(experts.shape)}"
        raise ValueError(f"{given}: accepted are bfloat16 [T, D] and the experts of T tokens")
    if held is not None or not supports(tokens, chosen, num_experts, columns):
        return sort_by_xla(
            x,
            experts,
            num_experts,
            quantize=quantize,
            blocks=blocks,
            held=held,
            used=used,
            sms=sms,
            interpret=interpret,
        )
    rows_of_tile = tile_rows(tokens, chosen, num_experts)
    form = _Form(tokens, chosen, num_experts, rows_of_tile, padded=used is not None)
    ctas = min(form.items, full * _PER_SM)
    moved = [((form.length, columns), jnp.float8_e4m3fn if quantize else x.dtype)]
    moved += [((form.length,), jnp.float32)] if quantize else []
    places, pairs, of_tiles, starts, ends, count, sizes, arrived, *rows = plgpu.kernel(
        functools.partial(_sort, form=form, ctas=ctas),
        out_type=[
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in form.listed),
            *(jax.ShapeDtypeStruct(*one) for one in moved),
        ],
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types={"sizes_s": plgpu.SMEM((form.wide,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="sort_rows",
        interpret=interpret,
    )(*([] if used is None else [used.astype(jnp.int32).reshape(1)]), experts.astype(jnp.int32), x)
    groups = Groups(
        places=places,
        pairs=pairs,
        experts=of_tiles,
        starts=starts,
        ends=ends,
        count=count,
        sizes=sizes[:num_experts],
        rows=form.rows,
        align=ALIGN,
        partial=form.padded,
        arrived=arrived,
    )
    if quantize:
        return groups, Quantized(*rows)
    return groups, quantize_blocks(rows[0]) if blocks else rows[0]


def sort_by_xla(
    x: jax.Array,
    experts: jax.Array,
    num_experts: int,
    *,
    quantize: bool = False,
    blocks: bool = False,
    held: HeldExperts | None = None,
    used: jax.Array | None = None,
    sms: int | None = None,
    interpret=None,
) -> tuple[Groups, jax.Array | Quantized]:
    """Return what `sort_rows` returns, with groups and a gather by XLA.
    Unused rows are other tokens' rows.
    """
    groups = grouped.list_groups(experts, num_experts, held, used)
    rows = quantize_blocks(x) if blocks else x
    if quantize:
        rows = quantize_api.quantize_rows(x, sms=sms, interpret=interpret)
    return groups, reference.gather(rows, groups)


@dataclasses.dataclass(frozen=True)
class _Form:
    """The sizes that the kernel is compiled for.

    rows: the rows of a tile. padded: some of the tokens may be padding.
    """

    tokens: int
    chosen: int
    experts: int
    rows: int
    padded: bool

    @property
    def wide(self) -> int:
        """Return the experts, rounded up to equal numbers in each thread."""
        return pl.cdiv(self.experts, _LANES) * _LANES

    @property
    def length(self) -> int:
        """Return M, the upper bound of rows."""
        return most_rows_and_tiles(self.tokens, self.chosen, self.experts, self.rows, ALIGN)[0]

    @property
    def tile_items(self) -> int:
        """Return the number of items of 128 tiles."""
        tiles = most_rows_and_tiles(self.tokens, self.chosen, self.experts, self.rows, ALIGN)[1]
        return pl.cdiv(tiles, _LANES)

    @property
    def items(self) -> int:
        """Return the number of items: those of the tiles, then one for each token."""
        return self.tile_items + self.tokens

    @property
    def listed(self) -> list[tuple[int, ...]]:
        """Return the shapes of places, pairs, experts, starts, ends, count, sizes and arrived."""
        tiles = (self.tile_items * _LANES,)
        return [(self.tokens, self.chosen), (self.length,), tiles, tiles, tiles, (1,), (self.wide,), tiles]


def _sort(*refs, form: _Form, ctas: int, sizes_s):
    """Process this CTA's items, every `ctas`-th item."""
    used = refs[0][0] if form.padded else None
    experts_ref, x_ref, places_ref, pairs_ref, *listed_refs, rows_ref = refs[form.padded : form.padded + 11]
    of_tiles_ref, starts_ref, ends_ref, count_ref, sizes_ref, arrived_ref = listed_refs
    scale_refs = refs[form.padded + 11 :]

    @pl.loop(lax.axis_index("cta"), form.items, step=ctas)
    def _(item):
        @pl.when(item < form.tile_items)
        def _():
            sizes = _sizes(_count(form, experts_ref, jnp.int32(0), used)[0])
            plgpu.commit_smem()  # the last item of this CTA has read its sizes
            sizes_s[...] = sizes
            plgpu.commit_smem()
            *found, count = _tiles(form, item * _LANES, sizes_s)
            for ref, values in zip((of_tiles_ref, starts_ref, ends_ref), found, strict=True):
                ref[pl.ds(item * _LANES, _LANES)] = values
            arrived_ref[pl.ds(item * _LANES, _LANES)] = _numbers(_LANES) * 0

            @pl.when(item == 0)
            def _():
                sizes_ref[...] = sizes
                count_ref[0] = count

        def sort_token(token):
            row = plgpu.load(x_ref.at[token], layout=quantize_api.layout_of(x_ref.shape[1]))
            scale = None
            counts, earlier = _count(form, experts_ref, token, used)
            expert, sizes = _numbers(form.wide), _sizes(counts)
            if scale_refs:
                row, scale = quantize_api.scaled(row.astype(jnp.float32))
            for choice in range(form.chosen):
                own = experts_ref[token, choice]
                before = jnp.where(expert < own, sizes, jnp.where(expert == own, earlier, 0))
                place = jnp.sum(before)
                places_ref[token, choice] = place
                pairs_ref[place] = token * form.chosen + choice
                rows_ref.at[place][...] = row.astype(rows_ref.dtype)
                for ref in scale_refs:
                    ref[place] = scale

        def skip_token(token):
            for choice in range(form.chosen):
                places_ref[token, choice] = jnp.int32(form.length)

        @pl.when(item >= form.tile_items)
        def _():
            token = item - form.tile_items
            if used is None:
                return sort_token(token)
            pl.when(token < used)(lambda: sort_token(token))
            pl.when(token >= used)(lambda: skip_token(token))


def _numbers(width: int, first=0):
    """Return `width` integers from `first`, as many in each thread."""
    layout = plgpu.Layout.WG_STRIDED((width,), width // _LANES)
    return plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout) + first


def _count(form: _Form, experts_ref, token, used):
    """Return the pairs of each expert, and those of tokens before `token`.

    used: the number of tokens that are counted; None: all.
    """
    expert = _numbers(form.wide)

    def expert_of(at, choice):
        """Return the expert of a pair, or a number that no thread has."""
        own = experts_ref[at, choice]
        return own if used is None else jnp.where(at < used, own, -1)

    def add(first, state, number: int = _AT_ONCE):
        counts, earlier = state
        of_tokens = [[expert_of(first + i, choice) for choice in range(form.chosen)] for i in range(number)]
        for i, chosen in enumerate(of_tokens):
            hits = sum(jnp.where(expert == one, 1, 0) for one in chosen)
            counts += hits
            earlier += hits * jnp.where(first + i < token, 1, 0)
        return counts, earlier

    whole, none = form.tokens // _AT_ONCE, expert * 0
    state = lax.fori_loop(0, whole, lambda block, state: add(block * _AT_ONCE, state), (none, none))
    rest = form.tokens % _AT_ONCE
    return add(jnp.int32(whole * _AT_ONCE), state, rest) if rest else state


def _sizes(counts):
    """Return the rows of each expert, padding included."""
    return (counts + (ALIGN - 1)) & -ALIGN


def _tiles(form: _Form, first, sizes_s):
    """Return (experts, starts, ends) of 128 tiles from tile `first`, and the number of all tiles.

    sizes_s: the rows of each expert.
    """
    tile = _numbers(_LANES, first)

    def past(at, state, number: int = _AT_ONCE):
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

    whole, none = form.experts // _AT_ONCE, tile * 0
    state = none, none, none, jnp.int32(0), jnp.int32(0)
    state = lax.fori_loop(0, whole, lambda block, state: past(block * _AT_ONCE, state), state)
    rest = form.experts % _AT_ONCE
    *found, _, count = past(jnp.int32(whole * _AT_ONCE), state, rest) if rest else state
    return *found, count

"""Grouped GEMM for Hopper (a mixture's experts) with many rows an expert: `dense_gemm`'s kernel over tiles of
128 rows with one weight each.

Rows are sorted by expert, and each expert is padded to full tiles, so a tile has one weight. The expert of a
tile and the number of tiles are data. A persistent grid takes (tile of rows, tile of columns) items up to
this number: 16 neighboring tiles of rows before the next columns, so that tiles of one expert share their
reads. XLA would multiply every row with every expert's weight, after a transpose of all weights.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.api import supports
from pallas_kernels.gemm.dense.epilogue import Form
from pallas_kernels.gemm.dense.kernel import multiply, scratch
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped import reference
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.grouped.tiles import check_operands
from pallas_kernels.gemm.tile_schedule import GemmTile
from pallas_kernels.hopper.layouts import LANE
from pallas_kernels.hopper.limits import sms_of

ROWS = 128  # rows of a tile; an expert's rows are padded to a multiple
_STRIP = 16  # neighboring tiles of rows before the next columns


def list_groups(
    experts: jax.Array, num_experts: int, held: HeldExperts | None = None, used: jax.Array | None = None
) -> Groups:
    """Return the groups of a routing in tiles of this kernel's rows."""
    return expert_groups.list_groups(experts, num_experts, ROWS, ROWS, held, used)


def grouped_gemm(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    *,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    tile: GemmTile | None = None,
    interpret=None,
) -> jax.Array:
    """Return `pallas_kernels.gemm.grouped.api.grouped_gemm` by this kernel,
    without a bias and clamped_swiglu.

    Args:
      groups: from `list_groups`, in tiles of 128 rows.
      tile: a tile of 128 rows; None: 128 x 256.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    (m, k), (experts, n, depth), sms = x.shape, w.shape, sms_of(sms)
    tile = tile or GemmTile(ROWS, 256, 4)
    if k != depth or m % ROWS or groups.experts.shape != (m // ROWS,) or tile.rows != ROWS:
        given = f"x {list(x.shape)}, w {list(w.shape)}, {groups.experts.shape[0]} tiles of rows"
        raise ValueError(f"{given}: accepted are equal K, and one tile for every {ROWS} rows")
    check_operands(x, w, activation)
    if not supports(m, n, k, gate_block):
        return reference.grouped_gemm(x, w, groups, activation=activation, gate_block=gate_block)
    form = Form(
        tile=tile,
        slots=0,
        width=min(gate_block or 64, 64),
        activation=activation,
        gate_block=gate_block,
        bias=False,
        residual=False,
        interpret=interpret is not None,
    )
    kernel = plgpu.kernel(
        functools.partial(_multiply, form=form, n=n, sms=sms),
        out_type=jax.ShapeDtypeStruct((m, n if gate_block is None else n // 2), x.dtype),
        grid=(sms,),
        grid_names=("worker",),
        cluster=(1,),
        cluster_names=("rank",),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch(form, jnp.dtype(x.dtype)),
        compiler_params=LANE,
        kernel_name=f"grouped_gemm_{sms}",
        interpret=interpret,
    )
    return kernel(groups.experts, groups.count, x, w.reshape(experts * n, k))


def _multiply(experts_ref, count_ref, x_ref, w_ref, o_ref, *, form: Form, n: int, sms: int, **shared):
    worker, tiles, columns = lax.axis_index("worker"), count_ref[0], -(-n // form.tile.cols)
    items, strip = tiles * columns, _STRIP * columns

    def item(i):
        which = jnp.minimum(i * sms + worker, items - 1)
        first = lax.div(which, jnp.int32(strip)) * _STRIP
        rest = lax.rem(which, jnp.int32(strip))
        strip_tiles = jnp.clip(tiles - first, 1, _STRIP)  # a device may have no tile at all
        row, column = first + lax.rem(rest, strip_tiles), lax.div(rest, strip_tiles)
        weight = experts_ref[jnp.clip(row, 0, experts_ref.shape[0] - 1)] * n + column * form.tile.cols
        steps = jnp.where(i * sms + worker < items, jnp.int32(x_ref.shape[1] // form.tile.depth), 0)
        return row, column, jnp.int32(0), steps, jnp.int32(-1), jnp.int32(0), jnp.int32(0), weight

    rounds = lax.div(items + sms - 1 - worker, jnp.int32(sms))
    multiply((rounds, item), x_ref, w_ref, o_ref, form=form, **shared)

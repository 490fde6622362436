"""The products of a mixture's experts for Hopper: `dense_gemm`'s kernel over tiles of rows that each have a
weight of their own.

Rows are sorted by expert, and an expert's begin at a whole tile, so that no tile has two weights. Which
expert a tile is of, and how many tiles there are, are data: a persistent grid takes (tile of rows, tile of
columns) items to that count, 16 tiles of rows beside each other before the next columns, so that tiles of one
expert share what they read. (XLA multiplies every row with every expert's weight, and transposes all weights
before that.)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.api import supports
from pallas_kernels.gemm.dense.epilogue import Form
from pallas_kernels.gemm.dense.kernel import multiply, scratch
from pallas_kernels.gemm.grouped import reference
from pallas_kernels.gemm.grouped.reference import Groups
from pallas_kernels.gemm.tile_schedule import GemmTile
from pallas_kernels.hopper.layouts import LANE
from pallas_kernels.hopper.limits import sms_of

ROWS = 128  # of a tile: what an expert's rows are padded to
_STRIP = 16  # tiles of rows that are multiplied beside each other


def list_groups(experts: jax.Array, num_experts: int) -> Groups:
    """`reference.list_groups` in tiles of this kernel's."""
    return reference.list_groups(experts, num_experts, ROWS)


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
    """act(x @ w[expert of the row].T), summed in float32 (the twin: `reference.grouped_gemm`).

    Args:
      x: [M, K] bfloat16, rows as `groups` has them.
      w: [E, N, K] bfloat16. Where N or K is no multiple of 64, the product is XLA's.
      groups: of `list_groups`, in tiles of 128 rows.
      activation: silu, gelu_tanh, relu or None. gate_block: so many gates, then as many ups, alternating, or
      None; blocks of other than 16,
        32 or 64 are XLA's.
      sms: CTAs of the persistent grid: how many SMs the kernel may take, 1 to 132; None: all.
      tile: of 128 rows, for the kernel alone; None: 128 x 256.
    Returns:
      [M, N] bfloat16, N / 2 with gates; tiles behind the last are not written.
    Raises:
      ValueError: for a shape, dtype, activation or sms that the kernel does not take.
    """
    (m, k), (experts, n, depth), sms = x.shape, w.shape, sms_of(sms)
    tile = tile or GemmTile(ROWS, 256, 4)
    if k != depth or m % ROWS or groups.experts.shape != (m // ROWS,) or tile.rows != ROWS:
        given = f"x {list(x.shape)}, w {list(w.shape)}, {groups.experts.shape[0]} tiles of rows"
        raise ValueError(f"{given}: the same K, and a tile for every {ROWS} rows")
    if (
        x.dtype != jnp.bfloat16
        or w.dtype != jnp.bfloat16
        or activation not in (None, "silu", "gelu_tanh", "relu")
    ):
        raise ValueError(
            f"dtypes {x.dtype}, {w.dtype}, {activation=}: bfloat16 twice; None, silu, gelu_tanh or relu"
        )
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
        beside, rest = jnp.minimum(tiles - first, _STRIP), lax.rem(which, jnp.int32(strip))
        row, column = first + lax.rem(rest, beside), lax.div(rest, beside)
        weight = experts_ref[jnp.clip(row, 0, experts_ref.shape[0] - 1)] * n + column * form.tile.cols
        steps = jnp.where(i * sms + worker < items, jnp.int32(x_ref.shape[1] // form.tile.depth), 0)
        return row, column, jnp.int32(0), steps, jnp.int32(-1), jnp.int32(0), jnp.int32(0), weight

    rounds = lax.div(items + sms - 1 - worker, jnp.int32(sms))
    multiply((rounds, item), x_ref, w_ref, o_ref, form=form, **shared)

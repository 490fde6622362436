"""Persistent dense GEMM for Hopper: bfloat16 operands, float32 sums, and an epilogue before the store.

`sms` CTAs process a table of items (`tile_schedule.schedule`): full output tiles, then tiles split along K
so that all CTAs end together. In a CTA one warpgroup copies operands through a ring of stages, ahead over
the borders of tiles. Two warpgroups compute half of the tile's rows each. K is contiguous in both operands:
the weight is wgmma's transposed right-hand side. For alternating gates and ups, a warpgroup holds both of a
pair in registers, so act(gate) · up moves no memory. A kernel with all SMs runs in clusters of two CTAs on
vertically adjacent tiles. Each CTA loads half of the weight's tile for both, which reduces the reads from
the L2 by a third.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.dense.epilogue import Form
from pallas_kernels.gemm.dense.kernel import multiply, scratch, table_items
from pallas_kernels.gemm.epilogue_limits import check_bias_and_residual
from pallas_kernels.gemm.tile_schedule import GemmPlan, gemm_plan
from pallas_kernels.hopper.layouts import LANE, pad_rows
from pallas_kernels.hopper.limits import sms_of

GATE_BLOCKS = (16, 32, 64)  # gates and ups that alternate, which the epilogue takes
_ACTIVATIONS = (None, "silu", "gelu_tanh", "relu")


def supports(m: int, n: int, k: int, gate_block: int | None = None) -> bool:
    """Return whether `dense_gemm` supports [m, k] x [n, k]: K and N in full 128-byte rows of shared memory,
    any m.
    """
    gates = gate_block is None or (gate_block in GATE_BLOCKS and n % (2 * gate_block) == 0)
    return min(m, n, k) > 0 and n % 64 == 0 and k % 64 == 0 and gates


def dense_gemm(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    out_dtype=None,
    sms: int | None = None,
    plan: GemmPlan | None = None,
    interpret=None,
) -> jax.Array:
    """Return act(x @ w.T + bias) + residual, summed in float32.

    The reference implementation is `pallas_kernels.gemm.reference.gemm`.

    Args:
      x: [M, K] bfloat16, K a multiple of 64. The kernel copies x if M is not a multiple of 8.
      w: [N, K] bfloat16, N a multiple of 64.
      bias: [N], any float.
      residual: [M, N], or [M, N / 2] with gates, of the output's dtype.
      activation: silu, gelu_tanh, relu or None.
      gate_block: columns are alternating blocks of `gate_block` (16, 32 or 64) gates and as many ups; the
        result is act(gate) · up.
      out_dtype: bfloat16 or float32; None: x's.
      sms: CTAs of the persistent grid, which is the number of SMs that the kernel may occupy, 1 to 132;
        None: all.
      plan: tile and schedule; None: `gemm_plan`'s.
    Returns:
      [M, N], or [M, N / 2] with gates.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    out_dtype, sms = jnp.dtype(out_dtype or x.dtype), sms_of(sms)
    _check(x, w, activation, gate_block, out_dtype)
    check_bias_and_residual(
        x.shape[0], w.shape[0], bias, residual, gated=gate_block is not None, dtype=out_dtype
    )
    m, x = x.shape[0], pad_rows(x)
    residual = None if residual is None else pad_rows(residual)
    n, k = w.shape
    plan = plan or gemm_plan(m, n, k, sms, gate_block)
    tile, slots = plan.tile, plan.schedule.slots
    full_box = 128 // out_dtype.itemsize
    form = Form(
        tile=tile,
        slots=slots,
        width=full_box if gate_block is None else min(gate_block, full_box),
        activation=activation,
        gate_block=gate_block,
        bias=bias is not None,
        residual=residual is not None,
        interpret=interpret is not None,
    )
    out = [jax.ShapeDtypeStruct((x.shape[0], n if gate_block is None else n // 2), out_dtype)]
    if slots:
        out.append(jax.ShapeDtypeStruct((slots * tile.cluster, 2, tile.rows // 2, tile.cols), jnp.float32))
    kernel = plgpu.kernel(
        functools.partial(_multiply, form=form),
        out_type=out,
        grid=(plan.schedule.table.shape[0],),
        grid_names=("worker",),
        cluster=(tile.cluster,),
        cluster_names=("rank",),
        num_threads=3,
        thread_name="wg",
        scratch_types=scratch(form, out_dtype),
        compiler_params=LANE,
        kernel_name=f"dense_gemm_{sms}_{tile.rows}x{tile.cols}",
        interpret=interpret,
    )
    extra = [v for v in (bias, residual) if v is not None]
    return kernel(jnp.asarray(plan.schedule.table), x, w, *extra)[0][:m]


def _multiply(work_ref, x_ref, w_ref, *refs, form: Form, **shared):
    refs = list(refs)
    rest = {
        name: refs.pop(0) for name in ("bias_ref", "residual_ref") if getattr(form, name.removesuffix("_ref"))
    }
    o_ref, rest["part_ref"] = refs.pop(0), refs.pop(0) if form.slots else None
    multiply(table_items(work_ref, form.tile.cols), x_ref, w_ref, o_ref, form=form, **rest, **shared)


def _check(x, w, activation, gate_block, out_dtype):
    (m, k), (n, width) = x.shape, w.shape
    if k != width or not supports(m, n, k, gate_block):
        raise ValueError(
            f"{m=}, {n=}, k={k} and {width}, {gate_block=}: accepted are equal k, n and k multiples "
            "of 64, and blocks of 16, 32, 64 or None"
        )
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16 or out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"dtypes {x.dtype}, {w.dtype} -> {out_dtype}: accepted are bfloat16 -> bfloat16 or float32"
        )
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{activation=}: accepted are {_ACTIVATIONS}")

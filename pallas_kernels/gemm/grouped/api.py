"""Grouped GEMM for Hopper (a mixture's experts): the choice between two kernels by the rows of an expert.

`swapped` has tiles of 8 to 144 rows, and reads an expert's weight once if its rows fit one tile. `padded` has
tiles of 128 rows, and is faster for experts of several tiles (docs/expert-kernels.md). `swapped` also takes
e4m3 with scales of rows or of blocks, and a weight in MXFP4 or int4.
"""

from collections.abc import Callable

import jax

from pallas_kernels.gemm.dense.api import GATE_BLOCKS
from pallas_kernels.gemm.grouped import padded, reference, swapped
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.gemm.grouped.tiles import TALLEST, ExpertWeight, adds_bias
from pallas_kernels.gemm.reference import CLAMPED_SWIGLU
from pallas_kernels.quantized import FORMATS, BlockFp8, Quantized


def list_groups(
    experts: jax.Array, num_experts: int, held: HeldExperts | None = None, used: jax.Array | None = None
) -> Groups:
    """Return the groups of a routing [T, e], for the kernel that suits the mean rows of an expert.

    num_experts: of the model. held: the experts that get rows; None: all. used: the number of tokens that
    get rows, from the first one; None: all.
    """
    kernel = swapped if experts.size <= TALLEST * num_experts else padded
    return kernel.list_groups(experts, num_experts, held=held, used=used)


def grouped_gemm(
    x: jax.Array | Quantized,
    w: ExpertWeight,
    groups: Groups,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    gate_block: int | None = None,
    sms: int | None = None,
    interpret=None,
) -> jax.Array:
    """Return act(x @ w[expert of the row].T + bias[expert of the row]), summed in float32.

    The reference implementation is `pallas_kernels.gemm.grouped.reference.grouped_gemm`.

    Args:
      x: [M, K] bfloat16, rows in the order of `groups`; or e4m3 with scales [M],
          or [M, K / 128] with `BlockFp8`.
      w: [E, N, K] bfloat16; or e4m3 with scales [E, N]. XLA computes the product if N or K is not a multiple
        of 64, or of 128 in e4m3. Or `Mxfp4`, `Mxfp4Blocks` or `ExpertInt4`: the numbers go to bfloat16 in
        registers, or by XLA where `supports_mxfp4`, `supports_mxfp4_blocks` or `supports_int4` of
        `pallas_kernels.gemm.grouped.tiles` is False. Or `BlockFp8`.
      groups: from `list_groups`, which chose the kernel.
      bias: [E, N], or None. With a bias, with clamped_swiglu, or with blocks of gates other than 16, 32 or
        64, `swapped` computes the epilogue where `pallas_kernels.gemm.grouped.tiles.adds_bias` is True, and
        XLA after the product elsewhere.
      activation: silu, gelu_tanh, relu, clamped_swiglu or None.
      gate_block: alternating blocks of `gate_block` gates and ups, or None.
      sms: CTAs of the persistent grid, which is the number of SMs that the kernel may occupy, 1 to 132;
        None: all.
    Returns:
      [M, N] bfloat16, N / 2 with gates; rows after the last tile are not written.
    Raises:
      ValueError: for a shape, dtype, activation or sms outside the limits.
    """
    product: Callable[..., jax.Array] = swapped.grouped_gemm
    if groups.align == padded.ROWS and not isinstance(w, FORMATS):
        product = padded.grouped_gemm
    if bias is None and activation != CLAMPED_SWIGLU and gate_block in (None, *GATE_BLOCKS):
        return product(
            x, w, groups, activation=activation, gate_block=gate_block, sms=sms, interpret=interpret
        )
    if product is swapped.grouped_gemm and adds_bias(w, gate_block):
        epilogue = {"bias": bias, "activation": activation, "gate_block": gate_block}
        return product(x, w, groups, **epilogue, sms=sms, interpret=interpret)
    if isinstance(w, BlockFp8):  # the order of its scales depends on the gates, which the product must know
        return reference.grouped_gemm(x, w, groups, bias=bias, activation=activation, gate_block=gate_block)
    y = product(x, w, groups, sms=sms, interpret=interpret)
    return reference.finish_rows(y, groups, bias=bias, activation=activation, gate_block=gate_block)

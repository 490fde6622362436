"""The steps of attention kernels whose output of 64 rows fills the registers of two warpgroups.

One warpgroup computes the weights of a block of 64 keys (`soften`). Two warpgroups multiply the weights and
the values, half of the columns each (`add_products`). A fourth one copies. The kernels of latent vectors and
of heads of 512 columns have this form.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.attention.paged import PAGE

ROWS = 64  # rows of a tile, which are the rows of a wgmma
# Registers of a thread of each warpgroup. The four warpgroups have 512 together.
REGISTERS = {"scores": 128, "values": 176, "copies": 32}
COLUMNS = 128  # columns of a wgmma's output, because ptxas compiles 256 only for fewer than 512 threads
_SLACK = 8.0  # A row's maximum moves only for a score above it by 2^8, so most blocks rescale no output.
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)


def column_blocks(half: int) -> list[tuple[int, int]]:
    """Return (first column, columns) of the products of one warpgroup's half of the columns."""
    return [(column, min(COLUMNS, half - column)) for column in range(0, half, COLUMNS)]


def by_row(x, shape):
    """Return x [rows] for each column of a shape [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, [0])


def full_rows(x: float):
    """Return [64] float32 of one value, in the layout of a row's sums."""
    return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), ROW)


def no_sums():
    """Return the sums of weights by column modulo 8, [64, 8], before the first block."""
    return plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), WGMMA)


def soften(scores, top, total):
    """Return (maximum, sums, factor of the earlier outputs, weights [64, keys]) after a block.

    scores: in powers of two, -inf for keys that a row does not see. top: the maximum, [64]. total: [64, 8].
    """
    highest = scores.max(axis=1)
    new_top = jnp.where(highest > top + _SLACK, highest, top)
    keep = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - by_row(new_top, scores.shape))
    total = total * by_row(keep, total.shape)
    for column in range(0, PAGE, 8):
        total = total + weights[:, column : column + 8]
    return new_top, total, keep, weights


def hidden_zero(interpret: bool):
    """Return 0 that the compiler does not know.

    The compiler would otherwise keep the queries' 32 addresses in registers across the loop over blocks, and
    spill.
    """
    if interpret:
        return jnp.int32(0)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar))
    def zero(_):
        i32 = ir.IntegerType.get_signless(32)
        found = llvm.inline_asm(i32, [], "mov.b32 $0, 0;", "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return zero()  # pyright: ignore[reportCallIssue]


def add_products(out, weights, values, interpret: bool):
    """Return out + weights @ values, by blocks of columns, in place in out's registers.

    The interpreter has no such accumulator.
    """
    parts = [values.at[:, pl.ds(column, width)] for column, width in column_blocks(values.shape[1])]
    if interpret:
        wide = weights[...].astype(jnp.float32)
        return [x + jnp.dot(wide, part[...].astype(jnp.float32)) for x, part in zip(out, parts, strict=True)]

    def multiply(accs):
        for acc, part in zip(accs, parts, strict=True):
            plgpu.wgmma(acc, weights, part)

    return pl.run_state(multiply)([plgpu.ACC.init(x) for x in out])

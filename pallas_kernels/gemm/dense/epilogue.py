"""The epilogue of the dense GEMM: bias, activation, gates, residual and store, before the sums leave the
SM.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.tile_schedule import GemmTile
from pallas_kernels.hopper.layouts import LOG2E

BOXES = 2  # pieces of a warpgroup's output in flight to memory


@dataclasses.dataclass(frozen=True)
class Form:
    """The parameters that the kernel is compiled for. width: columns of one store."""

    tile: GemmTile
    slots: int
    width: int
    activation: str | None
    gate_block: int | None
    bias: bool
    residual: bool
    interpret: bool

    @property
    def half(self) -> int:
        """Return the rows of a warpgroup."""
        return self.tile.rows // 2

    def pieces(self) -> list[tuple[int, int]]:
        """Return (row, column) of the 64 x width pieces of a warpgroup's sums (or of their gates) that one
        store each writes.
        """
        columns = self.width if self.gate_block is None else 2 * self.gate_block
        inside = (
            range(0, columns, self.width)
            if self.gate_block is None
            else range(0, self.gate_block, self.width)
        )
        return [
            (r, c + i)
            for r in range(0, self.half, 64)
            for c in range(0, self.tile.cols, columns)
            for i in inside
        ]


def store(form: Form, wg, o_ref, o_s, part_ref, bias_ref, residual_ref, read, y, row, column, take, taken):
    """Add parts take .. take + taken to the sums y [half, cols], apply the epilogue, and store the result."""
    width, pieces = form.width, form.pieces()
    first_row, first_column = row * form.tile.rows + wg * form.half, column * form.tile.cols

    def summed(r, c):
        """Return 64 x width of x @ w.T + bias."""
        total = y[r : r + 64, c : c + width]
        if form.slots:

            def add(part, total):
                source = part_ref.at[
                    part * form.tile.cluster + lax.axis_index("rank"), wg, pl.ds(r, 64), pl.ds(c, width)
                ]
                return total + plgpu.load(source, (), layout=plgpu.Layout.WGMMA, optimized=False)

            total = lax.fori_loop(take, take + taken, add, total)
        if bias_ref is None:
            return total
        # Columns beyond the output are not stored.
        start = jnp.minimum(first_column + c, bias_ref.shape[0] - width)
        bias = plgpu.load(
            bias_ref.at[pl.ds(start, width)], (), layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
        )
        return total + lax.broadcast_in_dim(bias.astype(jnp.float32), total.shape, [1])

    def of(ref, r, c):
        """Return the slice of a piece in the output or the residual."""
        if form.gate_block is not None:  # half of the columns before this piece's block are ups
            block, inside = divmod(c, 2 * form.gate_block)
            c, start = block * form.gate_block + inside, lax.div(first_column, jnp.int32(2))
        else:
            start = first_column
        return ref.at[pl.ds(first_row + r, 64), pl.ds(start + c, width)]

    def fetch(i):
        plgpu.copy_gmem_to_smem(
            of(residual_ref, *pieces[i]), o_s.at[wg, i % BOXES], read.at[wg * BOXES + i % BOXES]
        )

    if form.residual:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(min(BOXES, len(pieces))):
            fetch(i)
    for i, (r, c) in enumerate(pieces):
        box = o_s.at[wg, i % BOXES]
        value = activate(summed(r, c), form.activation)
        if form.gate_block is not None:
            value = value * summed(r, c + form.gate_block)
        if form.residual:
            plgpu.barrier_wait(read.at[wg * BOXES + i % BOXES])
            value = value + plgpu.load(box, (), layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        else:
            plgpu.wait_smem_to_gmem(BOXES - 1, wait_read_only=True)
        box[...] = value.astype(box.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(box, of(o_ref, r, c))
        if form.residual and i + BOXES < len(pieces):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(i + BOXES)


def activate(x, activation):
    """Return silu, gelu_tanh or relu of float32 registers, from exp2, because the hardware's tanh has only
    11 bits.
    """
    if activation is None:
        return x
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    inner = (
        x if activation == "silu" else x * (1.5957691216057308 + 0.0713548162726009 * x * x)
    )  # gelu: 2 sqrt(2 / pi) (x + 0.044715 x³)
    return x / (1.0 + jnp.exp2(inner * -LOG2E))

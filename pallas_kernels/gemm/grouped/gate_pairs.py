"""Gates and ups that alternate in blocks of 8 rows of a weight, side by side in registers.

A thread has rows r and r + 8 of each 16 rows of wgmma's sums: a gate and its up. Warp w multiplies the 16-row
block 2 w of the weight's 128 rows in the first half of the sums, and block 2 w + 1 in the second half. So the
registers of both halves, in another order, are the gates and the ups of 64 columns of the result.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.gemm.grouped.tiles import GATE_PAIRS
from pallas_kernels.hopper.wgmma_registers import at, const, place

ROWS = 2 * GATE_PAIRS  # of a block of gates and the block of their ups


def place_of(block: int) -> int:
    """Return the row of the sums where a block of 16 of the weight's 128 rows begins."""
    return 64 * (block % 2) + ROWS * (block // 2)


def in_halves(rows: jax.Array) -> jax.Array:
    """Return 128 rows of a weight in the order of the sums, in the interpreter."""
    return rows.reshape(4, 2, ROWS, -1).swapaxes(0, 1).reshape(rows.shape)


def biases(ref, row: jax.Array, interpret: bool) -> list[jax.Array]:
    """Return the bias of 64 gates and of their ups, float32 [64] each, one number a row of the sums.

    ref: the bias of all experts in memory, [E · N] bfloat16 or float32. row: int32, the first of 128 rows.
    """
    row = jnp.minimum(row, ref.shape[0] - 8 * ROWS)  # rows past the last expert do not exist
    if interpret:
        own = ref[pl.ds(row, 8 * ROWS)].reshape(8, 2, GATE_PAIRS)
        return [own[:, which].reshape(-1).astype(jnp.float32) for which in (0, 1)]
    make = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((64,), ref.dtype, layout=plgpu.Layout.WGMMA.reduce(1)),
    )
    read = [make(lambda _, ref, row, which=which: _read(ref, row, which))(ref, row) for which in (0, 1)]
    return [each.astype(jnp.float32) for each in read]


def _read(ref: ir.Value, row: mgpu.FragmentedArray, which: int) -> mgpu.FragmentedArray:
    """Return the thread's two numbers of the gates or, where `which` is 1, of the ups."""
    kind = ir.MemRefType(ref.type).element_type
    size = mgpu.utils.bitwidth(kind) // 8
    warp, own, _ = place()
    first = arith.addi(arith.addi(arith.muli(warp, const(2 * ROWS)), own), row.registers.item())
    offset = arith.muli(first, const(size))
    registers = np.empty(mgpu.WGMMA_ROW_LAYOUT.registers_shape((64,)), dtype=object)
    for half in (0, 1):
        address = at(ref, offset, size * (ROWS * half + GATE_PAIRS * which))
        registers[0, 0, half, 0, 0] = llvm.load(ir.VectorType.get((1,), kind), address, alignment=size)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None)


def split(first: jax.Array, second: jax.Array, interpret: bool) -> list[jax.Array]:
    """Return the gates and the ups [64, tokens] of both halves of the sums, float32 [64, tokens] in WGMMA's
    layout.
    """
    if interpret:
        both = [half.reshape(4, 2, GATE_PAIRS, -1) for half in (first, second)]
        chosen = [jnp.stack([half[:, which] for half in both], axis=1) for which in (0, 1)]
        return [one.reshape(first.shape) for one in chosen]
    layout = plgpu.Layout.WGMMA
    run = plgpu.inline_mgpu(
        arg_types=(layout, layout),
        return_type=plgpu.ShapeDtypeStruct(first.shape, jnp.float32, layout=layout),
    )
    return [run(lambda _, a, b, which=which: _chosen(a, b, which))(first, second) for which in (0, 1)]


def _chosen(first: mgpu.FragmentedArray, second: mgpu.FragmentedArray, which: int) -> mgpu.FragmentedArray:
    """Return the registers of the gates or, where `which` is 1, of the ups."""
    registers = first.registers.copy()
    for half, given in enumerate((first, second)):
        registers[:, :, :, :, half] = given.registers[:, :, :, :, which]
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

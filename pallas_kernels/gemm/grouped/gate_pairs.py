"""Gates and ups that alternate in blocks of 8 rows of a weight, side by side in registers.

A thread has rows r and r + 8 of each 16 rows of wgmma's sums: a gate and its up. Warp w multiplies the 16-row
block 2 w of the weight's 128 rows in the first half of the sums, and block 2 w + 1 in the second half. So the
registers of both halves, in another order, are the gates and the ups of 64 columns of the result.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

GATE_PAIRS = 8  # rows of a block of gates
ROWS = 2 * GATE_PAIRS  # of a block of gates and the block of their ups


def place_of(block: int) -> int:
    """Return the row of the sums where a block of 16 of the weight's 128 rows begins."""
    return 64 * (block % 2) + ROWS * (block // 2)


def in_halves(rows: jax.Array) -> jax.Array:
    """Return 128 rows of a weight in the order of the sums, in the interpreter."""
    return rows.reshape(4, 2, ROWS, -1).swapaxes(0, 1).reshape(rows.shape)


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

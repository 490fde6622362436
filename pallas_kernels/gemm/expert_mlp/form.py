"""The parameters that the kernel for both products is compiled for, and its shared memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.expert_mlp.touched import FewTokens
from pallas_kernels.gemm.fp8.epilogue import E4M3
from pallas_kernels.gemm.grouped.kernel import GroupedForm
from pallas_kernels.gemm.grouped.tiles import ALIGN, PART, GroupedTile
from pallas_kernels.hopper.layouts import swizzled
from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.quantized import BLOCK_ROWS

DEPTH_BYTES = 256  # of a row in a stage


@dataclasses.dataclass(frozen=True)
class MlpForm:
    """The forms of both products, or of one of them.

    quantized: the operands are in e4m3 with scales; otherwise in bfloat16. interpret: the kernel runs in the
    interpreter. few: x has the rows of a few tokens, and each of their experts multiplies all of them; None:
    x is sorted by expert.
    """

    up: GroupedForm | None
    down: GroupedForm | None
    quantized: bool
    interpret: bool
    few: FewTokens | None = None

    @property
    def tile(self) -> GroupedTile:
        """Return the tile of both products."""
        one = self.up or self.down
        assert one is not None
        return one.tile

    @property
    def waits(self) -> bool:
        """Return whether tiles of the second product wait for tiles of the first one."""
        return self.up is not None and self.down is not None

    @property
    def dtype(self) -> Any:
        """Return the dtype of the operands."""
        return E4M3 if self.quantized else jnp.bfloat16

    @property
    def inner_rows(self) -> int:
        """Return the rows between the products for each row of x (`fp8_products`)."""
        return 2 if self.quantized else 1

    @property
    def copies(self) -> int:
        """Return the copies of a stage of the weight, which are as many for both products."""
        return PART // (self.up.block if self.up is not None else 64)


def mlp_tile(rows: int, depth: int, quantized: bool) -> GroupedTile:
    """Return the tile of so many rows, with the stages that shared memory holds."""
    # Pieces of the results, and barriers.
    outside, itemsize, wide = (8 * 1024, 1, 2 * rows) if quantized else (2048 + 256 * rows, 2, rows)
    stage = (PART + wide) * depth * itemsize
    return GroupedTile(rows, 1, depth, min(12, (SMEM_BYTES - outside) // stage))


def scratch(form: MlpForm) -> dict:
    """Return the kernel's shared memory and barriers."""
    tile, moved = form.tile, swizzled(form.dtype)
    rows = form.inner_rows * tile.rows
    arrays: dict[str, Any] = {
        "w_s": plgpu.SMEM((tile.stages, PART, tile.depth), form.dtype, transforms=moved),
        "x_s": plgpu.SMEM((tile.stages, rows, tile.depth), form.dtype, transforms=moved),
        "full": plgpu.Barrier(num_arrivals=form.copies + 1, num_barriers=tile.stages),
        "empty": plgpu.Barrier(num_barriers=tile.stages),
    }
    if form.quantized and form.up is not None:
        half = swizzled(E4M3, BLOCK_ROWS)
        arrays["q_s"] = plgpu.SMEM((2, ALIGN, BLOCK_ROWS), E4M3, transforms=half)
        arrays["zero_s"] = plgpu.SMEM((ALIGN, BLOCK_ROWS), E4M3, transforms=half)
    if form.down is not None or not form.quantized:
        height = ALIGN if form.quantized else tile.rows
        arrays["o_s"] = plgpu.SMEM((2, height, 64), jnp.bfloat16, transforms=swizzled(jnp.bfloat16))
    return arrays

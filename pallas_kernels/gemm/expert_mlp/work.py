"""The arrays and the ring of the multiplying warpgroup, in the kernel for both products."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.expert_mlp.form import MlpForm
from pallas_kernels.gemm.grouped.tiles import PART


@dataclasses.dataclass(frozen=True)
class Work:
    """The arrays in memory by name, and the ring of stages in shared memory with its barriers.

    steps: the stages of a tile of each product. pieces: shared memory of the results, by name.
    """

    form: MlpForm
    of: Mapping[str, Any]
    steps: Mapping[str, int]
    w_s: Any
    x_s: Any
    full: Any
    empty: Any
    pieces: Mapping[str, Any]

    def sums(self, before, name: str) -> jax.Array:
        """Return the product [PART, rows] of a tile, in float32 registers.

        before: the stages before this tile. name: of the product, "up" or "down".
        """
        stages, rows, steps = jnp.int32(self.form.tile.stages), self.form.tile.rows, self.steps[name]

        def product(acc):
            def one(step, _):
                slot = lax.rem(before + step, stages)
                plgpu.barrier_wait(self.full.at[slot])
                plgpu.wgmma(acc, self.w_s.at[slot], self.x_s.at[slot, pl.ds(0, rows)].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)
                def _():  # the step before this one is done
                    plgpu.barrier_arrive(self.empty.at[lax.rem(before + step + stages - 1, stages)])

            lax.fori_loop(0, steps, one, None)
            y = acc[...]
            plgpu.barrier_arrive(self.empty.at[lax.rem(before + steps - 1, stages)])
            return y

        return pl.run_scoped(product, plgpu.ACC((PART, rows), jnp.float32))

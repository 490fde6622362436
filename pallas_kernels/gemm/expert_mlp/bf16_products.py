"""Both products of a tile in bfloat16, for the multiplying warpgroup."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm.expert_mlp.arrivals import arrive
from pallas_kernels.gemm.expert_mlp.work import Work
from pallas_kernels.gemm.grouped.epilogue import epilogue
from pallas_kernels.gemm.grouped.kernel import GroupedForm, store
from pallas_kernels.gemm.grouped.tiles import PART


def begin(work: Work) -> None:
    """Do nothing, because no piece of shared memory holds a constant."""


def up(work: Work, before, at, expert, start, end, column) -> None:
    """Store act(gate) · up of a tile, and count the tile. A tile has 64 columns of the result."""
    form = work.form.up
    assert form is not None
    _store(work, form, work.sums(before, "up"), "a", start, end, column * (PART // 2))
    if work.form.waits:
        plgpu.wait_smem_to_gmem(0)
        arrive(work.of["arrived"], at)


def down(work: Work, before, at, expert, start, end, column) -> None:
    """Store the second product of a tile."""
    form = work.form.down
    assert form is not None
    _store(work, form, work.sums(before, "down"), "y", start, end, column * PART)


def _store(work: Work, form: GroupedForm, y, to: str, start, end, column) -> None:
    """Store the epilogue of the sums y from a column on."""

    def sums_of(half, token, count):
        return y[64 * half : 64 * half + 64, token : token + count]

    finished = epilogue(form, sums_of, [], start, None)
    store(form, finished, work.pieces["o_s"], work.of[to], start, end, column)

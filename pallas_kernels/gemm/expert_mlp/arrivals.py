"""The counters of finished tiles, by which the second product waits for the first one in one kernel."""

from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def arrive(arrived, place):
    """Add 1 to arrived[place] after the writes of this warpgroup, and after its copies that are complete."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        code = """{
            .reg .pred p;
            fence.proxy.async;
            fence.acq_rel.gpu;
            barrier.cta.sync $2, 128;
            setp.eq.u32 p, $1, 0;
            @p red.release.gpu.global.add.u32 [$0], 1;
            }"""
        operands = [
            mgpu.utils.memref_ptr(counter),
            thread,
            mgpu.utils.warpgroup_barrier_idx(sync=False),
        ]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, "l,r,r,~{memory}", has_side_effects=True)

    add(arrived.at[pl.ds(place, 1)])  # pyright: ignore[reportCallIssue]


def wait_for(arrived, place, number: int):
    """Wait until arrived[place] is at least `number`. Later copies see what was written before."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        code = """{
            .reg .pred p;
            .reg .b32 seen;
            again:
            ld.acquire.gpu.global.u32 seen, [$0];
            setp.lt.u32 p, seen, $1;
            @p bra again;
            fence.proxy.async;
            }"""
        operands = [mgpu.utils.memref_ptr(counter), mgpu.c(number, i32)]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, "l,r,~{memory}", has_side_effects=True)

    wait(arrived.at[pl.ds(place, 1)])  # pyright: ignore[reportCallIssue]


def leave(arrived, place, number: int):
    """Count one of `number` readers of arrived[place] after its wait. The last one makes it 0 again.

    number: the additions and the readers together.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wrap(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(128, i32))
        code = """{
            .reg .pred p;
            barrier.cta.sync $2, 128;
            setp.eq.u32 p, $1, 0;
            @p red.relaxed.gpu.global.inc.u32 [$0], $3;
            }"""
        operands = [
            mgpu.utils.memref_ptr(counter),
            thread,
            mgpu.utils.warpgroup_barrier_idx(sync=False),
            mgpu.c(number - 1, i32),
        ]
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"), operands, code, "l,r,r,r,~{memory}", has_side_effects=True
        )

    wrap(arrived.at[pl.ds(place, 1)])  # pyright: ignore[reportCallIssue]

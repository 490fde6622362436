"""Stores to places that the data choose, and sums over the threads before a thread.

The arrays are rows of a multiple of 128 elements in a warpgroup, as many consecutive elements in each thread.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

LANES = 128  # threads of a warpgroup
_DYNAMIC = -(2**31)  # an index of getelementptr that is an operand


def row_layout(width: int):
    """Return the layout of a row of `width` elements, a multiple of 128."""
    return plgpu.Layout.WG_STRIDED((width,), width // LANES)


def read_row(ref, width: int, interpret: bool) -> jax.Array:
    """Return an array [E] in memory as a row of `width` elements. Those past the last element repeat it."""
    if interpret:
        return ref[...][jnp.minimum(jnp.arange(width), ref.shape[0] - 1)]
    layout, last, per = row_layout(width), ref.shape[0] - 1, width // LANES
    make = plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((width,), ref.dtype, layout=layout),
    )

    def read(_, ref):
        i32, element = ir.IntegerType.get_signless(32), ir.MemRefType(ref.type).element_type
        base = mgpu.utils.memref_ptr(ref)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(LANES, i32))
        first, loaded = arith.muli(thread, mgpu.c(per, i32)), []
        for i in range(per):
            place = arith.minui(arith.addi(first, mgpu.c(i, i32)), mgpu.c(last, i32))
            at = llvm.getelementptr(base.type, base, [place], [_DYNAMIC], element, llvm.GEPNoWrapFlags.none)
            loaded.append(llvm.load(element, at))
        kind = layout.to_mgpu()
        registers = np.empty(kind.registers_shape((width,)), dtype=object)
        registers.flat[0] = vector.from_elements(ir.VectorType.get((per,), element), loaded)
        return mgpu.FragmentedArray(_registers=registers, _layout=kind, _is_signed=None)

    return make(read)(ref)


def scatter(ref, at: jax.Array, value: jax.Array, keep: jax.Array, interpret: bool) -> None:
    """Store value[i] at ref[at[i]] for each i where `keep` is not 0.

    ref: one axis, 32-bit elements, in shared or global memory. at, value and keep: rows of one width, in
    `row_layout`. at and keep: int32.
    """
    if interpret:
        ref[...] = ref[...].at[jnp.where(keep != 0, at, ref.shape[0])].set(value, mode="drop")
        return
    layout, letter = row_layout(at.shape[0]), "f" if value.dtype == jnp.float32 else "r"

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout, layout))
    def put(_, ref, at, value, keep):
        base = mgpu.utils.memref_ptr(ref)
        shared = base.type == llvm.PointerType.get(3)
        element = ir.MemRefType(ref.type).element_type
        code = f"""{{
            .reg .pred p;
            setp.ne.u32 p, $2, 0;
            @p st.{"shared" if shared else "global"}.{"b" if letter == "r" else "f"}32 [$0], $1;
            }}"""
        for registers in zip(*(each.registers.flat for each in (at, value, keep)), strict=True):
            for place, one, kept in _elements(registers):
                to = llvm.getelementptr(
                    base.type, base, [place], [_DYNAMIC], element, llvm.GEPNoWrapFlags.none
                )
                constraints = f"l,{letter},r,~{{memory}}"
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"), [to, one, kept], code, constraints, has_side_effects=True
                )

    put(ref, at, value, keep)  # pyright: ignore[reportCallIssue]


def sums_before(values: jax.Array, warps_s, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the elements before each element, and the sum of all.

    values: int32 in `row_layout`. warps_s: int32 [4] in shared memory, which no other thread still reads.
    """
    if interpret:
        return jnp.cumsum(values) - values, jnp.sum(values)
    layout, scalar = row_layout(values.shape[0]), plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=(
            plgpu.ShapeDtypeStruct(values.shape, jnp.int32, layout=layout),
            plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar),
        ),
    )
    def scan(_, values, warps):
        i32 = ir.IntegerType.get_signless(32)
        (register,) = values.registers.flat
        own = [one for (one,) in _elements([register])]
        total = own[0]
        for one in own[1:]:
            total = arith.addi(total, one)
        through = total  # of this thread and of those before it in the warp
        for distance in (1, 2, 4, 8, 16):
            code = f"""{{
                .reg .pred p;
                .reg .b32 other;
                shfl.sync.up.b32 other|p, $1, {distance}, 0, 0xffffffff;
                @!p mov.b32 other, 0;
                add.s32 $0, $1, other;
                }}"""
            through = llvm.inline_asm(i32, [through], code, "=r,r", has_side_effects=True)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(LANES, i32))
        warp = arith.shrui(thread, mgpu.c(5, i32))
        base = mgpu.utils.memref_ptr(warps)
        at = lambda i: llvm.getelementptr(base.type, base, [i], [_DYNAMIC], i32, llvm.GEPNoWrapFlags.none)
        last = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread, mgpu.c(31, i32)), mgpu.c(31, i32))
        with mgpu.utils.when(last):
            llvm.store(through, at(warp))
        mgpu.utils.warpgroup_barrier()
        before, everything = arith.subi(through, total), mgpu.c(0, i32)
        for i in range(LANES // 32):
            one = llvm.load(i32, at(mgpu.c(i, i32)))
            here = arith.cmpi(arith.CmpIPredicate.ugt, warp, mgpu.c(i, i32))
            before = arith.addi(before, arith.select(here, one, mgpu.c(0, i32)))
            everything = arith.addi(everything, one)
        sums = []
        for one in own:
            sums.append(before)
            before = arith.addi(before, one)
        registers = values.registers.copy()
        registers.flat[0] = vector.from_elements(register.type, sums)
        return (
            mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=True),
            mgpu.FragmentedArray.splat(everything, (), is_signed=True),
        )

    return scan(values, warps_s)  # pyright: ignore[reportCallIssue]


def _elements(registers):
    """Return the elements of registers, which are vectors of one length, as one tuple a place."""
    length = ir.VectorType(registers[0].type).shape[0]
    return [tuple(vector.extract(each, [], [i]) for each in registers) for i in range(length)]

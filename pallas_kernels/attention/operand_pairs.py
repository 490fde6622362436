"""Operands of 8 bits for wgmma: a number that needs more bits takes a pair of columns, the number rounded and
what rounding left.

Where the keys and values of a cache have 8 bits, so must the queries and the softmax's weights that they are
multiplied with. wgmma's N is at least 8 while a group often has 4 query heads, so the second column is nearly
free, and the product keeps bfloat16's 8 bits or more.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

E4M3 = jnp.float8_e4m3fn
REST = (
    16.0  # what rounding to 4 bits left is at most 1/16 of a number, so it may be written 16 times as large
)


def split(x):
    """Pairs of equal columns of x [M, 2n] float32, |x| <= 448, as e4m3: the even one x rounded, the odd one
    REST times what that left.
    """
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
    left = (x - x.astype(E4M3).astype(jnp.float32)) * REST
    return jnp.where((column & 1) == 0, x, left).astype(E4M3)


def joined(x, interpret: bool):
    """Pairs of columns of x [M, 2n] float32 in WGMMA's layout, where a thread holds both: even + odd / REST,
    in both columns.
    """
    if interpret:
        pairs = x.reshape(x.shape[0], -1, 2)
        return jnp.repeat(pairs[..., 0] + pairs[..., 1] / REST, 2, axis=1)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)
    )
    def add(_, x):
        f32 = ir.F32Type.get()
        weight = arith.constant(f32, ir.FloatAttr.get(f32, 1 / REST))
        new = x.registers.copy()
        for at in range(new.size):
            even, odd = (vector.extract(new.flat[at], [], [i]) for i in range(2))
            total = arith.addf(
                even,
                arith.mulf(odd, weight, fastmath=arith.FastMathFlags.contract),
                fastmath=arith.FastMathFlags.contract,
            )
            new.flat[at] = vector.broadcast(ir.VectorType.get((2,), f32), total)
        return mgpu.FragmentedArray(_registers=new, _layout=x.layout, _is_signed=None)

    return add(x)  # pyright: ignore[reportCallIssue]

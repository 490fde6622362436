"""8-bit wgmma operands with 16-bit precision: a pair of columns holds a number and its rounding error.

With 8-bit keys and values, wgmma needs 8-bit queries and softmax weights. wgmma's N is at least 8, and a
group often has 4 query heads, so the second column costs almost nothing. The product keeps at least
bfloat16's 8 bits.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

E4M3 = jnp.float8_e4m3fn
REST = 16.0  # scale of the rounding error, which is at most 1/16 of the number


def split(x):
    """Return e4m3 pairs for x [M, 2n] float32 with equal columns in each pair and |x| <= 448.

    The even column is x rounded. The odd column is the rounding error times REST.
    """
    column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=plgpu.Layout.WGMMA)
    left = (x - x.astype(E4M3).astype(jnp.float32)) * REST
    return jnp.where((column & 1) == 0, x, left).astype(E4M3)


def joined(x, interpret: bool):
    """Return even + odd / REST in both columns of each pair of x [M, 2n] float32 in WGMMA's layout.

    A thread holds both columns of a pair.
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

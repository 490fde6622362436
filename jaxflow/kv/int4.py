"""4-bit KV: group quantization along the head width, with a minimum and a scale for each group.

FlexGen's group quantization (§5), in the format of 4-bit weights (`quantized.Int4`): two numbers a byte, and
a bfloat16 scale and zero for each group, 4.5 bits a number in groups of 64. All functions are `jnp`, so they
run inside and outside of `jit`, on the device of their arguments.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gemm.int4.reference import dequantize_int4, quantize_int4
from pallas_kernels.quantized import GROUP, Int4


def kv_group(head_dim: int) -> int:
    """Return the group size of a head: the largest even divisor of H up to 64.

    Raises:
      ValueError: H is odd.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim}: accepted are even numbers, because a byte holds two 4-bit numbers"
        )
    return max(group for group in range(2, GROUP + 1, 2) if head_dim % group == 0)


def quantize_kv(x: Float[Array, "*M H"]) -> Int4:
    """Quantize keys or values to packed uint8 [..., H / 2], scale and zero bfloat16 [..., H / `kv_group(H)`].

    The error of a number is at most half a level, a 30th of its group's range, plus the bfloat16 rounding of
    the group's scale and minimum. A group of equal bfloat16 numbers has no error.

    Raises:
      ValueError: H is odd.
    """
    return quantize_int4(x, kv_group(x.shape[-1]))


def dequantize_kv(kv: Int4, dtype=jnp.bfloat16) -> Float[Array, "*M H"]:
    """Return the values of `quantize_kv`, computed in float32 and rounded once to `dtype`."""
    return dequantize_int4(kv, dtype)


def kv_shape(shape: tuple[int, ...]) -> Int4:
    """Return the shapes of `quantize_kv` for an array of this shape. Raises: ValueError."""
    *rows, head_dim = shape
    factor = jax.ShapeDtypeStruct((*rows, head_dim // kv_group(head_dim)), jnp.bfloat16)
    return Int4(jax.ShapeDtypeStruct((*rows, head_dim // 2), jnp.uint8), factor, factor)  # pyright: ignore[reportArgumentType]


def kv_bytes(head_dim: int) -> int:
    """Return the bytes of one token's keys (or values) of one head. Raises: ValueError."""
    return sum(a.size * a.dtype.itemsize for a in kv_shape((head_dim,)))

"""KV of 4 bits for the tiers beside the device: groups along the head width, each between its minimum and its
maximum.

FlexGen's group quantisation (§5) in the format that weights of 4 bits have (`quantized.Int4`): two numbers a
byte, a bfloat16 scale and zero for each group, 4.5 bits a number in groups of 64. All of it is `jnp`: it runs
where its arrays lie, inside `jit` or not.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gemm.int4.reference import dequantize_int4, quantize_int4
from pallas_kernels.quantized import GROUP, Int4


def kv_group(head_dim: int) -> int:
    """Numbers of a head that share a scale: 64, or where that does not cut H evenly, the most below 64 that
    does.

    Raises:
      ValueError: H is odd, and two numbers make a byte.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: an even number, since two numbers of 4 bits make a byte")
    return max(group for group in range(2, GROUP + 1, 2) if head_dim % group == 0)


def quantize_kv(x: Float[Array, "*M H"]) -> Int4:
    """Keys or values, whatever their leading axes, as packed uint8 [..., H / 2], scale and zero bfloat16
    [..., H / `kv_group(H)`].

    A number comes back within half a level, a 30th of what its group spans, and what rounding the group's
    scale and minimum to bfloat16 moves them. Equal numbers that bfloat16 has come back as they were.

    Raises:
      ValueError: H is odd.
    """
    return quantize_int4(x, kv_group(x.shape[-1]))


def dequantize_kv(kv: Int4, dtype=jnp.bfloat16) -> Float[Array, "*M H"]:
    """What `quantize_kv` packed, computed in float32 and rounded to `dtype` once."""
    return dequantize_int4(kv, dtype)


def kv_shape(shape: tuple[int, ...]) -> Int4:
    """What `quantize_kv` makes of an array of this shape, as `jax.ShapeDtypeStruct`s. Raises: ValueError."""
    *rows, head_dim = shape
    factor = jax.ShapeDtypeStruct((*rows, head_dim // kv_group(head_dim)), jnp.bfloat16)
    return Int4(jax.ShapeDtypeStruct((*rows, head_dim // 2), jnp.uint8), factor, factor)  # pyright: ignore[reportArgumentType]


def kv_bytes(head_dim: int) -> int:
    """Bytes of one head's keys, or values, of one token. Raises: ValueError."""
    return sum(a.size * a.dtype.itemsize for a in kv_shape((head_dim,)))

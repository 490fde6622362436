"""MXFP4, the format of gpt-oss's experts: numbers of 4 bits with a power of two for each 32 columns of a row.

A number is e2m1: a sign, two bits of exponent and one bit of mantissa (OCP Microscaling Formats, §5.3.3). Its
magnitude is 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.quantized import MXFP4_GROUP, Mxfp4

_BIAS = 127  # the bias of the exponents of scales
_LARGEST = 2  # the exponent of the largest magnitude, 6 = 1.5 · 2 ** 2
# The middles between neighboring magnitudes. A number in the middle goes to the
# neighbor with an even mantissa.
_DOWN, _UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def quantize_mxfp4(x: Float[Array, "*M K"]) -> Mxfp4:
    """Return the nearest numbers of MXFP4, with the scales of the definition's §6.3.

    Magnitudes above 6 after scaling become 6.

    Raises: ValueError if K is not a multiple of 32.
    """
    *rows, k = x.shape
    if k % MXFP4_GROUP:
        raise ValueError(f"K={k}: accepted are multiples of {MXFP4_GROUP}")
    groups = x.astype(jnp.float32).reshape(*rows, k // MXFP4_GROUP, MXFP4_GROUP)
    exponent = jnp.frexp(jnp.abs(groups).max(-1))[1] - 1 - _LARGEST  # frexp's fraction is 0.5 to 1
    exponent = jnp.clip(exponent, 1 - _BIAS, _BIAS)
    sizes = jnp.abs(groups) * _power_of_two(_BIAS - exponent)[..., None]
    code = sum((sizes > middle).astype(jnp.uint8) for middle in _DOWN)
    code += sum((sizes >= middle).astype(jnp.uint8) for middle in _UP)
    code |= jnp.signbit(groups).astype(jnp.uint8) << 3
    pairs = code.reshape(*rows, k // 2, 2)
    return Mxfp4(pairs[..., 0] | pairs[..., 1] << 4, (exponent + _BIAS).astype(jnp.uint8))


def dequantize_mxfp4(w: Mxfp4, dtype=jnp.bfloat16) -> Float[Array, "*M K"]:
    """Return the numbers of `w`, exact in bfloat16 and float32; numbers below 2 ** -126 are 0."""
    code = jnp.stack([w.packed & 15, w.packed >> 4], axis=-1).reshape(*w.scale.shape, MXFP4_GROUP)
    exponent, mantissa = code >> 1 & 3, code & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1)
    signed = jnp.where(code >> 3 == 1, -1.0, 1.0) * (doubled.astype(jnp.float32) * 0.5)
    return (signed * _power_of_two(w.scale)[..., None]).reshape(w.shape).astype(dtype)


def _power_of_two(biased: Array) -> Array:
    """Return 2 ** (biased - 127) in float32, of integers from 1 to 254; 0 for 0."""
    return lax.bitcast_convert_type(biased.astype(jnp.uint32) << 23, jnp.float32)

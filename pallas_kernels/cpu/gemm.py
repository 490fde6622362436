"""Matrix products in forms that XLA runs fast on a CPU, above all products of one row.

XLA multiplies one row by a matrix on one core. It first converts a matrix of bfloat16 or e4m3 as a whole, in
every step. The forms here use all cores, and read each weight of one row once.
"""

import os
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.gemm import reference
from pallas_kernels.quantized import BlockFp8, Int4, Quantized

_LANES = 64  # the columns of a term of e4m3 weights are a multiple of this number
_FEW_LANES = 16  # the same for bfloat16: one vector of 512 bits in float32
_MOST_TERMS = {_LANES: 48, _FEW_LANES: 96}  # XLA takes longer to compile more terms, which run no faster
_MOST_SLICES = 12  # XLA writes the bits of e4m3 numbers to memory if more than 15 slices read them
_OVER_FLOAT16 = 256.0  # 2^(15 - 7), of the biases of the exponents of float16 and e4m3


def gemm(
    x: Float[Array, "M K"] | Quantized,
    w: Float[Array, "N K"] | Quantized | Int4 | BlockFp8,
    bias: Float[Array, " N"] | None = None,
    **settings: Any,
) -> Float[Array, "M N2"] | Quantized:
    """Return act(x @ w.T + bias) + residual, summed in float32.

    The reference implementation is `pallas_kernels.gemm.reference.gemm`, which describes the
    settings. Weights of e4m3 hold no NaN.
    """
    return reference.gemm(x, w, bias, **settings, multiply=multiply)


def multiply(x: Shaped[Array, "M K"], w: Shaped[Array, "N K"], operands, dtype) -> Float[Array, "M N"]:
    """Return x @ w.T in `dtype`; see `pallas_kernels.gemm.reference.multiply`.

    Where XLA would multiply e4m3 numbers directly, they are converted to float32, with equal products.
    """
    operands = jnp.float32 if operands == jnp.float8_e4m3fn else operands
    x = x.astype(operands)
    if x.shape[0] == 1:
        return one_row(x.astype(jnp.float32), w).astype(dtype)
    return reference.multiply(x, e4m3_numbers(w) if w.dtype == jnp.float8_e4m3fn else w, operands, dtype)


def one_row(x: Float[Array, "1 K"], w: Shaped[Array, "N K"]) -> Float[Array, "1 N"]:
    """Return x @ w.T in float32. w: floats of 8 to 32 bits; e4m3 without NaN."""
    lanes = _LANES if w.dtype == jnp.float8_e4m3fn else _FEW_LANES
    terms = 0 if w.dtype == jnp.float32 else _terms(w.shape[1], lanes)
    if terms:
        return _sum_of_terms(x, w, terms)
    return _row_blocks(x, e4m3_numbers(w) if w.dtype == jnp.float8_e4m3fn else w.astype(jnp.float32))


def e4m3_numbers(x: Shaped[Array, "*M"]) -> Float[Array, "*M"]:
    """Return e4m3 numbers in float32, exactly. NaN becomes 480 or -480."""
    return _to_float32(_bits(x)) * _OVER_FLOAT16


def _row_blocks(x: Float[Array, "1 K"], w: Float[Array, "N K"]) -> Float[Array, "1 N"]:
    """Return x @ w.T as one product a core. XLA runs the products of a batch at the same time."""
    n, k = w.shape
    blocks = next(b for b in range(min(n, os.cpu_count() or 1), 0, -1) if n % b == 0)
    rows = jnp.broadcast_to(x, (blocks, 1, k))
    by_block = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(rows, w.reshape(blocks, n // blocks, k), by_block).reshape(1, n)


def _sum_of_terms(x: Float[Array, "1 K"], w: Shaped[Array, "N K"], terms: int) -> Float[Array, "1 N"]:
    """Return x @ w.T from the sums [N, K / terms] of `terms` slices of the columns.

    XLA makes one loop of vector instructions of these sums and of the conversion of w, and divides its rows
    among the cores. A sum over all columns in the same loop would add one number at a time, and the loop
    would compute x anew for every row. So barriers keep both outside.
    """
    width, is_e4m3 = w.shape[1] // terms, w.dtype == jnp.float8_e4m3fn
    x = lax.optimization_barrier(x * _OVER_FLOAT16 if is_e4m3 else x)
    total, numbers = jnp.float32(0), w
    for term in range(terms):
        if is_e4m3 and term % _MOST_SLICES == 0:
            w = lax.optimization_barrier(w)
            numbers = _bits(w)
        columns = slice(term * width, (term + 1) * width)
        total = total + _to_float32(numbers[:, columns]) * x[:, columns]
    total = lax.optimization_barrier(total)
    return _sum_of_halves(total) if width == _FEW_LANES else total.sum(-1)[None]


def _sum_of_halves(x: Float[Array, "N W"]) -> Float[Array, "1 N"]:
    """Return the sum of each row, W a power of two. XLA computes this sum inside the loop that reads it.

    A sum over the last axis is a call of a library, which takes up to a third of the time of a product.
    """
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x.reshape(1, -1)


def _bits(x: Shaped[Array, "*M"]) -> Shaped[Array, "*M"]:
    """Return the bits of e4m3 numbers, uint8.

    Slices of e4m3 numbers themselves XLA would convert to float16 and back.
    """
    return lax.bitcast_convert_type(x, jnp.uint8)


def _to_float32(x: Shaped[Array, "*M"]) -> Float[Array, "*M"]:
    """Return x in float32. uint8 are the bits of e4m3 numbers, of which a 256th is returned.

    The bits of an e4m3 number in the places of a float16 stand for a 256th of the number, which may be
    subnormal. CPUs convert float16 by one instruction. XLA converts e4m3 by about twenty.
    """
    if x.dtype != jnp.uint8:
        return x.astype(jnp.float32)
    wide = x.astype(jnp.int8).astype(jnp.int16) << 7
    return lax.bitcast_convert_type(wide & jnp.int16(0xBF80 - 0x10000), jnp.float16).astype(jnp.float32)


def _terms(columns: int, lanes: int) -> int:
    """Return the most equal slices of the columns, up to the limit, with whole lanes; 0 without any."""
    slices, rest = divmod(columns, lanes)
    if rest or not slices:
        return 0
    return next(terms for terms in range(min(slices, _MOST_TERMS[lanes]), 0, -1) if slices % terms == 0)

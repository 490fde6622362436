"""The jnp twin of every kernel: its definition, and the backend where no faster kernel exists.

Loops run to counts that are data, so the cost follows the tokens that are there and not the padded shapes.
Letters: T tokens, B and R sequences, N query heads, K key/value heads, H head width, P pages, S tokens a
page, MP pages a sequence at most, C prefill chunks, M rows of a product.
"""

from pallas_kernels.attention.reference import (
    chunk_attention,
    decode_attention,
    list_chunk_work,
    list_decode_work,
)
from pallas_kernels.gemm.grouped.reference import Groups, grouped_gemm, list_groups
from pallas_kernels.gemm.reference import activate, finish, gate_mul, gemm
from pallas_kernels.pointwise.norm.reference import add_norm, rms_norm
from pallas_kernels.pointwise.quantize.reference import dequantize, quantize_blocks, quantize_rows, to_e4m3
from pallas_kernels.pointwise.rope_append.reference import append, rope, rope_append
from pallas_kernels.pointwise.sample.reference import token_limits

__all__ = [
    "Groups",
    "activate",
    "add_norm",
    "append",
    "chunk_attention",
    "decode_attention",
    "dequantize",
    "finish",
    "gate_mul",
    "gemm",
    "grouped_gemm",
    "list_chunk_work",
    "list_decode_work",
    "list_groups",
    "quantize_blocks",
    "quantize_rows",
    "rms_norm",
    "rope",
    "rope_append",
    "to_e4m3",
    "token_limits",
]

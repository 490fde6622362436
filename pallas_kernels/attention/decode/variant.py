"""The variants of the decode attention kernel, and the shared memory of each."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import operand_pairs as pairs
from pallas_kernels.attention.paged import PAGE
from pallas_kernels.attention.tiles import DecodeTile
from pallas_kernels.hopper.layouts import swizzled

BOX = 32  # rows of a page in one TMA copy


@dataclasses.dataclass(frozen=True)
class Form:
    """The parameters that the kernel's code depends on.

    cols: wgmma's N. e4m3: the cache is e4m3 and is multiplied as e4m3. int8: the cache is int8 with a scale
    for each token and head. unified_max: rows start at the unified max value. fill: rows without keys
    become 0. pdl: launch with programmatic dependent launch. spans: each entry of the work list is one
    (row, head) pair with its own span. sinks: the first keys that every pair sees. page_heads: KV heads in
    a page; with fewer than kv, each group of heads has its own page table. sink_logits: each
    query head has an attention sink. spread: consecutive workers are on different SMs. one_fence: as for
    `join.is_last`. raw_sinks: the kernel reads the sinks' logits as the model has them.
    """

    group: int
    kv: int
    h: int
    cols: int
    e4m3: bool
    int8: bool
    tile: DecodeTile
    scale: float
    window: int | None
    soft_cap: float | None
    unified_max: bool
    fill: bool
    pdl: bool
    interpret: bool
    spans: bool = False
    sinks: int = 0
    page_heads: int = 0
    sink_logits: bool = False
    spread: bool = False
    one_fence: bool = False
    raw_sinks: bool = False

    @property
    def pitch(self) -> int:
        """Return the rows of q for each KV head.

        A copy of TMA tiles must start at a tile of 8 rows, or end inside the tile in which it starts.
        """
        return 1 << (self.group - 1).bit_length()

    @property
    def entry_heads(self) -> int:
        """Return the KV heads of an entry of the work list."""
        return 1 if self.spans else self.kv

    def pair(self, entry, head):
        """Return (row, KV head) of a head of an entry."""
        if not self.spans:
            return entry, head
        return lax.div(entry, jnp.int32(self.kv)), lax.rem(entry, jnp.int32(self.kv))

    def in_span(self, key, since):
        """Return which keys a pair sees, up to its length. since: the first key of its span."""
        return key >= since if self.sinks == 0 else (key >= since) | (key < self.sinks)

    @property
    def value_boxes(self) -> int:
        """Return the number of TMA boxes in a page of values."""
        return 1 if self.e4m3 or self.int8 else PAGE // BOX


def scratch(form: Form, dtype) -> dict:
    """Return the kernel's shared memory and barriers."""
    w, keys, values, cols, h = (
        form.tile.workers,
        form.tile.key_pages,
        form.tile.value_pages,
        form.cols,
        form.h,
    )
    if form.e4m3:
        by_width, by_key = swizzled(pairs.E4M3, min(h, 128)), swizzled(pairs.E4M3, PAGE)
        operands = {
            "k_ring": plgpu.SMEM((w, keys, PAGE, h), pairs.E4M3, transforms=by_width),
            "v_ring": plgpu.SMEM((w, values, h, PAGE), pairs.E4M3, transforms=by_key),
            "q_s": plgpu.SMEM((w, 2, form.pitch, h), dtype),
            "q_8": plgpu.SMEM((w, cols, h), pairs.E4M3, transforms=by_width),
            "p_s": plgpu.SMEM((w, form.tile.pages, cols, PAGE), pairs.E4M3, transforms=by_key),
        }
    elif form.int8:
        operands = {
            "k_ring": plgpu.SMEM((w, keys, PAGE, h), jnp.int8),
            "v_ring": plgpu.SMEM((w, values, h, PAGE), jnp.int8),
            "scales": plgpu.SMEM((w, keys, 2, PAGE), jnp.float32),
            "q_s": plgpu.SMEM((w, 2, cols, h), dtype),
            "q_16": plgpu.SMEM((w, cols, h), dtype, transforms=swizzled(dtype)),
            "p_s": plgpu.SMEM((w, form.tile.pages, cols, PAGE), dtype, transforms=swizzled(dtype)),
        }
    else:
        operands = {
            "k_ring": plgpu.SMEM((w, keys, PAGE, h), dtype, transforms=swizzled(dtype)),
            "v_ring": plgpu.SMEM((w, values, PAGE, h), dtype, transforms=swizzled(dtype)),
            "q_s": plgpu.SMEM((w, 2, cols, h), dtype, transforms=swizzled(dtype)),
            "p_s": plgpu.SMEM((w, form.tile.pages, cols, PAGE), dtype, transforms=swizzled(dtype)),
        }
    return operands | {
        "o_s": plgpu.SMEM((w, cols, h), dtype),
        "sums": plgpu.SMEM((w, 512), jnp.float32),
        "k_full": plgpu.Barrier(num_arrivals=PAGE // BOX + 2 * form.int8, num_barriers=w * keys),
        "v_full": plgpu.Barrier(num_arrivals=form.value_boxes, num_barriers=w * values),
        "k_empty": plgpu.Barrier(num_barriers=w * keys),
        "v_empty": plgpu.Barrier(num_barriers=w * values),
        "q_full": plgpu.Barrier(num_barriers=w * 2),
        "q_empty": plgpu.Barrier(num_barriers=w * 2),
    }

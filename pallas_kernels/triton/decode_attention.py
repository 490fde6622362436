"""Paged decode attention in Triton, for GPUs without TMA and wgmma.

The batch's pages form one line, which `decode_work` splits into equal pieces, one for each program. One
long row next to many short rows then fills the chip. A program leaves at most two (row, KV head) pairs
unfinished. A second kernel adds their parts in the order of their keys, so equal batches give equal bits.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false
# The extra `triton` may be missing, and pyright cannot type-check Triton's language.

import math

import jax
import jax.numpy as jnp
import jax_triton as jt
import triton
import triton.language as tl
from jax.experimental import pallas as pl

from pallas_kernels.attention.decode.work_list import PAGE, DecodeWork, decode_work
from pallas_kernels.this_device import this_device

_LOG2E = math.log2(math.e)  # softmax uses powers of two
_PROGRAMS = 4  # programs on a multiprocessor, whose copies and arithmetic overlap
_COLS = 16  # minimum rows of a matrix product: the padded query heads of a KV head


def shared_bytes(h: int, itemsize: int) -> int:
    """Return an upper bound of a program's shared memory: 2.3 to 2.5 pages, as Triton 3.7 compiles it for
    7.5 to 9.0.
    """
    return 5 * PAGE * h * itemsize // 2


@triton.jit
def _attend(
    q, k_pages, v_pages, table, rows, pieces, out, parts, levels,
    TABLE: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr,
    S: tl.constexpr, FACTOR: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0)
    row = tl.load(pieces + worker * 4)
    head = tl.load(pieces + worker * 4 + 1)
    page = tl.load(pieces + worker * 4 + 2)
    left = tl.load(pieces + worker * 4 + 3)
    cols, width, keys = tl.arange(0, COLS), tl.arange(0, H), tl.arange(0, S)
    within = keys[:, None] * H + width[None, :]
    while left > 0:
        first = tl.load(rows + row * 4)
        pages = tl.load(rows + row * 4 + 1)
        length = tl.load(rows + row * 4 + 2)
        here = tl.minimum(pages - page, left)
        at = (row * KV + head).to(tl.int64) * GROUP
        heads = (at + cols[:, None]) * H + width[None, :]
        queries = tl.load(q + heads, mask=cols[:, None] < GROUP, other=0.0)
        top = tl.full([COLS], -1e30, tl.float32)
        total = tl.zeros([COLS], tl.float32)
        acc = tl.zeros([COLS, H], tl.float32)
        for i in range(here):
            block = first + page + i
            start = (tl.load(table + row.to(tl.int64) * TABLE + block).to(tl.int64) * KV + head) * (S * H)
            key = block * S + keys
            seen = key < length
            if WINDOW > 0:
                seen = seen & (key >= length - WINDOW)
            # Unwritten memory can hold NaN, so it is not read.
            k = tl.load(k_pages + start + within, mask=seen[:, None], other=0.0)
            v = tl.load(v_pages + start + within, mask=seen[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
            if CAP > 0:
                # scores * FACTOR is score / cap * 2 log2(e). tanh is computed from exp2, which is accurate.
                scores = (1.0 - 2.0 / (tl.exp2(scores * FACTOR) + 1.0)) * CAP
            else:
                scores = scores * FACTOR
            scores = tl.where(seen[None, :], scores, -1e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.where(seen[None, :], tl.exp2(scores - new_top[:, None]), 0.0)
            keep = tl.exp2(top - new_top)
            total = total * keep + tl.sum(weights, 1)
            acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            top = new_top
        # total is 0 if all scores are -inf. The output is then 0, with no weight next to other parts.
        total = tl.maximum(total, 1e-30)
        acc = acc / total[:, None]
        if here == pages:
            tl.store(out + heads, acc.to(out.dtype.element_ty), mask=cols[:, None] < GROUP)
        else:
            # 0: continues an earlier worker's pair, 1: the first part of a pair.
            part = worker.to(tl.int64) * 2 + tl.where(page == 0, 1, 0)
            tl.store(parts + (part * COLS + cols[:, None]) * H + width[None, :], acc)
            tl.store(levels + part * COLS + cols, top + tl.log2(total))
        left -= here
        page = 0
        head += 1
        if head == KV:
            head = 0
            row = tl.load(rows + row * 4 + 3)


@triton.jit
def _join(
    parts, levels, pieces, chains, out,
    KV: tl.constexpr, GROUP: tl.constexpr, COLS: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    worker = tl.program_id(0)
    chain = tl.load(chains + worker)
    if chain > 0:
        cols, width = tl.arange(0, COLS), tl.arange(0, H)
        within = cols[:, None] * H + width[None, :]
        top = tl.full([COLS], -1e30, tl.float32)
        total = tl.zeros([COLS], tl.float32)
        acc = tl.zeros([COLS, H], tl.float32)
        for i in range(chain + 1):
            holder = worker - chain + i
            part = holder.to(tl.int64) * 2 + tl.where(holder == worker - chain, 1, 0)
            level = tl.load(levels + part * COLS + cols)
            values = tl.load(parts + part * (COLS * H) + within)
            new_top = tl.maximum(top, level)
            keep, weight = tl.exp2(top - new_top), tl.exp2(level - new_top)
            total = total * keep + weight
            acc = acc * keep[:, None] + values * weight[:, None]
            top = new_top
        acc = acc / total[:, None]
        at = (tl.load(pieces + worker * 4) * KV + tl.load(pieces + worker * 4 + 1)).to(tl.int64) * GROUP
        tl.store(
            out + (at + cols[:, None]) * H + width[None, :],
            acc.to(out.dtype.element_ty),
            mask=cols[:, None] < GROUP,
        )


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    unified_max: jax.Array | None = None,
    sms: int | None = None,
    work: DecodeWork | None = None,
    into: jax.Array | None = None,
    capability: int | None = None,
) -> jax.Array:
    """Return the attention of one new token a sequence over its pages.

    The reference implementation is `pallas_kernels.attention.decode.reference.decode_attention`.

    Args:
      q: [T, N, H] bfloat16, float16 or float32, H a power of two from 16; N / K from 1 to 16. The first
        B rows belong to the sequences.
      k_pages, v_pages: [P, K, 64, H], of q's dtype; unwritten positions are not read.
      page_table: [B, MP] int32. lengths: [B] int32, 0 skips the row.
      k_scale, v_scale: None only, because this kernel reads no 8-bit cache.
      unified_max: unused, because the running maximum gives the same result.
      sms: multiprocessors to fill; None: all of this device.
      work: `decode_work(lengths, K, 4 * sms, window)`, if layers share one list.
      into: [T, N, H], the results of rows without keys and of rows from B on; None: 0.
      capability: compute capability to compile for, for example 80; None: this device's.
    Returns:
      [T, N, H] of q's dtype.
    Raises:
      ValueError: for a shape or dtype outside the limits.
    """
    (_, n, h), kv = q.shape, k_pages.shape[1]
    _check(q, k_pages, v_pages, k_scale, v_scale)
    group = n // kv
    workers = _PROGRAMS * (sms or this_device().sms or 1)
    work = decode_work(lengths, kv, workers, window) if work is None else work
    if work.pieces.shape[0] != workers:
        raise ValueError(
            f"work.pieces has {work.pieces.shape[0]} workers: accepted are {workers}, {_PROGRAMS} for each SM"
        )
    factor, cap = (
        (scale * _LOG2E, 0.0) if soft_cap is None else (2 * _LOG2E * scale / soft_cap, soft_cap * _LOG2E)
    )
    shape = {"KV": kv, "GROUP": group, "COLS": _COLS, "H": h}
    out, parts, levels = jt.triton_call(
        q, k_pages, v_pages, page_table.astype(jnp.int32), work.rows, work.pieces,
        kernel=_attend,
        name="decode_attention",
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((workers, 2, _COLS, h), jnp.float32),
            jax.ShapeDtypeStruct((workers, 2, _COLS), jnp.float32),
        ),
        grid=(workers,),
        compute_capability=capability,
        num_warps=4,
        num_stages=3,
        S=PAGE, TABLE=page_table.shape[1], FACTOR=factor, CAP=cap, WINDOW=window or 0, **shape,
    )  # fmt: skip

    def join(out):
        jt.triton_call(
            parts, levels, work.pieces, work.chains, out,
            kernel=_join, name="decode_attention_join", out_type=(), grid=(workers,),
            compute_capability=capability, num_warps=4, **shape,
        )  # fmt: skip

    there = jnp.arange(q.shape[0]) < lengths.shape[0]
    there &= jnp.pad(lengths, (0, q.shape[0] - lengths.shape[0])) > 0
    return jnp.where(there[:, None, None], pl.run_state(join)(out), 0 if into is None else into)


def _check(q, k_pages, v_pages, k_scale, v_scale):
    (_, n, h), (_, kv, s, width) = q.shape, k_pages.shape
    if k_scale is not None or v_scale is not None:
        raise ValueError("k_scale, v_scale: accepted is None, because this kernel reads no 8-bit cache")
    if h < 16 or h & (h - 1) or width != h:
        raise ValueError(
            f"head width {h} (pages: {width}): accepted is a power of two from 16, equal in both"
        )
    if s != PAGE or k_pages.shape != v_pages.shape:
        raise ValueError(f"pages {k_pages.shape} and {v_pages.shape}: accepted is [P, K, {PAGE}, H] for both")
    if n % kv or not 1 <= n // kv <= _COLS:
        raise ValueError(f"{n} query heads over {kv} KV heads: accepted are 1 to {_COLS} for each KV head")
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or {k_pages.dtype, v_pages.dtype} != {q.dtype}:
        raise ValueError(
            f"dtypes {q.dtype}, {k_pages.dtype}, {v_pages.dtype}: "
            "accepted are bfloat16, float16 or float32, equal for all"
        )

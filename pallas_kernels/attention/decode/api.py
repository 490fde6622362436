"""Paged decode attention for Hopper: one query row of every sequence over its pages, with KV split over the
chip.

`decode_work` splits the batch's pages into equal pieces, one for each worker. A worker is a compute
warpgroup with a warp or a warpgroup that copies pages to its rings (`kernel`). The partial results of split
(row, head) pairs go to a workspace. The last worker of a pair adds them up in a fixed order (`join`), so
equal batches give equal bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.decode.join import join_afterwards
from pallas_kernels.attention.decode.kernel import attend
from pallas_kernels.attention.decode.variant import Form, scratch
from pallas_kernels.attention.decode.work_list import (
    EQUAL_PIECES,
    DecodeWork,
    PairCuts,
    decode_work,
    padded_workers,
    stacked_work,
)
from pallas_kernels.attention.paged import (
    check_pages,
    check_scales,
    check_sink_logits,
    check_spans,
    check_unified_max,
    flat,
)
from pallas_kernels.attention.tiles import (
    WIDEST,
    WIDEST_GROUP,
    WIDTHS,
    DecodeTile,
    decode_tile,
    wgmma_columns,
)
from pallas_kernels.cards import this_card
from pallas_kernels.hopper.layouts import LANE, LOG2E, pad_rows
from pallas_kernels.hopper.limits import sms_of


def decode_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    spans: jax.Array | None = None,
    sinks: int = 0,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    unified_max: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
    sms: int | None = None,
    tile: DecodeTile | None = None,
    cuts: PairCuts | None = None,
    one_fence: bool | None = None,
    work: DecodeWork | None = None,
    into: jax.Array | None = None,
    pdl: bool = False,
    interpret=None,
) -> jax.Array:
    """Return the attention of one new token a sequence over its pages.

    The reference implementation is `pallas_kernels.attention.decode.reference.decode_attention`.

    Args:
      q: [T, N, H] bfloat16, H 64, 128, 256 or 512; N / K from 1 to 16. With H = 512 N / K is at most 8, and
        the cache is bfloat16. The first B rows belong to the sequences.
        B is an upper bound: a row of length 0 costs only the store of its zeros.
      k_pages, v_pages: [P, K, 64, H] bfloat16, or [P, K, 64, H] and [P, K, H, 64] float8_e4m3fn or int8.
      page_table: [B, MP] int32; entries of pages without visible keys and past a row's length are never
        read. With spans also [G, B, MP], one table for each group of heads: a page then holds K / G heads,
        so k_pages is [P, K / G, 64, H].
      lengths: [B] int32, keys of each row, the new token included; 0 skips the row, and its output is 0.
      scale: scores are q·k · scale; scale may be 0 or negative.
      window: the number of last keys that a row sees. soft_cap: scores become cap · tanh(score / cap).
      spans: [K] or [B, K] int32, instead of a window: the number of last keys that each KV head sees
        (FlashDecoding++Next §III). A span below 1 counts as 1.
      sinks: the number of first keys that every head sees besides its span.
      k_scale, v_scale: float32 scales of 8-bit numbers: [K] for float8 (None: 1), [P, K, 64] for int8. The
        kernel never uses the scale of an unwritten token.
      unified_max: [2] float32 (phi, bound): rows with all scores within phi ± bound use phi as their
        maximum, other rows their own maximum (FlashDecoding++Next §3; see `softmax`). None: all rows use
        their own maximum. The choice changes only rounding.
      sink_logits: [N], the logit of each query head's attention sink, which adds its weight to the sum of
        weights; for a bfloat16 cache.
      sms: CTAs of the persistent grid, which is the number of SMs that the kernel may occupy, 1 to 132;
        None: all.
      cuts: when a piece of the work list has pages of one (row, head) pair only; None: the card's figures.
        With cuts and no more pairs than workers, consecutive workers are on different SMs.
      one_fence: count parts with fewer fences (`join.is_last`); None: the card's choice.
      work: `list_decode_work(...)` for the same lengths, heads, window and sms, if layers share one list.
      into: [T, N, H] bfloat16, the result of rows without keys instead of 0, updated in place if it has no
        later reader.
      pdl: start before the previous kernel has ended (`pallas_kernels.hopper.pdl`).
    Returns:
      [T, N, H] bfloat16; 0 for rows with only -inf scores.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    (t, n, h), b, groups = q.shape, lengths.shape[0], page_table.shape[0] if page_table.ndim == 3 else 1
    kv = k_pages.shape[1] * groups
    check_pages(q, k_pages, v_pages, (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8), groups, WIDTHS)
    if h == WIDEST and (k_pages.dtype != jnp.bfloat16 or n // kv > WIDEST_GROUP):
        raise ValueError(
            f"head width {h} with a cache of {k_pages.dtype} and {n // kv} query heads for each KV head: "
            f"accepted are bfloat16 and up to {WIDEST_GROUP}"
        )
    check_spans(spans, sinks, window, b, kv)
    check_sink_logits(sink_logits, n, k_pages)
    if b > t or (into is not None and (into.shape != q.shape or into.dtype != q.dtype)):
        given = "" if into is None else f", into {into.dtype}{list(into.shape)}"
        raise ValueError(
            f"{b} lengths for q {q.dtype}{list(q.shape)}{given}: accepted are up to {t} lengths, and into "
            "like q"
        )
    if page_table.ndim not in ((2,) if spans is None else (2, 3)) or page_table.shape[-2] != b:
        accepted = f"[{b}, MP]" + ("" if spans is None else f" and [G, {b}, MP]")
        raise ValueError(f"page_table {list(page_table.shape)} for {b} lengths: accepted is {accepted}")
    sms, group, e4m3, int8 = (
        sms_of(sms),
        n // kv,
        k_pages.dtype == jnp.float8_e4m3fn,
        k_pages.dtype == jnp.int8,
    )
    tile = tile or decode_tile(h, group, k_pages.dtype.itemsize, sms, int8)
    workers, cuts = sms * tile.workers, cuts_of(cuts)
    cols = wgmma_columns(group, e4m3)
    form = Form(
        group=group, kv=kv, h=h, cols=cols, e4m3=e4m3, int8=int8, tile=tile,
        scale=scale, window=window, soft_cap=soft_cap, unified_max=unified_max is not None, fill=into is None,
        pdl=pdl, interpret=interpret is not None, spans=spans is not None, sinks=sinks,
        page_heads=k_pages.shape[1], sink_logits=sink_logits is not None,
        spread=cuts != EQUAL_PIECES and b * kv <= workers,
        one_fence=this_card().decode_attention_one_fence if one_fence is None else one_fence,
        raw_sinks=cols == group,
    )  # fmt: skip
    work = decode_work(lengths, kv, workers, window, spans, sinks, cuts) if work is None else work
    if work.pieces.shape[0] not in (workers, padded_workers(workers)):
        raise ValueError(
            f"work.pieces has {work.pieces.shape[0]} workers: accepted are {workers} for sms={sms} and {tile}"
        )
    grouped = q
    if form.pitch > group:
        grouped = q[:b].reshape(b * kv, group, h)
        grouped = lax.pad(grouped, jnp.zeros((), q.dtype), [(0, 0, 0), (0, form.pitch - group, 0), (0, 0, 0)])
    inputs = (
        pad_rows(grouped.reshape(-1, h)),
        flat(k_pages),
        flat(v_pages),
        page_table.astype(jnp.int32).reshape(-1, page_table.shape[-1]),
        work.rows,
        work.pieces,
        work.starts,
        work.chains,
        work.enders,
        work.arrived,
        *_numbers(k_pages, groups, k_scale, v_scale, unified_max),
        *([] if sink_logits is None else [_by_column(sink_logits, form)]),
    )
    parts = (
        jax.ShapeDtypeStruct((workers, 2, h, form.cols), jnp.float32),
        jax.ShapeDtypeStruct((workers, 2, form.cols), jnp.float32),
    )
    result = jax.ShapeDtypeStruct((t * n, h), q.dtype)
    kernel = plgpu.kernel(
        functools.partial(attend, form=form),
        out_type=(result, *parts) if into is None else parts,
        grid=(sms,),
        grid_names=("cta",),
        num_threads=2 * tile.workers if tile.workers <= 2 else tile.workers + 1,
        thread_name="wg",
        scratch_types=scratch(form, q.dtype),
        compiler_params=LANE,
        kernel_name=f"decode_attention_{sms}",
        interpret=interpret,
    )
    join = functools.partial(
        join_afterwards, work=work, group=group, kv=form.entry_heads, e4m3=e4m3, interpret=interpret
    )
    if into is None:
        out, *cut = kernel(*inputs)
        return (pl.run_state(join(*cut))(out) if form.interpret else out).reshape(t, n, h)

    def in_place(o):
        cut = kernel(*inputs, o)
        if form.interpret:
            join(*cut)(o)

    return pl.run_state(in_place)(into.reshape(t * n, h)).reshape(t, n, h)


def _by_column(sink_logits, form: Form) -> jax.Array:
    """Return the logits in powers of two, float32 [K, cols], with 0 in columns without a query head.

    The kernel scales the logits itself if each column has a query head, so that XLA computes nothing before.
    """
    if form.raw_sinks:
        return sink_logits.reshape(form.kv, form.group)
    by_head = sink_logits.astype(jnp.float32).reshape(form.kv, form.group) * LOG2E
    return jnp.pad(by_head, ((0, 0), (0, form.cols - form.group)))


def list_decode_work(
    lengths: jax.Array,
    *,
    kv_heads: int,
    group: int,
    head_dim: int,
    itemsize: int,
    window: int | None = None,
    sms: int | None = None,
    spans: jax.Array | None = None,
    sinks: int = 0,
    cuts: PairCuts | None = None,
) -> DecodeWork:
    """Return the work list of `decode_attention` for lengths [B], for all layers with the same window, or
    the same spans and sinks.

    itemsize: bytes of a number in the cache.
    spans: as for `decode_attention`, or [J, B, K], several choices of spans. The result is then a stack: list
      j is index j of each of its arrays.
    cuts: when a piece has pages of one (row, head) pair only; None: the card's figures.
    """
    sms, cuts = sms_of(sms), cuts_of(cuts)
    workers = sms * decode_tile(head_dim, group, itemsize, sms).workers
    if spans is not None and spans.ndim == 3:
        return stacked_work(lengths, kv_heads, workers, spans, sinks, cuts)
    return decode_work(lengths, kv_heads, workers, window, spans, sinks, cuts)


def cuts_of(cuts: PairCuts | None) -> PairCuts:
    """Return `cuts`, or the figures of this device's card for None."""
    if cuts is not None:
        return cuts
    card = this_card()
    return PairCuts(
        card.decode_attention_least_pages,
        card.decode_attention_whole_pages,
        card.decode_attention_short_pages,
    )


def _numbers(k_pages, groups, k_scale, v_scale, unified_max) -> list[jax.Array]:
    """Return the arrays of scales and bounds that this variant of the kernel reads."""
    (_, held, s, _) = k_pages.shape
    check_scales(k_pages, k_scale, v_scale, groups)
    check_unified_max(unified_max)
    numbers = []
    if k_pages.dtype != jnp.bfloat16:
        numbers = [
            jnp.ones((held * groups,)) if x is None else x.reshape(-1, s) if x.ndim == 3 else x
            for x in (k_scale, v_scale)
        ]
    return [x.astype(jnp.float32) for x in [*numbers, *([] if unified_max is None else [unified_max])]]

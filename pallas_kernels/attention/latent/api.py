"""Paged latent attention for Hopper (absorbed MLA, DeepSeek-V2 §2.1).

`latent_work` splits the pages of all rows into equal pieces, one for each worker. A worker is a CTA for each
64 heads (`kernel`). A second pass adds up the rows that are split between workers (`combine`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.latent.combine import combine
from pallas_kernels.attention.latent.kernel import ROTARY, Form, attend, scratch
from pallas_kernels.attention.latent.work_list import (
    HEADS,
    LatentWork,
    chunk_rows,
    head_tiles,
    latent_work,
    latent_workers,
    tokens_together,
)
from pallas_kernels.attention.paged import PAGE, flat
from pallas_kernels.hopper.layouts import LANE

# The kernel's reductions along a row exchange no values between warps.
_LANE = dataclasses.replace(LANE, reduction_scratch_bytes=0)
RANKS = (128, 256, 384, 512)  # columns of a latent vector


def takes_heads(heads: int) -> bool:
    """Return whether the kernel takes this number of heads on a device."""
    return heads % 8 == 0 if heads <= HEADS else heads % HEADS == 0


def list_decode_work(lengths: jax.Array, *, heads: int, sms: int | None = None) -> LatentWork:
    """Return the work list of `decode_attention` for lengths [B], for all layers.

    heads: query heads of one device. sms: as for `decode_attention`.
    """
    return latent_work(lengths, latent_workers(heads, sms))


def list_chunk_work(chunks: jax.Array, tokens: int, *, heads: int, sms: int | None = None) -> LatentWork:
    """Return the work list of `chunk_attention` for chunks among `tokens` rows of q, for all layers.

    heads: query heads of one device. sms: as for `chunk_attention`.
    """
    lengths, of_rows = chunk_rows(chunks, tokens, tokens_together(heads))
    return latent_work(lengths, latent_workers(heads, sms), of_rows)


def decode_attention(
    q: jax.Array,
    rope_pages: jax.Array,
    latent_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    into: jax.Array | None = None,
    sms: int | None = None,
    work: LatentWork | None = None,
    interpret=None,
) -> jax.Array:
    """Return the attention of one new token a sequence over its pages of latent vectors.

    The reference implementation is `pallas_kernels.attention.latent.reference.decode_attention`.

    Args:
      q: [T, N, R + 64] bfloat16, R 128, 256, 384 or 512; N a multiple of 8 up to 64, or a multiple of 64. The
        first B rows belong to the sequences.
      rope_pages, latent_pages: [P, 1, 64, 64] and [P, 1, 64, R] bfloat16.
      page_table: [B, MP] int32; entries past a row's length are never read.
      lengths: [B] int32, keys of each row, the new token included; 0 skips the row, and its output is 0.
      scale: scores are q·k · scale; scale may be 0 or negative.
      into: [T, N, R] bfloat16, the result of rows without keys and of rows from B on instead of 0, updated in
        place if it has no later reader.
      sms: CTAs of the grid, at least one for each 64 heads; None: all.
      work: `list_decode_work(...)` for the same lengths, heads and sms, if layers share one list.
    Returns:
      [T, N, R] bfloat16; 0 for rows with only -inf scores.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    b = lengths.shape[0]
    _check(q, rope_pages, latent_pages, b, into)
    if page_table.ndim != 2 or page_table.shape[0] != b:
        raise ValueError(f"page_table {list(page_table.shape)} for {b} lengths: accepted is [{b}, MP]")
    work = list_decode_work(lengths, heads=q.shape[1], sms=sms) if work is None else work
    call = _Call("decode", scale, 1, sms, interpret)
    return _attend_rows(q, rope_pages, latent_pages, page_table, work, into, call)


def chunk_attention(
    q: jax.Array,
    rope_pages: jax.Array,
    latent_pages: jax.Array,
    page_table: jax.Array,
    chunks: jax.Array,
    *,
    scale: float,
    sms: int | None = None,
    work: LatentWork | None = None,
    interpret=None,
) -> jax.Array:
    """Return the causal attention of prefill chunks over their sequences' pages of latent vectors.

    The reference implementation is `pallas_kernels.attention.latent.reference.chunk_attention`. A token
    sees the keys up to its own. 64 heads fill the rows of a wgmma: of one token, or of consecutive tokens
    with fewer heads each.

    Args:
      q, rope_pages, latent_pages, scale, sms: as for `decode_attention`.
      page_table: [R, MP] int32; entries past a sequence's last page are never read.
      chunks: [C, 4] int32, one row a chunk: first token in q, tokens (0: skipped), row of page_table,
        position of the first token. Chunks do not overlap in q. The pages already hold their latent vectors.
      work: `list_chunk_work(...)` for the same chunks, T, heads and sms, if layers share one list.
    Returns:
      [T, N, R] bfloat16; 0 at tokens outside all chunks, and for rows with only -inf scores.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    _check(q, rope_pages, latent_pages, q.shape[0], None)
    if page_table.ndim != 2 or chunks.ndim != 2 or chunks.shape[1] != 4:
        raise ValueError(
            f"page_table {list(page_table.shape)}, chunks {list(chunks.shape)}: accepted are [R, MP] and "
            "[C, 4]"
        )
    work = list_chunk_work(chunks, q.shape[0], heads=q.shape[1], sms=sms) if work is None else work
    together = tokens_together(q.shape[1])
    call = _Call("chunk", scale, together, sms, interpret)
    into = None if together == 1 else jnp.zeros((*q.shape[:2], latent_pages.shape[3]), q.dtype)
    return _attend_rows(q, rope_pages, latent_pages, page_table, work, into, call)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The settings of a call. op: `decode` or `chunk`, for the kernel's name. together: tokens of a row."""

    op: str
    scale: float
    together: int
    sms: int | None
    interpret: Any


def _attend_rows(
    q: jax.Array,
    rope_pages: jax.Array,
    latent_pages: jax.Array,
    page_table: jax.Array,
    work: LatentWork,
    into: jax.Array | None,
    call: _Call,
) -> jax.Array:
    """Return the attention [T, N, R] of the rows of a work list."""
    (t, n, _), rank, interpret = q.shape, latent_pages.shape[-1], call.interpret
    workers, tiles = latent_workers(n, call.sms), head_tiles(n)
    if work.pieces.shape[0] != workers:
        raise ValueError(
            f"work.pieces has {work.pieces.shape[0]} workers: accepted are {workers} for sms={call.sms}"
        )
    form = Form(n, rank, tiles, call.together, call.scale, interpret=interpret is not None)
    inputs = (
        q.reshape(t * n, -1),
        flat(rope_pages),
        flat(latent_pages),
        page_table.astype(jnp.int32),
        work.rows,
        work.pieces,
    )
    result = jax.ShapeDtypeStruct((t * n, rank), q.dtype)
    parts = (
        jax.ShapeDtypeStruct((workers * 2 * form.part, rank), q.dtype),
        jax.ShapeDtypeStruct((workers, 2, tiles * HEADS), jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(attend, form=form),
        out_type=(result, *parts) if into is None else parts,
        grid=(workers * tiles,),
        grid_names=("cta",),
        num_threads=4,
        thread_name="wg",
        scratch_types=scratch(form),
        compiler_params=_LANE,
        kernel_name=f"latent_{call.op}_attention_{workers * tiles}",
        interpret=interpret,
    )
    add_up = functools.partial(
        combine, work=work, heads=n, together=call.together, fill=into is None, interpret=interpret
    )
    if into is None:
        out, *cut = kernel(*inputs)
        return pl.run_state(add_up(*cut))(out).reshape(t, n, rank)

    def in_place(o):
        add_up(*kernel(*inputs, o))(o)

    return pl.run_state(in_place)(into.reshape(t * n, rank)).reshape(t, n, rank)


def _check(q, rope_pages, latent_pages, b: int, into) -> None:
    """Raise ValueError for arguments outside the kernel's limits."""
    (t, n, width), (p, kv, s, rank) = q.shape, latent_pages.shape
    if rank not in RANKS or width != rank + ROTARY:
        raise ValueError(
            f"latent vectors of {rank} columns with queries of {width}: accepted are "
            f"{', '.join(map(str, RANKS))}, with queries of {ROTARY} columns more"
        )
    if (kv, s) != (1, PAGE) or rope_pages.shape != (p, 1, PAGE, ROTARY):
        raise ValueError(
            f"pages {rope_pages.shape} and {latent_pages.shape}: accepted are [P, 1, {PAGE}, {ROTARY}] and "
            f"[P, 1, {PAGE}, R]"
        )
    if not takes_heads(n):
        raise ValueError(
            f"{n} query heads: accepted are multiples of 8 up to {HEADS}, and multiples of {HEADS}"
        )
    dtypes = [x.dtype.name for x in (q, rope_pages, latent_pages)]
    if set(dtypes) != {"bfloat16"}:
        raise ValueError(f"dtypes {', '.join(dtypes)}: accepted is bfloat16 for queries and pages")
    if b > t or (into is not None and (into.shape != (t, n, rank) or into.dtype != q.dtype)):
        given = "" if into is None else f", into {into.dtype}{list(into.shape)}"
        raise ValueError(
            f"{b} lengths for q {q.dtype}{list(q.shape)}{given}: accepted are up to {t} lengths, and into "
            f"bfloat16{[t, n, rank]}"
        )

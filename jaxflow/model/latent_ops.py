"""Latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1): what the ops of an
attention block do for such a model.

Attention runs in the absorbed form. A head's plain key is a product of the latent vector, so its score is the
product of the latent vector and of the query times the transposed matrix. All heads then read one key, and
the latent vector is their value: multi-query attention with R + Hr columns a key and R columns a value.

Prefill chunks can also run with keys and values by head, which are made from the latent vectors. A pair of a
query and a key then costs less, but the keys and values of the context are made in every step. A program that
may do so passes queries of Hp + Hr columns and outputs of Hv columns between the ops. It chooses the form on
the device, by the step's chunks (`prefers_heads`).

Letters: R `Latent.rank`, Hp `plain_dim`, Hr `rope_dim`, Hv `value_dim`. The cache of a layer is (rotary keys
[P, 1, S, Hr], latent vectors [P, 1, S, R]).
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxflow.config import Latent, Layer
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import KV, Context, Weights
from jaxflow.model.rope import inverse_frequencies
from pallas_kernels.attention.latent.windows import MOST_WINDOWS, pairs_of_window, windows_of
from pallas_kernels.cards import this_card
from pallas_kernels.pointwise.norm.reference import rms_norm
from pallas_kernels.pointwise.rope_append.reference import rope

_EPS = 1e-6  # epsilon of both norms: the published models have this value, whatever `rms_norm_eps` is


def project(c: Context, w: Weights, h: Float[Array, "t D"]) -> Float[Array, "t A"]:
    """Return the queries of all heads [N · (Hp + Hr)], the latent vector [R] and
    the rotary key [Hr] in one array.
    """
    latent = _latent(c)
    down = _gemm(c, h, w["latent_down"], w.get("latent_down_bias"))
    queries = rms_norm(down[:, : latent.query_rank], w["query_norm"], eps=_EPS, offset=0.0)
    return jnp.concatenate([_gemm(c, queries, w["query_up"]), down[:, latent.query_rank :]], axis=1)


def append(
    c: Context,
    layer: Layer,
    w: Weights,
    batch: Batch,
    start: int,
    stop: int,
    fused: Float[Array, "t A"],
    kv: KV,
) -> tuple[Float[Array, "t N A"], KV]:
    """Return the absorbed queries, and the cache with the latent vectors and
    rotary keys of tokens [start, stop).

    A program that may attend by head gets the queries of Hp + Hr columns.
    """
    latent = _latent(c)
    assert layer.rope is not None
    stored = latent.rank + latent.rope_dim
    heads = fused[:, :-stored].reshape(fused.shape[0], -1, c.config.head_dim)
    vector = rms_norm(fused[:, -stored : -latent.rope_dim], w["latent_norm"], eps=_EPS, offset=0.0)
    positions = batch.positions[start:stop]
    inv_freq = jnp.asarray(inverse_frequencies(layer.rope, latent.rope_dim))
    key = rope(fused[:, None, -latent.rope_dim :], positions, inv_freq)
    turned = rope(heads[..., latent.plain_dim :], positions, inv_freq)
    turned = (turned * layer.rope.attention_factor**2).astype(
        fused.dtype
    )  # the factors of the query and the key
    queries = jnp.concatenate([heads[..., : latent.plain_dim], turned], axis=-1)
    if not may_attend_by_head(c, batch, stop - start):
        queries = _absorbed(c, w, queries)
    slots = batch.slots[c.group(layer), start:stop]
    return queries, c.kernels.latent_append(*kv, key, vector[:, None], slots)


def _absorbed(c: Context, w: Weights, q: Float[Array, "t N Hp+Hr"]) -> Float[Array, "t N R+Hr"]:
    plain_dim = _latent(c).plain_dim
    plain = jnp.einsum("tnh,nhr->tnr", q[..., :plain_dim], w["key_up"])
    return jnp.concatenate([plain, q[..., plain_dim:]], axis=-1)


def _restored(w: Weights, o: Float[Array, "t N R"]) -> Float[Array, "t N Hv"]:
    return jnp.einsum("tnr,nhr->tnh", o, w["value_up"])


def may_attend_by_head(c: Context, batch: Batch, tokens: int) -> bool:
    """Return whether the chunks among `tokens` tokens of a program may run with keys and values by head.

    No chunk is long enough for it in a program of few tokens.
    """
    latent = _latent(c)
    by_head = c.kernels.latent_up_chunk_attention is not None and batch.chunks.shape[0] > 0
    # `values` knows the form of its input from the columns.
    return by_head and latent.rank != latent.value_dim and tokens * _saved(latent) > _made(latent)


def _saved(latent: Latent) -> int:
    """Return the FLOP that keys by head save for each head and pair of a query and a key."""
    return 2 * (2 * latent.rank - latent.plain_dim - latent.value_dim)


def _made(latent: Latent) -> int:
    """Return the FLOP that make the key and the value of a token for each head. To absorb a query and to
    restore an output costs as much.
    """
    return 2 * latent.rank * (latent.plain_dim + latent.value_dim)


def prefers_heads(latent: Latent, chunks: Int[Array, "C 4"], tokens: int, heads: int) -> Bool[Array, ""]:
    """Return whether keys and values by head cost a step's chunks less FLOP than the absorbed form.

    chunks: as in `Batch`, positions of at most 2^24. tokens: of the program, which the absorbed form makes
    queries and outputs for. heads: of a device. Keys and values are made for whole windows. A window also
    has a fixed cost, which does not depend on the heads. A step with more windows than a work list has keeps
    the absorbed form.
    """
    new, before = (chunks[:, i].astype(jnp.float32) for i in (1, 3))
    pairs = jnp.sum(new * before + new * (new + 1) / 2)
    windows, keys = windows_of(chunks, pairs_of_window(tokens, chunks.shape[0]))
    made = (windows * keys - tokens).astype(jnp.float32) * _made(latent)
    fixed = windows.astype(jnp.float32) * (this_card().latent_window_flop / heads)
    fewer = pairs * _saved(latent) > made + fixed
    return fewer & (windows <= MOST_WINDOWS)


def attend_chunks(
    c: Context,
    layer: Layer,
    w: Weights,
    batch: Batch,
    start: int,
    stop: int,
    q: Float[Array, "t N A"],
    kv: KV,
    work: Any = None,
) -> Float[Array, "t N B"]:
    """Return attention of the prefill tokens of [start, stop), and 0 at the decode tokens.

    q and the result are absorbed, or by head in a program that may attend by head.
    """
    if batch.chunks.shape[0] == 0:  # a program for steps of decodes only
        return jnp.zeros_like(q[..., : _latent(c).rank])
    table, chunks = batch.page_table[c.group(layer)], batch.chunks_in(start, stop)
    settings = {"scale": c.config.scale, "sms": c.sms}

    listed, listed_by_head = work or (None, None)

    def absorbed(q: Array, *pages: Array) -> Array:
        return c.kernels.latent_chunk_attention(q, *pages, table, chunks, work=listed, **settings)

    attend_by_head = c.kernels.latent_up_chunk_attention
    if attend_by_head is None or not may_attend_by_head(c, batch, stop - start):
        return absorbed(q, *kv)

    def by_head(q: Array, *pages: Array) -> Array:
        ups = w["key_up"], w["value_up"]
        return attend_by_head(q, *pages, *ups, table, chunks, work=listed_by_head, **settings)

    return lax.cond(
        prefers_heads(_latent(c), chunks, stop - start, q.shape[1]),
        by_head,
        lambda q, *pages: _restored(w, absorbed(_absorbed(c, w, q), *pages)),
        q,
        *kv,
    )


def attend_decodes(
    c: Context,
    layer: Layer,
    w: Weights,
    batch: Batch,
    start: int,
    stop: int,
    q: Float[Array, "t N A"],
    kv: KV,
    chunks: Float[Array, "t N B"] | None,
    work: Any = None,
) -> Float[Array, "b N B"]:
    """Return attention of the decode tokens of [start, stop); see `jaxflow.model.ops.decode_attention`.

    q, chunks and the result have the forms of `attend_chunks`. Decodes always run in the absorbed form.
    """
    rows, lengths = batch.decode_rows(start, stop)
    latent, by_head = _latent(c), may_attend_by_head(c, batch, stop - start)
    if rows.start == rows.stop:
        empty = jnp.zeros((0, q.shape[1], latent.value_dim if by_head else latent.rank), q.dtype)
        return empty if chunks is None else chunks
    table = batch.page_table[c.group(layer), rows]
    settings = {"scale": c.config.scale, "sms": c.sms, "work": work}
    attend = functools.partial(c.kernels.latent_decode_attention, **settings)
    if not by_head:
        return attend(q, *kv, table, lengths, into=chunks if batch.chunks.shape[0] else None)
    own = _absorbed(c, w, q[: rows.stop - rows.start])
    own = _restored(w, attend(own, *kv, table, lengths))
    if chunks is None:
        return jnp.pad(own, ((0, q.shape[0] - own.shape[0]), (0, 0), (0, 0)))
    own = jnp.where((lengths > 0)[:, None, None], own, chunks[: own.shape[0]])
    return lax.dynamic_update_slice_in_dim(chunks, own, 0, axis=0)


def decode_work(c: Context, batch: Batch, start: int, stop: int) -> Any:
    """Return the work list of the decode tokens of [start, stop), which all
    layers share, or None without any.
    """
    rows, lengths = batch.decode_rows(start, stop)
    if rows.start == rows.stop:
        return None
    return c.kernels.list_latent_work(lengths, heads=_heads(c), sms=c.sms)


def chunk_work(c: Context, batch: Batch, start: int, stop: int) -> Any:
    """Return the work lists of both forms for the prefill tokens of [start, stop), which all layers share, or
    None without chunks.
    """
    if batch.chunks.shape[0] == 0:
        return None
    chunks, tokens, by_head = batch.chunks_in(start, stop), stop - start, None
    if may_attend_by_head(c, batch, tokens):
        by_head = c.kernels.list_latent_up_chunk_work(chunks, tokens)
    return c.kernels.list_latent_chunk_work(chunks, tokens, heads=_heads(c), sms=c.sms), by_head


def values(c: Context, w: Weights, o: Float[Array, "t N*B"]) -> Float[Array, "t N*Hv"]:
    """Return the values of all heads from the sums of latent vectors. Outputs by head are values already."""
    heads = w["value_up"].shape[0]
    if o.shape[1] == heads * _latent(c).value_dim:
        return o
    return _restored(w, o.reshape(o.shape[0], heads, -1)).reshape(o.shape[0], -1)


def _latent(c: Context) -> Latent:
    assert c.config.latent is not None
    return c.config.latent


def _heads(c: Context) -> int:
    """Return the query heads of a device."""
    return c.config.num_heads // (1 if c.axis is None else lax.axis_size(c.axis))


def _gemm(c: Context, x: Array, w: Array, bias: Array | None = None) -> Any:
    return c.kernels.gemm(x, w, bias, **({} if c.sms is None else {"sms": c.sms}))

"""Latent attention (DeepSeek-V2, arXiv:2405.04434, §2.1): what the ops of an
attention block do for such a model.

Attention runs in the absorbed form. A head's plain key is a product of the latent vector, so its score is the
product of the latent vector and of the query times the transposed matrix. All heads then read one key, and
the latent vector is their value: multi-query attention with R + Hr columns a key and R columns a value.

Letters: R `Latent.rank`, Hp `plain_dim`, Hr `rope_dim`, Hv `value_dim`. The cache of a layer is (rotary keys
[P, 1, S, Hr], latent vectors [P, 1, S, R]).
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxflow.config import Latent, Layer
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import KV, Context, Weights
from jaxflow.model.rope import inverse_frequencies
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
) -> tuple[Float[Array, "t N R+Hr"], KV]:
    """Return the absorbed queries, and the cache with the latent vectors and
    rotary keys of tokens [start, stop).
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
    plain = jnp.einsum("tnh,nhr->tnr", heads[..., : latent.plain_dim], w["key_up"])
    slots = batch.slots[c.group(layer), start:stop]
    return jnp.concatenate([plain, turned], axis=-1), c.kernels.latent_append(
        *kv, key, vector[:, None], slots
    )


def attend_chunks(
    c: Context,
    layer: Layer,
    batch: Batch,
    start: int,
    stop: int,
    q: Float[Array, "t N R+Hr"],
    kv: KV,
    work: Any = None,
) -> Float[Array, "t N R"]:
    """Return attention of the prefill tokens of [start, stop), and 0 at the decode tokens."""
    if batch.chunks.shape[0] == 0:  # a program for steps of decodes only
        return jnp.zeros_like(q[..., : _latent(c).rank])
    table, chunks = batch.page_table[c.group(layer)], batch.chunks_in(start, stop)
    settings = {"scale": c.config.scale, "sms": c.sms, "work": work}
    return c.kernels.latent_chunk_attention(q, *kv, table, chunks, **settings)


def attend_decodes(
    c: Context,
    layer: Layer,
    batch: Batch,
    start: int,
    stop: int,
    q: Float[Array, "t N R+Hr"],
    kv: KV,
    chunks: Float[Array, "t N R"] | None,
    work: Any = None,
) -> Float[Array, "b N R"]:
    """Return attention of the decode tokens of [start, stop); see `jaxflow.model.ops.decode_attention`."""
    rows, lengths = batch.decode_rows(start, stop)
    if rows.start == rows.stop:
        return q[:0, :, : _latent(c).rank] if chunks is None else chunks
    into = chunks if batch.chunks.shape[0] else None
    table = batch.page_table[c.group(layer), rows]
    settings = {"scale": c.config.scale, "into": into, "sms": c.sms, "work": work}
    return c.kernels.latent_decode_attention(q, *kv, table, lengths, **settings)


def decode_work(c: Context, batch: Batch, start: int, stop: int) -> Any:
    """Return the work list of the decode tokens of [start, stop), which all
    layers share, or None without any.
    """
    rows, lengths = batch.decode_rows(start, stop)
    if rows.start == rows.stop:
        return None
    return c.kernels.list_latent_work(lengths, heads=_heads(c), sms=c.sms)


def chunk_work(c: Context, batch: Batch, start: int, stop: int) -> Any:
    """Return the work list of the prefill tokens of [start, stop), which all layers share, or None without
    chunks.
    """
    if batch.chunks.shape[0] == 0:
        return None
    chunks = batch.chunks_in(start, stop)
    return c.kernels.list_latent_chunk_work(chunks, stop - start, heads=_heads(c), sms=c.sms)


def values(c: Context, w: Weights, o: Float[Array, "t N*R"]) -> Float[Array, "t N*Hv"]:
    """Return the values of all heads from the sums of latent vectors."""
    heads = o.reshape(o.shape[0], -1, _latent(c).rank)
    return jnp.einsum("tnr,nhr->tnh", heads, w["value_up"]).reshape(o.shape[0], -1)


def _latent(c: Context) -> Latent:
    assert c.config.latent is not None
    return c.config.latent


def _heads(c: Context) -> int:
    """Return the query heads of a device."""
    return c.config.num_heads // (1 if c.axis is None else lax.axis_size(c.axis))


def _gemm(c: Context, x: Array, w: Array, bias: Array | None = None) -> Any:
    return c.kernels.gemm(x, w, bias, **({} if c.sms is None else {"sms": c.sms}))

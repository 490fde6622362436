"""The attention ops: decodes and prefill chunks of a token range over the paged cache, their outputs in one
array.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxflow.config import Layer
from jaxflow.model.batch import Batch
from jaxflow.model.context import KV, Context, Weights
from pallas_kernels.quantized import Quantized


def _attention(c: Context, layer: Layer, w: Weights, kv: KV) -> tuple[KV, dict[str, Any]]:
    """The arrays of the cache, and what else an attention kernel is told."""
    k, v = kv
    settings = {"scale": c.config.scale, "window": layer.window, "soft_cap": c.config.attention_soft_cap}
    if "unified" in w:
        settings["unified"] = w["unified"]
    if c.sms is not None:
        settings["sms"] = c.sms
    if isinstance(k, Quantized) and isinstance(v, Quantized):
        return (k.values, v.values), settings | {"k_scale": k.scale, "v_scale": v.scale}
    return (k, v), settings | kv_scales(w)


def kv_scales(w: Weights) -> dict[str, Array]:
    """What the numbers of an e4m3 cache are multiplied with; nothing for other caches."""
    return {name: w[name] for name in ("k_scale", "v_scale") if name in w}


def attention_work(c: Context, layer: Layer, batch: Batch, start: int, stop: int, op: str, kv: KV) -> Any:
    """What the kernel of `op`, one of both attentions, is to do for tokens [start, stop) in every layer of
    this one's window.

    kv: of any layer, for its shapes. Returns the kernel's list of work and its rows of the page table, or
    None for nothing to do.
    """
    keys = kv[0].values if isinstance(kv[0], Quantized) else kv[0]
    rows, lengths = batch.decode_rows(start, stop)
    if (batch.chunks.shape[0] if op == "chunk_attention" else rows.stop - rows.start) == 0:
        return None
    _, kv_heads, _, h = keys.shape
    common = {"head_dim": h, "itemsize": keys.dtype.itemsize, "window": layer.window}
    if op == "chunk_attention":
        return c.kernels.list_chunk_work(
            batch.chunks_in(start, stop), stop - start, **common
        ), batch.page_table[c.group(layer)]
    group = c.config.num_heads // c.config.num_kv_heads
    listed = c.kernels.list_decode_work(lengths, kv_heads=kv_heads, group=group, sms=c.sms, **common)
    return listed, batch.page_table[c.group(layer), rows]


def decode_attention(
    c: Context,
    layer: Layer,
    w: Weights,
    batch: Batch,
    start: int,
    stop: int,
    q: Float[Array, "t N H"],
    kv: KV,
    prefilled: Float[Array, "t N H"] | None = None,
    work: Any = None,
) -> Float[Array, "b N H"]:
    """Attention of the decode tokens of [start, stop), 0 at the others; of no tokens at all (b = 0, else t)
    where none could decode.

    prefilled: what `chunk_attention` made of the same tokens; the result is then both's. work: of
    `attention_work`.
    """
    rows, lengths = batch.decode_rows(start, stop)
    if rows.start == rows.stop:  # the range lies beyond any decode
        return q[:0] if prefilled is None else prefilled
    listed, table = work or (None, batch.page_table[c.group(layer), rows])
    pages, settings = _attention(c, layer, w, kv)
    into = (
        prefilled if batch.chunks.shape[0] else None
    )  # where nobody prefills, 0 is what the kernel gives all others
    return c.kernels.decode_attention(q, *pages, table, lengths, into=into, work=listed, **settings)


def chunk_attention(
    c: Context,
    layer: Layer,
    w: Weights,
    batch: Batch,
    start: int,
    stop: int,
    q: Float[Array, "t N H"],
    kv: KV,
    work: Any = None,
) -> Float[Array, "t N H"]:
    """Attention of the prefill tokens of [start, stop); 0 at the decode tokens. work: of `attention_work`."""
    if batch.chunks.shape[0] == 0:  # a step of decodes alone
        return jnp.zeros_like(q)
    listed, table = work or (None, batch.page_table[c.group(layer)])
    pages, settings = _attention(c, layer, w, kv)
    return c.kernels.chunk_attention(q, *pages, table, batch.chunks_in(start, stop), work=listed, **settings)


def merge_heads(
    is_decode: Bool[Array, " t"],
    decoded: Float[Array, "b N H"],
    prefilled: Float[Array, "t N H"],
    *,
    in_place: bool = True,
) -> Float[Array, "t N H"]:
    """Each token's heads from the attention that computed them, where `decode_attention` did not write them
    beside the others'.

    in_place: only the rows that could decode are read and written; else all rows are, in one pass, which a
    side stream needs.
    """
    rows, t = decoded.shape[0], prefilled.shape[0]
    if not rows:
        return prefilled
    if not in_place:
        return jnp.where(
            is_decode[:, None, None], jnp.pad(decoded, ((0, t - rows), (0, 0), (0, 0))), prefilled
        )
    # Not by `.at[:rows].set`: two such scatters under shard_map crash XLA's CPU compiler (jaxlib 0.11.2).
    merged = jnp.where(is_decode[:rows, None, None], decoded, prefilled[:rows])
    return lax.dynamic_update_slice_in_dim(prefilled, merged, 0, axis=0)

"""The ops of the graph as functions; plans, the plain forward and offloaded runs call these functions.

An op takes a `Site` and its inputs, and returns its outputs, both in the graph's order. A norm adds the
residual stream, so that one kernel does both. `x` is the residual stream [t, D], `h` a normed input [t, D],
`y` a block's addition to x [t, D]. The input of a GEMM with an e4m3 weight (`Quantized`) is e4m3, too. `h`
and the heads have one scale per token. `a` has one scale per 128 columns, since no kernel sees a full row.
All inputs of a weight in blocks (`BlockFp8`) have one scale per 128 columns.

    embed(token_ids, positions) -> x             layer_embed(token_ids, x) -> layer_input of each layer
    attn_norm(x, y) -> x, h                      qkv(h) -> qkv
    rope_append(qkv, kv) -> q, kv                rope(qkv) -> q
    chunk_attention(q, kv) -> o                  decode_attention(q, kv, o) -> o
    out_proj(o) -> y                             attn_reduce(y) -> y, post_attn_norm(y) -> y
    mlp_norm(x, y) -> x, h                       up_gate(h) -> a, down(a) -> y
    router(h) -> routing                         expert_up_gate(h, routing) -> expert_rows
    expert_down(expert_rows, routing) -> y
    shared_up_gate(h) -> a                       shared_down(a, y) -> y
    mlp_reduce(y) -> y, post_mlp_norm(y) -> y    layer_gate(x, y, layer_input) -> x, gated
    layer_proj(gated) -> y                       post_layer_norm(y) -> y
    final_norm(x, y) -> x, hidden                logits(hidden)

In the scattered form of tensor parallelism, y, x and the norms' outputs are each device's local rows:

    attn_norm(x, y) -> x, h; attn_gather(h) -> h                attn_scatter(y) -> y; mlp_norm(x, y) -> x, h;
    mlp_gather(h) -> h
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxflow.config import Layer, Span, gate_block
from jaxflow.model import latent_ops, one_router
from jaxflow.model.batch import Batch
from jaxflow.model.exchanged_experts import ReceivedRows, list_sent, send_back, send_to_experts
from jaxflow.model.expert_copies import EXPERT_OF_SLOT, choose_copies, has_copies
from jaxflow.model.gathered_tokens import GatheredTokens, gather_tokens, gathers, scatter_sums
from jaxflow.model.head_groups import (
    call_once_traced,
    group_spans,
    join_heads,
    sinks_of,
    spans_of,
    take_heads,
    windows_at,
    windows_of,
)
from jaxflow.model.op_registry import KV, OPS, Context, OpFunction, Weights, op
from jaxflow.model.rope import inverse_frequencies
from jaxflow.model.routing import ExpertRows, Routing, UnsortedTokens, weighted_sum
from jaxflow.model.sigmoid_router import choose_experts
from jaxflow.parallel.collectives import (
    Sum,
    UnaddedSum,
    added,
    exchange,
    gather_rows,
    local_rows,
    scatter_rows,
)
from pallas_kernels.gemm.expert_mlp import limits as expert_mlp_limits
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts
from pallas_kernels.pointwise.norm.reference import rms_norm
from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.pointwise.rope_append.reference import rope as rotated
from pallas_kernels.quantized import BlockFp8, Quantized


def find_op(name: str) -> OpFunction:
    """Return the op of this name. Raises: KeyError."""
    return OPS[name]


# ---- the ends of the model


@op("embed")
def embed(
    c: Context, w: Weights, token_ids: Int[Array, " t"], positions: Int[Array, " t"]
) -> Float[Array, "t D"]:
    """Return scaled rows of the vocabulary-parallel table, plus learned positions where the model has
    them."""
    x = _rows(c, w["embed"], token_ids)
    if c.config.embedding_scale != 1.0:
        x = x * jnp.asarray(c.config.embedding_scale, x.dtype)
    if c.config.learned_position_offset is not None:
        x = x + jnp.take(w["positions"], positions + c.config.learned_position_offset, axis=0, mode="clip")
    return x


def _rows(c: Context, table: Float[Array, "V D"], token_ids: Int[Array, " t"]) -> Float[Array, "t D"]:
    """Return rows of a vocabulary-parallel table."""
    local = token_ids - _vocabulary_offset(c, table)
    here = (local >= 0) & (local < table.shape[0])
    return _sum_shards(c, jnp.where(here[:, None], jnp.take(table, local, axis=0, mode="clip"), 0))


@op("layer_embed")
def layer_embed(
    c: Context, w: Weights, token_ids: Int[Array, " t"], x: Float[Array, "t D"]
) -> tuple[Float[Array, "t p"], ...]:
    """Return the input of each layer: its own embedding of the tokens, plus a normed product of x.

    x: the scaled embeddings of the model.
    """
    p, layers = c.config.layer_input_size, c.config.num_layers
    split = (x.shape[0], layers, p)
    product = c.kernels.gemm(x, w["layer_embed_proj"]) * jnp.asarray(c.config.hidden_size**-0.5, x.dtype)
    settings = {"eps": c.config.norm_eps, "offset": c.config.norm_weight_offset}
    normed = rms_norm(product.reshape(split), w["layer_embed_norm"], **settings)
    own = _rows(c, w["layer_embed"], token_ids) * jnp.asarray(p**0.5, x.dtype)
    both = (normed + own.reshape(split)) * jnp.asarray(2**-0.5, x.dtype)
    return tuple(both[:, layer] for layer in range(layers))


@op("final_norm")
def final_norm(
    c: Context, w: Weights, x: Float[Array, "t D"], y: Float[Array, "t D"] | None
) -> tuple[Array, Array]:
    """Return (x + y, its norm): the stream after the last layer, and the input of the head."""
    return _add_norm(c, w, "final_norm", x, y)


def head_table(w: Weights) -> Any:
    """Return the matrix of the head: its own, or the table of the embeddings."""
    return w["lm_head"] if "lm_head" in w else w["embed"]


@op("logits")
def logits(c: Context, w: Weights, hidden: Float[Array, "R D"]) -> Float[Array, "R W"]:
    """Return float32 scores over the padded vocabulary W, gathered from all shards; -inf at the padding."""
    scores = c.kernels.gemm(hidden, head_table(w), out_dtype=jnp.float32)
    if c.axis is not None:
        scores = lax.all_gather(scores, c.axis, axis=1, tiled=True)
    cap = c.config.logits_soft_cap
    if cap is not None:
        scores = jnp.tanh(scores / cap) * cap
    if scores.shape[1] == c.config.vocab_size:
        return scores
    return jnp.where(jnp.arange(scores.shape[1]) < c.config.vocab_size, scores, -jnp.inf)


def _vocabulary_offset(c: Context, table: Array) -> Int[Array, ""] | int:
    return 0 if c.axis is None else lax.axis_index(c.axis) * table.shape[0]


# ---- norms


@op("attn_norm")
def attn_norm(c: Context, w: Weights, x: Float[Array, "t D"], y: Sum | None = None) -> tuple[Array, Any]:
    """Return (x + y, its norm). y: the sum that the previous layer adds; None in the first layer."""
    x, h = _add_norm(c, w, "attn_norm", x, y, quantize=_quantized(w, "qkv"))
    return x, _in_blocks(c, w, "qkv", h)


@op("post_attn_norm")
def post_attn_norm(c: Context, w: Weights, y: Sum) -> Float[Array, "t D"]:
    """Return Gemma's norm of the attention block's output."""
    return _add_norm(c, w, "post_attn_norm", added(y), None)[1]


@op("mlp_norm")
def mlp_norm(c: Context, w: Weights, x: Float[Array, "t D"], y: Sum) -> tuple[Array, Any]:
    """Return (x + y, its norm).

    With a factor of the stream after the layer, the first result has it already, as `post_mlp_norm`'s has.
    `layer_gate` applies the factor in a model whose layers have embeddings of their own. A layer whose
    branches have norms of their own has no weight here (`ModelConfig.branch_norms`).
    """
    w = w | {"mlp_norm": norm_weight(w, "mlp_norm")}
    x, h = _add_norm(c, w, "mlp_norm", x, y, quantize=_quantized(w, "up_gate"))
    return _at_last_add(c, w, x), _in_blocks(c, w, "up_gate", h)


@op("post_mlp_norm")
def post_mlp_norm(c: Context, w: Weights, y: Sum) -> Float[Array, "t D"]:
    """Return Gemma's norm of the MLP's output.

    With `ModelConfig.branch_norms`, y of a mixture holds the shared and then the routed experts' output, and
    the result is the norm of the sum of their norms.
    """
    total = added(y)
    if "post_shared_norm" in w:
        shared, routed = jnp.split(total, 2, axis=-1)
        shared = _add_norm(c, w, "post_shared_norm", shared, None)[1]
        total = shared + _add_norm(c, w, "post_routed_norm", routed, None)[1]
    return _at_last_add(c, w, _add_norm(c, w, "post_mlp_norm", total, None)[1])


@op("layer_gate")
def layer_gate(
    c: Context, w: Weights, x: Float[Array, "t D"], y: Sum, layer_input: Float[Array, "T p"]
) -> tuple[Float[Array, "t D"], Float[Array, "t p"]]:
    """Return x + y with the factor of the stream after the layer, and act(gate(x + y)) · layer_input.

    layer_input: all rows. x and y may be the device's local rows.
    """
    x = x + added(y)
    gated = c.kernels.gemm(
        x, w["layer_gate"], None, activation=c.config.activation, gate_block=None, **_sms(c)
    )
    if c.axis is not None and layer_input.shape[0] != x.shape[0]:
        layer_input = local_rows(layer_input, c.axis)
    return _times_layer_scalar(w, x), gated * layer_input


@op("layer_proj")
def layer_proj(c: Context, w: Weights, gated: Float[Array, "t p"]) -> Float[Array, "t D"]:
    """Project a layer's gated input to the model's width. Every device has the whole weight."""
    return c.kernels.gemm(gated, w["layer_proj"], None, **_sms(c))


@op("post_layer_norm")
def post_layer_norm(c: Context, w: Weights, y: Float[Array, "t D"]) -> Float[Array, "t D"]:
    """Return the norm of a layer's projected input, with the factor of the stream after the layer."""
    return _times_layer_scalar(w, _add_norm(c, w, "post_layer_norm", y, None)[1])


def norm_weight(w: Weights, name: str) -> Float[Array, " D"]:
    """Return the weight of a layer's norm before a block; ones where each branch of the block has a norm."""
    return w[name] if name in w else jnp.ones_like(w["attn_norm"])


def _at_last_add(c: Context, w: Weights, x: Array) -> Array:
    """Return a term of the stream after the MLP, with the layer's factor if the layer adds nothing more."""
    return x if c.config.layer_input_size else _times_layer_scalar(w, x)


def _times_layer_scalar(w: Weights, x: Array) -> Array:
    return x * w["layer_scalar"] if "layer_scalar" in w else x


def _add_norm(
    c: Context, w: Weights, name: str, x: Array, y: Sum | None, *, quantize: bool = False
) -> tuple[Array, Any]:
    settings: dict[str, Any] = {
        "eps": c.config.norm_eps,
        "offset": c.config.norm_weight_offset,
        "quantize": quantize,
    }
    if isinstance(y, UnaddedSum):
        y, settings["other"] = y
    return c.kernels.add_norm(x, y, w[name], w.get(f"{name}_bias"), **settings, **_sms(c))


def _sms(c: Context) -> dict[str, int]:
    """Return the SMs that a plan leaves to a kernel, as a keyword argument."""
    return {} if c.sms is None else {"sms": c.sms}


# ---- GEMMs


@op("qkv")
def qkv(c: Context, w: Weights, h: Float[Array, "t D"] | Quantized) -> Float[Array, "t A"]:
    """Return all heads of one projection: per key/value head its query heads, its key, its value.

    With latent attention, see `jaxflow.model.latent_ops.project`.
    """
    if c.config.latent is not None:
        assert not isinstance(h, Quantized)  # an engine refuses quantization
        return latent_ops.project(c, w, h)
    return _gemm(c, w, "qkv", h, w.get("qkv_bias"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnmergedHeads:
    """The outputs of both attentions for the same tokens, in two arrays.

    start: the first token's index in the step. The step's first `num_decodes` tokens are decodes.
    """

    chunks: Float[Array, "t N H"]
    decodes: Float[Array, "t N H"]
    num_decodes: Int[Array, ""]
    start: int = dataclasses.field(metadata={"static": True})


@op("out_proj")
def out_proj(c: Context, w: Weights, o: Float[Array, "t N H"] | UnmergedHeads) -> Float[Array, "t D"]:
    """Project the heads of both attentions. Returns a partial sum under tensor parallelism."""
    quantized, both = _quantized(w, "out_proj"), o if isinstance(o, UnmergedHeads) else None
    heads = o.chunks if isinstance(o, UnmergedHeads) else o
    quantize_rows = c.kernels.for_heads(heads.shape[-1]).quantize_rows
    heads = heads.reshape(heads.shape[0], -1)
    if both is not None:
        decodes = both.decodes.reshape(heads.shape)
        if quantized:
            heads = quantize_rows(heads, decodes, both.num_decodes, start=both.start, sms=c.sms)
        else:
            is_decode = both.start + jnp.arange(heads.shape[0]) < both.num_decodes
            heads = jnp.where(is_decode[:, None], decodes, heads)
    elif quantized:
        heads = quantize_rows(heads, sms=c.sms)
    if c.config.latent is not None:
        heads = latent_ops.values(c, w, heads)
    heads = _in_blocks(c, w, "out_proj", heads)
    return _gemm(c, w, "out_proj", heads, _first_shard_only(c, w.get("out_proj_bias")))


@op("up_gate")
def up_gate(
    c: Context, layer: Layer | None, w: Weights, h: Float[Array, "t D"] | Quantized
) -> Float[Array, "t F"] | Quantized:
    """Return act(gate(h)) · up(h), or act(up(h)) where the MLP has no gate.

    layer: None for an MLP of the model's width.
    """
    config = c.config if layer is None else c.config.for_layer(layer)
    epilogue = {
        "activation": config.activation,
        "gate_block": config.gate_block if config.gated_mlp else None,
    }
    quantize = isinstance(w.get("down"), Quantized | BlockFp8)
    return _gemm(c, w, "up_gate", h, w.get("up_gate_bias"), **epilogue, quantize=quantize)


@op("down")
def down(c: Context, w: Weights, a: Float[Array, "t F"] | Quantized) -> Float[Array, "t D"]:
    """Project back to the model's width. Returns a partial sum under tensor parallelism."""
    return _gemm(c, w, "down", a, _first_shard_only(c, w.get("down_bias")))


def _quantized(w: Weights, name: str) -> bool:
    """Return whether the GEMM of this weight takes an e4m3 input with a scale for each token."""
    return isinstance(w.get(name), Quantized)


def _in_blocks(c: Context, w: Weights, name: str, x: Any) -> Any:
    """Return x in e4m3 with a scale for each 128 columns if the weight has scales of blocks."""
    return c.kernels.quantize_blocks(x) if isinstance(w.get(name), BlockFp8) else x


def _gemm(
    c: Context, w: Weights, name: str, x: Array | Quantized, bias: Array | None, **epilogue: Any
) -> Any:
    if isinstance(x, Quantized):  # The dtype of the residual stream is unknown from an e4m3 input.
        epilogue["out_dtype"] = w["attn_norm"].dtype
    return c.kernels.gemm(x, w[name], bias, **epilogue, **_sms(c))


def _first_shard_only(c: Context, bias: Array | None) -> Array | None:
    """Return a bias that the sum over shards must add once."""
    if bias is None or c.axis is None:
        return bias
    return jnp.where(lax.axis_index(c.axis) == 0, bias, jnp.zeros_like(bias))


# ---- attention


@op("rope_append")
def rope_append(
    c: Context,
    layer: Layer,
    w: Weights,
    batch: Batch,
    start: int,
    stop: int,
    fused: Float[Array, "t A"],
    kv: KV,
) -> tuple[Float[Array, "t N H"], KV]:
    """Split the heads, norm and rotate them, and write keys and values of tokens [start, stop) to their
    pages."""
    if c.config.latent is not None:
        return latent_ops.append(c, layer, w, batch, start, stop, fused, kv)
    h = c.config.for_layer(layer).head_dim
    rope = None if layer.rope is None else jnp.asarray(inverse_frequencies(layer.rope, h))
    if c.config.value_norm:
        fused = _with_normed_values(fused, kv, h, c.config.norm_eps)
    settings: dict[str, Any] = {
        "head_dim": h,
        "inv_freq": rope,
        "q_norm": w.get("q_norm"),
        "k_norm": w.get("k_norm"),
        "eps": c.config.norm_eps,
        "norm_offset": c.config.norm_weight_offset,
    }
    positions = batch.positions[start:stop]

    def append(columns: Array, pages: KV, group: int, scales: dict[str, Array]) -> tuple[Array, Any, Any]:
        slots = batch.slots[group, start:stop]
        given = columns, *pages, positions, slots
        call = (
            c.kernels.for_heads(h).rope_append
            if layer.spans is None
            else functools.partial(call_once_traced, c.kernels.rope_append)
        )
        return call(*given, **settings, **scales)

    if layer.spans is None:
        q, k_pages, v_pages = append(fused, kv, c.group(layer), kv_scales(w))
        return q, (k_pages, v_pages)
    parts = [
        append(take_heads(fused, heads, len(layer.spans), axis=1), pages, group, _scales_of(layer, heads, w))
        for (group, heads), pages in zip(layer.group_heads.items(), zip(*kv, strict=True), strict=True)
    ]
    queries, k_parts, v_parts = zip(*parts, strict=True)
    return join_heads(layer, queries), (k_parts, v_parts)


@op("rope")
def rope(
    c: Context, layer: Layer, w: Weights, batch: Batch, start: int, stop: int, fused: Float[Array, "t A"]
) -> Float[Array, "t N H"]:
    """Split the queries of a layer that shares keys and values, and norm and rotate them."""
    h = c.config.for_layer(layer).head_dim
    q = fused.reshape(fused.shape[0], -1, h)
    if "q_norm" in w:
        q = rms_norm(q, w["q_norm"], eps=c.config.norm_eps, offset=c.config.norm_weight_offset)
    if layer.rope is None:
        return q
    return rotated(q, batch.positions[start:stop], jnp.asarray(inverse_frequencies(layer.rope, h)))


def _with_normed_values(fused: Float[Array, "t A"], kv: KV, head_dim: int, eps: float) -> Float[Array, "t A"]:
    """Return the heads of one projection, each value over its root mean square."""
    keys = kv[0].values if isinstance(kv[0], Quantized) else kv[0]
    heads = fused.reshape(fused.shape[0], keys.shape[1], -1, head_dim)
    values = heads[:, :, -1:].astype(jnp.float32)
    values = values * lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + eps)
    return jnp.concatenate([heads[:, :, :-1], values.astype(fused.dtype)], axis=2).reshape(fused.shape)


@op("chunk_attention")
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
    """Return attention of the prefill tokens of [start, stop), and 0 at the decode tokens."""
    if c.config.latent is not None:
        return latent_ops.attend_chunks(c, layer, w, batch, start, stop, q, kv, work)
    if batch.chunks.shape[0] == 0:  # a program for steps of decodes only
        return jnp.zeros_like(q)
    chunks = batch.chunks_in(start, stop)
    if layer.spans is not None:
        positions = batch.positions[start:stop]
        return join_heads(
            layer,
            [
                call_once_traced(
                    c.kernels.chunk_attention, queries, *pages, batch.page_table[group], chunks, **settings
                )
                for group, queries, pages, settings in _head_groups(c, layer, w, q, kv, positions)
            ],
        )
    listed, table = work or (None, batch.page_table[c.group(layer)])
    pages, settings = _attention(c, layer, w, kv)
    kernels = c.kernels.for_heads(q.shape[-1])
    return kernels.chunk_attention(q, *pages, table, chunks, work=listed, **settings)


@op("decode_attention")
def decode_attention(
    c: Context,
    layer: Layer,
    w: Weights,
    batch: Batch,
    start: int,
    stop: int,
    q: Float[Array, "t N H"],
    kv: KV,
    chunks: Float[Array, "t N H"] | None = None,
    work: Any = None,
) -> Float[Array, "b N H"]:
    """Return attention of the decode tokens of [start, stop), and 0 at the prefill tokens.

    The result has no rows (b = 0, else b = t) where the range lies after the last possible decode.
    chunks: the output of `chunk_attention` for the same tokens. The result then holds both outputs.
    """
    if c.config.latent is not None:
        return latent_ops.attend_decodes(c, layer, w, batch, start, stop, q, kv, chunks, work)
    rows, lengths = batch.decode_rows(start, stop)
    if rows.start == rows.stop:
        return q[:0] if chunks is None else chunks
    into = chunks if batch.chunks.shape[0] else None  # without chunks the kernel itself writes 0 elsewhere
    if layer.spans is not None:
        parts = []
        for group, queries, pages, settings in _head_groups(c, layer, w, q, kv, lengths - 1):
            heads = layer.group_heads[group]
            own = None if into is None else take_heads(into, heads, len(layer.spans), axis=1)
            table = batch.page_table[group, rows]
            listed = None if work is None else _listed(c, work, spans_of(layer, heads))
            settings |= {"into": own, "work": listed}
            parts.append(
                call_once_traced(c.kernels.decode_attention, queries, *pages, table, lengths, **settings)
            )
        return join_heads(layer, parts)
    listed, table = work or (None, batch.page_table[c.group(layer), rows])
    pages, settings = _attention(c, layer, w, kv)
    kernels = c.kernels.for_heads(q.shape[-1])
    return kernels.decode_attention(q, *pages, table, lengths, into=into, work=listed, **settings)


def _attention(c: Context, layer: Layer, w: Weights, kv: KV) -> tuple[KV, dict[str, Any]]:
    """Return the arrays of the cache, and an attention kernel's settings."""
    k, v = kv
    scale = c.config.for_layer(layer).scale
    settings = {"scale": scale, "window": layer.window, "soft_cap": c.config.attention_soft_cap}
    if "unified_max" in w:
        settings["unified_max"] = w["unified_max"]
    if "sink_logits" in w:
        settings["sink_logits"] = w["sink_logits"]
    settings |= _sms(c)
    if isinstance(k, Quantized) and isinstance(v, Quantized):
        return (k.values, v.values), settings | {"k_scale": k.scale, "v_scale": v.scale}
    return (k, v), settings | kv_scales(w)


def _head_groups(
    c: Context, layer: Layer, w: Weights, q: Float[Array, "t N H"], kv: KV, positions: Int[Array, " r"]
) -> Iterator[tuple[int, Float[Array, "t n H"], KV, dict[str, Any]]]:
    """Yield (page group, queries, arrays of the cache, an attention kernel's
    settings) for a layer with spans.

    positions: of the queries whose spans the kernel needs.
    """
    assert layer.spans is not None
    for (group, heads), part in zip(layer.group_heads.items(), zip(*kv, strict=True), strict=True):
        pages, settings = _attention(c, layer, w | _scales_of(layer, heads, w), part)
        spans = {"spans": windows_at(layer, heads, positions), "sinks": sinks_of(layer)}
        yield group, take_heads(q, heads, len(layer.spans), axis=1), pages, settings | spans


def _scales_of(layer: Layer, heads: tuple[int, ...], w: Weights) -> dict[str, Array]:
    """Return the scales of an e4m3 cache for some KV heads of a layer with spans; empty for other caches."""
    assert layer.spans is not None
    kv_heads = len(layer.spans)
    return {name: take_heads(scale, heads, kv_heads, axis=0) for name, scale in kv_scales(w).items()}


def kv_scales(w: Weights) -> dict[str, Array]:
    """Return the scales of an e4m3 cache; empty for other caches."""
    return {name: w[name] for name in ("k_scale", "v_scale") if name in w}


def attention_work(c: Context, layer: Layer, batch: Batch, start: int, stop: int, name: str, kv: KV) -> Any:
    """Return the work list of an attention kernel for tokens [start, stop), and its rows of the page table.

    All layers of one window share the work list. With attention spans all layers share the decodes' lists of
    all layers, see `_listed`. Returns None where the kernel has nothing to do, and for chunks with spans. A
    list with latent attention comes without rows of the page table.
    name: `chunk_attention` or `decode_attention`. kv: the cache of any layer, for its shapes.
    """
    if c.config.latent is not None:
        listed = latent_ops.decode_work if name == "decode_attention" else latent_ops.chunk_work
        return listed(c, batch, start, stop)
    if layer.spans is not None and name == "chunk_attention":
        return None
    part = kv[0] if layer.spans is None else kv[0][0]
    keys = part.values if isinstance(part, Quantized) else part
    rows, lengths = batch.decode_rows(start, stop)
    if (batch.chunks.shape[0] if name == "chunk_attention" else rows.stop - rows.start) == 0:
        return None
    _, kv_heads, _, h = keys.shape
    kernels = c.kernels.for_heads(h)
    common = {"head_dim": h, "itemsize": keys.dtype.itemsize, "window": layer.window}
    if name == "chunk_attention":
        return kernels.list_chunk_work(
            batch.chunks_in(start, stop), stop - start, **common
        ), batch.page_table[c.group(layer)]
    group = c.config.num_heads // c.config.for_layer(layer).num_kv_heads
    made = functools.partial(kernels.list_decode_work, lengths, group=group, sms=c.sms, **common)
    if layer.spans is None:
        return made(kv_heads=kv_heads), batch.page_table[c.group(layer), rows]
    return {
        count: made(
            kv_heads=count,
            spans=jnp.stack([windows_of(spans, lengths - 1) for spans in listed]),
            sinks=sinks_of(layer),
        )
        for count, listed in group_spans(c.config.layers).items()
    }


def _listed(c: Context, work: dict[int, Any], spans: tuple[Span, ...]) -> Any:
    """Return the decode work list of a page group's heads in a layer, which have these spans.

    work: of `attention_work`, the lists of all layers and groups: for each number of heads, a stack of lists.
    """
    place = group_spans(c.config.layers)[len(spans)].index(spans)
    return jax.tree.map(lambda stack: lax.index_in_dim(stack, place, keepdims=False), work[len(spans)])


def merge_heads(
    is_decode: Bool[Array, " t"],
    decodes: Float[Array, "b N H"],
    chunks: Float[Array, "t N H"],
    *,
    in_place: bool = True,
) -> Float[Array, "t N H"]:
    """Return each token's heads from the attention that computed the token.

    in_place: read and write only the rows that could decode. Otherwise copy all rows in one pass, which a
    side stream needs.
    """
    rows, t = decodes.shape[0], chunks.shape[0]
    if not rows:
        return chunks
    if not in_place:
        return jnp.where(is_decode[:, None, None], jnp.pad(decodes, ((0, t - rows), (0, 0), (0, 0))), chunks)
    # Not by `.at[:rows].set`: two such scatters under shard_map crash XLA's CPU compiler (jaxlib 0.11.2).
    merged = jnp.where(is_decode[:rows, None, None], decodes, chunks[:rows])
    return lax.dynamic_update_slice_in_dim(chunks, merged, 0, axis=0)


# ---- sums over devices


def _sum_shards(c: Context, y: Array) -> Array:
    return y if c.axis is None else lax.psum(y, c.axis)


def _reduce(c: Context, y: Sum) -> Sum:
    """Return the sum over tensor-parallel shards, or over both pairs of a sum that `…_swap` made."""
    if not c.copies:
        return y if c.axis is None else _sum_shards(c, added(y))
    return exchange(added(y), _axis(c), distance=2 if isinstance(y, UnaddedSum) else 1)


def _swap(c: Context, y: Float[Array, "t D"]) -> UnaddedSum:
    """Return the sum over each pair of four tensor-parallel shards."""
    return exchange(y, _axis(c))


def _scatter(c: Context, y: Float[Array, "t D"]) -> Float[Array, "t/tp D"]:
    """Return the device's local rows of the sum over tensor-parallel shards."""
    return scatter_rows(y, _axis(c))


def _gather(c: Context, local: Any) -> Any:
    """Return all rows from the devices that hold them, and the scales of `Quantized` rows."""
    return gather_rows(local, _axis(c))


def _axis(c: Context) -> str:
    assert c.axis is not None, "a sum over devices on one device"
    return c.axis


attn_reduce, mlp_reduce = op("attn_reduce")(_reduce), op("mlp_reduce")(_reduce)
attn_swap, mlp_swap = op("attn_swap")(_swap), op("mlp_swap")(_swap)
attn_scatter, mlp_scatter = op("attn_scatter")(_scatter), op("mlp_scatter")(_scatter)
attn_gather, mlp_gather = op("attn_gather")(_gather), op("mlp_gather")(_gather)


# ---- mixture of experts


@op("router")
def router(
    c: Context, w: Weights, batch: Batch | None, start: int, stop: int, h: Float[Array, "t D"]
) -> Routing:
    """Return the likeliest experts of each token, with softmax weights over all experts.

    `ModelConfig.norm_topk_prob` scales the weights of a token's experts to a sum of 1. A `SigmoidRouter`
    chooses by `jaxflow.model.sigmoid_router`. A token goes to one copy of an expert
    (`jaxflow.model.expert_copies`). Of data-parallel ranks that exchange pairs, the result has the groups of
    `jaxflow.model.exchanged_experts`.
    """
    is_token = batch.is_token[start:stop] if batch is not None else None
    if one_router.sorts(c, w, h) and not _without_sort(c, w, h):
        return one_router.route_and_sort(c, w, h, is_token)
    chosen, weights = _choose(c, w, h)
    experts, logical = chosen, None
    if has_copies(w):
        assert batch is not None, "copies of experts need the step's tokens"
        ranks = 1 if c.rank_axis is None else lax.axis_size(c.rank_axis)
        rows = ranks * chosen.size / c.config.num_experts
        experts = choose_copies(w, chosen, batch.token_ids[start:stop], batch.positions[start:stop], rows)
        logical = chosen
    if c.exchanges_tokens and not gathers(c):
        groups = list_sent(experts, _num_held(c, w), is_token)
    else:
        groups = None  # `expert_up_gate` sorts the pairs
    return Routing(experts, weights, groups, logical, is_token)


def _num_held(c: Context, w: Weights) -> int:
    """Return the number of experts that all devices hold together: of slots where experts have copies."""
    return w[EXPERT_OF_SLOT].shape[0] if has_copies(w) else c.config.num_experts


def _choose(c: Context, w: Weights, h: Float[Array, "t D"]) -> tuple[Int[Array, "t e"], Float[Array, "t e"]]:
    """Return the experts of each token, and their weights."""
    h = _columns(w, "router_columns", h)
    if one_router.is_one(c, w, h):
        return one_router.route(c, w, h)
    scores = c.kernels.gemm(h, w["router"], w.get("router_bias"), out_dtype=jnp.float32)
    if c.config.router_scales:
        scores = scores * c.config.hidden_size**-0.5
    top_k = functools.partial(c.kernels.top_k, sms=c.sms)
    if c.config.router is not None:
        return choose_experts(scores, w["score_bias"], c.config, top_k=top_k)
    if c.config.norm_topk_prob:  # equals the softmax over all experts, scaled to a sum of 1
        weights, experts = top_k(scores, c.config.experts_per_token, softmax=True)
    else:
        weights, experts = top_k(jax.nn.softmax(scores, axis=-1), c.config.experts_per_token)
    if "expert_factors" in w:
        weights = weights * w["expert_factors"][experts]
    return experts, weights


def _columns(w: Weights, name: str, h: Float[Array, "t D"]) -> Float[Array, "t D"]:
    """Return h times the weight of each column, if the layer has this weight."""
    return (h * w[name]).astype(h.dtype) if name in w else h


def _groups(c: Context, w: Weights, experts: Int[Array, "t e"]) -> Groups:
    """Return the pairs of this device's experts, sorted by expert. Device i of ep
    holds the i-th E / ep experts.

    Where experts have copies, these are slots.
    """
    return c.kernels.list_groups(experts, _num_held(c, w), held=_held(c, w))


def _held(c: Context, w: Weights) -> HeldExperts | None:
    """Return this device's experts; None where every device has a share of all."""
    if c.expert_axis is None:
        return None
    count = _num_held(c, w) // lax.axis_size(c.expert_axis)
    return HeldExperts(lax.axis_index(c.expert_axis) * count, count)


@op("expert_dispatch")
def expert_dispatch(
    c: Context, w: Weights, h: Float[Array, "t D"], routing: Routing
) -> GatheredTokens | ReceivedRows:
    """Return the rows that this device's experts may need of all data-parallel ranks' tokens."""
    h = _columns(w, "routed_norm", h)
    if gathers(c):
        return gather_tokens(c, h, routing, _num_held(c, w))
    return send_to_experts(c, h, routing)


@op("expert_combine")
def expert_combine(
    c: Context, y: Float[Array, "n*t D"] | ReceivedRows, routing: Routing
) -> Float[Array, "t D"]:
    """Return the weighted sum of the experts' outputs of each of this rank's tokens.

    The sum is partial over a rank's devices. y: the result of `expert_down`.
    """
    return send_back(c, y, routing) if isinstance(y, ReceivedRows) else scatter_sums(c, y)


@op("expert_up_gate")
def expert_up_gate(
    c: Context, w: Weights, h: Float[Array, "t D"] | GatheredTokens | ReceivedRows, routing: Routing
) -> ExpertRows | UnsortedTokens:
    """Return act(gate) · up of each token at each of its experts, in one GEMM over pairs sorted by expert.

    h: under data-parallel ranks the result of `expert_dispatch`. The result then has the pairs of this
    device's experts. Where one kernel computes both products, the result has its inputs.
    """
    gates = {"activation": c.config.activation, "gate_block": gate_block(c.config.expert_intermediate_size)}
    gates |= _expert_bias(w.get("expert_up_gate_bias"))
    weight, back, weights = w["expert_up_gate"], None, None
    if isinstance(h, ReceivedRows):
        groups, back = h.groups, h.back
        rows = _as_stored(c, weight, h.rows)
    elif isinstance(h, GatheredTokens):
        weights = h.weights
        groups, rows = _sorted(c, w, h.h, h.experts, None)
    else:
        tokens, used = _columns(w, "routed_norm", h), _used(routing)
        if _without_sort(c, w, tokens):
            return UnsortedTokens(tokens, used)
        groups, rows = routing.sorted_rows or _sorted(c, w, tokens, routing.experts, used)
    if back is None and _in_one_kernel(c, w, groups):
        return ExpertRows(rows, groups, back, weights, pending=True)
    a = c.kernels.grouped_gemm(rows, weight, groups, **gates, **_sms(c))
    return ExpertRows(a, groups, back, weights)


def _used(routing: Routing) -> Int[Array, ""] | None:
    """Return the number of tokens before the padding, which gets no rows; None without padding.

    Among tokens that data-parallel ranks gathered, padding has no experts.
    """
    return None if routing.is_token is None else jnp.sum(routing.is_token, dtype=jnp.int32)


def _sorted(
    c: Context,
    w: Weights,
    tokens: Float[Array, "t D"],
    experts: Int[Array, "t e"],
    used: Int[Array, ""] | None,
) -> tuple[Groups, Float[Array, "M D"] | Quantized]:
    """Return the groups of this device's experts, and their rows in the form of the weight."""
    weight = w["expert_up_gate"]
    stored = {"quantize": isinstance(weight, Quantized), "blocks": isinstance(weight, BlockFp8)}
    placed = {"held": _held(c, w), "used": used}
    return c.kernels.sort_rows(tokens, experts, _num_held(c, w), **stored, **placed, **_sms(c))


def _without_sort(c: Context, w: Weights, tokens: Float[Array, "t D"]) -> bool:
    """Return whether `expert_down` computes both products in one kernel, from the tokens themselves."""
    few = tokens.shape[0] <= c.kernels.expert_mlp_bf16_max_tokens
    block, weights = gate_block(c.config.expert_intermediate_size), (w["expert_up_gate"], w["expert_down"])
    takes = expert_mlp_limits.supports_few(tokens.shape[0], *weights, block)
    return few and takes and _whole_without_bias(c, w) and c.expert_axis is None


def _whole_without_bias(c: Context, w: Weights) -> bool:
    """Return whether no plan cuts the tokens or bounds the SMs, and the experts have no biases."""
    return c.whole and c.sms is None and "expert_up_gate_bias" not in w and "expert_down_bias" not in w


def _in_one_kernel(c: Context, w: Weights, groups: Groups) -> bool:
    """Return whether one kernel computes both products of the experts, in `expert_down`."""
    quantized = isinstance(w["expert_up_gate"], Quantized)
    most = c.kernels.expert_mlp_max_tokens if quantized else c.kernels.expert_mlp_bf16_max_tokens
    few = groups.places.shape[0] <= most and groups.arrived is not None
    block, weights = gate_block(c.config.expert_intermediate_size), (w["expert_up_gate"], w["expert_down"])
    takes = expert_mlp_limits.supports(groups.rows, *weights, block)
    return few and takes and _whole_without_bias(c, w)


@op("expert_down")
def expert_down(
    c: Context, w: Weights, a: ExpertRows | UnsortedTokens | Float[Array, "t e F"], routing: Routing
) -> Sum | ReceivedRows:
    """Return the weighted sum of the experts' outputs; a partial sum over tensor-parallel devices.

    Under data-parallel ranks the result is for `expert_combine`: this device's part of the sum of each
    gathered token, or the outputs of the received rows.

    a: in the tokens' order if the rows of `expert_up_gate` were of other tokens.
    """
    gates = {"activation": c.config.activation, "gate_block": gate_block(c.config.expert_intermediate_size)}
    if isinstance(a, UnsortedTokens):
        weights = w["expert_up_gate"], w["expert_down"]
        y, places = c.kernels.few_expert_mlp(a.rows, routing.experts, *weights, used=a.used, **gates)
        return _weighted(c, WeightedRows(y, places, routing.weights, a.used is not None))
    if not isinstance(a, ExpertRows):
        groups = _groups(c, w, routing.experts)
        a = ExpertRows(a.reshape(-1, a.shape[-1])[groups.pairs], groups)
    if a.pending:
        y = c.kernels.expert_mlp(
            a.rows,
            w["expert_up_gate"],
            w["expert_down"],
            a.groups,
            **gates,
        )
    else:
        assert not isinstance(a.rows, Quantized)  # the first product's result
        shares = c.expert_axis is None  # each device has a share of every expert, and all have the bias
        down_bias = w.get("expert_down_bias")
        bias = _expert_bias(_first_shard_only(c, down_bias) if shares else down_bias)
        rows = _as_stored(c, w["expert_down"], a.rows)
        y = c.kernels.grouped_gemm(rows, w["expert_down"], a.groups, **bias, **_sms(c))
    if a.back is not None:
        return ReceivedRows(y, a.groups, a.back)
    if a.weights is not None:
        return weighted_sum(y, a.groups, a.weights)
    return _weighted(c, WeightedRows(y, a.groups.places, routing.weights, a.groups.partial))


def _weighted(c: Context, terms: WeightedRows) -> Sum:
    """Return the weighted sum of each token's rows, or its terms where the next layer's norm adds them."""
    alone = c.whole and c.axis is None and c.expert_axis is None
    plain = not c.config.post_norms and not c.config.shared_expert_intermediate_size
    if alone and plain and terms.weights.shape[0] <= c.kernels.norm_of_rows_max_tokens:
        return terms
    return terms.total()


@op("shared_up_gate")
def shared_up_gate(c: Context, w: Weights, h: Float[Array, "t D"]) -> Float[Array, "t F"] | Quantized:
    """Return act(gate(h)) · up(h) of the experts that every token goes to."""
    gates = {
        "activation": c.config.activation,
        "gate_block": gate_block(c.config.shared_expert_intermediate_size),
    }
    gates["quantize"] = isinstance(w.get("shared_down"), BlockFp8)
    h = _in_blocks(c, w, "shared_up_gate", _columns(w, "shared_norm", h))
    return _gemm(c, w, "shared_up_gate", h, None, **gates)


@op("shared_down")
def shared_down(
    c: Context, w: Weights, a: Float[Array, "t F"] | Quantized, routed: Float[Array, "t D"]
) -> Float[Array, "t D"]:
    """Return the sum of the shared experts' output and of the routed experts' output;
    partial under tensor parallelism.

    With `ModelConfig.branch_norms`, return both outputs side by side, [t, 2 D].
    """
    shared = _gemm(c, w, "shared_down", a, None)
    return jnp.concatenate([shared, routed], axis=-1) if c.config.branch_norms else routed + shared


def _as_stored(c: Context, weight: Array | Quantized | BlockFp8, x: Array) -> Array | Quantized:
    """Return x in e4m3 if the experts' weight is e4m3, with scales of blocks if the weight has them."""
    if isinstance(weight, BlockFp8):
        return c.kernels.quantize_blocks(x)
    return c.kernels.quantize_rows(x, sms=c.sms) if isinstance(weight, Quantized) else x


def _expert_bias(bias: Array | None) -> dict[str, Array]:
    """Return the bias of each expert [E, columns] as a keyword argument, if the model has one."""
    return {} if bias is None else {"bias": bias}

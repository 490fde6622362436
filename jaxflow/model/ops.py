"""The ops of the graph, each as a function of a token range; plans and the plain forward are made of these.

An op takes what it reads and returns what it makes. The residual stream is added where it is next normed, so
that one kernel does both. `x` is the residual stream [t, D], `h` a normed input [t, D], `y` what a block adds
to x [t, D]. Where a weight is e4m3 (`Quantized`), so is the input of its product: `h` and the heads with a
scale for each token, `a`, whose rows no kernel sees whole, with one for every 128 columns.

    embed -> x                                   attn_norm(x, y) -> x, h
    qkv(h) -> qkv                                rope_append(qkv, kv) -> q, kv
    chunk_attention(q, kv) -> o                  decode_attention(q, kv, o) -> o
    out_proj(o) -> y                             attn_reduce(y) -> y, post_attn_norm(y) -> y
    mlp_norm(x, y) -> x, h                       up_gate(h) -> a, down(a) -> y
    router(h) -> routing                         expert_up_gate(h, routing) -> a, expert_down(a, routing) -> y
    mlp_reduce(y) -> y, post_mlp_norm(y) -> y    final_norm(x, y) -> x, hidden; logits(hidden)

Scattered (`jaxflow.parallel.sequence_parallel`), y, x and what a norm makes of them are each device's own rows:

    attn_norm(x, y) -> x, h; attn_gather(h) -> h                attn_scatter(y) -> y; mlp_norm(x, y) -> x, h;
    mlp_gather(h) -> h
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxflow.config import Layer
from jaxflow.model.attention import (  # noqa: F401  (ops, too)
    attention_work,
    chunk_attention,
    decode_attention,
    kv_scales,
    merge_heads,
)
from jaxflow.model.batch import Batch
from jaxflow.model.context import KV, Context, Weights
from jaxflow.model.moe import Routing, expert_down, expert_up_gate, router  # noqa: F401  (ops, too)
from jaxflow.model.rope import inverse_frequencies
from jaxflow.parallel.peer_reduce import Halves, Sum, added, exchanged
from jaxflow.parallel.sequence_parallel import (  # noqa: F401  (ops, too)
    attn_gather,
    attn_scatter,
    mlp_gather,
    mlp_scatter,
)
from pallas_kernels.quantized import Quantized


def _add_norm(
    c: Context, w: Weights, name: str, x: Array, y: Sum | None, *, quantize: bool = False
) -> tuple[Array, Any]:
    settings: dict[str, Any] = {
        "eps": c.config.norm_eps,
        "offset": c.config.norm_weight_offset,
        "quantize": quantize,
    }
    if isinstance(y, Halves):
        y, settings["other"] = y
    if c.sms is not None:
        settings["sms"] = c.sms
    return c.kernels.add_norm(x, y, w[name], w.get(f"{name}_bias"), **settings)


def _first_shard_only(c: Context, bias: Array | None) -> Array | None:
    """A bias that must be added once, before the sum over shards."""
    if bias is None or c.axis is None:
        return bias
    return jnp.where(lax.axis_index(c.axis) == 0, bias, jnp.zeros_like(bias))


def _sum_shards(c: Context, y: Array) -> Array:
    return y if c.axis is None else lax.psum(y, c.axis)


def _vocabulary_offset(c: Context, table: Array) -> Int[Array, ""] | int:
    return 0 if c.axis is None else lax.axis_index(c.axis) * table.shape[0]


def embed(
    c: Context, w: Weights, token_ids: Int[Array, " t"], positions: Int[Array, " t"]
) -> Float[Array, "t D"]:
    """Rows of the vocabulary-parallel table, scaled, with learned positions where the model has them."""
    table = w["embed"]
    local = token_ids - _vocabulary_offset(c, table)
    here = (local >= 0) & (local < table.shape[0])
    x = jnp.where(here[:, None], jnp.take(table, local, axis=0, mode="clip"), 0)
    x = _sum_shards(c, x)
    if c.config.embedding_scale != 1.0:
        x = x * jnp.asarray(c.config.embedding_scale, x.dtype)
    if c.config.learned_position_offset is not None:
        x = x + jnp.take(w["positions"], positions + c.config.learned_position_offset, axis=0, mode="clip")
    return x


def _quantized(w: Weights, name: str) -> bool:
    """Whether a weight takes its input in e4m3."""
    return isinstance(w.get(name), Quantized)


def _gemm(c: Context, w: Weights, name: str, x: Array | Quantized, bias: Array | None, **behind: Any) -> Any:
    if isinstance(x, Quantized):  # its dtype does not say what the stream's is
        behind["out_dtype"] = w["attn_norm"].dtype
    if c.sms is not None:
        behind["sms"] = c.sms
    return c.kernels.gemm(x, w[name], bias, **behind)


def attn_norm(c: Context, w: Weights, x: Float[Array, "t D"], y: Sum | None) -> tuple[Array, Any]:
    """(x + y, its norm); y is what the layer before adds, None in the first."""
    return _add_norm(c, w, "attn_norm", x, y, quantize=_quantized(w, "qkv"))


def qkv(c: Context, w: Weights, h: Float[Array, "t D"] | Quantized) -> Float[Array, "t A"]:
    """All heads of one projection: for each key/value head its query heads, its key, its value."""
    return _gemm(c, w, "qkv", h, w.get("qkv_bias"))


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
    """Splits the heads, norms and rotates them, writes keys and values of tokens [start, stop) to their
    pages.
    """
    rope = None if layer.rope is None else jnp.asarray(inverse_frequencies(layer.rope, c.config.head_dim))
    q, k_pages, v_pages = c.kernels.rope_append(
        fused,
        *kv,
        batch.positions[start:stop],
        batch.slots[c.group(layer), start:stop],
        head_dim=c.config.head_dim,
        inv_freq=rope,
        q_norm=w.get("q_norm"),
        k_norm=w.get("k_norm"),
        eps=c.config.norm_eps,
        norm_offset=c.config.norm_weight_offset,
        **kv_scales(w),
    )
    return q, (k_pages, v_pages)


def out_proj(
    c: Context,
    w: Weights,
    o: Float[Array, "t N H"],
    decoded: Float[Array, "t N H"] | None = None,
    num_decodes: Int[Array, ""] | None = None,
    start: int = 0,
) -> Float[Array, "t D"]:
    """Projects the heads of both attentions; a partial sum under tensor parallelism.

    decoded: the heads of decodes, where o has the others' alone; the step's first `num_decodes` tokens are
    decodes, these begin at `start`.
    """
    o = o.reshape(o.shape[0], -1)
    if decoded is not None and num_decodes is not None:
        decoded = decoded.reshape(o.shape)
        if _quantized(w, "out_proj"):
            o = c.kernels.quantize_rows(o, decoded, num_decodes, start=start, sms=c.sms)
        else:
            o = jnp.where((start + jnp.arange(o.shape[0]) < num_decodes)[:, None], decoded, o)
    elif _quantized(w, "out_proj"):
        o = c.kernels.quantize_rows(o, sms=c.sms)
    return _gemm(c, w, "out_proj", o, _first_shard_only(c, w.get("out_proj_bias")))


def attn_swap(c: Context, y: Float[Array, "t D"]) -> Halves:
    """The sum over pairs of four tensor-parallel shards."""
    return exchanged(c, y)


mlp_swap = attn_swap


def attn_reduce(c: Context, y: Sum) -> Sum:
    """The sum over tensor-parallel shards; of what was swapped, over both pairs."""
    if not c.copies:
        return _sum_shards(c, added(y))
    return exchanged(c, added(y), distance=2 if isinstance(y, Halves) else 1)


mlp_reduce = attn_reduce


def post_attn_norm(c: Context, w: Weights, y: Sum) -> Float[Array, "t D"]:
    """Gemma's norm of what attention adds."""
    return _add_norm(c, w, "post_attn_norm", added(y), None)[1]


def mlp_norm(c: Context, w: Weights, x: Float[Array, "t D"], y: Sum) -> tuple[Array, Any]:
    """(x + y, its norm)."""
    return _add_norm(c, w, "mlp_norm", x, y, quantize=_quantized(w, "up_gate"))


def up_gate(c: Context, w: Weights, h: Float[Array, "t D"] | Quantized) -> Float[Array, "t F"] | Quantized:
    """act(gate(h)) · up(h), or act(up(h)) where the MLP has no gate."""
    behind = {
        "activation": c.config.activation,
        "gate_block": c.config.gate_block if c.config.gated_mlp else None,
    }
    return _gemm(c, w, "up_gate", h, w.get("up_gate_bias"), **behind, quantize=_quantized(w, "down"))


def down(c: Context, w: Weights, a: Float[Array, "t F"] | Quantized) -> Float[Array, "t D"]:
    """Back to the model's width; a partial sum under tensor parallelism."""
    return _gemm(c, w, "down", a, _first_shard_only(c, w.get("down_bias")))


def post_mlp_norm(c: Context, w: Weights, y: Sum) -> Float[Array, "t D"]:
    """Gemma's norm of what the MLP adds."""
    return _add_norm(c, w, "post_mlp_norm", added(y), None)[1]


def final_norm(
    c: Context, w: Weights, x: Float[Array, "t D"], y: Float[Array, "t D"] | None
) -> tuple[Array, Array]:
    """(x + y, its norm): the stream after the last layer, and what the head reads."""
    return _add_norm(c, w, "final_norm", x, y)


def logits(c: Context, w: Weights, hidden: Float[Array, "R D"]) -> Float[Array, "R W"]:
    """Float32 scores over the padded vocabulary W, gathered from all shards; -inf beyond the vocabulary."""
    table = w.get("lm_head", w["embed"])
    scores = c.kernels.gemm(hidden, table, out_dtype=jnp.float32)
    if c.axis is not None:
        scores = lax.all_gather(scores, c.axis, axis=1, tiled=True)
    cap = c.config.logits_soft_cap
    if cap is not None:
        scores = jnp.tanh(scores / cap) * cap
    if scores.shape[1] == c.config.vocab_size:
        return scores
    return jnp.where(jnp.arange(scores.shape[1]) < c.config.vocab_size, scores, -jnp.inf)

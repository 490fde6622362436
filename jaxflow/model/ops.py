"""The ops of the graph, each as a function of a token range; plans and the plain forward are made of these.

An op takes what it reads and returns what it makes. The residual stream is added where it is next normed, so that
one kernel does both. `x` is the residual stream [t, D], `h` a normed input [t, D], `y` what a block adds to x [t, D].
Where a weight is e4m3 (`Quantized`), so is the input of its product: `h` with a scale for each token, and the heads and
`a`, whose rows no kernel sees whole, with one for every 128 columns.

    embed -> x                                   attn_norm(x, y) -> x, h
    qkv(h) -> qkv                                rope_append(qkv, kv) -> q, kv
    decode_attention(q, kv) -> o                 chunk_attention(q, kv) -> o
    out_proj(o, o) -> y                          attn_reduce(y) -> y, post_attn_norm(y) -> y
    mlp_norm(x, y) -> x, h                       up_gate(h) -> a, down(a) -> y
    router(h) -> routing                         expert_up_gate(h, routing) -> a, expert_down(a, routing) -> y
    mlp_reduce(y) -> y, post_mlp_norm(y) -> y    final_norm(x, y) -> x, hidden; logits(hidden)

Scattered (`jaxflow.model.scattered`), y, x and what a norm makes of them are each device's own rows:

    attn_norm(x, y) -> x, h; attn_gather(h) -> h                attn_scatter(y) -> y; mlp_norm(x, y) -> x, h; mlp_gather(h) -> h
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxflow.config import Layer, ModelConfig, gate_block
from jaxflow.model.batch import Batch
from jaxflow.model.rope import inverse_frequencies
from jaxflow.model.scattered import attn_gather, attn_scatter, mlp_gather, mlp_scatter  # noqa: F401  (ops, too)
from pallas_kernels.kernel_set import KernelSet
from pallas_kernels.quantized import Quantized
from pallas_kernels.reference import gate_mul, quantize_blocks

Weights = dict[str, Any]
KV = tuple[Any, Any]  # keys and values of a layer, in one of the forms of `jaxflow.memory.kv_cache`


@dataclasses.dataclass(frozen=True)
class Context:
    """What is fixed for a compiled step. `axis` is the tensor-parallel mesh axis inside `shard_map`, or None.

    sms: how many SMs products and attention may occupy, where a plan shares the device between ops; None: all.
    beside: the op runs on a side stream, where XLA (jaxlib 0.11.2) cannot update an array in place.
    """

    config: ModelConfig
    kernels: KernelSet
    axis: str | None = None
    sms: int | None = None
    beside: bool = False

    def group(self, layer: Layer) -> int:
        """The layer's row on the page table's group axis."""
        return self.config.windows.index(layer.window)


@flax.struct.dataclass
class Routing:
    """Which experts a token goes to (E' of them) and how much each weighs."""

    experts: Int[Array, "t e"]
    weights: Float[Array, "t e"]


def _add_norm(c: Context, w: Weights, name: str, x: Array, y: Array | None, *, quantize: bool = False) -> tuple[Array, Any]:
    settings = {"eps": c.config.norm_eps, "offset": c.config.norm_weight_offset, "quantize": quantize}
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


def embed(c: Context, w: Weights, token_ids: Int[Array, " t"], positions: Int[Array, " t"]) -> Float[Array, "t D"]:
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


def attn_norm(c: Context, w: Weights, x: Float[Array, "t D"], y: Float[Array, "t D"] | None) -> tuple[Array, Any]:
    """(x + y, its norm); y is what the layer before adds, None in the first."""
    return _add_norm(c, w, "attn_norm", x, y, quantize=_quantized(w, "qkv"))


def qkv(c: Context, w: Weights, h: Float[Array, "t D"] | Quantized) -> Float[Array, "t A"]:
    """All heads of one projection: for each key/value head its query heads, its key, its value."""
    return _gemm(c, w, "qkv", h, w.get("qkv_bias"))


def rope_append(
    c: Context, layer: Layer, w: Weights, batch: Batch, start: int, stop: int, fused: Float[Array, "t A"], kv: KV
) -> tuple[Float[Array, "t N H"], KV]:
    """Splits the heads, norms and rotates them, writes keys and values of tokens [start, stop) to their pages."""
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
        **_kv_scales(w),
    )
    return q, (k_pages, v_pages)


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
    return (k, v), settings | _kv_scales(w)


def _kv_scales(w: Weights) -> dict[str, Array]:
    """What the numbers of an e4m3 cache are multiplied with; nothing for other caches."""
    return {name: w[name] for name in ("k_scale", "v_scale") if name in w}


def decode_attention(
    c: Context, layer: Layer, w: Weights, batch: Batch, start: int, stop: int, q: Float[Array, "t N H"], kv: KV
) -> Float[Array, "b N H"]:
    """Attention of the decode tokens of [start, stop): one output for each row that could decode there (b <= t)."""
    rows, lengths = batch.decode_rows(start, stop)
    if rows.start == rows.stop:  # the range lies beyond any decode
        return q[:0]
    table = batch.page_table[c.group(layer), rows]
    pages, settings = _attention(c, layer, w, kv)
    return c.kernels.decode_attention(q[: rows.stop - rows.start], *pages, table, lengths, **settings)


def chunk_attention(
    c: Context, layer: Layer, w: Weights, batch: Batch, start: int, stop: int, q: Float[Array, "t N H"], kv: KV
) -> Float[Array, "t N H"]:
    """Attention of the prefill tokens of [start, stop); 0 at the decode tokens."""
    table = batch.page_table[c.group(layer)]
    pages, settings = _attention(c, layer, w, kv)
    return c.kernels.chunk_attention(q, *pages, table, batch.chunks_in(start, stop), **settings)


def merge_heads(
    is_decode: Bool[Array, " t"], decoded: Float[Array, "b N H"], prefilled: Float[Array, "t N H"], *, in_place: bool = True
) -> Float[Array, "t N H"]:
    """Each token's heads from the attention that computed them. Merging the result with itself changes nothing.

    in_place: only the rows that could decode are read and written; else all rows are, in one pass.
    """
    rows, t = decoded.shape[0], prefilled.shape[0]
    if not in_place:
        return jnp.where(is_decode[:, None, None], jnp.pad(decoded, ((0, t - rows), (0, 0), (0, 0))), prefilled)
    # Not by `.at[:rows].set`: two such scatters under shard_map crash XLA's CPU compiler (jaxlib 0.11.2).
    merged = jnp.where(is_decode[:rows, None, None], decoded, prefilled[:rows])
    return lax.dynamic_update_slice_in_dim(prefilled, merged, 0, axis=0)


def out_proj(
    c: Context, w: Weights, is_decode: Bool[Array, " t"], decoded: Float[Array, "b N H"], prefilled: Float[Array, "t N H"]
) -> Float[Array, "t D"]:
    """Merges the heads of both attentions and projects; a partial sum under tensor parallelism."""
    o = merge_heads(is_decode, decoded, prefilled, in_place=not c.beside)
    o = o.reshape(o.shape[0], -1)
    o = quantize_blocks(o) if _quantized(w, "out_proj") else o
    return _gemm(c, w, "out_proj", o, _first_shard_only(c, w.get("out_proj_bias")))


def attn_reduce(c: Context, y: Float[Array, "t D"]) -> Float[Array, "t D"]:
    """The sum over tensor-parallel shards."""
    return _sum_shards(c, y)


mlp_reduce = attn_reduce


def post_attn_norm(c: Context, w: Weights, y: Float[Array, "t D"]) -> Float[Array, "t D"]:
    """Gemma's norm of what attention adds."""
    return _add_norm(c, w, "post_attn_norm", y, None)[1]


def mlp_norm(c: Context, w: Weights, x: Float[Array, "t D"], y: Float[Array, "t D"]) -> tuple[Array, Any]:
    """(x + y, its norm)."""
    return _add_norm(c, w, "mlp_norm", x, y, quantize=_quantized(w, "up_gate"))


def up_gate(c: Context, w: Weights, h: Float[Array, "t D"] | Quantized) -> Float[Array, "t F"] | Quantized:
    """act(gate(h)) · up(h), or act(up(h)) where the MLP has no gate."""
    behind = {"activation": c.config.activation, "gate_block": c.config.gate_block if c.config.gated_mlp else None}
    return _gemm(c, w, "up_gate", h, w.get("up_gate_bias"), **behind, quantize=_quantized(w, "down"))


def down(c: Context, w: Weights, a: Float[Array, "t F"] | Quantized) -> Float[Array, "t D"]:
    """Back to the model's width; a partial sum under tensor parallelism."""
    return _gemm(c, w, "down", a, _first_shard_only(c, w.get("down_bias")))


def router(c: Context, w: Weights, h: Float[Array, "t D"]) -> Routing:
    """The likeliest experts of each token; weights are softmax over all, renormed over the chosen where the model says."""
    scores = jax.nn.softmax(c.kernels.gemm(h, w["router"], out_dtype=jnp.float32), axis=-1)
    weights, experts = lax.top_k(scores, c.config.experts_per_token)
    if c.config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdims=True)
    return Routing(experts, weights)


def _by_expert(routing: Routing, num_experts: int) -> tuple[Array, Array, Array]:
    """(order that sorts the (token, choice) pairs by expert, its inverse, pairs of each expert)."""
    flat = routing.experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    return order, jnp.argsort(order), jnp.bincount(flat, length=num_experts).astype(jnp.int32)


def _expert_gemm(x: Float[Array, "m D"], w: Float[Array, "E F D"], group_sizes: Int[Array, " E"]) -> Float[Array, "m F"]:
    """Rows grouped by expert, each group times its expert's matrix."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
    return lax.ragged_dot_general(x, w, group_sizes, numbers)


def expert_up_gate(c: Context, w: Weights, h: Float[Array, "t D"], routing: Routing) -> Float[Array, "t e F"]:
    """act(gate) · up of each token at each of its experts."""
    order, back, sizes = _by_expert(routing, c.config.num_experts)
    y = _expert_gemm(h[order // routing.experts.shape[1]], w["expert_up_gate"], sizes)
    a = gate_mul(y, gate_block(c.config.expert_intermediate_size), c.config.activation)
    return a[back].reshape(*routing.experts.shape, -1)


def expert_down(c: Context, w: Weights, a: Float[Array, "t e F"], routing: Routing) -> Float[Array, "t D"]:
    """The experts' outputs, weighed and summed; a partial sum under tensor parallelism."""
    order, back, sizes = _by_expert(routing, c.config.num_experts)
    y = _expert_gemm(a.reshape(-1, a.shape[-1])[order], w["expert_down"], sizes)[back]
    y = y.reshape(*routing.experts.shape, -1).astype(jnp.float32) * routing.weights[..., None]
    return y.sum(1).astype(a.dtype)


def post_mlp_norm(c: Context, w: Weights, y: Float[Array, "t D"]) -> Float[Array, "t D"]:
    """Gemma's norm of what the MLP adds."""
    return _add_norm(c, w, "post_mlp_norm", y, None)[1]


def final_norm(c: Context, w: Weights, x: Float[Array, "t D"], y: Float[Array, "t D"] | None) -> tuple[Array, Array]:
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
    return jnp.where(jnp.arange(scores.shape[1]) < c.config.vocab_size, scores, -jnp.inf)

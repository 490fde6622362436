"""The plain forward: every op over all tokens of the step, in order. Every plan must compute this function."""

import jax
from jaxtyping import Array, Float

from jaxflow.model import ops
from jaxflow.model.batch import Batch
from jaxflow.model.ops import KV, Context, Weights
from jaxflow.parallel.peer_reduce import added


def forward(
    c: Context, weights: Weights, kv: list[KV], batch: Batch
) -> tuple[Float[Array, "R D"], Float[Array, "T D"], list[KV]]:
    """One step through all layers.

    Returns:
      the normed hidden state of each row's sampled token, the residual stream of all tokens after the last
      layer (for prompt log-probabilities), and the cache with this step's keys and values.
    """
    t = batch.num_tokens
    with jax.named_scope("embed"):
        x = ops.embed(c, weights, batch.token_ids, batch.positions)
    y, kv = None, list(kv)
    for i, (layer, w) in enumerate(zip(c.config.layers, weights["layers"], strict=True)):
        with jax.named_scope("attn_norm"):
            x, h = ops.attn_norm(c, w, x, y)
        with jax.named_scope("qkv"):
            fused = ops.qkv(c, w, h)
        with jax.named_scope("rope_append"):
            q, kv[i] = ops.rope_append(c, layer, w, batch, 0, t, fused, kv[i])
        with jax.named_scope("chunk_attention"):
            o = ops.chunk_attention(c, layer, w, batch, 0, t, q, kv[i])
        with jax.named_scope("decode_attention"):
            o = ops.decode_attention(c, layer, w, batch, 0, t, q, kv[i], o)
        with jax.named_scope("out_proj"):
            y = ops.out_proj(c, w, o)
        with jax.named_scope("attn_reduce"):
            y = ops.attn_reduce(c, y)
        if c.config.post_norms:
            with jax.named_scope("post_attn_norm"):
                y = ops.post_attn_norm(c, w, y)
        with jax.named_scope("mlp_norm"):
            x, h = ops.mlp_norm(c, w, x, y)
        y = _experts(c, w, h) if layer.experts else _mlp(c, w, h)
        with jax.named_scope("mlp_reduce"):
            y = ops.mlp_reduce(c, y)
        if c.config.post_norms:
            with jax.named_scope("post_mlp_norm"):
                y = ops.post_mlp_norm(c, w, y)
    with jax.named_scope("final_norm"):
        x = x if y is None else x + added(y)
        _, hidden = ops.final_norm(c, weights, x[batch.sample_tokens], None)
    return hidden, x, kv


def _mlp(c: Context, w: Weights, h: Float[Array, "T D"]) -> Float[Array, "T D"]:
    with jax.named_scope("up_gate"):
        a = ops.up_gate(c, w, h)
    with jax.named_scope("down"):
        return ops.down(c, w, a)


def _experts(c: Context, w: Weights, h: Float[Array, "T D"]) -> Float[Array, "T D"]:
    with jax.named_scope("router"):
        routing = ops.router(c, w, h)
    with jax.named_scope("expert_up_gate"):
        a = ops.expert_up_gate(c, w, h, routing)
    with jax.named_scope("expert_down"):
        return ops.expert_down(c, w, a, routing)

"""The plain forward: every op over all tokens of the step, in order. Every plan must compute this
function."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxtyping import Array, Float, Int

from jaxflow.model import ops
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import KV, Context, Site, Weights, op_scope
from jaxflow.parallel.collectives import Sum, added

# The experts of each token, one entry for each mixture layer in order. A forward appends the entries while it
# is traced. An entry is None if the step does not count the experts of the layer.
Routed = list[Int[Array, "T e"] | None]


def forward(
    c: Context, weights: Weights, kv: list[KV], batch: Batch, routed: Routed | None = None
) -> tuple[Float[Array, "R D"], Float[Array, "T D"], list[KV]]:
    """Run one step through all layers, or through the layers of one pipeline stage.

    routed: takes the experts of each mixture layer.

    Returns:
      the normed hidden state of each sequence's sampled token, the residual stream of all tokens after the
      last layer (for prompt log-probabilities and the next stage), and the cache with this step's keys and
      values. The hidden state is not normed in a stage without the final norm.
    """
    ends = Site(c, weights)
    x = ops.embed(ends, batch.token_ids, batch.positions) if batch.hidden is None else batch.hidden
    y, kv, inputs = None, list(kv), layer_inputs(ends, batch, x)
    for i, (layer, w) in enumerate(zip(c.config.layers, weights["layers"], strict=True)):
        site, cache = Site(c, w, layer, batch, 0, batch.num_tokens), c.config.cache_of(i)
        own = inputs[i] if inputs else None
        x, y, kv[cache] = forward_layer(site, x, y, kv[cache], routed, layer_input=own)
    with op_scope("final_norm"):
        x = x if y is None else x + added(y)
    return sampled_hidden(ends, x, batch), x, kv


def forward_layer(
    site: Site,
    x: Float[Array, "T D"],
    y: Sum | None,
    kv: KV,
    routed: Routed | None = None,
    work: Mapping[str, Any] = MappingProxyType({}),
    layer_input: Float[Array, "T p"] | None = None,
) -> tuple[Float[Array, "T D"], Sum, KV]:
    """Run one layer over all tokens of the step.

    x and y: the residual stream, and what the layer before adds to it; y is None in the first layer.
    kv: the cache that the layer reads (`ModelConfig.cache_of`).
    routed: takes the experts of the layer if the layer is a mixture.
    work: the work lists of the attention kernels that have one, by the names of their ops.
    layer_input: the layer's own embeddings, of `layer_inputs`, in a model that has them.

    Returns:
      x and y for the next layer, and the cache with this step's keys and values.
    """
    assert site.layer is not None
    x, h = ops.attn_norm(site, x, y)
    fused = ops.qkv(site, h)
    q, kv = (ops.rope(site, fused), kv) if site.layer.shares_kv else ops.rope_append(site, fused, kv)
    o = ops.chunk_attention(dataclasses.replace(site, work=work.get("chunk_attention")), q, kv)
    o = ops.decode_attention(dataclasses.replace(site, work=work.get("decode_attention")), q, kv, o)
    x, added_last = after_attention(site, x, o, routed)
    if layer_input is not None:
        x, gated = ops.layer_gate(site, x, added_last, layer_input)
        added_last = ops.post_layer_norm(site, ops.layer_proj(site, gated))
    return x, added_last, kv


def layer_inputs(ends: Site, batch: Batch, x: Float[Array, "T D"]) -> tuple[Float[Array, "T p"], ...]:
    """Return the embeddings of each layer; empty in a model without them. x: the embeddings of the model."""
    return ops.layer_embed(ends, batch.token_ids, x) if ends.c.config.layer_input_size else ()


def sampled_hidden(ends: Site, x: Float[Array, "T D"], batch: Batch) -> Float[Array, "R D"]:
    """Return the hidden state of each sequence's sampled token, normed if the stage has the final norm.

    x: the residual stream after the last layer.
    """
    hidden = x[batch.sample_tokens]
    return ops.final_norm(ends, hidden, None)[1] if "final_norm" in ends.w else hidden


def after_attention(
    site: Site, x: Float[Array, "t D"], o: Float[Array, "t N H"], routed: Routed | None = None
) -> tuple[Float[Array, "t D"], Array]:
    """Return (x, y) after a layer. x: the residual stream before the MLP. y: the MLP's output, not added
    yet. routed: see `forward_layer`."""
    y = ops.attn_reduce(site, ops.out_proj(site, o))
    if site.c.config.post_norms:
        y = ops.post_attn_norm(site, y)
    x, h = ops.mlp_norm(site, x, y)
    if site.layer is not None and site.layer.experts:
        routing = ops.router(site, h)
        if routed is not None:
            routed.append(routing.chosen)
        ranked = site.c.rank_axis is not None
        sent = ops.expert_dispatch(site, h, routing) if ranked else h
        y = ops.expert_down(site, ops.expert_up_gate(site, sent, routing), routing)
        if ranked:
            y = ops.expert_combine(site, y, routing)
        if site.c.config.shared_expert_intermediate_size:
            y = ops.shared_down(site, ops.shared_up_gate(site, h), y)
    else:
        y = ops.down(site, ops.up_gate(site, h))
    y = ops.mlp_reduce(site, y)
    return x, ops.post_mlp_norm(site, y) if site.c.config.post_norms else y

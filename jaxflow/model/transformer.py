"""The plain forward: every op over all tokens of the step, in order. Every plan must compute this
function."""

from jaxtyping import Array, Float

from jaxflow.model import ops
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import KV, Context, Site, Weights, op_scope
from jaxflow.parallel.collectives import added


def forward(
    c: Context, weights: Weights, kv: list[KV], batch: Batch
) -> tuple[Float[Array, "R D"], Float[Array, "T D"], list[KV]]:
    """Run one step through all layers, or through the layers of one pipeline stage.

    Returns:
      the normed hidden state of each sequence's sampled token, the residual stream of all tokens after the
      last layer (for prompt log-probabilities and the next stage), and the cache with this step's keys and
      values. The hidden state is not normed in a stage without the final norm.
    """
    ends = Site(c, weights)
    x = ops.embed(ends, batch.token_ids, batch.positions) if batch.hidden is None else batch.hidden
    y, kv = None, list(kv)
    for i, (layer, w) in enumerate(zip(c.config.layers, weights["layers"], strict=True)):
        site = Site(c, w, layer, batch, 0, batch.num_tokens)
        x, h = ops.attn_norm(site, x, y)
        q, kv[i] = ops.rope_append(site, ops.qkv(site, h), kv[i])
        o = ops.chunk_attention(site, q, kv[i])
        o = ops.decode_attention(site, q, kv[i], o)
        x, y = after_attention(site, x, o)
    with op_scope("final_norm"):
        x = x if y is None else x + added(y)
    hidden = x[batch.sample_tokens]
    if "final_norm" in weights:
        _, hidden = ops.final_norm(ends, hidden, None)
    return hidden, x, kv


def after_attention(
    site: Site, x: Float[Array, "t D"], o: Float[Array, "t N H"]
) -> tuple[Float[Array, "t D"], Array]:
    """Return (x, y) after a layer. x: the residual stream before the MLP. y: the MLP's output, not added
    yet."""
    y = ops.attn_reduce(site, ops.out_proj(site, o))
    if site.c.config.post_norms:
        y = ops.post_attn_norm(site, y)
    x, h = ops.mlp_norm(site, x, y)
    if site.layer is not None and site.layer.experts:
        routing = ops.router(site, h)
        y = ops.expert_down(site, ops.expert_up_gate(site, h, routing), routing)
    else:
        y = ops.down(site, ops.up_gate(site, h))
    y = ops.mlp_reduce(site, y)
    return x, ops.post_mlp_norm(site, y) if site.c.config.post_norms else y

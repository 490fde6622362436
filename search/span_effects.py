"""Measure what each KV head's span does to a model's answers (after MoA; FlashDecoding++Next §III).

The loss is the divergence of the model with spans from the model with full attention: the sum over a text's
tokens of KL(full || spans) of the next token's distribution. It needs no labels, and it is 0 with full
attention. One backward pass gives the gradient of the loss by each head's attention output. The effect of
another span for a head is that gradient times the exact change of the head's output: the softmax over the
other keys, times their values.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from jaxflow.config import ModelConfig, Span
from jaxflow.model import ops
from jaxflow.model.checkpoints.calibrate import forward_text
from jaxflow.model.op_registry import Context, Site
from pallas_kernels.kernel_set import REFERENCE


@dataclasses.dataclass(frozen=True)
class Effects:
    """What one choice of spans costs, and what other spans would change.

    Attributes:
      loss: the divergence from full attention, in nats a token.
      changes: float64 [L · K, C], the first-order change of the loss if one head took one candidate instead.
    """

    loss: float
    changes: np.ndarray


def first_keys(spans: Sequence[Span], tokens: int) -> np.ndarray:
    """Return int [C, T]: the first key of the window of each query of a text, with each span."""
    positions = np.arange(tokens)
    return np.maximum(positions + 1 - np.array([span.window(positions) for span in spans]), 0)


def scores_of_head(
    q: Float[Array, "G T H"], k: Float[Array, "T H"], scale: float, soft_cap: float | None
) -> Float[Array, "G T T"]:
    """Return the attention scores of one KV head's queries. Later keys have -inf."""
    scores = jnp.einsum("gth,sh->gts", q, k) * scale
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    positions = np.arange(len(k))
    return jnp.where(positions[:, None] >= positions, scores, -jnp.inf)


def attend(
    q: Float[Array, "K G T H"],
    k: Float[Array, "K T H"],
    v: Float[Array, "K T H"],
    first: Int[Array, "K T"],
    *,
    sinks: int,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "K G T H"]:
    """Return the attention of all heads of a layer.

    A query sees the sinks and the keys from its `first` on.
    """

    def of_head(
        q: Float[Array, "G T H"], k: Float[Array, "T H"], v: Float[Array, "T H"], first: Int[Array, " T"]
    ) -> Float[Array, "G T H"]:
        positions = np.arange(len(k))
        seen = (positions >= first[:, None]) | (positions < sinks)
        scores = jnp.where(seen, scores_of_head(q, k, scale, soft_cap), -jnp.inf)
        return jnp.einsum("gts,sh->gth", jax.nn.softmax(scores, axis=-1), v)

    return jax.vmap(of_head)(q, k, v, first)


def products(
    q: Float[Array, "G T H"],
    k: Float[Array, "T H"],
    v: Float[Array, "T H"],
    gradient: Float[Array, "G T H"],
    first: Int[Array, "C T"],
    *,
    sinks: int,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, " C"]:
    """Return gradient · output of one KV head with each candidate, summed over its queries.

    Scores, weights and their products with the gradient are computed once for all candidates.
    """
    scores = scores_of_head(q, k, scale, soft_cap)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    along = weights * jnp.einsum("gth,sh->gts", gradient, v)
    positions = np.arange(len(k))

    def of_span(first: Int[Array, " T"]) -> Float[Array, ""]:
        seen = (positions >= first[:, None]) | (positions < sinks)
        above, below = (jnp.sum(jnp.where(seen, one, 0.0), axis=-1) for one in (along, weights))
        # A window far below the row's largest score can underflow to nothing; then the output counts as 0.
        return (above / jnp.maximum(below, jnp.finfo(jnp.float32).tiny)).sum()

    return jax.lax.map(of_span, first)


def _log_probabilities(
    config: ModelConfig, weights: Any, text: Array, attention: Callable[..., Array]
) -> Float[Array, "T V"]:
    """Return the log-probabilities of the next token, with attention(q, k, v, settings) of each layer.

    q: [K, G, T, H]. k, v: [K, T, H].
    """

    def chunk_attention(q: Array, k: Array, v: Array, table: Array, chunks: Array, **settings: Any) -> Array:
        t, n, h = q.shape
        grouped = q.reshape(t, config.num_kv_heads, -1, h).transpose(1, 2, 0, 3)
        used = {name: settings[name] for name in ("scale", "soft_cap")}
        return attention(grouped, k[0], v[0], used).transpose(2, 0, 1, 3).reshape(t, n, h)

    hidden = forward_text(config, weights, text, chunk_attention)
    scores = ops.logits(Site(Context(config, REFERENCE), weights), hidden)[:, : config.vocab_size]
    return jax.nn.log_softmax(scores, axis=-1)


class Measurement:
    """The texts, and the model's distributions with full attention.

    A call with a choice, int [L · K] indices of `spans`, returns its effects.
    """

    def __init__(self, config: ModelConfig, weights: Any, texts: np.ndarray, spans: Sequence[Span]):
        self._weights, self._texts, self._layers = weights, texts, config.num_layers
        first, sinks = jnp.asarray(first_keys(spans, texts.shape[1])), spans[0].sinks
        full = jnp.zeros((config.num_kv_heads, texts.shape[1]), jnp.int32)

        def dense(weights: Any, text: Array) -> Float[Array, "T V"]:
            def attention(q: Array, k: Array, v: Array, settings: dict[str, Any]) -> Array:
                return attend(q, k, v, full, sinks=sinks, **settings)

            return _log_probabilities(config, weights, text, attention)

        def effects(
            weights: Any, text: Array, target: Float[Array, "T V"], choice: Int[Array, "L K"]
        ) -> tuple[Array, Float[Array, "L K C"]]:
            settings_of = []

            def loss(added: list[Array]) -> tuple[Array, list[tuple[Array, Array, Array]]]:
                seen = []

                def attention(q: Array, k: Array, v: Array, settings: dict[str, Any]) -> Array:
                    layer = len(seen)
                    seen.append((q, k, v))
                    settings_of.append(settings)
                    # The backward pass computes the scores again: those of all layers do not fit in memory.
                    run = jax.checkpoint(functools.partial(attend, sinks=sinks, **settings))
                    return run(q, k, v, first[choice[layer]]) + added[layer]

                found = _log_probabilities(config, weights, text, attention)
                return jnp.sum(jnp.exp(target) * (target - found)), seen

            heads = config.num_kv_heads
            shape = (heads, config.num_heads // heads, len(text), config.head_dim)
            zeros = [jnp.zeros(shape, jnp.float32)] * config.num_layers
            (found, seen), gradients = jax.value_and_grad(loss, has_aux=True)(zeros)
            of_layers = []
            for layer, (qkv, gradient) in enumerate(zip(seen, gradients, strict=True)):
                run = functools.partial(products, first=first, sinks=sinks, **settings_of[layer])
                of_layers.append(jax.lax.map(lambda one, run=run: run(*one), (*qkv, gradient)))
            return found, jnp.stack(of_layers)

        self._effects = jax.jit(effects)
        run = jax.jit(dense)
        self._targets = [np.asarray(run(weights, text)) for text in texts]

    def __call__(self, choice: np.ndarray) -> Effects:
        loss, changes = 0.0, 0.0
        for text, target in zip(tqdm(self._texts, unit="window", leave=False), self._targets, strict=True):
            found, products = self._effects(self._weights, text, target, choice.reshape(self._layers, -1))
            loss, changes = loss + float(found), changes + np.asarray(products, np.float64)
        changes = np.reshape(changes, (len(choice), -1)) / self._texts.size
        return Effects(loss / self._texts.size, changes - changes[np.arange(len(choice)), choice][:, None])

"""The count of the tokens that go to each expert of each mixture layer, made inside a step on the device."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from jaxflow.config import ModelConfig


def mixture_layers(config: ModelConfig) -> list[int]:
    """Return the indices of the layers that have experts."""
    return [index for index, layer in enumerate(config.layers) if layer.experts]


def add_tokens(
    counts: UInt[Array, "L E"], routed: Sequence[Int[Array, "T e"] | None], is_token: Bool[Array, " T"]
) -> UInt[Array, "L E"]:
    """Return the counts plus the tokens of a step at each expert of the L mixture layers.

    A count wraps at 2**32. One scatter counts all layers, because a scatter for each
    layer is a kernel for each layer.

    Args:
      routed: the experts of each token in each mixture layer; None for a layer that is not counted.
      is_token: False for padding, which is not counted.
    """
    counted = [index for index, experts in enumerate(routed) if experts is not None]
    if not counted:
        return counts
    experts = jnp.stack([experts for experts in routed if experts is not None])
    experts = jnp.where(is_token[None, :, None], experts, counts.shape[1])  # outside: dropped
    layers = jnp.asarray(counted, jnp.int32)[:, None, None]
    return counts.at[layers, experts].add(jnp.uint32(1), mode="drop")

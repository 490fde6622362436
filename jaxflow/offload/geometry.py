"""The static shapes of an offloaded run: everything that a policy and a model fix before the first weight is read.

KV lies in pages, as in the engine, so that its ops and kernels serve here too; but a sequence's pages are its own and lie next to each
other: page `row · MP + i` holds tokens i·S to (i + 1)·S - 1 of that row. A batch's rows are cut into *parts*, one for each tier.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxflow.config import ModelConfig
from jaxflow.memory.quantize import kv_shape
from jaxflow.model.weights import leaves
from jaxflow.offload.placement import Tier, place_rows, place_weights
from jaxflow.offload.policy import TIERS, Policy

BEFORE = ("attn_norm", "attn_norm_bias", "qkv", "qkv_bias", "q_norm", "k_norm")  # what a layer needs before it attends


@dataclasses.dataclass(frozen=True)
class Part:
    """The rows [start, stop) of a batch, whose tensors live on one tier."""

    tier: Tier
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Geometry:
    """dtype: of activations, and of weights and KV of 16 bits (float32 where the model runs in it). page_size: S, tokens in a page."""

    config: ModelConfig
    policy: Policy
    dtype: Any
    page_size: int

    @property
    def quantization(self) -> str | None:
        """As `EngineConfig.quantization` has it."""
        return "int4" if self.policy.weight_bits == 4 else None

    @property
    def batch(self) -> int:
        """Sequences of a batch."""
        return self.policy.gpu_batch_size

    @property
    def prompt(self) -> int:
        """Tokens that a prompt is padded to."""
        return self.policy.prompt_tokens

    @property
    def pages(self) -> int:
        """MP, pages of a sequence: its prompt and all tokens but the last, whose KV nobody reads."""
        return -(-(self.prompt + self.policy.output_tokens - 1) // self.page_size)

    @property
    def prompt_pages(self) -> int:
        """Those that hold prompt tokens."""
        return -(-self.prompt // self.page_size)

    @property
    def kv_parts(self) -> tuple[Part, ...]:
        return _parts(place_rows(self.batch, self.policy.kv))

    @property
    def activation_parts(self) -> tuple[Part, ...]:
        return _parts(place_rows(self.batch, self.policy.activations))

    def kv_pages(self, rows: int) -> tuple[Any, Any]:
        """Shapes of the keys and values of `rows` sequences at one layer, as they are stored."""
        return self._stored((rows * self.pages, self.config.num_kv_heads, self.page_size, self.config.head_dim))

    def kv_rows(self, rows: int) -> tuple[Any, Any]:
        """Shapes of one token's key and value of `rows` sequences at one layer, as they are stored."""
        return self._stored((rows, self.config.num_kv_heads, self.config.head_dim))

    def activation(self, rows: int, tokens: int) -> Any:
        """The shape of what `rows` sequences of `tokens` tokens pass from layer to layer."""
        return jax.ShapeDtypeStruct((rows * tokens, self.config.hidden_size), self.dtype)

    def _stored(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        one = kv_shape(shape) if self.policy.kv_bits == 4 else jax.ShapeDtypeStruct(shape, self.dtype)
        return one, one


def _parts(counts: tuple[int, int, int]) -> tuple[Part, ...]:
    """Those that have rows."""
    parts, start = [], 0
    for tier, rows in zip(TIERS, counts, strict=True):
        if rows:
            parts.append(Part(tier, start, start + rows))  # type: ignore[arg-type]
        start += rows
    return tuple(parts)


@dataclasses.dataclass(frozen=True)
class PlacedWeights:
    """Shapes of the weights as they are stored, and the tier of each. `ends`: what is in no layer, always on the device."""

    ends: dict[str, Any]
    layers: tuple[dict[str, Any], ...]
    tiers: tuple[dict[str, Tier], ...]

    def of_tier(self, layer: int, tier: Tier, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The shapes of a layer's tensors that live on a tier, of those named."""
        found = self.tiers[layer]
        return {key: leaf for key, leaf in self.layers[layer].items() if found[key] == tier and (keys is None or key in keys)}

    def bytes_of(self, layer: int, tier: Tier) -> int:
        return tree_bytes(self.of_tier(layer, tier))


def place(g: Geometry) -> PlacedWeights:
    """Norms and biases stay on the device: they are a few millionths of a model, and each would cost a transfer of its own."""
    tree = leaves(g.config, quantization=g.quantization)
    ends = {key: leaf.struct(g.dtype) for key, leaf in tree.items() if key != "layers"}
    layers = tuple({key: leaf.struct(g.dtype) for key, leaf in layer.items()} for layer in tree["layers"])
    matrices = [{key: tree_bytes(leaf) for key, leaf in layer.items() if is_matrix(leaf)} for layer in layers]
    placed = place_weights(matrices, g.policy.weights)
    tiers: Any = tuple({key: one.get(key, "device") for key in layer} for one, layer in zip(placed, layers, strict=True))
    return PlacedWeights(ends, layers, tiers)


def is_matrix(leaf: Any) -> bool:
    return len(leaf.shape) > 1


def array_bytes(a: Any) -> int:
    """Of an array or its shape."""
    size = 1
    for extent in a.shape:
        size *= extent
    return size * jnp.dtype(a.dtype).itemsize


def tree_bytes(tree: Any) -> int:
    """Of all arrays of a pytree, or of their shapes."""
    return sum(array_bytes(a) for a in jax.tree.leaves(tree))


def halves(keys: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a layer's weights that are needed before it attends, and after."""
    return tuple(key for key in keys if key in BEFORE), tuple(key for key in keys if key not in BEFORE)

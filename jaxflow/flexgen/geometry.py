"""The static shapes of an offloaded run: everything that a policy and a model fix before the first weight is
read.

KV lies in pages, as in the engine, so that its ops and kernels serve here too; but a sequence's pages are its
own and lie next to each other: page `row · MP + i` holds tokens i·S to (i + 1)·S - 1 of that row. A batch's
rows are cut into *parts*, one for each tier.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxflow.config import ModelConfig
from jaxflow.flexgen.placement import Tier, place_rows, place_weights
from jaxflow.flexgen.policy import TIERS, Policy
from jaxflow.flexgen.shards import CUT, placed, tree_bytes
from jaxflow.kv.int4 import kv_shape
from jaxflow.model.weight_spec import TENSOR_PARALLEL_AXIS
from jaxflow.model.weights import kv_head_copies, leaves
from jaxflow.parallel.mesh import TP

BEFORE = (
    "attn_norm",
    "attn_norm_bias",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
)  # what a layer needs before it attends


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
    """dtype: of activations, and of weights and KV of 16 bits (float32 where the model runs in it).
    page_size: S, tokens in a page.

    Shapes that it gives are those over all devices of the mesh, with their shardings.
    """

    config: ModelConfig
    policy: Policy
    dtype: Any
    page_size: int
    mesh: Mesh

    @property
    def tp(self) -> int:
        """Devices."""
        return self.mesh.shape[TP]

    @property
    def kv_heads(self) -> int:
        """K of all devices: heads fewer than devices are repeated, so that each has one."""
        return self.config.num_kv_heads * kv_head_copies(self.config, self.tp)

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
        return self._stored((rows * self.pages, self.kv_heads, self.page_size, self.config.head_dim))

    def kv_rows(self, rows: int) -> tuple[Any, Any]:
        """Shapes of one token's key and value of `rows` sequences at one layer, as they are stored."""
        return self._stored((rows, self.kv_heads, self.config.head_dim))

    def activation(self, rows: int, tokens: int) -> Any:
        """The shape of what `rows` sequences of `tokens` tokens pass from layer to layer."""
        return placed(
            self.mesh, jax.ShapeDtypeStruct((rows * tokens, self.config.hidden_size), self.dtype), CUT
        )

    def heads(self, rows: int) -> Any:
        """The shape of one token's queries, or of its attention's output, of `rows` sequences."""
        return placed(
            self.mesh,
            jax.ShapeDtypeStruct((rows, self.config.num_heads, self.config.head_dim), self.dtype),
            CUT,
        )

    def _stored(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        one = kv_shape(shape) if self.policy.kv_bits == 4 else jax.ShapeDtypeStruct(shape, self.dtype)
        return placed(self.mesh, (one, one), CUT)


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
    """Shapes of the weights as they are stored, and the tier of each. `ends`: what is in no layer, always on
    the device.
    """

    ends: dict[str, Any]
    layers: tuple[dict[str, Any], ...]
    tiers: tuple[dict[str, Tier], ...]

    def of_tier(self, layer: int, tier: Tier, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
        """The shapes of a layer's tensors that live on a tier, of those named."""
        found = self.tiers[layer]
        return {
            key: leaf
            for key, leaf in self.layers[layer].items()
            if found[key] == tier and (keys is None or key in keys)
        }

    def bytes_of(self, layer: int, tier: Tier) -> int:
        return tree_bytes(self.of_tier(layer, tier))


def place(g: Geometry) -> PlacedWeights:
    """Norms, biases and routers stay on the device: they are a few millionths of a model, and each would cost
    a transfer of its own.

    Raises: ConfigError: `tensor_parallel_size` does not cut the model.
    """
    tree = leaves(g.config, g.tp, quantization=g.quantization)

    def shapes(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: placed(g.mesh, leaf.struct(g.dtype), leaf.specs)
            for key, leaf in group.items()
            if key != "layers"
        }

    layers = tuple(shapes(layer) for layer in tree["layers"])
    matrices = [
        {key: tree_bytes(struct) for key, struct in layer.items() if is_matrix(key, struct)}
        for layer in layers
    ]
    found = place_weights(matrices, g.policy.weights)
    tiers: Any = tuple(
        {key: one.get(key, "device") for key in layer} for one, layer in zip(found, layers, strict=True)
    )
    return PlacedWeights(shapes(tree), layers, tiers)


def is_matrix(key: str, struct: Any) -> bool:
    """Whether a tensor of a layer is a matrix that devices share: all but norms, biases and routers."""
    return len(struct.shape) > 1 and key in TENSOR_PARALLEL_AXIS


def halves(keys: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a layer's weights that are needed before it attends, and after."""
    return tuple(key for key in keys if key in BEFORE), tuple(key for key in keys if key not in BEFORE)

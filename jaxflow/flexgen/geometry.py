"""Static shapes of an offloaded run: placement of tensors, splits of a batch, and shardings.

KV lies in pages, as in the engine, so that the engine's ops and kernels apply. The pages of a sequence are
adjacent: page `row · MP + i` holds tokens i·S to (i + 1)·S - 1 of a row. The rows of a batch are split over
the tiers, one split for each tier.

Each device has its heads of the KV, its rows or columns of a matrix as in the engine, and its columns of the
activations between layers. The all-reduce at a layer's end gives each device its columns, and the next layer
begins with an all-gather. So every tensor travels in shards, each over the link of its device, and the host
has no duplicates. Layers are split over devices as in FlexGen (§4.4) by `jaxflow.flexgen.stages`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxflow.config import Layer, ModelConfig
from jaxflow.flexgen.policy import TIERS, Policy, Shares
from jaxflow.flexgen.sparse_values import top_count
from jaxflow.kv.int4 import kv_shape
from jaxflow.model.weight_spec import TENSOR_PARALLEL_AXIS
from jaxflow.model.weights import kv_head_copies, leaves
from jaxflow.parallel.mesh import TP, axis_of

# The weights of a layer that are used before attention.
BEFORE = ("attn_norm", "attn_norm_bias", "qkv", "qkv_bias", "q_norm", "k_norm")
REPLICATED = PartitionSpec()  # on every device
SHARDED = PartitionSpec(None, TP)  # KV and queries by heads, activations by columns
PINNED = "pinned_host"
Tier = Literal["device", "host", "disk"]
_EPSILON = 1e-9  # for rounding errors: 33.333... % of 3 rows are 1 row


def device_sharding(mesh: Mesh, spec: PartitionSpec = REPLICATED) -> Sharding:
    """Return the sharding of an array on the devices."""
    return SingleDeviceSharding(mesh.devices.flat[0]) if axis_of(mesh) is None else NamedSharding(mesh, spec)


def pinned_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding of an array in pinned host memory, each shard in the memory of its device."""
    return sharding.with_memory_kind(PINNED)


def spec_of(a: Any) -> PartitionSpec:
    """Return the partition of an array or its shape; a single device has no partition."""
    return getattr(a.sharding, "spec", REPLICATED)


def placed(mesh: Mesh, structs: Any, specs: Any) -> Any:
    """Return shapes with their shardings. `specs`: a pytree like `structs`, or one partition for all."""
    if isinstance(specs, PartitionSpec):
        specs = jax.tree.map(lambda _: specs, structs)
    return jax.tree.map(
        lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device_sharding(mesh, spec)),
        structs,
        specs,
    )


def array_bytes(a: Any) -> int:
    """Return the bytes of an array or its shape: all shards, or one copy of a replicated array."""
    return math.prod(a.shape) * jnp.dtype(a.dtype).itemsize


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays, or shapes, of a pytree."""
    return sum(array_bytes(a) for a in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Return the bytes of all arrays, or shapes, of a pytree on one device."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * jnp.dtype(a.dtype).itemsize
        for a in jax.tree.leaves(tree)
    )


def place_rows(rows: int, shares: Shares) -> tuple[int, int, int]:
    """Return the numbers of a batch's sequences on device, host and disk, in this order of rows.

    Only complete sequences are placed, so the percentages are approximate: a faster tier gets at most its
    share, and the slowest tier with a share gets the rest (FlexGen §4.2).
    """
    slowest = _slowest(shares)
    counts = [
        int(rows * share / 100 + _EPSILON) if tier != slowest else 0
        for tier, share in zip(TIERS, shares, strict=True)
    ]
    counts[TIERS.index(slowest)] = rows - sum(counts)
    return counts[0], counts[1], counts[2]


def place_weights(layers: Sequence[Mapping[str, int]], shares: Shares) -> list[dict[str, Tier]]:
    """Return the tier of each tensor of each layer.

    A layer's difference from the percentages counts for the next layer, so that a model of many layers comes
    within one tensor of the percentages.

    Args:
      layers: bytes of each layer's tensors by name.
    """
    slowest, total = _slowest(shares), 0
    used: dict[str, int] = dict.fromkeys(TIERS, 0)
    placed = []
    for layer in layers:
        total += sum(layer.values())
        tiers: dict[str, Any] = {}
        for name, size in sorted(layer.items(), key=lambda item: (-item[1], item[0])):
            room = (
                tier
                for tier, share in zip(TIERS, shares, strict=True)
                if used[tier] + size <= total * (share / 100 + _EPSILON)
            )
            tiers[name] = tier = next((tier for tier in room if tier != slowest), slowest)  # type: ignore[assignment]
            used[tier] += size
        placed.append(tiers)
    return placed


def _slowest(shares: Shares) -> Tier:
    """Return the slowest tier with a share."""
    return [tier for tier, share in zip(TIERS, shares, strict=True) if share > 0][-1]  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Split:
    """The rows [start, stop) of a batch, with tensors on one tier."""

    tier: Tier
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Shapes over all devices of the mesh, with their shardings.

    Attributes:
      dtype: of activations, and of 16-bit weights and KV (float32 for a float32 model).
      page_size: S, tokens in a page.
    """

    config: ModelConfig
    policy: Policy
    dtype: Any
    page_size: int
    mesh: Mesh

    @property
    def tp(self) -> int:
        """The number of devices."""
        return self.mesh.shape[TP]

    @property
    def kv_heads(self) -> int:
        """K over all devices. Heads are repeated if there are fewer heads than devices."""
        return self.config.num_kv_heads * kv_head_copies(self.config, self.tp)

    @property
    def quantization(self) -> str | None:
        """The value of `EngineConfig.quantization`."""
        return "int4" if self.policy.weight_bits == 4 else None

    @property
    def batch(self) -> int:
        """The number of sequences of a batch."""
        return self.policy.gpu_batch_size

    def slot(self, batch: int) -> int:
        """Return the place of a batch's KV and activations. A diagonal block has more batches than places."""
        return batch % self.places

    @property
    def places(self) -> int:
        """The number of batches with KV and activations at once."""
        return self.policy.num_gpu_batches * self.policy.pipeline_parallel_size

    @property
    def prompt(self) -> int:
        """The padded number of tokens of a prompt."""
        return self.policy.prompt_tokens

    @property
    def pages(self) -> int:
        """MP, the pages of a sequence: all tokens except the last, which no token attends to."""
        return -(-(self.prompt + self.policy.output_tokens - 1) // self.page_size)

    @property
    def prompt_pages(self) -> int:
        """The number of pages with prompt tokens."""
        return -(-self.prompt // self.page_size)

    @property
    def kv_splits(self) -> tuple[Split, ...]:
        """The splits of a batch's KV."""
        return _splits(place_rows(self.batch, self.policy.kv))

    @property
    def activation_splits(self) -> tuple[Split, ...]:
        """The splits of a batch's activations."""
        return _splits(place_rows(self.batch, self.policy.activations))

    def kv_pages(self, rows: int) -> tuple[Any, Any]:
        """Return the stored shapes of keys and values of `rows` sequences at one layer."""
        return self._stored((rows * self.pages, self.kv_heads, self.page_size, self.config.head_dim))

    def loaded_pages(self, rows: int) -> tuple[Any, ...]:
        """Return the shapes of the pages that a decode loads whole: keys and values, or keys only."""
        return self.kv_pages(rows)[: 1 if self.policy.sparse_values else 2]

    def top_rows(self, layer: Layer) -> int:
        """Return the most cached V rows of a sequence and KV head that a decode of a layer reads."""
        cached = self.prompt + self.policy.output_tokens - 2
        seen = cached if layer.window is None else min(cached, layer.window - 1)
        return max(1, top_count(self.policy.value_top_k_percent, seen))

    def top_values(self, layer: Layer, rows: int) -> Any:
        """Return the stored shapes of the V rows that a decode of a layer reads, [rows, K, C, H]."""
        return self._stored((rows, self.kv_heads, self.top_rows(layer), self.config.head_dim))[1]

    def attended_bytes(self, layer: Layer, split: "Split", lengths: Sequence[int]) -> int:
        """Return the bytes that the host's attention reads of a split: pages, or keys and chosen rows of V.

        `lengths`: tokens of each sequence, the new one included; 0 without a sequence.
        """
        pages = tree_bytes(self.loaded_pages(split.rows))
        if not self.policy.sparse_values:
            return pages
        seen = [n if layer.window is None else min(n, layer.window) for n in lengths if n]
        rows = sum(top_count(self.policy.value_top_k_percent, n - 1) + 1 for n in seen)
        return pages + rows * tree_bytes(self.kv_rows(1)[1])

    def kept(self, layer: Layer, rows: int) -> tuple[Any, Any]:
        """Return the shapes of the weights of the V rows to read, and of the new token's V row."""
        weights = (rows, self.kv_heads, self.config.num_heads // self.kv_heads, self.top_rows(layer) + 1)
        new = (rows, self.kv_heads, self.config.head_dim)
        structs = jax.ShapeDtypeStruct(weights, jnp.float32), jax.ShapeDtypeStruct(new, self.dtype)
        return placed(self.mesh, structs, SHARDED)

    def chosen(self, layer: Layer, rows: int) -> Any:
        """Return the shape of the positions of the V rows to read, [rows, K, C]."""
        shape = (rows, self.kv_heads, self.top_rows(layer))
        return placed(self.mesh, jax.ShapeDtypeStruct(shape, jnp.int32), SHARDED)

    def kv_rows(self, rows: int) -> tuple[Any, Any]:
        """Return the stored shapes of one token's key and value of `rows` sequences at one layer."""
        return self._stored((rows, self.kv_heads, self.config.head_dim))

    def activation(self, rows: int, tokens: int) -> Any:
        """Return the shape of the activations of `rows` sequences of `tokens` tokens."""
        return placed(
            self.mesh, jax.ShapeDtypeStruct((rows * tokens, self.config.hidden_size), self.dtype), SHARDED
        )

    def heads(self, rows: int) -> Any:
        """Return the shape of one token's queries, or of its attention output, of `rows` sequences."""
        return placed(
            self.mesh,
            jax.ShapeDtypeStruct((rows, self.config.num_heads, self.config.head_dim), self.dtype),
            SHARDED,
        )

    def _stored(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        one = kv_shape(shape) if self.policy.kv_bits == 4 else jax.ShapeDtypeStruct(shape, self.dtype)
        return placed(self.mesh, (one, one), SHARDED)


def _splits(counts: tuple[int, int, int]) -> tuple[Split, ...]:
    """Return the splits that have rows."""
    splits, start = [], 0
    for tier, rows in zip(TIERS, counts, strict=True):
        if rows:
            splits.append(Split(tier, start, start + rows))  # type: ignore[arg-type]
        start += rows
    return tuple(splits)


@dataclasses.dataclass(frozen=True)
class PlacedWeights:
    """Shapes of the stored weights, and the tier of each tensor.

    Attributes:
      ends: the embedding, the final norm and the head, always on the device.
    """

    ends: dict[str, Any]
    layers: tuple[dict[str, Any], ...]
    tiers: tuple[dict[str, Tier], ...]

    def of_tier(self, layer: int, tier: Tier, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Return the shapes of a layer's tensors on a tier, limited to `keys`."""
        found = self.tiers[layer]
        return {
            key: leaf
            for key, leaf in self.layers[layer].items()
            if found[key] == tier and (keys is None or key in keys)
        }

    def bytes_of(self, layer: int, tier: Tier) -> int:
        """Return the bytes of a layer on a tier."""
        return tree_bytes(self.of_tier(layer, tier))


def place(g: Geometry) -> PlacedWeights:
    """Place the weights of a model.

    Norms, biases and routers stay on the device: they are a few millionths of a model, and each would cost a
    transfer.

    Raises: ConfigError: the model cannot be sharded over `tensor_parallel_size` devices.
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
    """Return True for a matrix that is sharded: every tensor except norms, biases and routers."""
    return len(struct.shape) > 1 and key in TENSOR_PARALLEL_AXIS


def halves(keys: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a layer's weights for the computation before attention and after attention."""
    return tuple(key for key in keys if key in BEFORE), tuple(key for key in keys if key not in BEFORE)

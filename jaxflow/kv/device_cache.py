"""Paged KV cache on the device: page groups, the arrays of each layer, and the number of pages that fit.

A page group is a set of layers with one page table: one entry of axis G of `page_table[G, B, ·]`. A group has
its own KV heads, head width, dtype and window, and so its own page size and number of pages. Window layers
form a group for each window, which needs no more pages than its windows can see. Most models have one group.
A layer that shares the keys and values of an earlier layer has no arrays. Such layers are the last ones.
With attention spans (`jaxflow.model.attention_spans`) a group holds some heads of some layers, and the cache
of a layer is one array for each of the layer's groups.

The arrays of a layer are [P, K, S, H]: a page of one head is a contiguous box, the unit that attention
kernels load. 8-bit values (e4m3, int8) are [P, K, H, S], as Hopper's tensor cores need them. int8 has a
float32 scale for each token and head in the cache; e4m3 has a scale for each head, which is part of the
weights.

The two arrays of a layer with latent attention hold the rotary key [P, 1, S, rope_dim] and the latent vector
[P, 1, S, rank] of a token. Each tensor-parallel device has a copy, as of a key/value head that devices share.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxflow.config import ConfigError, ModelConfig, Window
from jaxflow.kv.visible import most_pages
from jaxflow.parallel.mesh import DP, axis_of, sharded
from pallas_kernels.quantized import Quantized


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """Layers, or heads of layers, that share a page table.

    Attributes:
      layers: indices of the layers.
      kv_heads: the heads of each layer in the cache, over all devices.
      splits_heads: the group holds some heads of a layer, and other groups may hold the others.
      head_dim: H, the width of the first array.
      value_dim: the width of the second array.
      dtype: name of the dtype of keys and values.
      window: a query sees its own token and the `window` - 1 tokens before; an
        elastic span; None: all tokens.
    """

    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    dtype: str
    window: Window
    value_dim: int
    splits_heads: bool = False

    def shapes(self, num_pages: int, block_size: int) -> list[tuple[Any, Any]]:
        """Return (keys, values) of each layer over all devices, as `jax.ShapeDtypeStruct`s."""
        return [self._layer_shapes(heads, num_pages, block_size) for heads in self.kv_heads]

    def _layer_shapes(self, heads: int, num_pages: int, block_size: int) -> tuple[Any, Any]:
        dtype = jnp.dtype(self.dtype)
        keys = (num_pages, heads, block_size, self.head_dim)
        wide = dtype.itemsize > 1
        values = (num_pages, heads, *((block_size, self.value_dim) if wide else (self.value_dim, block_size)))
        k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in (keys, values))
        if dtype != jnp.int8:
            return k, v
        scale = jax.ShapeDtypeStruct(keys[:-1], jnp.float32)
        return Quantized(k, scale), Quantized(v, scale)  # pyright: ignore[reportArgumentType]

    def page_bytes(self, block_size: int, tp: int) -> int:
        """Return the bytes of a page on one of `tp` devices: keys, values and scales of all layers."""
        arrays = jax.tree.leaves(self.shapes(1, block_size))
        return sum(array.size * array.dtype.itemsize for array in arrays) // tp

    def pages_of(self, tokens: int, block_size: int) -> int:
        """Return the most pages that a sequence of `tokens` tokens holds at once."""
        return int(most_pages(tokens, self.window, block_size))


def page_groups(config: ModelConfig, dtype: Any, tp: int) -> tuple[PageGroup, ...]:
    """Return the page groups of a model: one for each window of its layers, or for
    each class of attention spans.

    Full attention is first.
    """
    groups, latent = [], config.latent
    for index, window in enumerate(config.windows):
        held = {i: _heads_in(config, i, index, tp) for i in range(config.num_layers)}
        held = {i: heads for i, heads in held.items() if heads}
        own = config.for_layer(config.layers[min(held)])  # layers of one window have the same head width
        widths = (own.head_dim,) * 2 if latent is None else (latent.rope_dim, latent.rank)
        groups.append(
            PageGroup(
                tuple(held),
                tuple(held.values()),
                widths[0],
                jnp.dtype(dtype).name,
                window,
                widths[1],
                splits_heads=bool(config.span_classes),
            )
        )
    return tuple(groups)


def _heads_in(config: ModelConfig, layer: int, group: int, tp: int) -> int:
    """Return the number of a layer's KV heads in a page group."""
    own = config.layers[layer]
    if own.shares_kv:
        return 0
    if config.span_classes:
        return own.head_groups.count(group)
    return kv_heads(config.for_layer(own), tp) if own.window == config.windows[group] else 0


def kv_heads(config: ModelConfig, tp: int) -> int:
    """Return the KV heads in the cache. Heads are repeated if there are fewer heads than devices."""
    return max(config.num_kv_heads, tp)


def cache_spec(mesh: Mesh) -> PartitionSpec:
    """Return the partition of every array of the cache: the heads over the
    devices, the pages over the ranks.
    """
    return PartitionSpec(DP if DP in mesh.shape else None, axis_of(mesh))


def cache_shapes(
    groups: Sequence[PageGroup], num_pages: Sequence[int], block_size: int
) -> list[tuple[Any, ...]]:
    """Return (keys, values) of every layer over all devices, as `jax.ShapeDtypeStruct`s.

    Keys and values of a layer whose heads are split are tuples, one entry for each of the layer's groups.
    `num_pages`: P of each group.
    """
    whole: dict[int, tuple[Any, ...]] = {}
    parts: dict[int, list[tuple[Any, Any]]] = {}
    for group, pages in zip(groups, num_pages, strict=True):
        for layer, pair in zip(group.layers, group.shapes(pages, block_size), strict=True):
            if group.splits_heads:
                parts.setdefault(layer, []).append(pair)
            else:
                whole[layer] = pair
    layers = whole | {layer: tuple(zip(*pairs, strict=True)) for layer, pairs in parts.items()}
    return [layers[layer] for layer in sorted(layers)]


def make_cache(
    groups: Sequence[PageGroup], num_pages: Sequence[int], block_size: int, mesh: Mesh
) -> list[tuple[Any, ...]]:
    """Return zeroed (keys, values) of every layer, of `cache_shapes`."""
    zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharded(mesh, cache_spec(mesh)))
    return jax.tree.map(lambda a: zeros(a.shape, a.dtype), cache_shapes(groups, num_pages, block_size))


def page_bytes(groups: Sequence[PageGroup], block_size: int, tp: int) -> tuple[int, ...]:
    """Return the bytes of a page of each group on one of `tp` devices."""
    return tuple(group.page_bytes(block_size, tp) for group in groups)


def fit_pages(
    groups: Sequence[PageGroup],
    budget_bytes: int,
    *,
    block_size: int,
    tp: int,
    max_num_seqs: int,
    token_budget: int,
    max_model_len: int,
    memory: str = "device",
) -> tuple[int, ...]:
    """Return the number of pages of each group that fit in `budget_bytes` of one device.

    Every group gets pages for one sequence of `max_model_len` tokens. Of the rest, each window group gets up
    to the pages that `max_num_seqs` sequences see, and full attention gets the remainder. Numbers are rounded
    down to about two significant digits: free memory varies a little from start to start, and another number
    of pages would miss all compiled programs of earlier starts.

    Args:
      memory: name of the memory in the error.

    Raises:
      ConfigError: one sequence of `max_model_len` tokens does not fit.
    """
    sizes = page_bytes(groups, block_size, tp)
    needs = [group.pages_of(max_model_len, block_size) for group in groups]
    ceilings = [
        max_num_seqs * need + -(-token_budget // block_size) for need in needs
    ]  # with chunks in flight
    need = sum(n * size for n, size in zip(needs, sizes, strict=True))
    if need > budget_bytes:
        raise ConfigError(
            "max_model_len",
            max_model_len,
            f"one such sequence needs {need / 2**30:.3f} GiB of KV pages and "
            f"{max(0, budget_bytes) / 2**30:.3f} GiB of {memory} memory are free for them; "
            f"lower max_model_len or raise gpu_memory_utilization",
        )
    counts, left = list(needs), budget_bytes - need
    for g in sorted(range(len(groups)), key=lambda g: groups[g].window is None):  # full attention last
        count = counts[g] + min(ceilings[g] - counts[g], left // sizes[g])
        count = max(needs[g], count - count % max(1, (1 << count.bit_length()) // 128))
        left -= (count - counts[g]) * sizes[g]
        counts[g] = count
    return tuple(counts)

"""Paged KV cache on the device: page groups, the arrays of each layer, and the number of pages that fit.

A page group is a set of layers with one page table: one entry of axis G of `page_table[G, B, ·]`. A group has
its own KV heads, head width, dtype and window, and so its own page size and number of pages. Window layers
form a group for each window, which needs no more pages than its windows can see. Most models have one group.

The arrays of a layer are [P, K, S, H]: a page of one head is a contiguous box, the unit that attention
kernels load. 8-bit values (e4m3, int8) are [P, K, H, S], as Hopper's tensor cores need them. int8 has a
float32 scale for each token and head in the cache; e4m3 has a scale for each head, which is part of the
weights.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.parallel.mesh import axis_of, sharded
from pallas_kernels.quantized import Quantized


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """Layers that share a page table.

    Attributes:
      layers: indices of the layers.
      kv_heads: K, the heads in the cache over all devices.
      head_dim: H.
      dtype: name of the dtype of keys and values.
      window: a query sees its own token and the `window` - 1 tokens before; None: all tokens.
    """

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None

    def layer_shapes(self, num_pages: int, block_size: int) -> tuple[Any, Any]:
        """Return (keys, values) of one layer over all devices, as `jax.ShapeDtypeStruct`s."""
        dtype = jnp.dtype(self.dtype)
        keys = (num_pages, self.kv_heads, block_size, self.head_dim)
        values = keys if dtype.itemsize > 1 else (num_pages, self.kv_heads, self.head_dim, block_size)
        k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in (keys, values))
        if dtype != jnp.int8:
            return k, v
        scale = jax.ShapeDtypeStruct(keys[:-1], jnp.float32)
        return Quantized(k, scale), Quantized(v, scale)  # pyright: ignore[reportArgumentType]

    def page_bytes(self, block_size: int, tp: int) -> int:
        """Return the bytes of a page on one of `tp` devices: keys, values and scales of all layers."""
        arrays = jax.tree.leaves(self.layer_shapes(1, block_size))
        return len(self.layers) * sum(array.size * array.dtype.itemsize for array in arrays) // tp

    def pages_of(self, tokens: int, block_size: int) -> int:
        """Return the most pages that a sequence of `tokens` tokens holds at once.

        A window of w tokens spans one page more than it fills.
        """
        pages = -(-tokens // block_size)
        return pages if self.window is None else min(pages, -(-self.window // block_size) + 1)


def page_groups(config: ModelConfig, dtype: Any, tp: int) -> tuple[PageGroup, ...]:
    """Return the page groups of a model, one for each window of its layers, full attention first."""
    return tuple(
        PageGroup(
            tuple(i for i, layer in enumerate(config.layers) if layer.window == window),
            kv_heads(config, tp),
            config.head_dim,
            jnp.dtype(dtype).name,
            window,
        )
        for window in config.windows
    )


def kv_heads(config: ModelConfig, tp: int) -> int:
    """Return the KV heads in the cache. Heads are repeated if there are fewer heads than devices."""
    return max(config.num_kv_heads, tp)


def cache_spec(mesh: Mesh) -> PartitionSpec:
    """Return the partition of every array of the cache: the heads over the devices."""
    return PartitionSpec(None, axis_of(mesh))


def cache_shapes(
    groups: Sequence[PageGroup], num_pages: Sequence[int], block_size: int
) -> list[tuple[Any, Any]]:
    """Return (keys, values) of every layer over all devices, as `jax.ShapeDtypeStruct`s.

    `num_pages`: P of each group.
    """
    by_layer = {
        layer: group.layer_shapes(pages, block_size)
        for group, pages in zip(groups, num_pages, strict=True)
        for layer in group.layers
    }
    return [by_layer[layer] for layer in sorted(by_layer)]


def make_cache(
    groups: Sequence[PageGroup], num_pages: Sequence[int], block_size: int, mesh: Mesh
) -> list[tuple[Any, Any]]:
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

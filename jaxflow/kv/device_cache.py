"""The paged KV cache on the device: keys and values of each layer, and how many pages fit.

Each is [P, K, S, H]: a page of one head is one contiguous box, which is what the attention kernels load. Of 8
bits (e4m3, int8), values are [P, K, H, S], as Hopper's tensor cores need them; int8 has a float32 scale for
each token and head beside it, e4m3 one for each head, which is among the weights. Layers of one window share
a page table (a layer group, axis G) and so a number of pages; a group of window layers needs no more pages
than its windows can see.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.parallel.mesh import TP, axis_of, sharded
from pallas_kernels.quantized import Quantized


def kv_heads(config: ModelConfig, tp: int) -> int:
    """Key/value heads in the cache: each shard holds at least one, so they repeat where there are fewer than
    shards.
    """
    return max(config.num_kv_heads, tp)


def cache_spec(mesh: Mesh) -> PartitionSpec:
    """Heads are cut over the tensor-parallel shards."""
    return PartitionSpec(None, axis_of(mesh))


def cache_shapes(
    config: ModelConfig, num_pages: tuple[int, ...], block_size: int, dtype, tp: int
) -> list[tuple[Any, Any]]:
    """(keys, values) of every layer as `jax.ShapeDtypeStruct`s, over all `tp` devices; P is the pages of the
    layer's group.
    """
    heads, narrow = kv_heads(config, tp), jnp.dtype(dtype).itemsize == 1

    def layer_shapes(p: int) -> tuple[Any, Any]:
        keys, turned = (p, heads, block_size, config.head_dim), (p, heads, config.head_dim, block_size)
        k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in (keys, turned if narrow else keys))
        if jnp.dtype(dtype) != jnp.int8:
            return k, v
        scale = jax.ShapeDtypeStruct(keys[:-1], jnp.float32)
        return Quantized(k, scale), Quantized(v, scale)  # pyright: ignore[reportArgumentType]

    return [layer_shapes(num_pages[config.windows.index(layer.window)]) for layer in config.layers]


def make_cache(
    config: ModelConfig, num_pages: tuple[int, ...], block_size: int, dtype, mesh: Mesh
) -> list[tuple[Any, Any]]:
    """Zeroed (keys, values) of every layer, of `cache_shapes`."""
    zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharded(mesh, cache_spec(mesh)))
    return jax.tree.map(
        lambda a: zeros(a.shape, a.dtype), cache_shapes(config, num_pages, block_size, dtype, mesh.shape[TP])
    )


def page_bytes(config: ModelConfig, block_size: int, dtype, tp: int) -> tuple[int, ...]:
    """Bytes that one page of each layer group takes on one device, keys and values of all of the group's
    layers, and their scales.
    """
    a_head = config.head_dim * jnp.dtype(dtype).itemsize + (4 if jnp.dtype(dtype) == jnp.int8 else 0)
    one_layer = 2 * kv_heads(config, tp) // tp * block_size * a_head
    return tuple(
        one_layer * sum(layer.window == window for layer in config.layers) for window in config.windows
    )


def fit_pages(
    config: ModelConfig,
    budget_bytes: int,
    *,
    block_size: int,
    dtype,
    tp: int,
    max_num_seqs: int,
    token_budget: int,
    max_model_len: int,
    memory: str = "the device's",
) -> tuple[int, ...]:
    """Pages of each layer group that fit in `budget_bytes` of one device.

    Every group can hold one sequence of `max_model_len` tokens. Of the rest, window groups get what
    `max_num_seqs` sequences can see at most, full attention what is left. Counts are rounded down to two
    significant digits or so: free memory differs a little from start to start, and with another number of
    pages no compiled program is found again. memory: whose it is, in the refusal.

    Raises:
      ConfigError: when not even one sequence of `max_model_len` tokens fits, naming what would.
    """
    sizes = page_bytes(config, block_size, dtype, tp)
    whole = -(-max_model_len // block_size)
    # A window of w tokens straddles one page more than it fills; chunks in flight need their own pages too.
    needs = [whole if w is None else min(whole, -(-w // block_size) + 1) for w in config.windows]
    ceilings = [max_num_seqs * need + -(-token_budget // block_size) for need in needs]
    need = sum(n * size for n, size in zip(needs, sizes, strict=True))
    if need > budget_bytes:
        raise ConfigError(
            "max_model_len",
            max_model_len,
            f"one such sequence needs {need / 2**30:.3f} GiB of KV pages and {max(0, budget_bytes) / 2**30:.3f} GiB of {memory} memory "
            "are free for them; lower max_model_len or raise gpu_memory_utilization",
        )
    counts, left = list(needs), budget_bytes - need
    for g in sorted(
        range(len(sizes)), key=lambda g: config.windows[g] is None
    ):  # windows first, full attention last
        count = counts[g] + min(ceilings[g] - counts[g], left // sizes[g])
        count = max(needs[g], count - count % max(1, (1 << count.bit_length()) // 128))
        left -= (count - counts[g]) * sizes[g]
        counts[g] = count
    return tuple(counts)

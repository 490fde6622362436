"""A decode's attention where its KV is: on the host, of one new token a sequence over pages in host memory (FlexGen §4.2).

Only queries and outputs cross the link, fewer bytes than the KV by its length. A row is a few products over numbers that are read once,
so it takes as long as the host's memory: XLA fuses a row's products into passes over its pages, and rows are shared out to threads.
"""

import concurrent.futures
import functools
import itertools
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflow.config import ConfigError, Layer, ModelConfig

_LOWEST = -1e30


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, *, scale: float, window: int | None = None, soft_cap: float | None = None
) -> jax.Array:
    """Attention of one token a row, summed in float32.

    Args:
      q: [R, N, H]. k, v: [R, MP, K, S, H], each row's own pages in order.
      lengths: [R] int32, keys of each row, its own included; 0: its output is 0.
      window: only the last `window` keys are seen. soft_cap: scores become soft_cap · tanh(score / soft_cap).

    Returns: [R, N, H], of q's dtype.
    """
    rows, heads, width = q.shape
    _, pages, kv_heads, size, _ = k.shape
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, width).astype(jnp.float32) * scale
    key = jnp.arange(pages * size).reshape(pages, 1, 1, size)

    def one(row: tuple[jax.Array, ...]) -> jax.Array:
        query, keys, values, length = row
        scores = (query[None, :, :, None] * keys[:, :, None].astype(jnp.float32)).sum(-1)  # [MP, K, G, S]
        scores = scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap
        seen = key < length
        seen = seen if window is None else seen & (key >= length - window)
        top = jnp.where(seen, scores, _LOWEST).max((0, 3), keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
        out = (weights[..., None] * values[:, :, None].astype(jnp.float32)).sum((0, 3))
        return out / jnp.maximum(weights.sum((0, 3)), 1e-30)[..., None]

    return lax.map(one, (grouped, k, v, lengths)).reshape(q.shape).astype(q.dtype)


class HostAttention:
    """`attend` over a batch's parts on the CPU, its rows cut over threads.

    Raises:
      ConfigError: JAX has no CPU backend here.
    """

    def __init__(self, config: ModelConfig, rows: Sequence[int], pages: int, page_size: int, dtype: np.dtype, threads: int | None = None):
        try:
            self._device = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise ConfigError("host_attention", True, "False: JAX was told to leave out its CPU backend (JAX_PLATFORMS)") from error
        self._config = config
        self._threads = max(1, min(threads or os.cpu_count() or 1, max(rows)))
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, thread_name_prefix="host-attention")
        self._kv = (pages, config.num_kv_heads, page_size, config.head_dim)
        self._query = (config.num_heads, config.head_dim)
        self._dtype = dtype
        self._compiled = {
            (layer.window, n): self._compile(layer.window, n)
            for layer in dict.fromkeys(config.layers)
            for count in set(rows)
            for n in {stop - start for start, stop in self._cuts(count)}
        }

    def __call__(self, layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
        """Attends, into `out`. q, out: [R, N, H]; k, v: [R · MP, K, S, H]; lengths: [R] int32."""
        rows = q.shape[0]
        k, v = (pages.reshape(rows, *self._kv) for pages in (k, v))

        def some(cut: tuple[int, int]) -> None:
            at = slice(*cut)
            inputs = jax.device_put((q[at], k[at], v[at], lengths[at]), self._device)
            out[at] = np.asarray(self._compiled[layer.window, cut[1] - cut[0]](*inputs))

        for done in [self._pool.submit(some, cut) for cut in self._cuts(rows)]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _cuts(self, rows: int) -> list[tuple[int, int]]:
        """Rows in as many runs as there are threads, of at most two lengths."""
        runs = min(self._threads, rows)
        borders = [rows * i // runs for i in range(runs + 1)]
        return list(itertools.pairwise(borders))

    def _compile(self, window: int | None, rows: int):
        placed = jax.sharding.SingleDeviceSharding(self._device)

        def struct(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=placed)

        settings = {"scale": self._config.scale, "window": window, "soft_cap": self._config.attention_soft_cap}
        arrays = struct(self._query, self._dtype), struct(self._kv, self._dtype), struct(self._kv, self._dtype), struct((), jnp.int32)
        return attend.lower(*arrays, **settings).compile()

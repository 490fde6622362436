"""A decode's attention where its KV is: on the host, of one new token a sequence over pages in host memory (FlexGen §4.2).

Only queries and outputs cross the link, fewer bytes than the KV by its length. A row is a few products over numbers that are read once,
so it takes as long as the host's memory, if little else is done: bfloat16 is widened by a shift, in pieces that stay in a core's cache, and
multiplied by numpy's BLAS; rows are shared out to threads, which hold Python's lock only between those calls. XLA's own loops of the
same (jaxlib 0.11.2) took two to five times a core's time. Each thread keeps the memory it widens into, since fresh memory is a page fault
every 4 KB. With arrays made anew for each piece 16 cores read 7 GB/s of KV, hardly more than two; whether this was why is not measured yet.
"""

import concurrent.futures
import itertools
import os
import threading

import numpy as np

from jaxflow.config import Layer, ModelConfig

_LOWEST = np.float32(-1e30)
_PIECE_BYTES = 1 << 20  # of keys or values that are widened at a time


class Scratch(threading.local):
    """A thread's memory to widen numbers in, kept from piece to piece."""

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint32)

    def widened(self, a: np.ndarray) -> np.ndarray:
        """An array as float32, until the next is; bfloat16 is its upper half."""
        if a.dtype.itemsize != 2:
            return a.astype(np.float32, copy=False)
        if self._words.size < a.size:
            self._words = np.empty(a.size, np.uint32)
        words = self._words[: a.size].reshape(a.shape)
        np.copyto(words, a.view(np.uint16))
        np.left_shift(words, np.uint32(16), out=words)
        return words.view(np.float32)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    length: int,
    *,
    scale: float,
    scratch: Scratch,
    window: int | None = None,
    soft_cap: float | None = None,
) -> np.ndarray:
    """Attention of one token of one sequence, computed in float32.

    Args:
      q: [N, H]. k, v: [MP, K, S, H], the sequence's pages in order; bfloat16 or float32.
      length: its keys, the token's own included; 0: the output is 0.
      window: only the last `window` keys are seen. soft_cap: scores become soft_cap · tanh(score / soft_cap).

    Returns: float32 [N, H].
    """
    _, heads, size, width = k.shape
    if not length:
        return np.zeros(q.shape, np.float32)
    first = 0 if window is None else max(0, length - window)
    start, stop = first // size, -(-length // size)
    pieces = list(itertools.pairwise([*range(start, stop, max(1, _PIECE_BYTES // k[0].nbytes)), stop]))
    grouped = (scratch.widened(q) * np.float32(scale)).reshape(heads, -1, width)
    scores = np.empty((stop - start, heads, grouped.shape[1], size), np.float32)
    for a, b in pieces:
        np.matmul(grouped, scratch.widened(k[a:b]).swapaxes(-1, -2), out=scores[a - start : b - start])
    if soft_cap is not None:
        scores = np.tanh(scores / np.float32(soft_cap)) * np.float32(soft_cap)
    key = np.arange(start * size, stop * size).reshape(-1, 1, 1, size)
    scores = np.where((key >= first) & (key < length), scores, _LOWEST)
    scores -= scores.max((0, 3), keepdims=True)
    weights = np.exp(scores, out=scores)
    out = sum(np.matmul(weights[a - start : b - start], scratch.widened(v[a:b])).sum(0) for a, b in pieces)
    return (out / weights.sum((0, 3))[..., None]).reshape(q.shape)


class HostAttention:
    """`attend` for the rows of a part, on threads."""

    def __init__(self, config: ModelConfig, rows: int, threads: int | None = None):
        self._config = config
        self._threads = max(1, min(threads or os.cpu_count() or 1, rows))
        self._scratch = Scratch()
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, thread_name_prefix="host-attention")

    def __call__(self, layer: Layer, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
        """Attends, into `out`. q, out: [R, N, H]; k, v: [R · MP, K, S, H]; lengths: [R] int32."""
        rows, settings = q.shape[0], {"scale": self._config.scale, "window": layer.window, "soft_cap": self._config.attention_soft_cap}
        k, v = (pages.reshape(rows, -1, *pages.shape[1:]) for pages in (k, v))

        def one(row: int) -> None:
            out[row] = attend(q[row], k[row], v[row], int(lengths[row]), scratch=self._scratch, **settings)

        for done in [self._pool.submit(one, row) for row in range(rows)]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()

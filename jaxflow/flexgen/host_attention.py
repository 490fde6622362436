"""Attention of decodes on the host: one new token a sequence over KV pages in host memory (FlexGen §4.2).

Only queries and outputs cross the link; the KV has more bytes by a factor of its length. The attention of a
row is a few matrix products over numbers that are read once, so the host's memory bandwidth is the bound. A
shift and a mask widen bfloat16 in pieces, and numpy's BLAS multiplies. Threads share the rows, or parts of a
row's heads. Most likely Python's lock, which a thread holds between these calls, limits the rate: on an
H200's host one thread reads 3.6 GB/s of bfloat16 in pieces of 1 MiB; eight threads read 13 GB/s and sixteen
6.5 GB/s in pieces of 2 MiB; eight threads read a third less in pieces of 1 MiB
(benchmarks/h200/opt-30b/host-attention.json: 330 MB of complete pages over median_s). XLA's loops for the
same work (jaxlib 0.11.2) took two to five times the time of a core. Each thread keeps its scratch memory,
because fresh memory costs a page fault every 4 KB.
"""

import concurrent.futures
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxflow.config import Layer, ModelConfig
from jaxflow.flexgen.sparse_values import top_count, top_positions

_LOWEST = np.float32(-1e30)
_SHIFT, _MASK = np.uint32(16), np.uint32(0xFFFF0000)
_PIECE_BYTES = 1 << 21  # keys or values widened at a time; with half of this eight threads read a third less
_MOST_THREADS = 8  # more threads take longer, because they wait for the lock


class Scratch(threading.local):
    """Memory of a thread for widened numbers, kept between pieces."""

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint32)

    def split(self, a: np.ndarray) -> np.ndarray:
        """Return [..., W] as float32 [n, ..., W / n], valid until the next call.

        For bfloat16, n = 2: the even and the odd columns. For float32, n = 1. A word of two bfloat16 values
        is widened by a shift (the even one) and a mask (the odd one), each on half of the numbers. This takes
        a third less time than a conversion of all numbers to words and a shift.
        """
        if a.dtype.itemsize != 2:
            return a[None]
        pairs = a.view(np.uint32)
        if self._words.size < a.size:
            self._words = np.empty(a.size, np.uint32)
        words = self._words[: a.size].reshape(2, *pairs.shape)
        np.left_shift(pairs, _SHIFT, out=words[0])
        np.bitwise_and(pairs, _MASK, out=words[1])
        return words.view(np.float32)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray | Callable[[np.ndarray], np.ndarray],
    length: int,
    *,
    scale: float,
    scratch: Scratch,
    window: int | None = None,
    soft_cap: float | None = None,
    percent: float = 100.0,
) -> np.ndarray:
    """Return the attention of one token of one sequence, float32 [N, H], computed in float32.

    Args:
      q: [N, H].
      k: [MP, K, S, H], the pages of the sequence in order; bfloat16 or float32.
      v: pages like k; with `percent` below 100, a function of positions [K, n] that returns rows [K, n, H].
      length: number of the sequence's tokens, including the new one; 0 gives an output of 0.
      window: only the last `window` tokens are seen.
      soft_cap: scores become soft_cap · tanh(score / soft_cap).
      percent: the share of cached keys with V rows that count (`jaxflow.flexgen.sparse_values`).
    """
    _, heads, size, width = k.shape
    if not length:
        return np.zeros(q.shape, np.float32)
    first = 0 if window is None else max(0, length - window)
    start, stop = first // size, -(-length // size)
    pieces = list(itertools.pairwise([*range(start, stop, max(1, _PIECE_BYTES // k[0].nbytes)), stop]))
    columns = scratch.split(q) * np.float32(
        scale
    )  # [n, N, H / n]: even and odd columns separated, like keys and values
    grouped = columns.reshape(len(columns), 1, heads, -1, width // len(columns))
    scores = np.empty((stop - start, heads, grouped.shape[3], size), np.float32)
    for a, b in pieces:
        np.add.reduce(
            np.matmul(grouped, scratch.split(k[a:b]).swapaxes(-1, -2)), 0, out=scores[a - start : b - start]
        )
    if soft_cap is not None:
        scores = np.tanh(scores / np.float32(soft_cap)) * np.float32(soft_cap)
    if first > start * size or length < stop * size:
        key = np.arange(start * size, stop * size).reshape(-1, 1, 1, size)
        scores = np.where((key >= first) & (key < length), scores, _LOWEST)
    scores -= scores.max((0, 3), keepdims=True)
    weights = np.exp(scores, out=scores)
    if callable(v):
        summed = weights.sum((0, 3))  # [K, N / K]
        weights = np.moveaxis(weights, 0, 2).reshape(*summed.shape, -1) / summed[..., None]  # by key
        cached, at = slice(first - start * size, length - 1 - start * size), length - 1
        count = top_count(percent, at - first)
        chosen = top_positions(weights.sum(1)[:, cached], count) + first
        chosen = np.concatenate([chosen, np.full((heads, 1), at, chosen.dtype)], axis=1)
        few = np.take_along_axis(weights, (chosen - start * size)[:, None], axis=-1)
        rows = np.matmul(few, scratch.split(v(chosen)))  # [n, K, N / K, H / n]
        return np.moveaxis(rows, 0, -1).reshape(q.shape)
    out = sum(
        np.matmul(weights[a - start : b - start], scratch.split(v[a:b])).sum(1) for a, b in pieces
    )  # [n, K, N / K, H / n]
    return (
        np.moveaxis(np.asarray(out), 0, -1).reshape(heads, -1, width) / weights.sum((0, 3))[..., None]
    ).reshape(q.shape)


def usable_cores() -> int:
    """Return the number of cores of this process: its CPU affinity, or a container's smaller quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def head_parts(rows: int, heads: int, threads: int) -> int:
    """Return the number of parts of a row's heads: the fewest with at most a tenth of idle time."""
    busy = {
        parts: rows * parts / (-(-rows * parts // threads) * threads)
        for parts in range(1, min(heads, 8) + 1)
        if heads % parts == 0
    }
    return next(
        (parts for parts, share in busy.items() if share >= 0.9), max(busy, key=lambda parts: busy[parts])
    )


# Return rows of V [n, H] for arrays [n] of sequences, heads and positions.
ValueRows = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _rows_of(values: ValueRows, row: int, first_head: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return `values` of one sequence and of consecutive heads, as a function of positions [K, n]."""

    def rows(positions: np.ndarray) -> np.ndarray:
        heads, n = positions.shape
        head = np.repeat(np.arange(first_head, first_head + heads), n)
        found = values(np.full(heads * n, row), head, positions.reshape(-1))
        return found.reshape(heads, n, -1)

    return rows


class HostAttention:
    """`attend` for the sequences of a split, on threads."""

    def __init__(self, config: ModelConfig, rows: int, threads: int | None = None, *, percent: float = 100.0):
        self._config, self._percent = config, percent
        self._threads = max(1, min(threads or min(usable_cores(), _MOST_THREADS), rows * config.num_kv_heads))
        self._scratch = Scratch()
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads, thread_name_prefix="host-attention")

    def __call__(
        self,
        layer: Layer,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray | ValueRows,
        lengths: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Attend, and write the result to `out`.

        Args:
          q, out: [R, N, H].
          k: [R · MP, K, S, H].
          v: pages like k; with `percent` below 100, a function that returns rows of V.
          lengths: [R] int32.
        """
        rows, heads = q.shape[0], k.shape[1]
        settings = {
            "scale": self._config.scale,
            "window": layer.window,
            "soft_cap": self._config.attention_soft_cap,
            "percent": self._percent,
        }
        parts = head_parts(rows, heads, self._threads)
        q, out = (a.reshape(rows * parts, -1, a.shape[-1]) for a in (q, out))
        k = k.reshape(rows, -1, *k.shape[1:])
        tasks = itertools.count()

        def work() -> None:
            """Take parts of rows until none is left. A job a part would cost more than its work."""
            while (task := next(tasks)) < rows * parts:
                row, part = divmod(task, parts)
                mine = slice(part * heads // parts, (part + 1) * heads // parts)
                values = _rows_of(v, row, mine.start) if callable(v) else v.reshape(k.shape)[row][:, mine]
                out[task] = attend(
                    q[task],
                    k[row][:, mine],
                    values,
                    int(lengths[row]),
                    scratch=self._scratch,
                    **settings,
                )

        for done in [self._pool.submit(work) for _ in range(min(self._threads, rows * parts))]:
            done.result()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()

"""Work lists of whole (row, KV head) pairs, for the comparison with the kernel's equal pieces.

FlashDecoding++Next §III gives whole heads to the SMs: a worker that is free takes the next pair. In the plain
order of heads a long pair can come last, and most workers then wait for it. The longest pairs first leave
short pairs for the end (the rule of the longest processing time).
"""

import heapq
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.decode.work_list import DecodeWork, decode_work


def whole_pairs(
    lengths: Sequence[int], spans: np.ndarray, sinks: int, workers: int, longest_first: bool
) -> DecodeWork:
    """Return the work list that gives whole pairs to `workers`, each to the worker that is free first.

    lengths: of B rows, all above 0. spans: [K] or [B, K]. longest_first: the order of the pairs;
    otherwise rows in order and heads in order. The time of a pair is its pages.
    """
    with jax.ensure_compile_time_eval():
        sized = jnp.asarray(lengths, jnp.int32)
        rows = np.array(decode_work(sized, spans.shape[-1], 1, None, jnp.asarray(spans), sinks).rows)
    pages = rows[:, 1]
    order = np.argsort(-pages, kind="stable") if longest_first else np.arange(len(pages))
    queues = assigned(pages[order].tolist(), workers)
    pieces, starts = np.zeros((workers, 4), np.int32), np.zeros((workers, 6), np.int32)
    for worker, queue in enumerate(queues):
        pairs = order[queue]
        if len(pairs) == 0:
            continue
        rows[pairs, 3] = np.append(pairs[1:], pairs[-1])
        pieces[worker] = pairs[0], 0, 0, pages[pairs].sum()
        starts[worker] = *rows[pairs[0]], rows[rows[pairs[0], 3], 0]
    none = np.zeros((workers,), np.int32)
    arrays = rows, pieces, starts, none, none, np.zeros((2 * workers,), np.int32)
    return DecodeWork(*map(jnp.asarray, arrays))


def assigned(costs: list[int], workers: int) -> list[list[int]]:
    """Return the items of each worker: each item in order goes to the worker that is free first."""
    free = [(0, worker) for worker in range(workers)]
    queues: list[list[int]] = [[] for _ in free]
    for item, cost in enumerate(costs):
        time, worker = heapq.heappop(free)
        queues[worker].append(item)
        heapq.heappush(free, (time + cost, worker))
    return queues

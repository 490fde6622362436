"""Transfer rates between device and pinned host memory: each direction, both at once, in pages, in pieces,
through numpy.

The measurement starts page copies as the engine does (`to_host`, `to_device`, `both_…`). Two comparisons are
one call for all pages, and one array of their total size.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxflow.kv.tiers.offload import PAGES_A_CALL, Transfers, in_calls
from jaxflow.kv.tiers.page_copies import PageCopies

TRAIN = 4  # requests in flight before the first wait, as in a run that keeps the link busy
CALLS = (1, 2, 4, 16)  # pages that one call copies


def rate(run: Callable[[], Any], num_bytes: int, seconds: float) -> float:
    """Return the bytes per second of `run`, which moves `num_bytes` and returns its arrays.

    The rate is the median over `seconds`, after one warm-up run.
    """
    jax.block_until_ready(run())
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return num_bytes / float(np.median(times))


def both(
    down: Callable[[], Any], up: Callable[[], Any], num_bytes: int, seconds: float
) -> tuple[float, float]:
    """Return the rates of two transfers that run at the same time."""
    found: dict[str, float] = {}
    gate = threading.Barrier(2)

    def measure(name: str, run: Callable[[], Any]) -> None:
        gate.wait()
        found[name] = rate(run, num_bytes, seconds)

    threads = [threading.Thread(target=measure, args=pair) for pair in (("down", down), ("up", up))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found["down"], found["up"]


def in_turns(
    there: list[jax.Array], here: list[jax.Array], transfers: Transfers, pages_a_call: int
) -> list[jax.Array]:
    """Start equal numbers of page copies in both directions, alternating groups as `Transfers.copy` does."""
    calls = (itertools.batched(pages, pages_a_call) for pages in (there * TRAIN, here * TRAIN))
    copies = []
    for down, up in zip(*calls, strict=True):
        copies += jax.device_put(down, transfers.to_host.sharding)
        copies += jax.device_put(up, transfers.to_device.sharding)
    return copies


def pieces_of(kv: list, pages: Sequence[int]) -> list[jax.Array]:
    """Return pages in their cache layout: one array for each layer's keys, values and scales of each page."""
    cut = jax.jit(lambda kv, page: [array[page] for array in jax.tree.leaves(kv)])
    return [piece for page in pages for piece in cut(kv, page)]


def measure(
    copies: PageCopies, transfers: Transfers, kv: list, group: int, count: int, seconds: float
) -> dict[str, float]:
    """Return the GB/s of `count` pages of a layer group, summed over shards, and the speedup of contiguous
    pages."""
    ids = np.random.default_rng(0).permutation(copies.num_pages[group])[:count].tolist()
    host, device = transfers.to_host.sharding, transfers.to_device.sharding
    layers = [kv[i] for i in copies.programs[group].group.layers]
    there = jax.block_until_ready(copies.gather(kv, group, ids))
    num_bytes = sum(page.nbytes for page in there)
    here = jax.block_until_ready(jax.device_put(there, host))
    few = ids[: max(1, count // 16)]
    pieces = jax.block_until_ready(pieces_of(layers, few))
    pieces_here = jax.block_until_ready(jax.device_put(pieces, [_on_host(piece) for piece in pieces]))
    piece_bytes = sum(piece.nbytes for piece in pieces)
    found = {
        "to_host": rate(lambda: in_calls(there, host), num_bytes, seconds),
        "to_device": rate(lambda: in_calls(here, device), num_bytes, seconds),
        "one_call_to_host": rate(lambda: jax.device_put(there, host), num_bytes, seconds),
        "one_call_to_device": rate(lambda: jax.device_put(here, device), num_bytes, seconds),
        "train_to_host": rate(
            lambda: [in_calls(there, host) for _ in range(TRAIN)], TRAIN * num_bytes, seconds
        ),
        "train_to_device": rate(
            lambda: [in_calls(here, device) for _ in range(TRAIN)], TRAIN * num_bytes, seconds
        ),
        "pieces_to_host": rate(
            lambda: jax.device_put(pieces, [_on_host(piece) for piece in pieces]), piece_bytes, seconds
        ),
        "pieces_to_device": rate(
            lambda: jax.device_put(pieces_here, [piece.sharding for piece in pieces]), piece_bytes, seconds
        ),
        "numpy_to_host": rate(
            lambda: [np.array(page) for page in _again(there[:1])], there[0].nbytes, min(seconds, 0.5)
        ),
        "begin_to_host": _begin_rate(lambda: in_calls(there, host), num_bytes),
        "begin_to_device": _begin_rate(lambda: in_calls(here, device), num_bytes),
        "gather": rate(lambda: copies.gather(kv, group, ids), num_bytes, seconds),
    }
    for few in CALLS:  # pages per call in each direction, until both rates are known
        found[f"both_in_turns_of_{few}"] = rate(
            lambda few=few: in_turns(there, here, transfers, few), TRAIN * num_bytes, seconds
        )
    found["both_to_host"] = found["both_to_device"] = found[f"both_in_turns_of_{PAGES_A_CALL}"]
    found["both_one_call_to_host"], found["both_one_call_to_device"] = both(
        lambda: jax.device_put(there, host), lambda: jax.device_put(here, device), num_bytes, seconds
    )
    whole = jax.block_until_ready(
        jax.jit(lambda pages: jax.numpy.concatenate(pages, axis=1))(there)
    )  # one array, for comparison
    whole_here = jax.block_until_ready(jax.device_put(whole, host))
    found["one_array_to_host"] = rate(lambda: jax.device_put(whole, host), num_bytes, seconds)
    found["one_array_to_device"] = rate(lambda: jax.device_put(whole_here, device), num_bytes, seconds)
    found["both_one_array_to_host"], found["both_one_array_to_device"] = both(
        lambda: jax.device_put(whole, host), lambda: jax.device_put(whole_here, device), num_bytes, seconds
    )
    return {f"{name}_gb_per_s": value / 1e9 for name, value in found.items()} | {
        "contiguous_over_pieces_to_host": found["to_host"] / found["pieces_to_host"],
        "contiguous_over_pieces_to_device": found["to_device"] / found["pieces_to_device"],
    }


def loaded_rate(executor: Any, group: int, count: int, transfers: Transfers, seconds: float) -> float:
    """Return the GB/s of loading host pages into their places in the cache: one copy, then a scatter."""
    ids = list(range(count))
    here = jax.device_put(executor.gather_pages(group, ids), transfers.to_host.sharding)

    def load() -> Any:
        executor.scatter_pages(group, ids, in_calls(here, transfers.to_device.sharding))
        return executor.kv

    return rate(load, sum(page.nbytes for page in here), seconds) / 1e9


def _begin_rate(run: Callable[[], Any], num_bytes: int) -> float:
    """Return the bytes per second at which copies are started.

    The start rate is far above the link's rate unless a start waits for its copy.
    """
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        copies = run()
        times.append(time.perf_counter() - begin)
        jax.block_until_ready(copies)
    return num_bytes / float(np.median(times))


def _on_host(array: jax.Array) -> Any:
    return array.sharding.with_memory_kind("pinned_host")


def _again(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return new arrays with the same content, because an array caches the values that numpy has read."""
    return jax.block_until_ready([array + 0 for array in arrays])

"""Transfer rates between device and host, and the slowdown of a step by concurrent page copies (NanoFlow
§4.2.2).

  python -m jaxflow.bench link --model llama-3.1-8b --load_format dummy --kv_offloading_size 8
      --workload 1024/512

The first part measures the link, from pinned memory reserved as in the engine. The measured rates are: each
direction separately and both at once; contiguous pages and the pieces of a page in the cache; and pages
loaded into their places.

The second part measures the average step of a workload, without and with concurrent copies, in turns.
`storing` copies all pages that such a step completes, as the engine does in every step. `loading` loads the
same number of pages. `storing and loading` does both. `storing x4` stores four times as many pages.
"""

import collections
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from jaxflow.bench.plans.bed import USUAL, make_bed
from jaxflow.bench.plans.steady import SteadyStep, parse_workload
from jaxflow.bench.report import machine
from jaxflow.bench.workload import flags as options
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError
from jaxflow.engine.executor import Executor
from jaxflow.engine.start import prefill_seconds_per_token
from jaxflow.kv.tiers.host_machine import bind, gpu_bus_ids, near_cpus, run_bound
from jaxflow.kv.tiers.offload import PAGES_A_CALL, Transfers, in_calls
from jaxflow.kv.tiers.page import HOST_MEMORY, copy_to
from jaxflow.kv.tiers.page_copies import PageCopies
from jaxflow.kv.tiers.start import link_bytes_per_s, reserve
from jaxflow.parallel.mesh import on_gpu
from pallas_kernels.measure.timing import interleaved

GOAL_GB_PER_S = 48
GOAL_SLOWDOWN = 1.03
UNDER_WAY = 2  # maximum number of steps with copies in flight


def define_flags() -> None:
    options.define_engine(kv_offloading_size=8.0)
    flags.DEFINE_string(
        "workload",
        "1024/512",
        "Workload of the step: prompt/output tokens (1024/512), or decodes x keys (256x1100).",
    )
    flags.DEFINE_integer("pages", 64, "Pages per transfer for the link rates.", lower_bound=1)
    flags.DEFINE_float("seconds", 0.5, "Seconds to measure each rate.", lower_bound=0.0)
    flags.DEFINE_float("step_seconds", 2.0, "Seconds to measure each kind of step.", lower_bound=0.0)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


class StepsWithCopies:
    """Steps with concurrent page copies. The copies start as in the engine."""

    def __init__(self, steady: SteadyStep, transfers: Transfers, pages: int):
        self.steady, self.transfers, self.pages = steady, transfers, pages
        assert isinstance(steady.executor.copies, PageCopies)
        self.copies, self.executor = steady.executor.copies, steady.executor
        ids = list(range(min(self.copies.num_pages[0], 4 * pages)))
        self._ids = ids
        self._host: list[Any] = copy_to(self.executor.gather_pages(0, ids[:pages]), HOST_MEMORY)
        self._down, self._up = 0, 0  # pages requested for copies
        self._came: collections.deque[Any] = collections.deque(maxlen=pages)

    def step(self, *, stored: int = 0, loaded: int = 0) -> jax.Array:
        """Run a step, then store `stored` times and load `loaded` times the number of pages that it
        completes."""
        self._drain()
        ids, down = self._ids[: stored * self.pages], []
        if loaded and len(self._came) == self.pages:
            self.executor.scatter_pages(0, self._ids[: self.pages], list(self._came))
            self._came.clear()
        if ids:
            self._down += len(ids)
            down = [(None, page) for page in self.executor.gather_pages(0, ids)]
        self._up += self.pages if loaded else 0
        self.transfers.copy(down, [(None, page) for page in self._host] if loaded else [])
        return self.steady.enqueue()

    def _drain(self) -> None:
        """Collect finished copies, and wait while more than two steps' copies are in flight.

        When the wait occurs, the link limits the rate.
        """
        while True:
            self._down -= len(self.transfers.to_host.done())
            arrived = [page for _, page in self.transfers.to_device.done() if page is not None]
            self._up -= len(arrived)
            self._came.extend(arrived)
            if self._down <= UNDER_WAY * 4 * self.pages and self._up <= UNDER_WAY * self.pages:
                return
            self.transfers.wait(0.001)


def measure_steps(steady: SteadyStep, transfers: Transfers, tokens: int, seconds: float) -> dict[str, Any]:
    """Return the milliseconds of a step of `tokens` tokens, without and with concurrent copies, and the
    slowdowns."""
    pages = max(1, tokens // steady.layout.page_size)
    stepper = StepsWithCopies(steady, transfers, pages)
    kinds: dict[str, dict[str, int]] = {
        "no copies": {},
        "storing": {"stored": 1},
        "loading": {"loaded": 1},
        "storing and loading": {"stored": 1, "loaded": 1},
        "storing x4": {"stored": 4},
    }
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(stepper.step, **kind) for name, kind in kinds.items()
    }
    timings = interleaved(runs, seconds=seconds)
    without = timings["no copies"].us
    return {
        "pages_a_step": pages,
        "bytes_a_step": pages * sum(page.nbytes for page in stepper._host[:1]),
        "steps": {
            name: {"ms": t.us / 1e3, "slowdown": t.us / without, "spread": t.spread, "watts": t.watts}
            for name, t in timings.items()
        },
    }


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, CheckpointError."""
    f = flags.FLAGS
    config, workload = engine_config_from_flags(), parse_workload(f.workload, "workload")
    if not config.kv_offloading_size:
        raise ConfigError("kv_offloading_size", 0, "a number of GiB of host memory greater than 0")
    bed = make_bed(dataclasses.replace(config, plan="sequential"), [], [], [workload], [USUAL], "workload")
    executor: Executor = bed.executor
    copies = executor.copies
    assert isinstance(copies, PageCopies)
    mesh = executor.programs.mesh
    cpus = near_cpus(gpu_bus_ids(mesh.size)) if on_gpu() else None
    bind(cpus)
    pages, transfers = executor.page_shapes(), Transfers()
    try:
        begin, capacity = time.perf_counter(), int(config.kv_offloading_size * 2**30)
        run_bound(cpus, lambda: reserve(pages, capacity))
        reserved_s = time.perf_counter() - begin
        count = min(f.pages, min(copies.num_pages), max(1, capacity // (max(copies.page_bytes) * mesh.size)))
        rates = measure_rates(copies, executor.kv, 0, count, f.seconds)
        rates["loaded_to_its_place_gb_per_s"] = loaded_rate(executor, 0, count, f.seconds)
        ((steady, step),) = bed.ready(workload).values()
        steps = measure_steps(steady, transfers, int(step.tokens), f.step_seconds)
        result = {
            "command_name": "link",
            "model": Path(bed.config.model).name,
            "engine_config": dataclasses.asdict(bed.config),
            "page_bytes": [size * mesh.size for size in copies.page_bytes],
            "pages": count,
            "near_cpus": None if cpus is None else len(cpus),
            "reserved_s": reserved_s,
            "reserve_gb_per_s": capacity / reserved_s / 1e9,
            "goals": {"gb_per_s": GOAL_GB_PER_S, "slowdown": GOAL_SLOWDOWN},
            "link": rates,
            "workload": workload.name,
            "step_tokens": int(step.tokens),
            **steps,
            "costs": {
                "link_gb_per_s": link_bytes_per_s(pages[0]) / 1e9,
                "us_a_token": prefill_seconds_per_token(executor) * 1e6,
                "load_us_a_token": 1e6
                * sum(copies.page_bytes)
                * mesh.size
                / bed.config.block_size
                / 1e9
                / rates["to_device_gb_per_s"],
            },
            **machine.describe(),
        }
    finally:
        transfers.close()
    print(text(result))
    return result


def text(result: dict[str, Any]) -> str:
    """Return the report as a table."""
    lines = [f"{'pages of ' + '/'.join(map(str, result['page_bytes'])) + ' bytes':<44}{'GB/s':>12}"]
    lines += [
        f"{name.removesuffix('_gb_per_s').replace('_', ' '):<44}{value:>12.2f}"
        for name, value in result["link"].items()
    ]
    lines.append(
        f"{result['step_tokens']} tokens, {result['pages_a_step']} pages a step".ljust(44)
        + f"{'ms':>12}{'slowdown':>12}"
    )
    lines += [
        f"{name:<44}{row['ms']:>12.3f}{row['slowdown']:>12.3f}" for name, row in result["steps"].items()
    ]
    costs = result["costs"]
    lines.append(
        f"a token: {costs['us_a_token']:.2f} us to compute, {costs['load_us_a_token']:.2f} us to load"
    )
    return "\n".join(lines)


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


def in_turns(on_device: list[jax.Array], on_host: list[jax.Array], pages_a_call: int) -> list[jax.Array]:
    """Start equal numbers of page copies in both directions, alternating groups as `Transfers.copy` does."""
    calls = (itertools.batched(pages, pages_a_call) for pages in (on_device * TRAIN, on_host * TRAIN))
    copies = []
    for down, up in zip(*calls, strict=True):
        copies += copy_to(down, HOST_MEMORY)
        copies += copy_to(up, None)
    return copies


def pieces_of(kv: list, pages: Sequence[int]) -> list[jax.Array]:
    """Return pages in their cache layout: one array for each layer's keys, values and scales of each page."""
    cut = jax.jit(lambda kv, page: [array[page] for array in jax.tree.leaves(kv)])
    return [piece for page in pages for piece in cut(kv, page)]


def measure_rates(copies: PageCopies, kv: list, group: int, count: int, seconds: float) -> dict[str, float]:
    """Return the GB/s of `count` pages of a layer group, summed over shards, and the speedup of contiguous
    pages."""
    ids = np.random.default_rng(0).permutation(copies.num_pages[group])[:count].tolist()
    host, device = HOST_MEMORY, None
    layers = [kv[i] for i in copies.programs[group].group.layers]
    on_device = jax.block_until_ready(copies.gather(kv, group, ids))
    num_bytes = sum(page.nbytes for page in on_device)
    on_host = jax.block_until_ready(copy_to(on_device, host))
    some = ids[: max(1, count // 16)]
    pieces = jax.block_until_ready(pieces_of(layers, some))
    pieces_here = jax.block_until_ready(jax.device_put(pieces, [_on_host(piece) for piece in pieces]))
    piece_bytes = sum(piece.nbytes for piece in pieces)
    found = {
        "to_host": rate(lambda: in_calls(on_device, host), num_bytes, seconds),
        "to_device": rate(lambda: in_calls(on_host, device), num_bytes, seconds),
        "one_call_to_host": rate(lambda: copy_to(on_device, host), num_bytes, seconds),
        "one_call_to_device": rate(lambda: copy_to(on_host, device), num_bytes, seconds),
        "train_to_host": rate(
            lambda: [in_calls(on_device, host) for _ in range(TRAIN)], TRAIN * num_bytes, seconds
        ),
        "train_to_device": rate(
            lambda: [in_calls(on_host, device) for _ in range(TRAIN)], TRAIN * num_bytes, seconds
        ),
        "pieces_to_host": rate(
            lambda: jax.device_put(pieces, [_on_host(piece) for piece in pieces]), piece_bytes, seconds
        ),
        "pieces_to_device": rate(
            lambda: jax.device_put(pieces_here, [piece.sharding for piece in pieces]), piece_bytes, seconds
        ),
        "numpy_to_host": rate(
            lambda: [np.array(page) for page in _again(on_device[:1])], on_device[0].nbytes, min(seconds, 0.5)
        ),
        "begin_to_host": _begin_rate(lambda: in_calls(on_device, host), num_bytes),
        "begin_to_device": _begin_rate(lambda: in_calls(on_host, device), num_bytes),
        "gather": rate(lambda: copies.gather(kv, group, ids), num_bytes, seconds),
    }
    for some in CALLS:  # pages per call in each direction, until both rates are known
        found[f"both_in_turns_of_{some}"] = rate(
            lambda some=some: in_turns(on_device, on_host, some), TRAIN * num_bytes, seconds
        )
    found["both_to_host"] = found["both_to_device"] = found[f"both_in_turns_of_{PAGES_A_CALL}"]
    found["both_one_call_to_host"], found["both_one_call_to_device"] = both(
        lambda: copy_to(on_device, host), lambda: copy_to(on_host, device), num_bytes, seconds
    )
    whole = jax.block_until_ready(
        jax.jit(lambda pages: jax.numpy.concatenate(pages, axis=1))(on_device)
    )  # one array, for comparison
    whole_on_host = jax.block_until_ready(copy_to([whole], host))
    found["one_array_to_host"] = rate(lambda: copy_to([whole], host), num_bytes, seconds)
    found["one_array_to_device"] = rate(lambda: copy_to(whole_on_host, device), num_bytes, seconds)
    found["both_one_array_to_host"], found["both_one_array_to_device"] = both(
        lambda: copy_to([whole], host), lambda: copy_to(whole_on_host, device), num_bytes, seconds
    )
    return {f"{name}_gb_per_s": value / 1e9 for name, value in found.items()} | {
        "contiguous_over_pieces_to_host": found["to_host"] / found["pieces_to_host"],
        "contiguous_over_pieces_to_device": found["to_device"] / found["pieces_to_device"],
    }


def loaded_rate(executor: Any, group: int, count: int, seconds: float) -> float:
    """Return the GB/s of loading host pages into their places in the cache: one copy, then a scatter."""
    ids = list(range(count))
    on_host: list[Any] = copy_to(executor.gather_pages(group, ids), HOST_MEMORY)

    def load() -> Any:
        executor.scatter_pages(group, ids, in_calls(on_host, None))
        return executor.kv

    return rate(load, sum(page.nbytes for page in on_host), seconds) / 1e9


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

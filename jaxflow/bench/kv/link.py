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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import flags

from jaxflow.bench.kv import link_rates
from jaxflow.bench.plans.command import USUAL, make_bed
from jaxflow.bench.plans.steady import Steady, parse_workload
from jaxflow.bench.report import machine
from jaxflow.bench.workload import flags as options
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError
from jaxflow.engine.executor import Executor
from jaxflow.engine.start import prefill_seconds_per_token
from jaxflow.kv.tiers.host_machine import bind, gpu_bus_ids, near_cpus, run_bound
from jaxflow.kv.tiers.offload import Transfers
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


class Beside:
    """Steps with concurrent copies, started as the engine starts them."""

    def __init__(self, steady: Steady, transfers: Transfers, pages: int):
        self.steady, self.transfers, self.pages = steady, transfers, pages
        assert steady.executor.copies is not None
        self.copies, self.executor = steady.executor.copies, steady.executor
        ids = list(range(min(self.copies.num_pages[0], 4 * pages)))
        self._ids = ids
        self._host = jax.device_put(self.executor.gather_pages(0, ids[:pages]), transfers.to_host.sharding)
        self._down, self._up = 0, 0  # pages requested for copies
        self._came: collections.deque[jax.Array] = collections.deque(maxlen=pages)

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


def measure_steps(steady: Steady, transfers: Transfers, tokens: int, seconds: float) -> dict[str, Any]:
    """Return the milliseconds of a step of `tokens` tokens, without and with concurrent copies, and the
    slowdowns."""
    pages = max(1, tokens // steady.layout.page_size)
    beside = Beside(steady, transfers, pages)
    kinds: dict[str, dict[str, int]] = {
        "alone": {},
        "storing": {"stored": 1},
        "loading": {"loaded": 1},
        "storing and loading": {"stored": 1, "loaded": 1},
        "storing x4": {"stored": 4},
    }
    ways: dict[str, Callable[[], Any]] = {
        name: functools.partial(beside.step, **kind) for name, kind in kinds.items()
    }
    timings = interleaved(ways, seconds=seconds)
    alone = timings["alone"].us
    return {
        "pages_a_step": pages,
        "bytes_a_step": pages * sum(page.nbytes for page in beside._host[:1]),
        "steps": {
            name: {"ms": t.us / 1e3, "slowdown": t.us / alone, "spread": t.spread, "watts": t.watts}
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
    assert copies is not None
    mesh = executor.programs.mesh
    cpus = near_cpus(gpu_bus_ids(mesh.size)) if on_gpu() else None
    bind(cpus)
    transfers = Transfers(mesh, copies.programs[0].spec)
    try:
        begin, capacity = time.perf_counter(), int(config.kv_offloading_size * 2**30)
        run_bound(cpus, lambda: reserve(copies, transfers, capacity))
        reserved_s = time.perf_counter() - begin
        count = min(f.pages, min(copies.num_pages), max(1, capacity // (max(copies.page_bytes) * mesh.size)))
        rates = link_rates.measure(copies, transfers, executor.kv, 0, count, f.seconds)
        rates["loaded_to_its_place_gb_per_s"] = link_rates.loaded_rate(
            executor, 0, count, transfers, f.seconds
        )
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
                "link_gb_per_s": link_bytes_per_s(copies, transfers) / 1e9,
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

"""CPU time of a step: the engine's thread, its scheduler, packing and deliveries, with a device that takes no
time.

  python -m jaxflow.bench host --running 1 --running 256 --running 1024

Prompt and output lengths are chosen so that each step fills the token budget. A step has one decode per
request, and prefill chunks for the rest. The cost of a step is the CPU time of the engine's thread between
two calls of the executor. The report also holds the wall-clock time, which other work on the machine
lengthens.
"""

import math
import time
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench.report import machine
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.drive import greedy_requests
from jaxflow.engine.driver import Driver
from jaxflow.engine.executor import Pending
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop import Loop
from jaxflow.engine.step_plans import token_buckets
from jaxflow.request import Event
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.scheduler import Scheduler

BLOCK_SIZE = 64
OUTPUT_TOKENS = 256
LONGEST_PROMPT = 2048


def define_flags() -> None:
    flags.DEFINE_multi_integer(
        "running", [1, 256, 1024], "Requests running at once. May be repeated.", lower_bound=1
    )
    flags.DEFINE_integer("max_num_batched_tokens", 2048, "Token budget of a step.", lower_bound=1)
    flags.DEFINE_integer("steps", 500, "Steps measured.", lower_bound=1)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


class InstantExecutor:
    """A replacement for `jaxflow.engine.executor.Executor` that finishes each step at once with token 0."""

    compilations = 0
    num_stages = 1
    expert_layers = ()
    substitutes = False

    def __init__(self, layouts: list[StepLayout]):
        self.layouts, self.decode_layouts = {layout.tokens: (layout,) for layout in layouts}, {}
        self.slots = layouts[0].slots
        # (CPU time, wall-clock time, decodes, rows of the step)
        self.calls: list[tuple[float, float, int, int]] = []

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        *,
        full: bool,
        targets: np.ndarray | None = None,
    ) -> Pending:
        now = time.perf_counter()
        self.calls.append((time.thread_time(), now, int(layout.views(buffer)["num_decodes"]), layout.tokens))
        return Pending(np.zeros(layout.rows, np.int32), None, None, now)  # type: ignore[arg-type]

    def set_slot(self, *_: Any) -> None: ...


class Unread:
    """A mailbox that discards all events."""

    def post(self, events: list[Event]) -> None: ...


def measure(running: int, budget: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds per step with `running` requests, over at least `steps` mostly-decode steps."""
    prompt = max(1, min(LONGEST_PROMPT, OUTPUT_TOKENS * (budget - running) // running))
    buckets = token_buckets(budget, sparse=False)
    executor = InstantExecutor(
        [StepLayout(tokens, min(tokens, running), running, BLOCK_SIZE) for tokens in buckets]
    )
    number = running + -(
        -2 * max(steps, OUTPUT_TOKENS) * running // OUTPUT_TOKENS
    )  # enough steps include arrivals and completions
    scheduler = Scheduler(
        SchedulerConfig(
            token_budget=budget,
            max_num_seqs=running,
            block_size=BLOCK_SIZE,
            windows=(None,),
            num_pages=((running + 1) * -(-(prompt + OUTPUT_TOKENS + 1) // BLOCK_SIZE),),
            max_model_len=prompt + OUTPUT_TOKENS,
            buckets=buckets,
            enable_prefix_caching=True,
            max_waiting=number,
        )
    )
    items = workload.constant(number, prompt, OUTPUT_TOKENS)
    requests = greedy_requests(items, workload.prompts(items, 32000))
    driver = Driver(Loop(scheduler, executor, eos_token_ids=()))  # type: ignore[arg-type]
    mailbox = Unread()
    for request in requests:
        driver.submit(request, mailbox)
    driver.start()
    driver.drain(math.inf)
    driver.close()
    return {
        "running": running,
        "token_budget": budget,
        "prompt_tokens": prompt,
        **_statistics(executor.calls, running, steps),
    }


def _statistics(calls: list[tuple[float, float, int, int]], running: int, steps: int) -> dict[str, Any]:
    cpu, clock, decodes, rows = (np.array(column) for column in zip(*calls, strict=True))
    full = np.flatnonzero(decodes[1:] >= min(0.9 * running, decodes.max()))
    full = full[len(full) // 4 :][
        :steps
    ]  # after the ramp-up, when the first requests all run and none has ended
    cpu_ms, clock_ms = 1e3 * np.diff(cpu)[full], 1e3 * np.diff(clock)[full]
    return {
        "steps": len(full),
        "mean_rows": float(rows[1:][full].mean()),
        "mean_ms": float(cpu_ms.mean()),
        "median_ms": float(np.median(cpu_ms)),
        "p90_ms": float(np.percentile(cpu_ms, 90)),
        "p99_ms": float(np.percentile(cpu_ms, 99)),
        "median_clock_ms": float(np.median(clock_ms)),
    }


def run() -> dict[str, Any]:
    """Run the command and return its report."""
    f = flags.FLAGS
    found = [measure(running, max(f.max_num_batched_tokens, running), f.steps) for running in f.running]
    print(" Host Cost of a Step ".center(report.WIDTH, "="))
    for one in found:
        print(f"{one['running']} running, {one['mean_rows']:.0f} tokens a step".center(report.WIDTH, "-"))
        for key in ("mean", "median", "p90", "p99"):
            print(report.line(f"{key.capitalize()} step, CPU time (ms):", f"{one[f'{key}_ms']:.3f}"))
        print(report.line("Median step, clock (ms):", f"{one['median_clock_ms']:.3f}"))
    result = {"command_name": "host", "host": found, **machine.describe()}
    print("Machine".center(report.WIDTH, "-"))
    print(report.line("CPU:", f"{result['cpu']}, {result['cpu_cores']} cores"))
    print(
        report.line(
            "Versions:", ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        )
    )
    print(f"Command: {result['command']}")
    print("=" * report.WIDTH)
    return result

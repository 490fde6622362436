"""What the device did with its time: each step's bucket, its own time, and the device's idle time before it."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.plan import load

COMPARED = "plans with predictions, which have the sequential one beside them"


@dataclasses.dataclass(frozen=True)
class Step:
    """Times of one clock: enqueueing began and was over; a step is done when its sampled tokens are there."""

    bucket: int
    decode_tokens: int
    prefill_tokens: int
    began_s: float
    enqueued_s: float
    done_s: float


@contextlib.contextmanager
def step_log(executor: Executor) -> Iterator[list[Step]]:
    """Logs every step that the executor runs while the block does; the list is complete when the block ends.

    A thread waits for each step on the device, so the engine's own thread pays for two clock readings and a
    queue.
    """
    log: list[Step] = []
    enqueued: queue.SimpleQueue[tuple[Any, dict[str, Any]] | None] = queue.SimpleQueue()
    run = executor.run

    def logged(layout, buffer, *args, **kwargs):
        fields = layout.views(buffer)
        decodes, tokens = int(fields["num_decodes"]), int((fields["token_rows"] >= 0).sum())
        known = {
            "bucket": layout.tokens,
            "decode_tokens": decodes,
            "prefill_tokens": tokens - decodes,
            "began_s": time.perf_counter(),
        }
        pending = run(layout, buffer, *args, **kwargs)
        enqueued.put((pending.tokens, known | {"enqueued_s": time.perf_counter()}))
        return pending

    def wait() -> None:
        while (entry := enqueued.get()) is not None:
            tokens, known = entry
            tokens.block_until_ready()
            log.append(Step(**known, done_s=time.perf_counter()))

    thread = threading.Thread(target=wait, name="step-log", daemon=True)
    thread.start()
    executor.run = logged  # an attribute of this one executor, in front of the method
    try:
        yield log
    finally:
        del executor.run
        enqueued.put(None)
        thread.join()


@contextlib.contextmanager
def sequential_alone(executor: Executor) -> Iterator[None]:
    """While the block runs, every step runs its bucket's sequential plan: what searched plans are compared
    with, in one engine.

    Raises: ConfigError for an engine in which a bucket has no sequential plan.
    """
    every = executor.layouts
    alone = {
        bucket: tuple(one for one in several if one.plan == "sequential") for bucket, several in every.items()
    }
    without = [several[0].plan for bucket, several in every.items() if not alone[bucket]]
    if without:
        raise ConfigError("plan", without[0], COMPARED)
    executor.layouts = alone
    try:
        yield
    finally:
        executor.layouts = every


def check_plan(config: EngineConfig) -> None:
    """Refuses what `sequential_alone` would, of a plan file, before a model is loaded for nothing. Raises:
    ConfigError, PlanError.
    """
    plan = load(config.plan) if Path(config.plan).is_file() else None
    if plan is not None and plan.predictions is None and not is_sequential(plan):
        raise ConfigError("plan", plan.name, COMPARED)


def plans_of(executor: Executor) -> set[str]:
    """The plans that an executor may run: the sequential one alone where no other is sure to gain."""
    return {layout.plan for several in executor.layouts.values() for layout in several}


def summary(log: list[Step]) -> dict[str, Any] | None:
    """Steps by bucket with their mean time, and the share of the time between first and last step that the
    device idled.

    The device idles from a step's end until the next one is enqueued, at most; until its enqueueing begins,
    at least. The two differ where a step has more launches than the driver queues (some thousand: an
    overlapped step of many layers, over devices), so that enqueueing it lasts into its run; a step's time is
    from the earlier one on.
    """
    if not log:
        return None
    by_bucket: dict[int, list[float]] = {}
    start = before = log[0].enqueued_s
    at_most_s, at_least_s, gaps = 0.0, 0.0, 0
    for step in log:
        gap = max(0.0, step.enqueued_s - before)
        at_most_s, gaps = at_most_s + gap, gaps + (gap > 0)
        at_least_s += max(0.0, step.began_s - before)
        by_bucket.setdefault(step.bucket, []).append(step.done_s - max(before, step.began_s))
        before = step.done_s
    total_s = log[-1].done_s - start
    tokens = sum(step.decode_tokens + step.prefill_tokens for step in log)
    return {
        "steps": len(log),
        "mean_step_ms": 1e3 * total_s / len(log),
        "device_idle_share": at_most_s / total_s if total_s else 0.0,
        "device_idle_share_at_least": at_least_s / total_s if total_s else 0.0,
        "steps_after_idle": gaps,
        "mean_tokens": tokens / len(log),
        "mean_decode_tokens": sum(step.decode_tokens for step in log) / len(log),
        "padding_share": 1 - tokens / sum(step.bucket for step in log),
        "by_bucket": {
            str(bucket): {"steps": len(times), "mean_ms": 1e3 * sum(times) / len(times)}
            for bucket, times in sorted(by_bucket.items())
        },
    }

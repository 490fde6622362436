"""The device's time by step: each step's bucket, its duration, and the idle time before it."""

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxflow.config import ConfigError
from jaxflow.engine.executor import Executor
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.plan import Plan

COMPARED = "plans with predictions and a sequential plan for comparison"


@dataclasses.dataclass(frozen=True)
class Step:
    """The times of one step on one clock: start and end of its enqueueing, and the arrival of its sampled
    tokens.

    bucket, decode_tokens, prefill_tokens: of all data-parallel ranks.
    """

    bucket: int
    decode_tokens: int
    prefill_tokens: int
    began_s: float
    enqueued_s: float
    done_s: float


class _Span(NamedTuple):
    """A step's time on the device, and the two bounds of the idle time before the step."""

    run_s: float
    idle_s: float
    idle_at_least_s: float


@contextlib.contextmanager
def step_log(executor: Executor | StagedExecutor) -> Iterator[list[Step]]:
    """Log every step that the executor runs during the `with` block. The list is complete when the block
    ends.

    A separate thread waits for each step on the device. The engine's own thread pays for two clock readings
    and a queue.
    """
    log: list[Step] = []
    enqueued: queue.SimpleQueue[tuple[Any, dict[str, Any]] | None] = queue.SimpleQueue()
    run = executor.run

    def logged(layout, buffer, *args, **kwargs) -> Any:
        ranks = [layout.views(part) for part in buffer.reshape(executor.ranks, -1)]
        decodes = sum(int(fields["num_decodes"]) for fields in ranks)
        tokens = sum(int((fields["token_rows"] >= 0).sum()) for fields in ranks)
        known = {
            "bucket": layout.tokens * executor.ranks,
            "decode_tokens": decodes,
            "prefill_tokens": tokens - decodes,
            "began_s": time.perf_counter(),
        }
        pending = run(layout, buffer, *args, **kwargs)
        enqueued.put((pending, known | {"enqueued_s": time.perf_counter()}))
        return pending

    def wait() -> None:
        while (entry := enqueued.get()) is not None:
            pending, known = entry
            pending.tokens.block_until_ready()
            log.append(Step(**known, done_s=time.perf_counter()))

    thread = threading.Thread(target=wait, name="step-log", daemon=True)
    thread.start()
    executor.run = logged  # an attribute of this executor instance that shadows the method
    try:
        yield log
    finally:
        del executor.run
        enqueued.put(None)
        thread.join()


@contextlib.contextmanager
def sequential_alone(executor: Executor | StagedExecutor) -> Iterator[None]:
    """Run every step with its bucket's sequential plan during the `with` block.

    The benchmark compares searched plans with these runs in one engine.

    Raises: ConfigError for an engine with a bucket without a sequential plan.
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


def check_plans(plans: Mapping[int, Sequence[Plan]]) -> None:
    """Check the plans of each step size for the condition of `sequential_alone`, before a model is loaded.

    Raises: ConfigError.
    """
    for plan in itertools.chain(*plans.values()):
        if plan.predictions is None and not is_sequential(plan):
            raise ConfigError("plan", plan.name, COMPARED)


def plans_of(executor: Executor | StagedExecutor) -> set[str]:
    """Return the plans that an executor may run: only the sequential plan if no other plan is expected to
    gain."""
    return {layout.plan for several in executor.layouts.values() for layout in several}


def summary(log: list[Step]) -> dict[str, Any] | None:
    """Return the steps by bucket with their mean time, and the idle share between the first and the last
    step. A bucket's idle share is the idle time before its steps over the time of all steps, so that the
    buckets' shares add up to the whole share.

    The idle time has two bounds. The upper bound is the time from a step's end to the end of the next
    enqueueing. The lower bound ends at the start of the next enqueueing. The bounds differ for steps with
    more launches than the driver queues (some thousand), whose enqueueing continues during the run. An
    overlapped step of many layers over several devices is an example. A step's time starts at the lower
    bound's end.
    """
    if not log:
        return None
    by_bucket: dict[int, list[_Span]] = {}
    start = before = log[0].enqueued_s
    for step in log:
        at_most_s, at_least_s = (max(0.0, at - before) for at in (step.enqueued_s, step.began_s))
        span = _Span(step.done_s - max(before, step.began_s), at_most_s, at_least_s)
        by_bucket.setdefault(step.bucket, []).append(span)
        before = step.done_s
    total_s = log[-1].done_s - start
    tokens = sum(step.decode_tokens + step.prefill_tokens for step in log)
    return {
        "steps": len(log),
        "mean_step_ms": 1e3 * total_s / len(log),
        **_idle(list(itertools.chain(*by_bucket.values())), total_s),
        "mean_tokens": tokens / len(log),
        "mean_decode_tokens": sum(step.decode_tokens for step in log) / len(log),
        "padding_share": 1 - tokens / sum(step.bucket for step in log),
        "by_bucket": {
            str(bucket): {
                "steps": len(spans),
                "mean_ms": 1e3 * sum(span.run_s for span in spans) / len(spans),
                **_idle(spans, total_s),
            }
            for bucket, spans in sorted(by_bucket.items())
        },
    }


def _idle(spans: Sequence[_Span], total_s: float) -> dict[str, Any]:
    """Return the idle time before some steps. Shares are of `total_s`, the time of all steps."""
    at_most_s = sum(span.idle_s for span in spans)
    at_least_s = sum(span.idle_at_least_s for span in spans)
    return {
        "device_idle_share": at_most_s / total_s if total_s else 0.0,
        "device_idle_share_at_least": at_least_s / total_s if total_s else 0.0,
        "steps_after_idle": sum(span.idle_s > 0 for span in spans),
    }

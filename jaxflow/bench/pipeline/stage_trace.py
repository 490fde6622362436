"""The times of an engine's steps on each pipeline stage, and the bubbles between them (SARATHI §5.3)."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.scheduler.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class StageTrace:
    """The steps of a run on P pipeline stages.

    Attributes:
      requests: the ids of each step's requests.
      enqueued_s: float64 [steps], time at which the host began to enqueue a step.
      ended_s: float64 [steps, P], time at which a stage ended a step.
    """

    requests: tuple[frozenset[str], ...]
    enqueued_s: np.ndarray
    ended_s: np.ndarray

    @property
    def began_s(self) -> np.ndarray:
        """Time at which a stage began a step, float64 [steps, P].

        A stage begins when it ended the step before and the input is there: the host's for the first stage,
        the stage before's for the others. So the copy between two stages counts as busy.
        """
        arrived = np.concatenate([self.enqueued_s[:, None], self.ended_s[:, :-1]], axis=1)
        before = np.concatenate([np.full((1, self.ended_s.shape[1]), -np.inf), self.ended_s[:-1]])
        return np.maximum(arrived, before)

    @property
    def idle_s(self) -> np.ndarray:
        """Idle time of a stage before each step, float64 [steps, P]; 0 before the first step."""
        idle = np.zeros_like(self.ended_s)
        idle[1:] = self.began_s[1:] - self.ended_s[:-1]
        return idle

    def bubble_s(self) -> dict[str, float]:
        """Return the bubble time of each request: the idle time before its steps, summed over stages."""
        found: dict[str, float] = {}
        for ids, idle in zip(self.requests, self.idle_s.sum(axis=1), strict=True):
            for request in ids:
                found[request] = found.get(request, 0.0) + float(idle)
        return found

    def busy_share(self) -> list[float]:
        """Return each stage's share of the run in which it was busy."""
        whole = self.ended_s.max() - self.enqueued_s.min()
        return ((self.ended_s - self.began_s).sum(axis=0) / whole).tolist()


@contextlib.contextmanager
def stage_traces(executor: StagedExecutor, scheduler: Scheduler) -> Iterator[list[StageTrace]]:
    """Record every step that the scheduler makes and the executor runs during the `with` block.

    The list gets one trace when the block ends. A thread for each stage waits for the stage's steps.
    """
    requests: list[frozenset[str]] = []
    enqueued: list[float] = []
    ended: list[list[float]] = [[] for _ in executor.stages]
    results: list[queue.SimpleQueue[jax.Array | None]] = [queue.SimpleQueue() for _ in executor.stages]
    schedule, run, draw = scheduler.schedule, executor.run, executor.stages[-1].draw

    def scheduled(now: float) -> Any:
        work = schedule(now)
        if work is not None:
            sequences = [*work.decodes, *(chunk.seq for chunk in work.chunks)]
            requests.append(frozenset(seq.request.request_id for seq in sequences))
        return work

    def ran(*args: Any, **kwargs: Any) -> Any:
        enqueued.append(time.perf_counter())
        return run(*args, **kwargs)

    def drew(*args: Any, **kwargs: Any) -> Any:
        pending = draw(*args, **kwargs)
        results[-1].put(pending.tokens)
        return pending

    def advanced(stage: int) -> Any:
        advance = executor.stages[stage].advance

        def logged(*args: Any, **kwargs: Any) -> Any:
            hidden, x, rows = advance(*args, **kwargs)
            results[stage].put(x)
            return hidden, x, rows

        return logged

    def wait(stage: int) -> None:
        while (array := results[stage].get()) is not None:
            array.block_until_ready()
            ended[stage].append(time.perf_counter())

    threads = [
        threading.Thread(target=wait, args=(stage,), name=f"stage-{stage}", daemon=True)
        for stage in range(len(results))
    ]
    for thread in threads:
        thread.start()
    # Attributes of these instances shadow the methods.
    scheduler.schedule, executor.run, executor.stages[-1].draw = scheduled, ran, drew
    for stage in range(len(results) - 1):
        executor.stages[stage].advance = advanced(stage)
    traces: list[StageTrace] = []
    try:
        yield traces
    finally:
        del scheduler.schedule, executor.run, executor.stages[-1].draw
        for stage in executor.stages[:-1]:
            del stage.advance
        for each in results:
            each.put(None)
        for thread in threads:
            thread.join()
    # A stage ends a step before the next stage does, also where its thread woke up later.
    observed = np.array(ended).T
    causal = np.minimum.accumulate(observed[:, ::-1], axis=1)[:, ::-1]
    traces.append(StageTrace(tuple(requests), np.array(enqueued), causal))

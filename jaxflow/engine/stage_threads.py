"""The threads that enqueue the steps of pipeline stages, one a stage.

The host launches the kernels of a stage one after another, so one thread for four stages needs four times as
long for a step. A stage's thread launches a step while the others launch the steps before and after.
"""

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxflow.engine.executor import Pending
from jaxflow.model.logprobs import LogprobsOut


class AtOnce(concurrent.futures.Executor):
    """Makes each call in the caller's thread."""

    def submit[T](self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the result of a call. Raises what the call raises."""
        made = Future()
        made.set_result(fn(*args, **kwargs))
        return made


def stage_threads(stages: int, own: bool) -> list[concurrent.futures.Executor]:
    """Return what makes the calls of each stage, in their order. own: each stage has a thread of its own."""
    if not own:
        return [AtOnce()] * stages
    return [ThreadPoolExecutor(1, f"stage-{number}-launches") for number in range(stages)]


class PendingLater:
    """The results of a step that threads enqueue, with the attributes of `Pending`.

    Reading an attribute waits until the step is enqueued. Raises: what enqueueing the step raised.
    """

    def __init__(self, step: Future[Pending], enqueued_s: float):
        self._step, self.enqueued_s = step, enqueued_s

    @property
    def tokens(self) -> jax.Array:
        return self._step.result().tokens

    @property
    def logprobs(self) -> LogprobsOut | None:
        return self._step.result().logprobs

    @property
    def prompt(self) -> LogprobsOut | None:
        return self._step.result().prompt

    @property
    def expert_counts(self) -> tuple[jax.Array, ...]:
        return self._step.result().expert_counts


AnyPending = Pending | PendingLater

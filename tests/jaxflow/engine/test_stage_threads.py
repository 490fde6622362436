"""The threads of pipeline stages, on stages without devices."""

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxflow.engine import staged_executor
from jaxflow.engine.executor import Pending
from jaxflow.engine.layout import StepLayout, empty_buffer
from jaxflow.engine.staged_executor import StagedExecutor

LAYOUT = StepLayout(4, 4, 4, 16)


class FakeStage:
    """A stage whose arrays are lists of the (stage, step) pairs that made them; it takes random time."""

    is_here, defers, layouts, decode_layouts = True, False, {}, {}
    slots, page_size, groups, own_groups, replicated = 4, 16, 1, [0], None
    expert_counts, last_tokens = (), ["start"]

    def __init__(self, number: int):
        self.number, self.calls, self.may_run = number, [], threading.Event()
        self.may_run.set()
        self.lower = SimpleNamespace(hidden=lambda tokens: None)
        self._random = random.Random(number)

    def _made(self, *call: Any) -> None:
        assert self.may_run.wait(10)
        time.sleep(self._random.uniform(0, 1e-3))
        self.calls.append(call)

    def advance(self, layout, buffer, appends, x):
        step = int(buffer[-1])
        self._made("advance", step)
        if step < 0:
            raise FloatingPointError("a fault of the device")
        return (*([*x, (self.number, step)],) * 2, step)

    def draw(self, layout, hidden, x, rows, enqueued_s, **more):
        self._made("draw", rows)
        self.last_tokens = [rows]
        return Pending(hidden, None, None, enqueued_s)

    def set_slot(self, slot, values, token_ids, num_prompt):
        self._made("set_slot", slot)

    def gather_pages(self, group, pages):
        self._made("gather", *pages)
        return pages


@pytest.fixture
def executor(monkeypatch):
    monkeypatch.setattr(staged_executor, "hand_over", lambda array, sharding: array)
    monkeypatch.setattr(staged_executor.jax, "ShapeDtypeStruct", lambda *a, **k: None)
    made = StagedExecutor([FakeStage(number) for number in range(3)])  # type: ignore[arg-type]
    made._drawn.append((np.ones(4, bool), made._threads[-1].submit(made._tokens_to_first)))
    return made


def run(executor, step: int, slot: int) -> Any:
    """Enqueue a step of one decode, which draws a token of its slot."""
    buffer = empty_buffer(LAYOUT)
    fields = LAYOUT.views(buffer)
    fields["num_decodes"][...], fields["row_slots"][0], fields["samples"][0] = 1, slot, 1
    buffer[-1] = step  # a word of an empty row's seed
    return executor.run(LAYOUT, buffer, np.zeros((0, 4), np.int32), full=False)


def test_each_stage_makes_its_calls_in_their_order(executor):
    found, every = [], [[], [], []]
    for step in range(12):
        executor.set_slot(step, None, np.zeros(0, np.int32), 0)
        found.append(run(executor, step, step % 3))
        for calls in every:
            calls.append(("advance", step))
        every[-1][-1:] = [("set_slot", step), ("advance", step), ("draw", step)]
        if step % 4 == 0:
            executor.gather_pages(0, [step])
            for calls in every:
                calls.append(("gather", step))
    sources = [step.tokens[0] for step in found]
    assert [stage.calls for stage in executor.stages] == every
    assert sources == ["start"] * 3 + list(range(9))  # the last token of the same slot
    assert [step.tokens[1:] for step in found] == [[(n, step) for n in range(3)] for step in range(12)]


def test_a_stage_runs_ahead_of_a_slow_one(executor):
    slow = executor.stages[1]
    slow.may_run.clear()
    found = [run(executor, step, step) for step in range(3)]
    deadline = time.monotonic() + 10
    while len(executor.stages[0].calls) < 3 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert len(executor.stages[0].calls) == 3 and not slow.calls
    slow.may_run.set()
    assert [step.tokens[-1] for step in found] == [(2, 0), (2, 1), (2, 2)]


def test_who_reads_a_step_gets_its_fault(executor):
    first, failed, later = (run(executor, step, 0) for step in (0, -1, 2))
    assert first.tokens[-1] == (2, 0)
    for step in (failed, later):
        with pytest.raises(FloatingPointError, match="a fault of the device"):
            _ = step.tokens

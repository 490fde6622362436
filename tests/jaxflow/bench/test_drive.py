"""The driver of an engine in this process, compared with an engine of known times."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.engine import steps
from jaxflow.bench.engine.steps import Step
from jaxflow.bench.workload.drive import drive, greedy_requests
from jaxflow.bench.workload.lengths import Item
from jaxflow.request import Delta, Finished, FinishReason, QueueFull, Started, Timings, Usage


class Echo:
    """Answers each request from a thread of its own: a delivery every 5 ms."""

    def __init__(self, refuse=()):
        self.submitted, self.refuse = [], refuse

    def submit(self, request, mailbox):
        self.submitted.append((time.perf_counter(), request))
        if request.request_id in self.refuse:
            raise QueueFull(7, 1.0)
        threading.Thread(target=self.answer, args=(request, mailbox)).start()

    def answer(self, request, mailbox):
        name, n = request.request_id, request.sampling.max_tokens
        mailbox.post([Started(name, len(request.prompt_token_ids), 3, 0)])
        for _ in range(n):
            time.sleep(0.005)
            mailbox.post([Delta(name, 0, (1,))])
        error = RuntimeError("boom") if name == "bench-2" else None
        usage = Usage(len(request.prompt_token_ids), 3, n)
        mailbox.post([Finished(name, 0, FinishReason.LENGTH, usage, Timings(0, 0, 0, 0), error=error)])


ITEMS = [Item(4, 2), Item(5, 3), Item(6, 1), Item(7, 2)]
IDS = [np.arange(item.prompt_tokens, dtype=np.int32) for item in ITEMS]


def test_requests_are_greedy_and_run_past_the_end_token():
    for item, request in zip(ITEMS, greedy_requests(ITEMS, IDS), strict=True):
        assert list(request.prompt_token_ids) == list(range(item.prompt_tokens))
        assert request.sampling.temperature == 0 and request.sampling.ignore_eos
        assert request.sampling.max_tokens == item.output_tokens


def test_records_of_all_requests_the_refused_and_the_failed_among_them():
    engine = Echo(refuse={"bench-3"})
    records, duration_s = drive(engine, greedy_requests(ITEMS, IDS))
    assert [r.prompt_tokens for r in records] == [4, 5, 6, 7]
    assert [r.output_tokens for r in records] == [2, 3, 1, 0]
    assert [r.completed for r in records] == [True, True, False, False]
    assert records[2].error == "RuntimeError: boom"
    assert records[3].error is not None and records[3].error.startswith("QueueFull")
    assert records[0].cached_prompt_tokens == 3
    for record in records[:2]:
        times = [t for t, _ in record.deliveries]
        assert record.sent_s < times[0] and times == sorted(times)
        assert record.finished_s is not None and record.finished_s >= times[-1]
    assert duration_s >= 0.015


def test_requests_are_sent_at_their_arrival_times():
    engine = Echo()
    arrivals = [0.0, 0.02, 0.02, 0.05]
    start = time.perf_counter()
    drive(engine, greedy_requests(ITEMS, IDS), arrivals)
    for (sent, _), due in zip(engine.submitted, arrivals, strict=True):
        assert sent - start >= due


def test_driving_no_requests_returns_at_once():
    assert drive(Echo(), [])[0] == []


BUFFER = np.zeros(4, np.int32)


class FakeTokens:
    def __init__(self, ready_s):
        self.ready_s = ready_s

    def block_until_ready(self):
        time.sleep(max(0, self.ready_s - time.perf_counter()))


class FakeLayout:
    tokens = 8

    def views(self, buffer):
        return {"num_decodes": np.int32(2), "token_rows": np.array([0, 1, 2, 2, 2, -1, -1, -1])}


class FakePending:
    def __init__(self, tokens):
        self.tokens = tokens


class FakeExecutor:
    ranks = 1

    def run(self, layout, buffer, appends, *, full):
        return FakePending(FakeTokens(time.perf_counter() + 0.01))


def test_step_log_records_every_step_and_restores_the_executor():
    executor = FakeExecutor()
    with steps.step_log(executor) as log:
        pending = executor.run(FakeLayout(), BUFFER, None, full=False)
        assert isinstance(pending, FakePending)
        executor.run(FakeLayout(), BUFFER, None, full=True)
    assert [(s.bucket, s.decode_tokens, s.prefill_tokens) for s in log] == [(8, 2, 3)] * 2
    assert all(step.done_s >= step.enqueued_s + 0.009 and step.enqueued_s >= step.began_s for step in log)
    executor.run(FakeLayout(), BUFFER, None, full=False)
    assert len(log) == 2 and "run" not in vars(executor)


def test_idle_time_counts_from_a_steps_end_to_the_next_enqueueing():
    log = [
        Step(8, 4, 4, 0.0, 0.0, 1.0),
        Step(8, 4, 4, 0.5, 0.5, 2.0),  # enqueued while the first ran
        Step(4, 3, 0, 2.25, 2.5, 3.0),  # half a second late, of which it was being enqueued for one half
    ]
    found = steps.summary(log)
    assert found is not None
    assert found["device_idle_share"] == pytest.approx(0.5 / 3)
    assert found["device_idle_share_at_least"] == pytest.approx(0.25 / 3)
    assert (found["steps"], found["steps_after_idle"]) == (3, 1)
    few, many = found["by_bucket"]["4"], found["by_bucket"]["8"]
    assert (few["steps"], few["mean_ms"]) == (1, 750.0) and (many["steps"], many["mean_ms"]) == (2, 1000.0)
    assert (few["steps_after_idle"], many["steps_after_idle"]) == (1, 0)
    assert few["device_idle_share"] == found["device_idle_share"] and many["device_idle_share"] == 0
    assert found["padding_share"] == pytest.approx(1 - 19 / 20)
    assert steps.summary([]) is None


@given(
    st.lists(
        st.tuples(st.sampled_from((8, 64, 512)), *[st.floats(0.0, 2.0) for _ in range(3)]),
        min_size=1,
        max_size=20,
    )
)
def test_the_times_of_the_buckets_add_up_to_those_of_all_steps(drawn):
    log, began, done = [], 0.0, 0.0
    for bucket, wait, enqueueing, runs in drawn:
        began += wait
        enqueued = began + enqueueing
        done = max(done, enqueued) + runs
        log.append(Step(bucket, 1, 0, began, enqueued, done))
        began = enqueued
    found = steps.summary(log)
    assert found is not None
    every = found["by_bucket"].values()
    for key in ("steps", "steps_after_idle", "device_idle_share", "device_idle_share_at_least"):
        assert sum(one[key] for one in every) == pytest.approx(found[key])

"""The engine's thread: whatever fails, ends or is cut short, every caller hears of it, and nobody waits for
ever.
"""

import contextlib
import queue
import random
import threading
import time
from typing import Any

import pytest
import toy

from jaxflow.engine.driver import Driver, EngineDead
from jaxflow.request import (
    Delta,
    Draining,
    Finished,
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
    Started,
)

MODEL = "tiny-llama"
PATIENCE_S = 60.0
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Box:
    """A mailbox that a test reads; knows when each of its sequences has ended."""

    def __init__(self):
        self.events = queue.SimpleQueue()

    def post(self, events):
        self.events.put(list(events))

    def until(self, kind):
        """Events up to and with the first of a kind."""
        seen = []
        while not any(isinstance(event, kind) for event in seen):
            seen += self.events.get(timeout=PATIENCE_S)
        return seen

    def ends(self, sequences=1):
        """The last events of so many sequences."""
        seen = []
        while len(seen) < sequences:
            seen += [event for event in self.events.get(timeout=PATIENCE_S) if isinstance(event, Finished)]
        assert len(seen) == sequences
        return seen


class Gated:
    """An executor with steps that wait for `gate`, and a step `fail_at` that fails."""

    def __init__(self, executor, fail_at=None):
        self._executor, self._left = executor, fail_at
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def run(self, *args, **kwargs):
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("the device fell off the bus")
        return self._executor.run(*args, **kwargs)


@contextlib.contextmanager
def driving(fail_at=None, **changes):
    """A started driver over the shared executor."""
    loop: Any = toy.loop(MODEL, **changes)
    loop.executor = Gated(loop.executor, fail_at)
    driver = Driver(loop)
    driver.start()
    try:
        yield driver, loop
    finally:
        loop.executor.gate.set()
        driver.close()
        assert not driver._thread.is_alive()


def request(name, params=SHORT, **more):
    return Request(name, [3, 1, 4, 1, 5], params, **more)


def all_free(loop):
    return (
        loop.scheduler.pages_free == sum(loop.scheduler.config.num_pages) and loop.scheduler.num_running == 0
    )


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class TestDelivery:
    def test_events_come_in_order_and_one_after_another(self):
        with driving() as (driver, _):
            box = Box()
            driver.submit(request("a"), box)
            events = box.until(Finished)
            assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Delta, Finished]

    def test_sequences_that_end_in_one_step_are_all_told(self):
        """All n run in step with each other, so their last tokens come together."""
        with driving() as (driver, loop):
            box = Box()
            driver.submit(request("many", SamplingParams(n=5, max_tokens=6, ignore_eos=True, seed=1)), box)
            ends = box.ends(5)
            assert sorted(end.index for end in ends) == [0, 1, 2, 3, 4]
            assert all(end.usage.completion_tokens == 6 for end in ends)
            driver.submit(request("next"), box)
            box.ends()
            assert all_free(loop)

    def test_a_request_keeps_its_place_until_it_is_in_the_queue(self):
        """Otherwise another caller could take the place, and an accepted request would be refused."""
        with driving() as (driver, loop):
            add, waiting = loop.add, []

            def adding(request, now):
                waiting.append(driver.stats().waiting_requests)
                return add(request, now)

            loop.add = adding
            box = Box()
            driver.submit(request("a"), box)
            box.until(Finished)
            assert waiting == [1] and driver.stats().waiting_requests == 0

    def test_a_mailbox_that_raises_harms_nobody_else(self):
        class Broken:
            def post(self, events):
                raise OSError("the caller is gone")

        with driving() as (driver, loop):
            box = Box()
            driver.submit(request("broken"), Broken())
            driver.submit(request("well"), box)
            assert box.ends()[0].reason is FinishReason.LENGTH
            wait_until(lambda: all_free(loop))
            assert driver.alive

    def test_many_threads_submit(self):
        alone = Box()
        with driving() as (driver, _):
            driver.submit(request("alone"), alone)
            tokens = [event.token_ids for event in alone.until(Finished) if isinstance(event, Delta)]
            boxes = [[Box() for _ in range(6)] for _ in range(8)]

            def caller(thread):
                for i, box in enumerate(boxes[thread]):
                    driver.submit(request(f"{thread}-{i}"), box)

            threads = [threading.Thread(target=caller, args=(i,)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for box in (box for mine in boxes for box in mine):
                assert [
                    event.token_ids for event in box.until(Finished) if isinstance(event, Delta)
                ] == tokens

    def test_a_name_in_use_is_refused_and_the_first_goes_on(self):
        with driving() as (driver, loop):
            loop.executor.gate.clear()
            first, second = Box(), Box()
            driver.submit(request("name"), first)
            driver.submit(request("name"), second)
            loop.executor.gate.set()
            [end] = second.ends()
            assert isinstance(end.error, InvalidRequest)
            assert end.error.field == "request_id"
            [end] = first.ends()
            assert (end.reason, end.usage.completion_tokens) == (FinishReason.LENGTH, 4)
            driver.submit(request("name"), second)
            assert second.ends()[0].reason is FinishReason.LENGTH

    def test_what_cannot_run_is_refused_at_the_door(self):
        with driving() as (driver, loop):
            with pytest.raises(InvalidRequest, match="prompt"):
                driver.submit(Request("empty", [], SHORT), Box())
            with pytest.raises(InvalidRequest, match="max_tokens"):
                driver.submit(
                    request("long", SamplingParams(max_tokens=loop.scheduler.config.max_model_len)), Box()
                )


class TestAbort:
    def test_before_during_and_after(self):
        with driving() as (driver, loop):
            driver.abort("never came")
            loop.executor.gate.clear()
            box = Box()
            driver.submit(request("early", LONG), box)
            driver.abort("early")
            loop.executor.gate.set()
            [end] = box.ends()
            assert (end.reason, end.error) == (FinishReason.ABORT, None)

            driver.submit(request("running", LONG), box)
            box.until(Delta)
            driver.abort("running")
            [end] = box.ends()
            assert end.reason is FinishReason.ABORT
            assert 1 <= end.usage.completion_tokens < 200

            driver.submit(request("done"), box)
            assert box.ends()[0].reason is FinishReason.LENGTH
            driver.abort("done")
            driver.submit(request("after"), box)
            assert box.ends()[0].reason is FinishReason.LENGTH
            wait_until(lambda: all_free(loop))
            assert box.events.empty()

    def test_n_sequences_end_together(self):
        with driving() as (driver, loop):
            box = Box()
            driver.submit(request("three", SamplingParams(n=3, max_tokens=200, ignore_eos=True)), box)
            box.until(Delta)
            driver.abort("three")
            ends = box.ends(3)
            assert {end.index for end in ends} == {0, 1, 2}
            wait_until(lambda: all_free(loop))

    def test_random_aborts_leave_nothing_behind(self):
        rng = random.Random(5)
        toy.executor(MODEL)[1].warm_up()
        with driving() as (driver, loop):
            boxes, compiled = [], driver.stats().compilations_after_warmup
            for i in range(40):
                params = SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.randint(1, 40), seed=i)
                boxes.append((Box(), params.n))
                driver.submit(request(f"r{i}", params), boxes[-1][0])
                if rng.random() < 0.5:
                    driver.abort(f"r{rng.randint(0, i)}")
            for box, n in boxes:
                box.ends(n)
            wait_until(lambda: all_free(loop))
            assert driver.stats().compilations_after_warmup == compiled


class TestFaults:
    @pytest.mark.parametrize("step", [0, 1, 5])
    def test_a_step_that_fails_ends_every_request_and_the_engine(self, step):
        with driving(fail_at=step) as (driver, loop):
            loop.executor.gate.clear()
            boxes = [Box() for _ in range(12)]  # more than run at once
            for i, box in enumerate(boxes):
                driver.submit(
                    request(f"r{i}", LONG if i else SamplingParams(n=2, max_tokens=100, ignore_eos=True)), box
                )
            loop.executor.gate.set()
            for i, box in enumerate(boxes):
                for end in box.ends(1 if i else 2):
                    assert end.reason is FinishReason.ABORT
                    assert "fell off the bus" in str(end.error)
            driver._thread.join(PATIENCE_S)
            assert not driver.alive
            with pytest.raises(EngineDead) as caught:
                driver.submit(request("late"), Box())
            assert "fell off the bus" in str(caught.value.__cause__)
            driver.abort("r0")
            assert driver.drain(0.0) == 0

    def test_a_fault_while_results_are_read_loses_no_end(self):
        """One request of the step has ended before the fault; the next request has not."""
        with driving() as (driver, loop):
            finish, finished = loop.scheduler.finish, []

            def finish_one(seq):
                if finished:
                    raise RuntimeError("a fault between two requests")
                finished.append(seq)
                finish(seq)

            loop.scheduler.finish = finish_one
            loop.executor.gate.clear()
            first, second = Box(), Box()
            driver.submit(request("first", SamplingParams(max_tokens=2)), first)
            driver.submit(request("second", SamplingParams(max_tokens=2)), second)
            loop.executor.gate.set()
            assert first.ends()[0].error is None
            assert "between two requests" in str(second.ends()[0].error)
            driver._thread.join(PATIENCE_S)
            assert not driver.alive

    def test_a_text_decoder_that_fails_ends_only_its_sequence(self):
        class Broken:
            def push(self, token_ids):
                raise ValueError("no such text")

        with driving() as (driver, loop):
            bad, good = Box(), Box()
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop="x")
            driver.submit(request("bad", params, make_detokenizer=Broken), bad)
            driver.submit(request("good", SHORT), good)
            [end] = bad.ends()
            assert (end.reason, str(end.error)) == (FinishReason.ABORT, "no such text")
            assert good.ends()[0].reason is FinishReason.LENGTH

            def cannot():
                raise ValueError("no such tokenizer")

            driver.submit(request("worse", params, make_detokenizer=cannot), bad)
            assert str(bad.ends()[0].error) == "no such tokenizer"
            driver.submit(request("good", SHORT), good)
            assert good.ends()[0].reason is FinishReason.LENGTH
            wait_until(lambda: all_free(loop))


class TestEnding:
    def test_a_full_queue(self):
        with driving(max_waiting=3) as (driver, loop):
            loop.executor.gate.clear()
            box = Box()
            taken = 0
            with pytest.raises(QueueFull) as caught:
                for i in range(50):
                    driver.submit(request(f"r{i}"), box)
                    taken += 1
            assert taken >= 3
            assert caught.value.retry_after_s > 0
            loop.executor.gate.set()
            box.ends(taken)
            driver.submit(request("again"), box)
            box.ends()

    def test_drain_lets_what_runs_finish(self):
        with driving() as (driver, loop):
            box = Box()
            for i in range(10):
                driver.submit(request(f"r{i}"), box)
            assert driver.drain(PATIENCE_S) == 0
            assert all(end.reason is FinishReason.LENGTH for end in box.ends(10))
            assert all_free(loop)
            with pytest.raises(Draining):
                driver.submit(request("late"), box)

    def test_drain_aborts_what_takes_too_long(self):
        with driving() as (driver, _):
            box = Box()
            driver.submit(request("slow", LONG), box)
            box.until(Started)
            assert driver.drain(0.0) == 1
            assert box.ends()[0].reason is FinishReason.ABORT

    def test_drain_aborts_what_the_engine_has_not_seen_yet(self):
        with driving() as (driver, loop):
            running, late = Box(), Box()
            driver.submit(request("running", LONG), running)
            running.until(Started)
            loop.executor.gate.clear()
            loop.executor.entered.clear()
            assert loop.executor.entered.wait(PATIENCE_S)
            driver.submit(request("late", LONG), late)
            assert driver.drain(0.0) == 2
            loop.executor.gate.set()
            for box in (running, late):
                assert box.ends()[0].reason is FinishReason.ABORT
            wait_until(lambda: all_free(loop))

    def test_close_ends_what_runs_and_what_was_just_submitted(self):
        with driving() as (driver, loop):
            running, late = Box(), Box()
            driver.submit(request("running", LONG), running)
            running.until(Started)
            loop.executor.gate.clear()
            loop.executor.entered.clear()
            assert loop.executor.entered.wait(PATIENCE_S)
            driver.submit(
                request("late", LONG), late
            )  # the engine's thread is in a step: it has not seen this one
            closing = threading.Thread(target=driver.close)
            closing.start()
            wait_until(lambda: driver._closed)
            loop.executor.gate.set()
            closing.join(PATIENCE_S)
            assert not closing.is_alive()
            for box in (running, late):
                [end] = box.ends()
                assert (end.reason, end.error) == (FinishReason.ABORT, None)
            with pytest.raises(Draining):
                driver.submit(request("too late"), late)

    def test_close_twice_and_from_a_mailbox(self):
        with driving() as (driver, _):
            driver.close()
            driver.close()

        with driving() as (driver, _):

            class Closing(Box):
                def post(self, events):
                    driver.close()
                    super().post(events)

            box = Closing()
            driver.submit(request("a", LONG), box)
            assert box.ends()[0].reason is FinishReason.ABORT

    def test_no_thread_is_left(self):
        with driving() as (driver, _):
            assert any(thread.name == "jaxflow-engine" for thread in threading.enumerate())
            box = Box()
            driver.submit(request("a"), box)
            box.ends()
        assert driver._thread not in threading.enumerate()

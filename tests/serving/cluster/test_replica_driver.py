"""The router's driver over fake replicas that die, hang, are slow, and are replaced under load."""

import dataclasses
import random
import threading
import time

import pytest
from fake_llm import FAULT_TOKEN
from replicas import CONFIG, Box, answer, cluster, submit, until

from jaxflow.request import (
    Draining,
    FinishReason,
    Interrupted,
    InvalidRequest,
    QueueFull,
    SamplingParams,
)
from serving.cluster.driver import MAX_LOSSES
from serving.cluster.replica import RemoteFault
from serving.cluster.router import home_of
from serving.cluster.wanted import WantedReplicas

STEP_S = 0.01


def complete(request, box: Box) -> None:
    """Check that a request was answered once and whole."""
    box.wait()
    assert [end.reason for end in box.ends] == [FinishReason.LENGTH] * request.sampling.n
    for i in range(request.sampling.n):
        assert box.ids(i) == answer(request, i)
    assert len(box.starts) == 1
    assert {event.request_id for event in box.events} == {request.request_id}
    for end in box.ends:
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (
            len(request.prompt_token_ids),
            request.sampling.max_tokens,
        )
        assert 0 <= end.timings.queued_s <= end.timings.time_to_first_token_s <= end.timings.total_s


def test_requests_are_spread_and_answered():
    with cluster(3) as (model, links):
        pairs = [submit(model, f"r{i}", prompt=[10 + i] * 5, seed=i) for i in range(30)]
        for pair in pairs:
            complete(*pair)
        used = [link.llm.driver.submitted for link in links.started]
        assert sum(map(len, used)) == 30 and all(len(one) >= 3 for one in used)
        until(lambda: model.driver.stats().completion_tokens == 30 * 20)
        assert model.driver.stats().running_requests == 0
        steps, ends = model.driver.log.take()
        assert len(ends) == 30 and {step.replica for step in steps} == {0, 1, 2}


def test_the_requests_of_a_session_go_to_its_home():
    with cluster(4) as (model, links):
        for session in "abcdef":
            home = links.running(home_of(session, [True] * 4)).llm.driver.submitted
            before = len(home)
            for i in range(3):
                sampling = SamplingParams(max_tokens=3, ignore_eos=True, seed=i)
                request = model.request([10 + i] * 5, sampling, request_id=f"{session}{i}")
                request, box = dataclasses.replace(request, session=session), Box()
                model.driver.submit(request, box)
                complete(request, box)
            assert len(home) == before + 3


def test_n_sequences_and_a_random_seed():
    with cluster() as (model, _):
        complete(*submit(model, "n", n=3))
        request, box = submit(model, "random", seed=None)
        assert len(box.wait().ids()) == request.sampling.max_tokens


@pytest.mark.parametrize("fault", ["die", "hang", "engine"])
def test_requests_of_a_lost_replica_go_on_at_another(fault):
    """Streams go on with equal tokens, and requests without a token move."""
    with cluster(step_s=STEP_S) as (model, links):
        began = [submit(model, f"began{i}", seed=i, max_tokens=60) for i in range(8)]
        assert all(box.first.wait(10) for _, box in began)
        lost = links.running(0)
        lost.llm.driver.gate.clear()
        waiting = [submit(model, f"waits{i}", seed=i, max_tokens=10) for i in range(8)]
        until(lambda: sum(state.requests for state in model.driver.replicas()) == 16)
        assert model.driver.replicas()[0].requests > 0
        if fault == "engine":
            lost.llm.driver.die(MemoryError("device"))
        else:
            getattr(lost, fault)()
        for pair in (*began, *waiting):
            complete(*pair)
        assert lost.killed and model.driver.moved > 0 and model.driver.interrupted == 0
        until(lambda: [state.state for state in model.driver.replicas()] == ["serving"] * 2)
        assert model.driver.replicas()[0].restarts == 1
        assert links.running(0) is not lost
        complete(*submit(model, "after"))


def test_a_request_that_finds_no_memory_moves():
    with cluster() as (model, links):
        full = links.running(0).llm
        full.request = lambda *_, **__: (_ for _ in ()).throw(MemoryError)
        for i in range(4):
            complete(*submit(model, f"r{i}", prompt=[30 + i] * 5, seed=i))
        assert model.driver.moved > 0 and model.driver.replicas()[0].restarts == 1


def test_a_stream_that_cannot_go_on_ends_with_its_tokens_and_a_reason():
    with cluster(step_s=STEP_S) as (model, links):
        pairs = [
            submit(model, "n", n=2, max_tokens=200),
            submit(model, "penalty", presence_penalty=0.5, max_tokens=200),
            submit(model, "stop", stop=["\0\0\0"], max_tokens=200),
        ]
        assert all(box.first.wait(10) for _, box in pairs)
        for index in range(2):
            links.running(index).die()
        for request, box in pairs:
            box.wait()
            for end in box.ends:
                assert isinstance(end.error, Interrupted) and end.reason is FinishReason.ABORT
                made = box.ids(end.index)
                assert end.usage.completion_tokens == len(made)
                assert made == answer(request, end.index)[: len(made)]
        assert model.driver.interrupted == 3


def test_a_request_that_ends_every_replica_is_given_up():
    with cluster(1, step_s=STEP_S) as (model, links):
        _, box = submit(model, "poison", max_tokens=1000)
        for loss in range(MAX_LOSSES):
            until(lambda loss=loss: len(links.started) > loss and links.started[loss].llm.driver.submitted)
            links.started[loss].die()
        assert isinstance(box.wait().ends[0].error, Interrupted)


def test_without_replicas_requests_wait():
    with cluster(1) as (model, links):
        gate = threading.Event()
        links.prepare = lambda link: setattr(link, "start_gate", gate)
        links.running(0).die()
        until(lambda: model.driver.unready() != "")
        request, box = submit(model, "held")
        _, cancelled = submit(model, "cancelled")
        until(lambda: model.driver.stats().waiting_requests == 2)
        model.driver.abort("cancelled")
        assert cancelled.wait().ends[0].reason is FinishReason.ABORT
        gate.set()
        complete(request, box)
        assert model.driver.unready() == ""


def test_a_slow_replica_gets_fewer_requests():
    with cluster(step_s=0.002) as (model, links):
        links.running(0).llm.driver.step_s = 0.05
        pairs = []
        for i in range(60):
            pairs.append(submit(model, f"r{i}", prompt=[20 + i, 5], seed=i))
            time.sleep(0.005)
        for pair in pairs:
            complete(*pair)
        slow, fast = (len(links.running(i).llm.driver.submitted) for i in range(2))
        assert slow < fast


def test_requests_that_wait_at_a_slow_replica_move():
    with cluster(slots=2) as (model, links):
        links.running(0).llm.driver.step_s = 0.15
        pairs = [submit(model, f"r{i}", prompt=[20 + i, 5], seed=i) for i in range(8)]
        for pair in pairs:
            complete(*pair)
        slow = links.running(0).llm.driver
        assert model.driver.moved == len(slow.aborted) > 0
        assert len(slow.submitted) - len(slow.aborted) >= 2  # running requests stay
        assert [state.restarts for state in model.driver.replicas()] == [0, 0]


def test_abort_reaches_the_replica():
    with cluster(step_s=STEP_S) as (model, links):
        _, box = submit(model, "gone", max_tokens=1000)
        assert box.first.wait(10)
        model.driver.abort("gone")
        model.driver.abort("unknown")
        end = box.wait().ends[0]
        assert (end.reason, end.error) == (FinishReason.ABORT, None)
        assert end.usage.completion_tokens == len(box.ids())
        until(lambda: any(link.llm.driver.aborted == ["gone"] for link in links.started))
        until(lambda: all(state.requests == 0 for state in model.driver.replicas()))


def test_refusals_and_faults_of_one_request():
    with cluster(1, max_waiting=3, stall_s=20) as (model, links):
        with pytest.raises(InvalidRequest):
            model.request([5], SamplingParams(max_tokens=10**6), request_id="long")
        _, box = submit(model, "fault", prompt=[FAULT_TOKEN])
        assert isinstance(box.wait().ends[0].error, RemoteFault)
        links.running(0).llm.driver.gate.clear()
        boxes = [submit(model, f"r{i}")[1] for i in range(3)]
        until(lambda: len(links.running(0).llm.driver.submitted) == 4)
        _, box = submit(model, "fourth")
        assert isinstance(box.wait().ends[0].error, QueueFull)
        links.running(0).llm.driver.gate.set()
        assert all(box.wait().ends[0].error is None for box in boxes)
        _, first = submit(model, "twice", max_tokens=100)
        _, second = submit(model, "twice")
        assert isinstance(second.wait().ends[0].error, InvalidRequest)
        first.wait()
        assert model.driver.replicas()[0].restarts == 0


def test_drain_finishes_then_refuses():
    with cluster(step_s=STEP_S) as (model, _):
        request, box = submit(model, "running", max_tokens=30)
        assert model.driver.drain(20) == 0
        complete(request, box)
        with pytest.raises(Draining):
            submit(model, "late")
    with cluster(step_s=STEP_S) as (model, _):
        _, box = submit(model, "long", max_tokens=2000)
        assert model.driver.drain(0.1) == 1
        assert box.wait().ends[0].reason is FinishReason.ABORT


class Load:
    """Requests that follow one another on some threads until the end of the block."""

    def __init__(self, model, threads: int = 4):
        self._model, self._stopped, self.pairs, self.errors = model, threading.Event(), [], []
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(threads)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        count = 0
        while not self._stopped.is_set():
            pair = submit(self._model, f"{number}.{count}", prompt=[5 + number], seed=count, max_tokens=15)
            try:
                complete(*pair)
            except AssertionError as error:
                self.errors.append((error, pair[1].events))
            self.pairs.append(pair)
            count += 1


@pytest.mark.parametrize("drain_s", [5.0, 0.0])
def test_updates_and_scaling_fail_no_request(drain_s):
    """drain_s 0: the requests of a replica under replacement move with their tokens."""
    with cluster(step_s=STEP_S, drain_s=drain_s) as (model, links), Load(model) as load:
        until(lambda: len(load.pairs) > 4)

        def versions():
            return [(state.state, state.version) for state in model.driver.replicas()]

        for wanted in (
            WantedReplicas(3, CONFIG),
            WantedReplicas(3, CONFIG, "b"),
            WantedReplicas(1, CONFIG, "b"),
            WantedReplicas(2, CONFIG, "c"),
        ):
            model.driver.change(wanted)
            until(lambda wanted=wanted: versions() == [("serving", wanted.version)] * wanted.replicas)
            done = len(load.pairs)
            until(lambda done=done: len(load.pairs) > done)
    assert load.errors == []
    assert model.driver.interrupted == 0
    assert len(links.started) == 2 + 1 + 3 + 1 + 1


def test_an_update_that_fails_stops_and_serves_on():
    with cluster() as (model, links):
        links.prepare = lambda link: setattr(
            link, "start_error", "no such plan" if link.config.plan == "searched" else None
        )
        model.driver.change(WantedReplicas(2, CONFIG.__class__(model="fake", plan="searched"), "bad"))
        until(lambda: model.driver.replicas()[0].restarts == 1)
        assert model.driver.replicas()[1].state == "serving"
        complete(*submit(model, "meanwhile"))
        until(lambda: [state.state for state in model.driver.replicas()] == ["serving"] * 2)
        assert {state.version for state in model.driver.replicas()} == {""}
        assert "no such plan" in model.driver.replicas()[0].reason


@pytest.mark.parametrize("seed", range(3))
def test_drawn_faults_lose_and_double_nothing(seed):
    rng = random.Random(seed)
    with cluster(step_s=0.003) as (model, links):
        pairs = [submit(model, f"r{i}", seed=rng.getrandbits(40), max_tokens=40 + i) for i in range(12)]
        for _ in range(3):
            time.sleep(rng.choice([0.0, rng.uniform(0, 0.15)]))
            getattr(links.running(rng.randrange(2)), rng.choice(["die", "hang"]))()
        for request, box in pairs:
            box.wait()
            [end] = box.ends
            if isinstance(end.error, Interrupted):  # all three losses were under this request
                assert box.ids() == answer(request)[: len(box.ids())]
            else:
                complete(request, box)

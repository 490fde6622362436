"""Batch requests beside online requests: what runs is right, and no batch token breaks the limit."""

import math

import numpy as np
import pytest
from batch_simulation import simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import World, config, prompt, requests, roomy

from jaxflow.request import BATCH_PRIORITY
from jaxflow.scheduler.batch_budget import BatchBudget
from jaxflow.scheduler.state import Sequence, StepWork
from jaxflow.scheduler.step_time import StepTime, most_within, pairs_of

times = st.builds(
    StepTime,
    st.just((4, 8, 16)),
    st.sampled_from([(1.0, 2.0, 3.0), (1.0, 1.0, 1.0), (0.0, 5.0, 5.0)]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 0.003]),
)
limits = st.sampled_from([0.5, 1.0, 1.5, 2.2, 3.1, math.inf])


class Shared(World):
    """A world that checks the limit and the precedence of online requests in every step."""

    limit_s: float = math.inf
    time: StepTime

    def check_step(self, work: StepWork, preempted: int) -> None:
        running = [seq for seq in self.sequences if seq.preemptions > getattr(self, "seen", {}).get(seq, 0)]
        if work.admitted and running:
            assert all(seq.is_batch for seq in running) or not any(not seq.is_batch for seq in work.admitted)
            preempted = 0
        super().check_step(work, preempted)
        self.seen = {seq: seq.preemptions for seq in self.sequences}
        parts = [
            (seq, 1, int(position)) for seq, position in zip(work.decodes, work.decode_positions, strict=True)
        ]
        batch = [seq for seq, *_ in parts if seq.is_batch] + [c.seq for c in work.chunks if c.seq.is_batch]
        online = len(parts) + len(work.chunks) > len(batch)
        if online and batch:
            assert predicted(self.time, work) <= self.limit_s + 1e-9


def predicted(time: StepTime, work: StepWork) -> float:
    keys = sum(int(position) + 1 for position in work.decode_positions)
    pairs = sum(chunk.start + i + 1 for chunk in work.chunks for i in range(chunk.tokens))
    return time.seconds(work.num_tokens, keys, pairs)


def shared(machine, limit_s: float, time: StepTime, **settings) -> Shared:
    world = Shared(machine, policy=BatchBudget(limit_s, time), **settings)
    world.limit_s, world.time = limit_s, time
    return world


@settings(max_examples=40)
@given(
    arrivals=st.lists(st.lists(st.tuples(requests, st.booleans()), max_size=3), max_size=12),
    windows=st.sampled_from([(None,), (None, 5), (6,)]),
    pages=st.sampled_from([16, 20, 40]),
    slots=st.sampled_from([1, 3, 8]),
    budget=st.sampled_from([3, 16]),
    caching=st.booleans(),
    limit_s=limits,
    time=times,
    lag=st.integers(0, 2),
    hope=st.sampled_from([1, 256]),
    seed=st.integers(0, 10**6),
)
def test_tokens_are_those_of_a_sequence_alone_and_no_batch_token_breaks_the_limit(
    arrivals, windows, pages, slots, budget, caching, limit_s, time, lag, hope, seed
):
    machine = config(
        windows=windows,
        num_pages=(pages,) * len(windows),
        token_budget=budget,
        max_num_seqs=slots,
        enable_prefix_caching=caching,
    )
    world, rng = shared(machine, limit_s, time, lag=lag, hope=hope), np.random.default_rng(seed)
    for new in arrivals:
        for (own, beginning, sampling), is_batch in new:
            priority = BATCH_PRIORITY + 1 if is_batch else sampling["priority"]
            world.add(prompt(rng, own, shared=beginning), **{**sampling, "priority": priority})
        world.step()
        if world.sequences and rng.random() < 0.15:
            world.abort(world.sequences[rng.integers(len(world.sequences))])
    world.run()


def names(sequences) -> list[str]:
    return [seq.request.request_id for seq in sequences]


def unit_time() -> StepTime:
    """One second a token."""
    return StepTime(range(1, 17), [float(n) for n in range(1, 17)], 0.0, 0.0)


def started(world: World, count: int, priority: int, **sampling) -> list[Sequence]:
    sequences = [
        world.add([1, 2, 3], **{"priority": priority, "max_tokens": 60, "ignore_eos": True, **sampling})[0]
        for _ in range(count)
    ]
    while any(seq.num_computed < 3 for seq in sequences):
        world.step()
    return sequences


def stepped(world: World) -> StepWork:
    work = world.step()
    assert work is not None
    return work


def test_the_limit_holds_decodes_back_youngest_first_and_fills_what_is_left():
    world = roomy(buckets=tuple(range(1, 17)))
    world.scheduler._policy = BatchBudget(5.0, unit_time())
    batch = started(world, 6, BATCH_PRIORITY)
    assert {*stepped(world).decodes} == {*batch}  # alone the batch has no limit
    [online] = world.add([1] * 3, max_tokens=4, ignore_eos=True)
    assert [(c.seq, c.tokens) for c in stepped(world).chunks] == [(online, 3)]
    assert {*stepped(world).decodes} == {online, *batch[:4]}
    world.scheduler.abort(batch[0])
    world.aborted.add(batch[0])
    assert {*stepped(world).decodes} == {online, *batch[1:5]}
    while not online.finished:
        world.step()
    assert {*stepped(world).decodes} == {*batch[1:]}


def test_prompts_of_a_batch_get_what_is_left_of_the_limit():
    world = roomy(buckets=tuple(range(1, 17)))
    world.scheduler._policy = BatchBudget(7.0, unit_time())
    started(world, 2, 0)
    world.add([1] * 30, priority=BATCH_PRIORITY, max_tokens=2, ignore_eos=True)
    assert [chunk.tokens for chunk in stepped(world).chunks] == [5]
    world.run()


@pytest.mark.parametrize("limit_s", [1.0, math.inf])
def test_an_online_request_takes_the_slot_and_the_pages_of_a_batch_request(limit_s):
    for changes in ({"max_num_seqs": 2}, {"num_pages": (24,)}):
        world = World(config(**changes), policy=BatchBudget(limit_s, unit_time()))
        batch = started(world, 2, BATCH_PRIORITY, max_tokens=40)
        [online] = world.add([1] * 20, max_tokens=9, ignore_eos=True)
        work = world.scheduler.schedule(world.now)
        assert work is not None and online in work.admitted
        assert batch[1].preemptions == 1 and batch[0].preemptions == 0
        world.under_way.append((work, world.device.run(work)))
        world.run()


def test_online_requests_do_not_take_slots_from_each_other():
    world = World(config(max_num_seqs=1), policy=BatchBudget())
    [first] = started(world, 1, 1)
    world.add([1], max_tokens=1)
    world.add([1], max_tokens=1, priority=BATCH_PRIORITY)
    world.run()
    assert first.preemptions == 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40).map(sorted), st.integers(-5, 60))
def test_the_most_tokens_within_a_limit(seconds, limit):
    most = len(seconds) - 1
    fitting = [n for n in range(most + 1) if seconds[n] <= limit]
    assert most_within(limit, lambda n: seconds[n], most) == max(fitting, default=0)


@given(st.integers(0, 100), st.integers(0, 30))
def test_pairs(start, tokens):
    assert pairs_of(start, tokens) == sum(start + i + 1 for i in range(tokens))


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.7, 4.0])
def test_the_prediction_learns_from_measured_steps(ratio):
    world, time = roomy(), StepTime((4, 8, 16), (1.0, 2.0, 3.0), 0.01, 0.001)
    truth = StepTime((4, 8, 16), (1.0, 2.0, 3.0), 0.01, 0.001)
    for _ in range(8):
        world.add([1] * 9, max_tokens=50, ignore_eos=True)
    errors = []
    for _ in range(400):
        work = world.step()
        if work is None:
            break
        measured = ratio * predicted(truth, work)
        errors.append(predicted(time, work) / measured)
        time.observe(work, measured)
        world.add([1] * 9, max_tokens=50, ignore_eos=True)
    assert errors[-1] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("rate", "limit_ms"), [(2.0, 25.0), (6.0, 40.0)])
def test_a_batch_uses_idle_capacity_and_online_tokens_stay_within_the_limit(rate, limit_ms):
    """On a virtual clock, on a device that is a quarter slower than predicted at first."""
    alone = simulate(batch=False, rate=rate, seconds=15.0)
    both = simulate(batch=True, rate=rate, limit_ms=limit_ms, seconds=15.0)
    unlimited = simulate(batch=True, rate=rate, seconds=15.0)
    assert alone.p99_tpot_ms() < limit_ms
    assert both.p99_tpot_ms() <= 1.1 * limit_ms < unlimited.p99_tpot_ms()
    assert both.batch_tokens_per_s > 2 * alone.online_tokens / 15.0
    assert both.batch_tokens_per_s > unlimited.batch_tokens_per_s * 0.8
    assert both.online_tokens == unlimited.online_tokens == alone.online_tokens

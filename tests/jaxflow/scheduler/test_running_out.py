"""Admission by forecast, and what happens when pages run out anyway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import World, config, output

from jaxflow.bench.engine.policies import step_policy


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=6))
def test_nobody_waits_for_memory_when_all_fit_to_their_ends(requests):
    needs = sum(-(-(length + tokens - 1) // 4) for length, tokens in requests)
    world = World(config(num_pages=(needs,), token_budget=200, buckets=(200,), max_num_seqs=8))
    for length, tokens in requests:
        world.add([1] * length, max_tokens=tokens, ignore_eos=True)
    assert len(world.step().admitted) == len(requests)
    world.run()
    assert world.scheduler.num_preemptions == 0


def test_two_whose_peaks_do_not_meet_share_a_pool_that_could_not_hold_both_peaks():
    # The first ends at 32 positions (8 pages) after 8 steps more; the second has 3 pages then, and 8 in the
    # end.
    world = World(config(num_pages=(12,)))
    world.add([1] * 4, max_tokens=29, ignore_eos=True)
    for _ in range(20):
        world.step()
    [late] = world.add([2] * 4, max_tokens=29, ignore_eos=True)
    world.step()
    assert late.slot >= 0
    world.run()
    assert world.scheduler.num_preemptions == 0


def preempting_world(lag):
    """Three sequences with outputs longer than forecast, in a pool for two."""
    world = World(config(num_pages=(16,)), lag=lag, hope=1)
    talkative = [seed for seed in range(100) if 25 < len(output([1, 2, 3], seed, 40)) < 40]
    return world, [world.add([1, 2, 3], max_tokens=40, seed=seed)[0] for seed in talkative[:3]]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_youngest_is_preempted_and_goes_on_once_its_tokens_are_known(lag):
    world, sequences = preempting_world(lag)
    preempted, again = [], []
    before = dict.fromkeys(sequences, 0)
    running = []
    for work in world.steps():
        hit = [seq for seq in sequences if seq.preemptions > before[seq]]
        if hit:
            assert hit == sorted(running, key=lambda seq: seq.key)[-len(hit) :]
            assert all((seq.slot, seq.num_computed, seq.pages) == (-1, 0, []) for seq in hit)
            assert not work.admitted
        preempted += hit
        again += [chunk for chunk in work.chunks if chunk.seq.preemptions and chunk.samples]
        before = {seq: seq.preemptions for seq in sequences}
        running = [seq for seq in sequences if seq.slot >= 0 and seq.num_total < seq.limit]
    assert len(preempted) == len(again) == world.scheduler.num_preemptions > 0
    # The sequences continue after their sampled tokens.
    assert all(chunk.start + chunk.tokens > chunk.seq.num_prompt for chunk in again)


@pytest.mark.parametrize("policy", ["decode-maximal", "prefill-first"])
def test_nobody_is_stuck_even_if_the_forecast_admits_everyone(policy, monkeypatch):
    world = World(config(num_pages=(9,), token_budget=8, buckets=(8,)), policy=step_policy(policy))
    monkeypatch.setattr(world.scheduler.running, "fits", lambda *_: True)
    for i in range(5):
        world.add([i] * 25, max_tokens=5, ignore_eos=True)
    world.run()
    assert world.scheduler.num_preemptions > 0


def test_two_prefills_that_hold_what_each_of_them_needs_are_not_stuck(monkeypatch):
    world = World(config(num_pages=(3,), token_budget=8, buckets=(8,)))
    monkeypatch.setattr(world.scheduler.running, "fits", lambda *_: True)
    [long] = world.add([1] * 12, max_tokens=1)
    [short] = world.add([2] * 8, max_tokens=1)
    world.run()
    assert (long.preemptions, short.preemptions) == (0, 1)


def test_sequences_that_share_a_beginning_need_its_pages_once():
    # 5 pages of beginning, and 2 of each one's own: 4 fit, where without sharing one does.
    world = World(config(num_pages=(13,)))
    beginning = [1] * 20
    [first] = world.add([*beginning, 2], max_tokens=8, ignore_eos=True)
    while first.num_computed < 21:
        world.step()
    for i in range(3):
        world.add([*beginning, 3 + i], max_tokens=8, ignore_eos=True)
        world.step()
        assert world.scheduler.num_running == 2 + i
    world.run()
    assert world.scheduler.num_preemptions == 0


def test_pages_shared_with_one_that_is_still_prefilling_cost_nothing():
    world = World(config(num_pages=(17,)))
    world.add([1] * 60, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        world.step()
    [second] = world.add([1] * 21, max_tokens=4, ignore_eos=True)
    world.step()
    assert second.slot >= 0
    world.run()
    assert (second.cached_tokens, world.scheduler.num_preemptions) == (20, 0)


def test_shared_pages_stay_when_the_one_that_computed_them_ends():
    # Both newcomers would fit if the first took the beginning's 5 pages with it: 10 - 5 and 6 of 13 pages.
    world = World(config(num_pages=(13,)))
    [first] = world.add([*[1] * 20, 2], max_tokens=4, ignore_eos=True)
    while first.num_computed < 21:
        world.step()
    world.add([*[1] * 20, 3], max_tokens=20, ignore_eos=True)
    world.add([4] * 4, max_tokens=21, ignore_eos=True)
    world.run()
    assert world.scheduler.num_preemptions == 0

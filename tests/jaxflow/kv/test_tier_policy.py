"""Scheduler with a host tier, on a simulated device that detects wrong reads."""

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SPANS, config, prompt, requests
from simulated_host import PAGE_BYTES, TieredWorld

from jaxflow.kv.tiers.policy import FetchCosts
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.scheduler import Scheduler


@st.composite
def worlds(draw, tight=False):
    windows = draw(
        st.sampled_from(
            [(None,), (None, 5)] if tight else [(None,), (None, 5), (6,), (None, 3, 9), (None, *SPANS), SPANS]
        )
    )
    machine = config(
        windows=windows,
        num_pages=tuple(16 if tight else draw(st.sampled_from([16, 20, 40])) for _ in windows),
        token_budget=draw(st.sampled_from([3, 16])),
        max_num_seqs=draw(st.sampled_from([3, 8])),
    )
    return TieredWorld(
        machine,
        lag=1 if tight else draw(st.integers(0, 2)),
        hope=1 if tight else draw(st.sampled_from([2, 256])),
        host_bytes=draw(st.sampled_from([40, 10**6] if tight else [4, 40, 10**6])),
        staging_bytes=draw(st.sampled_from([5, 20, 10**6])),
        slowness=draw(st.integers(0, 3)),
        faults=draw(st.sampled_from([0.0, 0.0, 0.2])),
        seed=draw(st.integers(0, 10**6)),
    )


def play(world, arrivals, rounds):
    """Add and abort requests; some answers are followed by a later round of their conversation."""
    for new in arrivals:
        for own, shared, sampling in new:
            world.add(prompt(world.random, own, shared=shared), **sampling)
        if world.random.random() < rounds and world.sequences:
            before = world.sequences[world.random.integers(len(world.sequences))]
            history = [*before.request.prompt_token_ids, *world.outputs[before], 7]
            if len(history) < 40:
                world.add(history, max_tokens=8, seed=3)
        for _ in range(int(world.random.integers(1, 6))):
            world.step()
        if world.sequences and world.random.random() < 0.15:
            world.abort(world.sequences[world.random.integers(len(world.sequences))])
    world.run()


@settings(max_examples=12)
@given(worlds(), st.lists(st.lists(requests, max_size=3), max_size=12))
def test_tokens_equal_an_isolated_run(world, arrivals):
    play(world, arrivals, rounds=0.3)


@settings(max_examples=12)
@given(worlds(tight=True), st.lists(st.lists(requests, min_size=1, max_size=3), min_size=6, max_size=12))
def test_tokens_equal_an_isolated_run_when_pages_run_out(world, arrivals):
    changed = [
        [(own, shared, {**s, "n": 1, "max_tokens": 30, "prompt_logprobs": None}) for own, shared, s in new]
        for new in arrivals
    ]
    play(world, changed, rounds=0.8)


def only_on_the_host(tokens, **more):
    """Return a world with the pages of a prompt on the host, and not on the device."""
    world = TieredWorld(config(num_pages=(20,), max_num_seqs=4), slowness=0, **more)
    world.add(tokens, max_tokens=1)
    world.run()
    world.add(prompt(world.random, 60), max_tokens=1)  # takes all pages except five
    world.add(prompt(world.random, 30), max_tokens=1)
    world.run()
    assert world.scheduler.running.tables.hit(world.sequences[0].names(5, 4)) < 5
    return world


def test_other_sequences_run_during_a_fetch_and_share_the_fetch():
    prefix = [1 + i % 7 for i in range(21)]
    world = only_on_the_host(prefix)
    [running] = world.add([9, 9, 9], max_tokens=20, ignore_eos=True)
    world.step()
    lost = 5 - world.scheduler.running.tables.hit(world.sequences[0].names(5, 4))
    world.copy = lambda done: world.copies.append(
        (4, lambda: done(False))
    )  # from now on copies take five steps
    first, second = (world.add([*prefix[:20], 20 + i], max_tokens=4, ignore_eos=True)[0] for i in range(2))
    [behind] = world.add([8, 8, 8], max_tokens=3, ignore_eos=True)
    before = world.policy.store.counters.loaded
    for _ in range(3):
        work = world.step()
        assert running in work.decodes.tolist()
        assert first.slot == second.slot == -1  # set aside, because their pages are under way
    assert behind.slot >= 0 or behind.finished
    world.run()
    assert world.policy.store.counters.loaded - before == lost
    assert (first.cached_tokens, second.cached_tokens) == (20, 20)
    assert world.policy.counters.host_hit_tokens == 4 * lost


def test_pages_of_another_salt_or_model_are_not_found():
    prefix = [1 + i % 7 for i in range(21)]
    world = only_on_the_host(prefix)
    [other] = world.add(prefix, salt="another", max_tokens=1)
    world.run()
    assert other.cached_tokens == 0
    names = {
        fingerprint: Scheduler(config(fingerprint=fingerprint))
        .add(Request("r", prefix, SamplingParams()))[0]
        .names(5, 4)
        for fingerprint in (b"", b"model a", b"model b")
    }
    assert len({name for chain in names.values() for name in chain}) == 15
    [same] = world.add(prefix, max_tokens=1)
    world.run()
    assert same.cached_tokens == 20


def test_pages_that_are_cheaper_to_compute_are_not_fetched():
    prefix = [1 + i % 7 for i in range(21)]
    world = only_on_the_host(prefix)
    world.policy.costs = FetchCosts(
        bytes_per_s=1.0, latency_s=0.0, seconds_per_token=0.1
    )  # two bytes a page of four tokens
    [again] = world.add(prefix, max_tokens=1)
    world.run()
    assert world.policy.store.counters.loaded == world.policy.counters.host_hit_tokens == 0
    assert again.cached_tokens < 20


def test_stores_beyond_the_staging_space_are_delayed():
    """Pages wait for staging space while the device has them; pages that the device lost are counted."""
    world = TieredWorld(config(num_pages=(64,)), slowness=0, staging_bytes=PAGE_BYTES[0])
    world.add(prompt(world.random, 40), max_tokens=1)
    world.run()  # ten pages, and one page of staging space
    policy = world.policy
    assert policy.store.counters.stored == 10
    assert policy.counters.stores_dropped == 0


def test_delayed_stores_are_counted_when_the_device_loses_the_page():
    world = TieredWorld(config(num_pages=(16,), max_num_seqs=1), staging_bytes=PAGE_BYTES[0])
    world.copy = lambda done: world.copies.append((50, lambda: done(False)))  # a copy takes 51 steps
    for i in range(4):
        world.add([20 + i, *prompt(world.random, 40)], max_tokens=1)
    world.run()
    counters = world.policy.counters
    assert counters.stores_dropped > 0
    assert counters.stores_dropped + world.policy.store.counters.stored == 40

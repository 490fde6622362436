"""The scheduler with a host tier, on a device that notices a wrong read: the same tokens, and nothing is left
behind.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import config, prompt, requests
from simulated_host import TieredWorld

from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.fetch_cost import LoadCosts
from jaxflow.scheduler.scheduler import Scheduler


@st.composite
def worlds(draw, tight=False):
    windows = draw(
        st.sampled_from([(None,), (None, 5)] if tight else [(None,), (None, 5), (6,), (None, 3, 9)])
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
    """Requests come and are aborted, and every now and then an answer is followed by a later round of its
    conversation.
    """
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


@settings(max_examples=40)
@given(worlds(), st.lists(st.lists(requests, max_size=3), max_size=12))
def test_every_sequence_gets_the_tokens_it_gets_alone_and_leaves_nothing_behind(world, arrivals):
    play(world, arrivals, rounds=0.3)


@settings(max_examples=25)
@given(worlds(tight=True), st.lists(st.lists(requests, min_size=1, max_size=3), min_size=6, max_size=12))
def test_the_same_when_pages_run_out_all_the_time(world, arrivals):
    changed = [
        [(own, shared, {**s, "n": 1, "max_tokens": 30, "prompt_logprobs": None}) for own, shared, s in new]
        for new in arrivals
    ]
    play(world, changed, rounds=0.8)


def on_the_host_alone(tokens, **more):
    """A world whose host has the pages of a prompt, and whose device has lost them."""
    world = TieredWorld(config(num_pages=(20,), max_num_seqs=4), slowness=0, **more)
    world.add(tokens, max_tokens=1)
    world.run()
    world.add(prompt(world.random, 60), max_tokens=1)  # takes all pages but five
    world.add(prompt(world.random, 30), max_tokens=1)
    world.run()
    assert world.scheduler.running.tables.hit(world.sequences[0].names(5, 4)) < 5
    return world


def test_while_one_waits_for_the_host_others_go_on_and_it_loads_once_for_all():
    prefix = [1 + i % 7 for i in range(21)]
    world = on_the_host_alone(prefix)
    [running] = world.add([9, 9, 9], max_tokens=20, ignore_eos=True)
    world.step()
    lost = 5 - world.scheduler.running.tables.hit(world.sequences[0].names(5, 4))
    world.fly = lambda done: world.copies.append(
        (4, lambda: done(False))
    )  # from now on copies take five steps
    first, second = (world.add([*prefix[:20], 20 + i], max_tokens=4, ignore_eos=True)[0] for i in range(2))
    [behind] = world.add([8, 8, 8], max_tokens=3, ignore_eos=True)
    before = world.tier.store.counters.loaded
    for _ in range(3):
        work = world.step()
        assert running in work.decodes.tolist()
        assert first.slot == second.slot == -1  # set aside: their pages are under way
    assert behind.slot >= 0 or behind.finished
    world.run()
    assert world.tier.store.counters.loaded - before == lost
    assert (first.cached_tokens, second.cached_tokens) == (20, 20)
    assert world.tier.counters.host_hit_tokens == 4 * lost


def test_what_another_tenant_or_model_has_is_not_found():
    prefix = [1 + i % 7 for i in range(21)]
    world = on_the_host_alone(prefix)
    [other] = world.add(prefix, salt="another", max_tokens=1)
    world.run()
    assert other.cached_tokens == 0
    names = {
        fingerprint: Scheduler(config(fingerprint=fingerprint))
        .add(Request("r", prefix, SamplingParams()), 0.0)[0]
        .names(5, 4)
        for fingerprint in (b"", b"model a", b"model b")
    }
    assert len({name for chain in names.values() for name in chain}) == 15
    [same] = world.add(prefix, max_tokens=1)
    world.run()
    assert same.cached_tokens == 20


def test_what_is_cheaper_to_compute_is_computed():
    prefix = [1 + i % 7 for i in range(21)]
    world = on_the_host_alone(prefix)
    world.tier.costs = LoadCosts(
        bytes_per_s=1.0, latency_s=0.0, seconds_a_token=0.1
    )  # two bytes a page of four tokens
    [again] = world.add(prefix, max_tokens=1)
    world.run()
    assert world.tier.store.counters.loaded == world.tier.counters.host_hit_tokens == 0
    assert again.cached_tokens < 20

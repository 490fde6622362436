"""The scheduler held against a device that notices a wrong read, and how it fills a step."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SPANS, World, config, prompt, requests, roomy

# ---- everything at once, held against a device that notices a wrong read


@st.composite
def worlds(draw, **changes):
    """A machine, and the requests and aborts that come step by step."""
    windows = draw(st.sampled_from([(None,), (None, 5), (6,), (None, 3, 9), (None, *SPANS), SPANS]))
    machine = {
        "windows": windows,
        "num_pages": tuple(draw(st.sampled_from([16, 20, 40])) for _ in windows),
        "token_budget": draw(st.sampled_from([1, 3, 16])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 8])),
        "enable_prefix_caching": draw(st.booleans()),
    }
    world = World(
        config(**{**machine, **changes}), lag=draw(st.integers(0, 2)), hope=draw(st.sampled_from([1, 2, 256]))
    )
    return world, draw(st.lists(st.lists(requests, max_size=3), max_size=12)), draw(st.integers(0, 10**6))


def play(world, arrivals, seed, aborts=True):
    rng = np.random.default_rng(seed)
    for new in arrivals:
        for own, shared, sampling in new:
            world.add(prompt(rng, own, shared=shared), **sampling)
        world.step()
        if aborts and world.sequences and rng.random() < 0.15:
            world.abort(world.sequences[rng.integers(len(world.sequences))])
    world.run()


@settings(max_examples=40)
@given(worlds())
def test_every_sequence_gets_the_tokens_it_gets_alone_and_leaves_nothing_behind(case):
    play(*case)


@settings(max_examples=20)
@given(worlds(num_pages=(16,), windows=(None,), max_num_seqs=8))
def test_the_same_when_pages_run_out_all_the_time(case):
    world, arrivals, seed = case
    arrivals = [
        [(own, shared, {**s, "n": 1, "max_tokens": 30, "ignore_eos": False}) for own, shared, s in new]
        for new in arrivals
    ]
    play(world, arrivals, seed)


machines = st.sampled_from([((None,), (20,)), ((None, 5), (20, 5)), ((6,), (7,))])


@settings(max_examples=25)
@given(machines.flatmap(lambda m: worlds(windows=m[0], num_pages=m[1], max_num_seqs=8, token_budget=16)))
def test_when_lengths_are_known_nothing_is_ever_preempted(case):
    world, arrivals, seed = case
    play(
        world,
        [[(own, shared, {**s, "ignore_eos": True}) for own, shared, s in new] for new in arrivals],
        seed,
    )
    assert world.scheduler.num_preemptions == 0


# ---- how a step is filled


lengths = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 1)), max_size=3),
    min_size=1,
    max_size=10,
)


@given(lengths)
def test_a_step_holds_the_budget_or_all_there_is_in_order(arrivals):
    world = roomy()
    rng = np.random.default_rng(0)
    scheduler = world.scheduler

    def is_long(seq):
        return seq.num_prompt > world.config.token_budget

    def step():
        before = [seq for seq in world.sequences if not seq.finished]
        # After its last token is scheduled a sequence has nothing to compute.
        left = {seq: seq.num_total - seq.num_computed if seq.num_total < seq.limit else 0 for seq in before}
        decoding = {
            seq for seq in before if seq.slot >= 0 and seq.num_computed >= seq.num_prompt and left[seq]
        }
        began = {seq for seq in before if seq.slot >= 0} - decoding
        work = world.step()
        if work is None:
            assert not any(left.values())
            return
        assert set(work.decodes) == decoding
        seatless = scheduler.num_running == world.config.max_num_seqs
        if not seatless:
            assert work.num_tokens == min(world.config.token_budget, sum(left.values()))
        # No sequence takes a slot before the pool has room.
        assert set(work.admitted) <= {chunk.seq for chunk in work.chunks}
        # Nobody is admitted while an older one waits, unless that one is long and others are long already.
        waiting = [seq for seq in before if seq.slot < 0 and left[seq] and not seq.finished]
        for seq in work.admitted:
            overtaken = [old for old in waiting if old.key < seq.key]
            assert all(is_long(old) for old in overtaken)
            assert not overtaken or any(map(is_long, began | set(work.admitted)))
        # The oldest prefilling sequence gets the room that decodes leave, and at least half of the room if
        # its prompt is long.
        running = sorted(began | set(work.admitted), key=lambda seq: seq.key)
        room = world.config.token_budget - len(work.decodes)
        if began and room:
            first = min(began, key=lambda seq: seq.key)
            got = sum(chunk.tokens for chunk in work.chunks if chunk.seq is first)
            assert got >= min(left[first], room - room // 2 if is_long(first) else room)
        assert [chunk.seq for chunk in work.chunks] == [
            seq for seq in running if seq in {chunk.seq for chunk in work.chunks}
        ]

    for new in arrivals:
        for own, tokens, priority in new:
            world.add(prompt(rng, own), max_tokens=tokens, ignore_eos=True, priority=priority)
        step()
    for _ in range(150):
        step()
    world.run()


def test_admission_is_by_priority_then_arrival():
    world = roomy(max_num_seqs=2)
    for priority in (1, 0, 1, 0):
        world.add([1, 2], max_tokens=1, priority=priority)
    order = [int(seq.request.request_id[1:]) for work in world.steps() for seq in work.admitted]
    assert order == [1, 3, 0, 2]


def test_no_decode_waits_for_a_prefill():
    world = roomy()
    world.add([1], max_tokens=40, ignore_eos=True)
    world.step()
    world.add([1] * 60, max_tokens=1)
    for _ in range(8):
        work = world.step()
        assert len(work.decodes) == 1
        assert work.num_tokens <= 16

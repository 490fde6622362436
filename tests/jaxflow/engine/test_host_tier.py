"""The scheduler with a host tier, on a device that notices a wrong read: the same tokens, and nothing is left behind."""

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import config, prompt
from simulated_host import TieredWorld

requests = st.tuples(
    st.integers(1, 16),  # tokens of its own
    st.sampled_from([0, 0, 8, 15]),  # after a beginning that others share
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 32),
            "n": st.sampled_from([1, 1, 1, 3]),
            "ignore_eos": st.booleans(),
            "priority": st.sampled_from([0, 0, 1]),
            "salt": st.sampled_from(["", "", "x"]),
            "seed": st.sampled_from([None, 5]),
            "prompt_logprobs": st.sampled_from([None, None, 0]),
        }
    ),
)


@st.composite
def worlds(draw, tight=False):
    windows = draw(st.sampled_from([(None,), (None, 5)] if tight else [(None,), (None, 5), (6,), (None, 3, 9)]))
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
    """Requests come and are aborted, and every now and then an answer is followed by a later round of its conversation."""
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
    changed = [[(own, shared, {**s, "n": 1, "max_tokens": 30, "prompt_logprobs": None}) for own, shared, s in new] for new in arrivals]
    play(world, changed, rounds=0.8)

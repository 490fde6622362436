import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import World, config, prompt

from jaxflow.bench.engine.policies import POLICIES, Hybrid, PrefillFirst, step_policy
from jaxflow.scheduler.scheduler import StepPolicy, bucket_of, surplus

bucket_lists = st.lists(st.integers(1, 100), min_size=1, unique=True).map(sorted)


def make(name: str) -> StepPolicy:
    """A policy by its name, with chunks of 5 tokens."""
    return step_policy(name, 5 if name == "hybrid" else None)


@given(bucket_lists, st.data())
def test_the_bucket_is_the_smallest_that_fits(buckets, data):
    tokens = data.draw(st.integers(1, buckets[-1]))
    assert bucket_of(tokens, buckets) == min(b for b in buckets if b >= tokens)


@given(bucket_lists, st.data())
def test_a_cut_fills_a_bucket_and_puts_off_no_more_than_the_padding_it_saves(buckets, data):
    tokens = data.draw(st.integers(1, buckets[-1]))
    over = surplus(tokens, buckets)
    padding = bucket_of(tokens, buckets) - tokens
    below = [b for b in buckets if b < tokens]
    if over:
        assert tokens - over in buckets
        assert over <= padding
    else:
        assert not below or tokens - max(below) > padding


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), lag=st.integers(0, 2), hope=st.sampled_from([1, 256]))
def test_every_policy_serves_all_requests(policy, seed, lag, hope):
    rng = np.random.default_rng(seed)
    world = World(config(num_pages=(20,)), lag, hope, make(policy))
    for _ in range(12):
        world.add(
            prompt(rng, int(rng.integers(1, 24))),
            max_tokens=int(rng.integers(1, 30)),
            ignore_eos=bool(rng.integers(2)),
        )
        for _ in range(int(rng.integers(0, 4))):
            world.step()
    world.run()


def steps_of(policy: str, prompts: list[int], outputs: list[int], **changes):
    """The steps in which all of these requests, handed over at once, are served."""
    world = World(config(**changes), lag=0, policy=make(policy))
    rng = np.random.default_rng(0)
    for length, tokens in zip(prompts, outputs, strict=True):
        world.add(prompt(rng, length), max_tokens=tokens, ignore_eos=True)
    return list(world.steps())


def shape(work) -> tuple[int, list[int]]:
    return len(work.decodes), [chunk.tokens for chunk in work.chunks]


def test_decode_maximal_fills_every_step_while_there_is_work():
    steps = steps_of("decode-maximal", [20, 20, 20], [4, 4, 4])
    assert [shape(work) for work in steps] == [
        (0, [16]),
        (0, [4, 12]),
        (1, [8, 7]),
        (2, [13]),
        (3, []),
        (2, []),
        (1, []),
    ]


@pytest.mark.parametrize("policy", ["request-level", "orca-worst", "prefill-first"])
def test_prefills_and_decodes_do_not_share_a_step(policy):
    steps = steps_of(policy, [5, 30, 3, 9, 12, 2, 7, 7], [6, 2, 9, 1, 3, 3, 4, 5])
    assert all(not (len(work.decodes) and work.chunks) for work in steps)
    assert any(len(work.decodes) for work in steps)


@pytest.mark.parametrize("policy", ["request-level", "orca-worst"])
def test_a_batch_begins_only_when_the_last_one_has_ended(policy):
    steps = steps_of(policy, [5] * 9, [3, 9, 2, 4, 2, 2, 5, 3, 2], max_num_seqs=3)
    assert [shape(work) for work in steps if work.chunks] == [(0, [5, 5, 5])] * 3
    ends = [i for i, work in enumerate(steps) if work.chunks] + [len(steps)]
    # The longest output; the prefill gives the first token.
    assert [b - a for a, b in itertools.pairwise(ends)] == [
        9,
        4,
        5,
    ]


def test_request_level_pads_to_the_rows_of_its_batch_and_orca_worst_does_not():
    lengths = [1, 1, 1, 1, 1, 9]
    padded = [work.bucket for work in steps_of("request-level", [2] * 6, lengths) if len(work.decodes)]
    assert padded == [8] * 8
    left = [work.bucket for work in steps_of("orca-worst", [2] * 6, lengths) if len(work.decodes)]
    assert left == [4] * 8


def test_prefill_first_lets_decodes_wait_for_every_prompt_that_comes():
    world = World(config(), lag=0, policy=PrefillFirst())
    world.add([1, 2, 3], max_tokens=5, ignore_eos=True)
    assert shape(world.step()) == (0, [3])
    assert shape(world.step()) == (1, [])
    world.add([4, 5], max_tokens=5, ignore_eos=True)
    assert shape(world.step()) == (0, [2])
    assert shape(world.step()) == (2, [])
    world.run()


def test_orca_best_prefills_one_whole_prompt_beside_the_decodes():
    steps = steps_of("orca-best", [5, 14, 13, 40], [9, 3, 3, 2])
    # 14 tokens fit with one decode, 13 tokens with two. 40 tokens fit in no step and are cut to its room.
    assert [shape(work) for work in steps[:3]] == [(0, [5]), (1, [14]), (2, [13])]
    assert all(len(work.chunks) <= 1 for work in steps)
    long = [chunk.tokens for work in steps for chunk in work.chunks if chunk.seq.num_prompt == 40]
    assert sum(long) == 40
    assert len(long) > 1


def test_orca_best_waits_for_room_rather_than_cut_a_prompt():
    steps = steps_of("orca-best", [5, 16], [4, 1])
    assert [shape(work) for work in steps] == [(0, [5]), (1, []), (1, []), (1, []), (0, [16])]


def test_hybrid_prefills_one_chunk_of_its_size():
    steps = steps_of("hybrid", [12, 7], [8, 2], buckets=tuple(range(1, 17)))
    assert [shape(work) for work in steps[:6]] == [(0, [5]), (0, [5]), (0, [2]), (1, [5]), (1, [2]), (2, [])]


def test_a_chunk_is_cut_back_to_the_tile_while_more_of_its_prompt_remains():
    # 1 decode + 8 tokens would open a second tile of 8 for one token.
    world = World(config(buckets=(8, 16)), lag=0, policy=Hybrid(8))
    world.add([1], max_tokens=30, ignore_eos=True)
    world.step()
    world.add([1] * 20, max_tokens=2, ignore_eos=True)
    steps = [world.step() for _ in range(3)]
    assert [(shape(work), work.bucket) for work in steps] == [((1, [7]), 8), ((1, [7]), 8), ((1, [6]), 8)]
    world.run()

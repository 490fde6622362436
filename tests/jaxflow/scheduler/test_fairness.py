"""Nobody starves, nobody blocks."""

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import World, config, roomy

from jaxflow.scheduler.scheduler import surplus


def test_a_short_prompt_does_not_wait_for_a_long_one():
    world = roomy(max_model_len=2000)
    world.add([1] * 1000, max_tokens=1)
    world.step()
    [short] = world.add([2] * 5, max_tokens=1)
    work = world.step()
    assert [(chunk.seq is short, chunk.tokens) for chunk in work.chunks] == [(False, 11), (True, 5)]


def test_equal_prompts_are_served_one_after_the_other():
    # Sharing would only make the first wait for the second.
    world = roomy()
    for _ in range(3):
        world.add([1] * 16, max_tokens=1)
    assert [[chunk.tokens for chunk in world.step().chunks] for _ in range(3)] == [[16]] * 3


def test_long_prompts_are_served_one_after_the_other():
    world = roomy(max_model_len=2000)
    sequences = [world.add([1] * 80, max_tokens=1)[0] for _ in range(3)]
    ends = {chunk.seq: world.now for work in world.steps() for chunk in work.chunks if chunk.samples}
    assert [ends[seq] for seq in sequences] == [5.0, 10.0, 15.0]


@settings(max_examples=20)
@given(
    long=st.integers(17, 400),
    before=st.lists(st.integers(1, 16), max_size=6),
    stream=st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=5), min_size=1, max_size=10),
    budget=st.sampled_from([2, 5, 16]),
)
def test_a_long_prompt_ends_within_twice_its_time_however_many_short_ones_come(long, before, stream, budget):
    world = roomy(max_model_len=2000, token_budget=budget, max_num_seqs=16)
    for length in before:
        world.add([2] * min(length, budget), max_tokens=1)
    [seq] = world.add([1] * (budget + long), max_tokens=1)
    older = sum(min(length, budget) for length in before)
    # None of the short ones decodes, so the room is always the budget: 5 tokens are cut to the bucket of 4.
    room = budget - surplus(budget, world.scheduler.config.buckets)
    most = older + 2 * (budget + long) / room + 3
    for i in range(int(most) + 1):
        for length in stream[i % len(stream)]:
            if world.scheduler.num_waiting < 50:
                world.add([3] * min(length, budget), max_tokens=1)
        world.step()
        if seq.finished:
            break
    assert seq.finished or seq.num_computed == seq.num_prompt, f"{seq} after {most} steps"


@settings(max_examples=20)
@given(st.lists(st.integers(17, 300), min_size=1, max_size=4), st.integers(0, 3))
def test_short_prompts_pass_long_ones_at_half_speed_or_better(longs, head_start):
    world = roomy(max_model_len=2000)
    for length in longs:
        world.add([1] * length, max_tokens=1)
    for _ in range(head_start):
        world.step()
    short = [world.add([2] * 6, max_tokens=1)[0] for _ in range(5)]
    for k in range(1, 6):
        world.step()
        assert sum(6 if seq.finished else seq.num_computed for seq in short) >= min(8 * k, 30)


def test_the_head_of_the_queue_is_not_overtaken_for_want_of_memory():
    world = World(config(num_pages=(16,)))
    world.add([1] * 8, max_tokens=24, ignore_eos=True)
    world.step()
    [big] = world.add([1] * 10, max_tokens=40, ignore_eos=True)
    [small] = world.add([1, 2], max_tokens=2, ignore_eos=True)
    order = [seq for work in world.steps() for seq in work.admitted]
    assert order == [big, small]


def test_a_request_of_many_sequences_lets_later_requests_start_between_them():
    world = World(config(max_num_seqs=8))
    many = world.add([1] * 4, max_tokens=10, n=64, ignore_eos=True)
    for _ in range(3):
        world.step()
    [late] = world.add([2] * 4, max_tokens=10, ignore_eos=True)
    order = [seq for work in world.steps() for seq in work.admitted]
    assert order.index(late) <= 8  # some of the first eight may be admitted in these steps
    assert all(seq.finished for seq in many)

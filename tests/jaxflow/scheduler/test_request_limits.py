"""The scheduler's refusals, and its queue."""

import pytest
from simulated_device import World, config, roomy

from jaxflow.config import ConfigError
from jaxflow.request import InvalidRequest, QueueFull, Request, SamplingParams


def refused(field: str, request: Request, **changes) -> str:
    world = World(config(**changes))
    with pytest.raises(InvalidRequest) as error:
        world.scheduler.add(request)
    with pytest.raises(InvalidRequest):
        world.scheduler.accept(request)
    assert error.value.field == field
    assert world.step() is None
    return str(error.value)


def test_what_could_never_run_is_refused():
    assert "at least one token" in refused("prompt", Request("a", []))
    assert "at most 63 tokens" in refused("prompt", Request("a", [1] * 64))
    assert "at most 14 after a prompt of 50" in refused(
        "max_tokens", Request("a", [1] * 50, SamplingParams(max_tokens=15))
    )
    # 5 pages of 4: 20 positions, and the last token needs none
    small = {"num_pages": (5,)}
    assert "at most 20 tokens" in refused("prompt", Request("a", [1] * 21), **small)
    assert "at most 11 after" in refused(
        "max_tokens", Request("a", [1] * 10, SamplingParams(max_tokens=12)), **small
    )
    # a window of 9 sees at most 3 pages; 2 are enough for whom 2 pages are enough
    refused("max_tokens", Request("a", [1] * 5, SamplingParams(max_tokens=5)), windows=(9,), num_pages=(2,))


@pytest.mark.parametrize(
    ("changes", "length", "tokens"),
    [
        ({}, 50, 14),
        ({"num_pages": (5,)}, 10, 11),
        ({"windows": (9,), "num_pages": (3,)}, 50, 14),
        ({"windows": (9,), "num_pages": (2,)}, 5, 4),
    ],
)
def test_the_largest_that_fits_runs_alone(changes, length, tokens):
    world = World(config(**changes))
    world.add([1] * length, max_tokens=tokens, ignore_eos=True)
    world.add([2] * length, max_tokens=tokens, ignore_eos=True)
    world.run()
    assert [len(world.outputs[seq]) for seq in world.sequences] == [tokens] * 2


@pytest.mark.parametrize(("changes", "limit"), [({}, 64), ({"num_pages": (5,)}, 21)])
def test_without_max_tokens_a_sequence_may_grow_to_the_context_or_the_pool(changes, limit):
    world = World(config(**changes))
    [seq] = world.add([1], max_tokens=None, ignore_eos=True)
    assert seq.limit == limit
    world.run()


def test_a_full_queue_refuses_with_a_hint_and_opens_again():
    world = roomy(max_waiting=2, max_num_seqs=1)
    for _ in range(2):
        world.add([1], max_tokens=1)
    with pytest.raises(QueueFull, match="2 requests wait") as error:
        world.add([1], max_tokens=1)
    assert 0.1 <= error.value.retry_after_s <= 60
    world.step()
    world.add([1], max_tokens=1)
    world.run()


def test_aborting_frees_a_place_in_the_queue_and_twice_is_once():
    world = roomy(max_waiting=1)
    [seq] = world.add([1], n=1)
    for _ in range(2):
        world.abort(seq)
        assert world.scheduler.num_waiting == 0
    world.add([1], max_tokens=1)
    world.run()


def test_seeds_are_the_requests_own_or_drawn_and_differ_within_it():
    world = roomy()
    first = world.add([1], n=3, seed=-1, max_tokens=1)
    assert first[0].seed == 2**64 - 1
    assert len({seq.seed for seq in first}) == 3
    drawn = [world.add([1], max_tokens=1)[0].seed for _ in range(2)]
    assert drawn[0] != drawn[1]
    assert drawn == [roomy_seed for roomy_seed in drawn if 0 <= roomy_seed < 2**64]
    again = roomy()
    again.add([1], n=3, seed=-1)
    assert [again.add([1])[0].seed for _ in range(2)] == drawn
    world.run()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("token_budget", {"token_budget": 0}),
        ("windows", {"windows": (None, None), "num_pages": (4, 4)}),
        ("num_pages", {"num_pages": (4, 4)}),
        ("num_pages", {"num_pages": (0,)}),
        ("buckets", {"buckets": (4, 8)}),
        ("buckets", {"buckets": (8, 4, 16)}),
    ],
)
def test_settings_that_cannot_work_are_refused(field, changes):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert error.value.field == field

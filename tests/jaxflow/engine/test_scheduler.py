import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import EOS, World, config, output, prompt

from jaxflow.config import ConfigError
from jaxflow.engine.request import InvalidRequest, QueueFull, Request, SamplingParams

# ---- everything at once, held against a device that notices a wrong read


@st.composite
def worlds(draw, **changes):
    """A machine, and the requests and aborts that come step by step."""
    windows = draw(st.sampled_from([(None,), (None, 5), (6,), (None, 3, 9)]))
    machine = {
        "windows": windows,
        "num_pages": tuple(draw(st.sampled_from([16, 20, 40])) for _ in windows),
        "token_budget": draw(st.sampled_from([1, 3, 16])),
        "max_num_seqs": draw(st.sampled_from([1, 3, 8])),
        "enable_prefix_caching": draw(st.booleans()),
    }
    world = World(config(**{**machine, **changes}), lag=draw(st.integers(0, 2)), hope=draw(st.sampled_from([1, 2, 256])))
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


@settings(max_examples=60)
@given(worlds())
def test_every_sequence_gets_the_tokens_it_gets_alone_and_leaves_nothing_behind(case):
    play(*case)


@settings(max_examples=30)
@given(worlds(num_pages=(16,), windows=(None,), max_num_seqs=8))
def test_the_same_when_pages_run_out_all_the_time(case):
    world, arrivals, seed = case
    arrivals = [[(own, shared, {**s, "n": 1, "max_tokens": 30, "ignore_eos": False}) for own, shared, s in new] for new in arrivals]
    play(world, arrivals, seed)


@settings(max_examples=30)
@given(worlds(windows=(None,), num_pages=(20,), max_num_seqs=8))
def test_when_lengths_are_known_nothing_is_ever_preempted(case):
    world, arrivals, seed = case
    play(world, [[(own, shared, {**s, "ignore_eos": True}) for own, shared, s in new] for new in arrivals], seed)
    assert world.scheduler.num_preemptions == 0


# ---- how a step is filled


def roomy(**changes):
    return World(config(**{"num_pages": (300,), "max_num_seqs": 16, "enable_prefix_caching": False, **changes}))


lengths = st.lists(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 1)), max_size=3), min_size=1, max_size=10)


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
        decoding = {seq for seq in before if seq.slot >= 0 and seq.num_computed >= seq.num_prompt and left[seq]}
        began = {seq for seq in before if seq.slot >= 0} - decoding
        work = world.step()
        if work is None:
            assert not any(left.values())
            return
        assert set(work.decodes) == decoding
        seatless = scheduler.num_running == world.config.max_num_seqs
        if not seatless:
            assert work.num_tokens == min(world.config.token_budget, sum(left.values()))
        # Nobody is admitted while an older one waits, unless that one is long and others are long already.
        waiting = [seq for seq in before if seq.slot < 0 and left[seq] and not seq.finished]
        for seq in work.admitted:
            overtaken = [old for old in waiting if old.key < seq.key]
            assert all(is_long(old) for old in overtaken)
            assert not overtaken or any(map(is_long, began | set(work.admitted)))
        # The oldest that is being prefilled gets what is left after the decodes, half of that at least if it is long.
        running = sorted(began | set(work.admitted), key=lambda seq: seq.key)
        room = world.config.token_budget - len(work.decodes)
        if began and room:
            first = min(began, key=lambda seq: seq.key)
            got = sum(chunk.tokens for chunk in work.chunks if chunk.seq is first)
            assert got >= min(left[first], room - room // 2 if is_long(first) else room)
        assert [chunk.seq for chunk in work.chunks] == [seq for seq in running if seq in {chunk.seq for chunk in work.chunks}]

    for new in arrivals:
        for own, tokens, priority in new:
            world.add(prompt(rng, own), max_tokens=tokens, ignore_eos=True, priority=priority)
        step()
    while not all(seq.finished for seq in world.sequences):
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


# ---- fairness


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


@settings(max_examples=40)
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
    # None of the short ones decodes, so the room is always the budget.
    most = older + 2 * (budget + long) / budget + 3
    for i in range(int(most) + 1):
        for length in stream[i % len(stream)]:
            if world.scheduler.num_waiting < 50:
                world.add([3] * min(length, budget), max_tokens=1)
        world.step()
        if seq.finished:
            break
    assert seq.finished or seq.num_computed == seq.num_prompt, f"{seq} after {most} steps"


@settings(max_examples=25)
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


# ---- memory


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
    # The first ends at 32 positions (8 pages) after 8 steps more; the second has 3 pages then, and 8 in the end.
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
    """Three sequences whose outputs are longer than they are hoped to be, in a pool that holds two."""
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
    # They go on behind what they had sampled already.
    assert all(chunk.start + chunk.tokens > chunk.seq.num_prompt for chunk in again)


def test_prefills_that_hold_each_others_pages_are_resolved():
    # All three are told to fit (their ends are not foreseen), and each gets a part of its prompt before pages run out.
    world = World(config(num_pages=(4, 4), windows=(None, 9), token_budget=6, buckets=(6,), max_model_len=17), hope=1)
    for i in range(3):
        world.add([i] * 12, max_tokens=5)
    world.run()


# ---- the prefix cache


def finished(world, tokens, **sampling):
    [seq] = world.add(tokens, **{"max_tokens": 1, **sampling})
    world.run()
    return seq


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (20, 16)])
def test_a_prompt_seen_before_spares_its_whole_pages_but_never_the_last_token(length, cached):
    world = roomy(enable_prefix_caching=True)
    finished(world, [1] * length)
    assert finished(world, [1] * length).cached_tokens == cached


def test_prefixes_are_shared_under_one_salt_only_and_not_with_prompt_logprobs():
    world = roomy(enable_prefix_caching=True)
    finished(world, [1] * 20, salt="a")
    assert finished(world, [1] * 20, salt="b").cached_tokens == 0
    assert finished(world, [1] * 20).cached_tokens == 0
    assert finished(world, [1] * 20, salt="a", prompt_logprobs=1).cached_tokens == 0
    assert finished(world, [1] * 20, salt="a").cached_tokens == 16


def test_without_prefix_caching_nothing_is_shared_or_kept():
    world = roomy(enable_prefix_caching=False)
    finished(world, [1] * 20)
    assert finished(world, [1] * 20).cached_tokens == 0
    assert [pool.num_cached for pool in world.scheduler.tables.pools] == [0]


def test_outputs_are_shared_too_and_a_surplus_token_is_not():
    world = World(config(num_pages=(200,), max_num_seqs=4))
    seed = next(seed for seed in range(100) if 8 < len(output([5, 6, 7], seed, 40)) < 40)
    [seq] = world.add([5, 6, 7], max_tokens=40, seed=seed)
    world.run()
    said = seq.token_ids.tolist()
    assert said[-1] == EOS
    computed = len(said)  # with lag 1 the end token, too, was an input of the surplus step
    assert finished(world, [*said, 1, 2, 3, 4]).cached_tokens == computed // 4 * 4
    # Whatever was sampled after the end token is nowhere in the cache: the named pages are those of known tokens.
    names = seq.names(len(said) // 4, 4)
    pool = world.scheduler.tables.pools[0]
    assert all(pool.find(name) >= 0 for name in names)


def test_two_that_compute_one_prefix_at_once_do_not_disturb_each_other():
    world = roomy(enable_prefix_caching=True, token_budget=64, buckets=(64,))
    sequences = [world.add([1] * 20, max_tokens=6, ignore_eos=True, seed=i)[0] for i in range(2)]
    work = world.step()
    assert [chunk.tokens for chunk in work.chunks] == [20, 20]  # what is computed in this step cannot be shared in it
    world.run()
    assert [seq.cached_tokens for seq in sequences] == [0, 0]
    assert world.scheduler.tables.pools[0].num_cached == 5 + 2  # the prompt's pages once, and one of each output
    assert finished(world, [1] * 20).cached_tokens == 16


@pytest.mark.parametrize("caching", [True, False])
def test_n_sequences_compute_their_prompt_once(caching):
    world = roomy(enable_prefix_caching=caching, token_budget=64, buckets=(64,))
    sequences = world.add([1] * 22, n=4, max_tokens=8, ignore_eos=True)
    chunks = []
    for _ in range(3):
        chunks.append([(chunk.seq.index, chunk.start, chunk.tokens) for chunk in world.step().chunks])
    assert chunks == [[(0, 0, 22)], [(1, 20, 2), (2, 20, 2), (3, 20, 2)], []]
    assert len({seq.pages[0][4] for seq in sequences}) == 1
    assert len({seq.pages[0][5] for seq in sequences}) == 4
    assert len({seq.seed for seq in sequences}) == 4
    world.run()
    assert finished(world, [1] * 22).cached_tokens == (20 if caching else 0)


def test_siblings_go_on_when_the_first_is_aborted_before_it_has_computed_the_prompt():
    world = roomy(max_model_len=200)
    sequences = world.add([1] * 40, n=3, max_tokens=4, ignore_eos=True)
    world.step()
    assert [seq.slot >= 0 for seq in sequences] == [True, False, False]
    world.abort(sequences[0])
    world.run()
    assert len(world.outputs[sequences[2]]) == 4


# ---- the door


def refused(field: str, request: Request, **changes) -> str:
    world = World(config(**changes))
    with pytest.raises(InvalidRequest) as error:
        world.scheduler.add(request, 0.0)
    with pytest.raises(InvalidRequest):
        world.scheduler.check(request)
    assert error.value.field == field
    assert world.step() is None
    return str(error.value)


def test_what_could_never_run_is_refused():
    assert "at least one token" in refused("prompt_token_ids", Request("a", []))
    assert "at most 63 tokens" in refused("prompt_token_ids", Request("a", [1] * 64))
    assert "at most 14 after a prompt of 50" in refused("max_tokens", Request("a", [1] * 50, SamplingParams(max_tokens=15)))
    # 5 pages of 4: 20 positions, and the last token needs none
    small = {"num_pages": (5,)}
    assert "at most 20 tokens" in refused("prompt_token_ids", Request("a", [1] * 21), **small)
    assert "at most 11 after" in refused("max_tokens", Request("a", [1] * 10, SamplingParams(max_tokens=12)), **small)
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
        ("policy", {"policy": "lifo"}),
        ("chunk_size", {"policy": "hybrid"}),
        ("chunk_size", {"chunk_size": 4}),
    ],
)
def test_settings_that_cannot_work_are_refused(field, changes):
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert error.value.field == field

"""Pages of equal content are computed once."""

import pytest
from simulated_device import EOS, World, config, output, roomy


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
    assert [len(pool._cached) for pool in world.scheduler.running.tables.pools] == [0]


def test_outputs_are_shared_too_and_a_surplus_token_is_not():
    world = World(config(num_pages=(200,), max_num_seqs=4))
    seed = next(seed for seed in range(100) if 8 < len(output([5, 6, 7], seed, 40)) < 40)
    [seq] = world.add([5, 6, 7], max_tokens=40, seed=seed)
    world.run()
    said = seq.token_ids.tolist()
    assert said[-1] == EOS
    computed = len(said)  # with lag 1 the end token, too, was an input of the surplus step
    assert finished(world, [*said, 1, 2, 3, 4]).cached_tokens == computed // 4 * 4
    # Whatever was sampled after the end token is nowhere in the cache: the named pages are those of known
    # tokens.
    names = seq.names(len(said) // 4, 4)
    pool = world.scheduler.running.tables.pools[0]
    assert all(pool.find(name) >= 0 for name in names)


def test_two_that_compute_one_prefix_at_once_do_not_disturb_each_other():
    world = roomy(enable_prefix_caching=True, token_budget=64, buckets=(64,))
    sequences = [world.add([1] * 20, max_tokens=6, ignore_eos=True, seed=i)[0] for i in range(2)]
    work = world.step()
    assert [chunk.tokens for chunk in work.chunks] == [
        20,
        20,
    ]  # tokens of the current step cannot be shared within the step
    world.run()
    assert [seq.cached_tokens for seq in sequences] == [0, 0]
    assert (
        len(world.scheduler.running.tables.pools[0]._cached) == 5 + 2
    )  # the prompt's pages once, and one of each output
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


def test_siblings_wait_until_all_of_the_prompt_is_computed():
    world = roomy(max_model_len=200, enable_prefix_caching=True)
    sequences = world.add([1] * 40, n=3, max_tokens=4, ignore_eos=True)
    steps = [world.step() for _ in range(4)]
    assert [[(chunk.seq.index, chunk.tokens) for chunk in work.chunks] for work in steps] == [
        [(0, 16)],
        [(0, 16)],
        [(0, 8)],
        [(1, 4), (2, 4)],
    ]
    world.run()
    assert [seq.cached_tokens for seq in sequences] == [0, 36, 36]


def test_siblings_go_on_when_the_first_is_aborted_before_it_has_computed_the_prompt():
    world = roomy(max_model_len=200)
    sequences = world.add([1] * 40, n=3, max_tokens=4, ignore_eos=True)
    world.step()
    assert [seq.slot >= 0 for seq in sequences] == [True, False, False]
    world.abort(sequences[0])
    world.run()
    assert len(world.outputs[sequences[2]]) == 4

"""Tiers of data-parallel ranks: the tokens of one device, and a disk whose pages every rank reads."""

import itertools

import jax
import numpy as np
import paths
import pytest
import toy

from jaxflow import LLM
from jaxflow.config import ConfigError
from jaxflow.engine.rank_pages import rank_pages
from jaxflow.kv.tiers import disk_tier
from jaxflow.kv.tiers.host_store import PageState
from jaxflow.kv.tiers.offload import Channel
from jaxflow.kv.tiers.policy import FetchCosts
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.admission import OutputLengths

MODEL, RANKS, VOCAB = "tiny-mixtral", 2, 256


def drawn_requests(count: int = 10) -> list[Request]:
    """Return requests with common prefixes, greedy and drawn."""
    rng = np.random.default_rng(7)
    shared = rng.integers(3, VOCAB, 60)
    prompts = [
        [*shared[: rng.integers(0, 60)].tolist(), *rng.integers(3, VOCAB, rng.integers(1, 50)).tolist()]
        for _ in range(count)
    ]
    return [
        Request(
            f"r{i}", prompt, SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=25, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts)
    ]


def tokens(results):
    return {name: result.token_ids for name, result in results.items()}


@pytest.fixture(scope="module")
def case():
    """Return requests, and their tokens on one device with all pages."""
    given = drawn_requests()
    return given, tokens(toy.run(toy.loop(MODEL, budget=16, enable_prefix_caching=False), given))


def small_loop(host_pages, *, pages=20, **more):
    """Return ranks with few pages that expect short outputs, so that they admit too much."""
    engine = toy.offloading_ranked_loop(MODEL, RANKS, host_pages, num_pages=(pages,), **more)
    for rank in engine.ranks:
        rank.scheduler.lengths = OutputLengths(2)
    return engine


def run(engine, given, preempt=True):
    """Run requests to their end. Each rank loses its youngest sequence now and then, at its own steps."""
    results = {one.request_id: toy.Result() for one in given}
    for one in given:
        engine.add(one, 0.0)
    for step in itertools.count(1):
        if not engine.has_work:
            return results
        scheduler = engine.ranks[step % RANKS].scheduler
        if preempt and step % 5 == 0 and scheduler.num_running > 1:
            scheduler.preempt_youngest()
        for event in engine.step():
            if event.request_id in results:
                results[event.request_id].take(event)
        assert step < 5000
    raise AssertionError


def close(engine):
    """End an engine, and check that no rank has a page, a pin or a copy under way."""
    for rank in engine.ranks:
        tier = rank.scheduler.tiers
        assert not (tier.busy or tier.copying or tier.fetches or rank.has_work)
        assert rank.scheduler.pages_free == sum(rank.scheduling.num_pages) and not rank.scheduler.num_running
        assert all(
            entry.pins == 0 and entry.state is PageState.STORED for entry in tier.store._entries.values()
        )
    engine.close()


def total(engine, count):
    return sum(count(rank.scheduler.tiers) for rank in engine.ranks)


@pytest.mark.parametrize(
    ("host_pages", "tp"), [(400, 1), (10, 1), (10, 2)], ids=["roomy", "full", "two devices a rank"]
)
def test_the_tokens_of_one_device_through_host_disk_and_pre_emption(case, host_pages, tp, tmp_path):
    given, expected = case
    engine = small_loop(host_pages, tp=tp, disk_folder=tmp_path)
    assert tokens(run(engine, given)) == expected
    compilations = engine.executor.compilations  # a toy engine compiles a step at its first use
    assert tokens(run(engine, given)) == expected
    assert all(rank.scheduler.num_preemptions > 1 for rank in engine.ranks)
    assert all(rank.scheduler.tiers.store.counters.loaded > 0 for rank in engine.ranks)
    assert total(engine, lambda tier: tier.counters.swapped_in) > 0
    assert engine.executor.compilations == compilations
    stats = engine.stats(0).kv_tiers
    assert stats["host_pages_stored"] == total(engine, lambda tier: tier.store.counters.stored)
    assert stats["host_capacity_bytes"] == total(engine, lambda tier: tier.store.capacity_bytes)
    if host_pages == 10:
        assert stats["host_pages_evicted"] > 0 and stats["disk_hit_tokens"] > 0
        assert stats["disk_hits"] == engine.ranks[0].scheduler.tiers.store.lower.disk.counters().hits
    close(engine)


def test_a_page_has_the_words_of_its_rank():
    """A scatter to one rank leaves the pages of the other, and a gather reads what the scatter wrote."""
    _, executor = toy._ranks_with_copies(MODEL, RANKS)
    ranks, rng = rank_pages(executor), np.random.default_rng(0)
    before = [np.asarray(rank.gather_pages(0, [3, 5])) for rank in ranks]
    for number, rank in enumerate(ranks):
        (shape,) = rank.page_shapes()
        pages = [
            jax.device_put(rng.random(shape.shape, np.float32).view(np.uint32), shape.sharding)
            for _ in range(2)
        ]
        rank.scatter_pages(0, [5, 3], pages)
        found = [np.asarray(other.gather_pages(0, [3, 5])) for other in ranks]
        np.testing.assert_array_equal(found[number], np.asarray(pages)[::-1])
        for other in set(range(RANKS)) - {number}:
            np.testing.assert_array_equal(found[other], before[other])
        before = found


def test_every_rank_finds_on_the_disk_what_another_wrote(case, tmp_path):
    given, expected = case
    first = toy.offloading_ranked_loop(MODEL, RANKS, 400, disk_folder=tmp_path)
    for one in given:
        first.ranks[0].add(one, 0.0)
    results = {one.request_id: toy.Result() for one in given}
    while first.has_work:
        for event in first.step():
            results[event.request_id].take(event)
    assert tokens(results) == expected
    close(first)
    again = toy.offloading_ranked_loop(MODEL, RANKS, 400, disk_folder=tmp_path)
    assert tokens(run(again, given, preempt=False)) == expected
    assert all(rank.scheduler.tiers.counters.disk_hit_tokens > 0 for rank in again.ranks)
    stats = again.stats(0).kv_tiers
    assert stats["disk_rejected"] == stats["disk_errors"] == 0
    close(again)


def test_all_ranks_write_their_pages_at_the_end(case, tmp_path, monkeypatch):
    """The disk takes pages only when the engine ends. The first rank that ends does not close it."""
    put = disk_tier.DiskTier.put
    with monkeypatch.context() as patch:
        patch.setattr(disk_tier.DiskTier, "put", lambda *_, **__: False)
        engine = toy.offloading_ranked_loop(MODEL, RANKS, 400, disk_folder=tmp_path)
        run(engine, case[0], preempt=False)
    assert disk_tier.DiskTier.put is put
    names = {name.hex() for rank in engine.ranks for name, _ in rank.scheduler.tiers.store.newest_first()}
    assert all(len(rank.scheduler.tiers.store) for rank in engine.ranks)
    close(engine)
    assert {file.stem for file in tmp_path.rglob("*.kv")} == names


def test_damaged_files_and_failed_copies_change_no_token(case, tmp_path, monkeypatch):
    given, expected = case
    engine = toy.offloading_ranked_loop(MODEL, RANKS, 400, disk_folder=tmp_path)
    run(engine, given, preempt=False)
    close(engine)
    for i, file in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(file.read_bytes())
        content[37 * i % len(content)] ^= 1 << i % 8
        file.write_bytes(content if i % 2 else content[: len(content) // 2])
    begin, calls = Channel._start, itertools.count()
    monkeypatch.setattr(
        Channel, "_start", lambda self, sources: None if next(calls) % 5 == 0 else begin(self, sources)
    )
    engine = small_loop(30, disk_folder=tmp_path)
    for _ in range(2):
        assert tokens(run(engine, given)) == expected
    assert engine.stats(0).kv_tiers["disk_rejected"] > 0
    close(engine)


def test_a_request_goes_to_the_rank_whose_host_has_its_prefix():
    engine, prompt = small_loop(400, pages=9), np.arange(3, 103)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    run(engine, [Request("first", prompt, sampling)], preempt=False)
    for rank in engine.ranks:  # the pages of `first` leave the device
        rank.add(Request(f"other {id(rank)}", np.arange(120, 240), sampling), 0.0)
    while engine.has_work:
        engine.step()
    engine.ranks[0].add(Request("busy", np.arange(5, 45), sampling), 0.0)
    results = run(engine, [Request("again", prompt, sampling)], preempt=False)
    assert results["again"].started.cached_prompt_tokens == 96
    assert engine.ranks[0].scheduler.tiers.counters.host_hit_tokens >= 64  # the device kept a page or two
    close(engine)


def test_the_python_api(tmp_path, monkeypatch):
    """A prompt that left the devices comes back, after a start that measures the copies."""
    monkeypatch.setattr(FetchCosts, "pays", lambda *_: True)  # the decision depends on the machine's load
    settings = {"block_size": 16, "max_num_batched_tokens": 16, "step_sizes": "16", "max_num_seqs": 8}
    settings |= {"num_kv_pages": 96, "plan": "sequential", "progress": False}  # as in `toy.ranked_loop`
    settings |= {"data_parallel_size": RANKS, "enable_expert_parallel": True}
    settings |= {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path), "kv_disk_size": 0.1}
    prompt = np.random.default_rng(3).integers(3, VOCAB, 100).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for _ in range(2):
        with LLM(str(paths.MODELS / MODEL), **settings) as llm:
            [answer] = llm.generate(prompt, sampling, use_tqdm=False)
            answers.append(answer)
            stats = llm.driver.stats()
        assert stats.compilations_after_warmup == 0
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    assert answers[1].num_cached_tokens == stats.kv_tiers["disk_hit_tokens"] == 96


def test_a_size_below_a_page_of_each_rank_is_refused():
    given = {"data_parallel_size": RANKS, "enable_expert_parallel": True, "max_num_batched_tokens": 16}
    with pytest.raises(ConfigError, match=r"kv_offloading_size=1e-06 .*a page of each page group for each"):
        LLM(str(paths.MODELS / MODEL), kv_offloading_size=1e-6, progress=False, **given)

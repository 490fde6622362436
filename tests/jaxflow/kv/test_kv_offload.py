"""Host tier in the engine: the tokens equal those of an engine with all pages on the device."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest
import toy

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.driver import Driver
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prefill_seconds_per_token
from jaxflow.kv.tiers import start
from jaxflow.kv.tiers.host_store import PageState
from jaxflow.kv.tiers.offload import Channel
from jaxflow.kv.tiers.page import copy_to, page_size
from jaxflow.kv.tiers.policy import FetchCosts
from jaxflow.kv.tiers.start import open_disk, pinned_pool_gib, staging_bytes, start_host_tier
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.admission import OutputLengths

LLAMA, WINDOWS = (
    ("stories260K", 1),
    ("tiny-gemma3_text", 2),
)  # full attention on one device; two layer groups on two
BUDGET = {1: 64, 2: 16}  # tokens of a step, by devices: on two devices all steps are one program
NEVER_LOAD = FetchCosts(bytes_per_s=1.0, latency_s=1e9, seconds_per_token=0.0)


def vocab(model, tp):
    return toy.executor(model, tp, BUDGET[tp])[1].programs.context.config.vocab_size


def conversations(model, tp, count=7, seed=0):
    """Return requests with common prefixes and every kind of sampling."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab(model, tp), 70)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"top_k": 20, "repetition_penalty": 1.3},
        {"n": 2},
        {"prompt_logprobs": 0},
    ]
    prompts = [
        np.concatenate(
            [shared[: int(rng.integers(0, 70))], rng.integers(3, vocab(model, tp), int(rng.integers(1, 60)))]
        )
        for _ in range(count)
    ]
    return [
        Request(
            f"r{i}",
            prompt,
            SamplingParams(seed=i, max_tokens=30, ignore_eos=i % 2 == 0, **kinds[i % len(kinds)]),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=[LLAMA, WINDOWS], ids=["llama", "windows-tp2"])
def case(request):
    """Return (model, tp, requests, tokens of an engine with all pages on the device)."""
    model, tp = request.param
    if tp > 1:  # on one device every program is compiled already
        toy.executor(model, tp, BUDGET[tp])[1].warm_up()
    requests = conversations(model, tp)
    results = toy.run(toy.loop(model, tp=tp, budget=BUDGET[tp]), requests)
    return model, tp, requests, {name: result.token_ids for name, result in results.items()}


def small_loop(case, host_pages, *, pages=20, **more):
    """Return an engine with few pages that expects short outputs, so that it pre-empts sequences."""
    model, tp, *_ = case
    groups = toy.executor(model, tp, BUDGET[tp])[1].groups
    numbers = {"tp": tp, "budget": BUDGET[tp], "num_pages": (pages,) * groups}
    engine = toy.offloading_loop(model, host_pages, **numbers, **more)
    engine.scheduler.lengths = OutputLengths(2)
    return engine


def check_idle(engine):
    """Check that no page, slot, staging space or pin is taken after the last copies."""
    tier = engine.scheduler.tiers
    assert not (tier.busy or tier.copying or tier.fetches or engine.has_work)
    assert engine.scheduler.pages_free == sum(engine.scheduler.config.num_pages)
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    assert all(entry.pins == 0 and entry.state is PageState.STORED for entry in tier.store._entries.values())
    assert tier.store.bytes <= tier.store.capacity_bytes


def threads():
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("jaxflow"))


@pytest.mark.parametrize(("host_pages", "staging_pages"), [(400, None), (12, 3)], ids=["roomy", "full"])
def test_the_same_tokens_through_eviction_and_pre_emption(case, host_pages, staging_pages):
    _, _, requests, expected = case
    engine = small_loop(case, host_pages, staging_pages=staging_pages)
    compilations = engine.executor.compilations
    for _ in range(2):
        results = toy.run(engine, requests, preempt_at=range(5, 60, 6))
        assert {name: result.token_ids for name, result in results.items()} == expected
        check_idle(engine)
    tier = engine.scheduler.tiers
    assert engine.scheduler.num_preemptions > 0
    assert tier.store.counters.stored > 20
    assert tier.store.counters.loaded > 0
    if staging_pages is None:
        assert tier.counters.swapped_in > 0
        assert tier.counters.host_hit_tokens > 100
    else:
        assert tier.store.counters.evicted > 0
    assert engine.executor.compilations == compilations
    engine.close()
    assert threads() == []


def test_a_pre_empted_sequence_continues_at_its_position(case):
    """With a host tier one token is computed again; without it, all tokens of the partial page."""
    prompt, times = np.arange(3, 60), (21,)
    requests = [
        Request(f"r{i}", prompt + i, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        for i in (0, 1)
    ]
    again = {}
    for costs in (toy.ALWAYS_LOAD, NEVER_LOAD):
        engine = small_loop(case, 400, costs=costs)
        results = toy.run(engine, requests, preempt_at=times)
        assert [len(result.tokens) for result in results.values()] == [60, 60]
        assert engine.scheduler.num_preemptions == len(times)
        assert engine.scheduler.tiers.counters.swapped_in == (len(times) if costs is toy.ALWAYS_LOAD else 0)
        again[costs] = engine.stats(0).prompt_tokens - 2 * len(prompt)
        check_idle(engine)
        engine.close()
    assert again[toy.ALWAYS_LOAD] == len(times)
    assert again[NEVER_LOAD] > 5 * len(times)


def test_aborts_at_any_moment_leave_nothing(case):
    _, _, requests, expected = case
    engine = small_loop(case, 60, staging_pages=4)
    rng = np.random.default_rng(4)
    for _ in range(2):
        results = {request.request_id: toy.Result() for request in requests}
        for request in requests:
            engine.add(request, 0.0)
        while engine.has_work:
            events = engine.step()
            if engine._live and rng.random() < 0.15:
                events += engine.abort(rng.choice(list(engine._live)))
            for event in events:
                results[event.request_id].take(event)
        for name, result in results.items():
            for index, tokens in result.token_ids.items():
                assert tokens == expected[name][index][: len(tokens)]
        check_idle(engine)
    engine.close()
    assert threads() == []


def test_failed_copies_change_no_token(case, monkeypatch):
    _, _, requests, expected = case
    begin, end, calls = Channel._start, Channel._end, iter(range(10**6))
    monkeypatch.setattr(
        Channel, "_start", lambda self, sources: None if next(calls) % 5 == 0 else begin(self, sources)
    )
    monkeypatch.setattr(
        Channel, "_end", lambda self, copies: None if next(calls) % 5 == 0 else end(self, copies)
    )
    engine = small_loop(case, 100)
    for _ in range(2):
        results = toy.run(engine, requests, preempt_at=range(5, 60, 9))
        assert {name: result.token_ids for name, result in results.items()} == expected
        check_idle(engine)
    engine.close()


def test_a_failed_copy_is_logged_once_and_does_not_reach_the_engine(caplog):
    engine = toy.offloading_loop(*LLAMA[:1], 10)
    channel = engine.offload.transfers.to_host
    channel.copy([("a", "no array"), ("b", "none either")])
    channel.copy([("c", "nor this")])
    channel.close()
    assert channel.done() == [("a", None), ("b", None), ("c", None)]
    engine.close()
    assert len([record for record in caplog.records if "cannot be copied" in record.message]) == 1


class TestDriver:
    class Box:
        def __init__(self):
            self.result, self.done = toy.Result(), threading.Event()

        def post(self, events):
            for event in events:
                self.result.take(event)
            if self.result.finished:
                self.done.set()

    def test_a_driver_closes_the_threads(self):
        engine = toy.offloading_loop(*LLAMA[:1], 50, costs=FetchCosts(1e9, 0.0, 1e-3))
        driver = Driver(engine)
        driver.start()
        assert threads() == ["jaxflow-engine"]
        prompt, answers = np.arange(3, 60), []
        for name in ("first", "second"):
            box = self.Box()
            driver.submit(
                Request(name, prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)), box
            )
            assert box.done.wait(60)
            answers.append(box.result.tokens)
        assert answers[0] == answers[1]
        driver.drain(60)  # until the last copy ends
        counts = driver.stats().kv_tiers
        assert counts["host_pages"] == counts["host_pages_stored"] == len(prompt) // 16 + 1
        assert counts["bytes_to_host"] == counts["host_bytes"] <= counts["host_capacity_bytes"]
        assert counts["device_hit_tokens"] + counts["host_hit_tokens"] == 48
        driver.close()
        assert threads() == []


class TestStart:
    @staticmethod
    def config(**changes):
        config, _ = toy._with_copies("stories260K", 1, 64, "auto")
        return dataclasses.replace(config, kv_offloading_size=0.001, **changes)

    def test_costs_are_measured(self):
        _, executor = toy._with_copies("stories260K", 1, 64, "auto")
        before = executor.compilations
        measure = functools.partial(prefill_seconds_per_token, executor)
        costs = start_host_tier(self.config(), executor.page_shapes(), measure).costs
        assert costs.bytes_per_s > 0
        assert 0 < costs.latency_s < 10
        assert 0 < costs.seconds_per_token < 1
        assert executor.compilations == before
        assert threads() == []

    def test_pinned_host_memory_is_reserved_at_start(self, monkeypatch, tmp_path):
        _, executor = toy._with_copies("stories260K", 1, 64, "auto")
        pages = []
        monkeypatch.setattr(start, "on_gpu", lambda: True)
        monkeypatch.setattr(
            start, "copy_to", lambda some, kind: pages.append((some, kind)) or copy_to(some, kind)
        )
        given = (executor.page_shapes(), lambda: 1.0)
        start_host_tier(self.config(), *given, costs=toy.ALWAYS_LOAD)
        assert {kind for _, kind in pages} == {"pinned_host"}
        reserved = sum(page.nbytes for batch, _ in pages for page in batch)
        assert 0 <= reserved - 0.001 * 2**30 < page_size(executor.page_shapes()[0])

        # Pages that left the host for the write queue stay in pinned memory.
        monkeypatch.setattr(start, "WRITE_QUEUE_BYTES", 1 << 20)
        pages.clear()
        config = self.config(kv_disk_path=str(tmp_path), kv_disk_size=1.0)
        disk = open_disk(config, executor.programs.context.config, b"a model")
        start_host_tier(config, *given, disk, costs=toy.ALWAYS_LOAD).store.close()
        more = sum(page.nbytes for batch, _ in pages for page in batch) - reserved - 2**20
        assert 0 <= more <= 9 * page_size(executor.page_shapes()[0])

        def none_left(pages, kind):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nand more lines")

        monkeypatch.setattr(start, "copy_to", none_left)
        with pytest.raises(ConfigError, match=r"kv_offloading_size=0.001 .*RESOURCE_EXHAUSTED: no memory\)$"):
            start_host_tier(self.config(), *given, costs=toy.ALWAYS_LOAD)

    @pytest.mark.parametrize(
        ("changes", "accepted"),
        [
            ({"kv_offloading_size": 1e-7}, "0, or at least 0.00"),
            ({"kv_offloading_size": 1e6}, "GiB of free host memory"),
            ({"kv_offloading_size": 0.1, "enable_prefix_caching": False}, "enable_prefix_caching"),
            ({"kv_offloading_size": -1.0}, "or 0"),
            ({"kv_offloading_size": float("nan")}, "or 0"),
        ],
    )
    def test_an_unusable_host_tier_is_refused(self, changes, accepted):
        with pytest.raises(ConfigError, match="kv_offloading_size") as refused:
            settings = EngineConfig(model=toy.executor("stories260K")[0].model, **changes)
            checkpoint = open_checkpoint(settings.model)
            make_executor(resolve(settings, checkpoint.model_config), checkpoint, {})
        assert accepted in str(refused.value)

    def test_sizes(self):
        assert staging_bytes((1 << 20,), 100 << 30) == 1 << 30
        assert staging_bytes((1 << 20,), 10 << 30) == (10 << 30) // 50
        assert staging_bytes((1 << 20, 3 << 20), 1 << 20) == 12 << 20
        assert pinned_pool_gib(1) == 64
        assert pinned_pool_gib(100) >= 125
        assert pinned_pool_gib(400, 4) == pinned_pool_gib(100)


def test_a_fetch_pays_where_the_link_is_faster_than_the_computation():
    costs = FetchCosts(bytes_per_s=50e9, latency_s=1e-4, seconds_per_token=27e-6)  # Llama 3.1 8B on an H200
    assert costs.pays(64, 64 * 131072)
    assert not costs.pays(1, 131072 * 64)
    assert not costs.pays(3, 0)
    assert not FetchCosts(2.5e9, 1e-4, 27e-6).pays(64, 64 * 131072)

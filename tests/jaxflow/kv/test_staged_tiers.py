"""Tiers below pipeline stages: the tokens of one device, and pages that any number of stages can read."""

import numpy as np
import paths
import pytest
import toy

from jaxflow import LLM
from jaxflow.kv.tiers.policy import FetchCosts
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Request, SamplingParams
from jaxflow.scheduler.admission import OutputLengths

# Model, stages, devices of a stage. The five layers of stories260K do not split evenly, and one stage of
# gemma2 has no layer with a window.
CASES = {"two": ("stories260K", 2, 1), "two of two": ("stories260K", 2, 2), "windows": ("tiny-gemma2", 2, 1)}
DEVICE_PAGES, HOST_PAGES = 20, 10
# Tokens of a step: of one stage as in other tests, which then share its programs.
ONE_STAGE, STAGES = 64, 16


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def case(request):
    """Return (model, stages, tp, requests, their tokens on one device with all pages)."""
    model, stages, tp = request.param
    requests = drawn_requests(model)
    return (
        model,
        stages,
        tp,
        requests,
        tokens(toy.run(toy.loop(model, budget=ONE_STAGE, enable_prefix_caching=False), requests)),
    )


def drawn_requests(model: str, count: int = 8) -> list[Request]:
    """Return requests with common prefixes, greedy and drawn."""
    rng = np.random.default_rng(7)
    vocabulary = model_config(model).vocab_size
    shared = rng.integers(3, vocabulary, 60)
    prompts = [
        [*shared[: rng.integers(0, 60)].tolist(), *rng.integers(3, vocabulary, rng.integers(1, 50)).tolist()]
        for _ in range(count)
    ]
    return [
        Request(
            f"r{i}", prompt, SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=25, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts)
    ]


def model_config(model: str):
    return open_checkpoint(str(paths.MODELS / model)).model_config


def tokens(results):
    return {name: result.token_ids for name, result in results.items()}


def few_pages(case, folder, stages, **more):
    """Return an engine with few pages on device and host, and a disk tier; it expects short outputs."""
    model, _, tp, *_ = case
    groups = len(model_config(model).windows)
    settings = {"tp": tp, "stages": stages, "budget": STAGES, "num_pages": (DEVICE_PAGES,) * groups}
    settings |= {"fingerprint": b"a model", "disk_folder": folder, "staging_pages": 4}
    engine = toy.offloading_loop(model, HOST_PAGES, **settings, **more)
    engine.scheduler.lengths = OutputLengths(2)
    return engine


def close(engine) -> None:
    """End an engine, and check that nothing is taken."""
    tier = engine.scheduler.tiers
    assert not (tier.busy or tier.copying or tier.fetches or engine.has_work)
    assert engine.scheduler.pages_free == sum(engine.scheduler.config.num_pages)
    engine.close()


def test_the_tokens_of_one_device_through_host_disk_and_pre_emption(case, tmp_path):
    _, stages, _, requests, expected = case
    engine = few_pages(case, tmp_path, stages)
    for _ in range(2):
        assert tokens(toy.run(engine, requests, preempt_at=range(5, 90, 6))) == expected
    counters, host = engine.scheduler.tiers.counters, engine.scheduler.tiers.store.counters
    assert engine.scheduler.num_preemptions > 3 and counters.swapped_in > 0
    assert host.evicted > 0 and host.loaded > 0 and counters.disk_hit_tokens > 0
    close(engine)


@pytest.mark.parametrize("stages_write", [True, False])
def test_a_restart_with_other_stages_finds_the_pages(case, stages_write, tmp_path):
    """A folder that stages wrote serves one stage, and the other way round."""
    model, stages, tp, requests, expected = case
    for restarted, number in enumerate((stages, 1) if stages_write else (1, stages)):
        budget = ONE_STAGE if number == 1 else STAGES
        engine = toy.offloading_loop(model, 400, tp=tp, stages=number, budget=budget, disk_folder=tmp_path)
        assert tokens(toy.run(engine, requests)) == expected
        found = engine.scheduler.tiers.counters.disk_hit_tokens
        assert found > 200 if restarted else found == 0
        close(engine)
        disk = engine.scheduler.tiers.store.lower.counters()
        assert disk.rejected == disk.errors == 0


@pytest.mark.slow
def test_the_python_api_with_stages(tmp_path, monkeypatch):
    """A prompt that left the device comes back from the host, after a start that measures the copies."""
    # The real decision depends on the load of the machine.
    monkeypatch.setattr(FetchCosts, "pays", lambda *_: True)
    settings = {"block_size": 16, "max_num_batched_tokens": 16, "step_sizes": "16", "max_num_seqs": 1}
    settings |= {"num_kv_pages": 9, "max_model_len": 128, "progress": False, "pipeline_parallel_size": 2}
    settings |= {"kv_offloading_size": 0.01, "kv_disk_path": str(tmp_path), "kv_disk_size": 0.1}
    first, other = np.random.default_rng(3).integers(3, 512, (2, 100)).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(paths.MODELS / "stories260K"), **settings) as llm:
        outputs = llm.generate([first, other, first], sampling, use_tqdm=False)
        stats = llm.driver.stats()
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    assert outputs[2].num_cached_tokens == 96 and stats.kv_tiers["host_hit_tokens"] >= 16
    assert stats.compilations_after_warmup == 0 and len(list(tmp_path.rglob("*.kv"))) >= 12

"""Every small checkpoint gives its golden tokens and logits, whatever else the engine does at the time."""

import threading
from typing import Any

import numpy as np
import paths
import pytest
import toy

from jaxflow.bench.engine.policies import Hybrid
from jaxflow.engine.loop import Loop
from jaxflow.request import Request, SamplingParams

MODELS = sorted(path.name for path in paths.MODELS.iterdir())
TOLERANCE = 1e-3  # absolute, of float32 logits
# Tokens of a step on one device: steps have two sizes of the model here, and one size of the others.
BUDGETS = {"stories260K": 64}
ONE_SIZE = 16
# Tokens of an answer. `test_one_request_at_a_time` compares whole answers, of up to 64 tokens.
FEW = 16


def budget(model: str, tp: int = 1) -> int:
    return BUDGETS.get(model, ONE_SIZE) if tp == 1 else ONE_SIZE


def loop(model: str, **changes) -> Loop:
    return toy.loop(model, budget=budget(model), **changes)


def requests(golden: dict, **changes) -> list[Request]:
    tokens = len(golden["prompts"][0]["greedy_ids"])
    sampling = SamplingParams(
        **{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 5, **changes}
    )
    return [Request(f"golden-{i}", prompt, sampling) for i, prompt in enumerate(toy.prompts(golden))]


def check(golden: dict, results: dict[str, toy.Result], tokens: int | None = None) -> None:
    """Ids equal; the five best logits agree, up to the constant that log-probabilities take away.

    tokens: of each answer; None for as many as the golden has.
    """
    for i, prompt in enumerate(golden["prompts"]):
        result = results[f"golden-{i}"]
        greedy_ids, top_ids, top_logits = (
            prompt[name][:tokens] for name in ("greedy_ids", "top_ids", "top_logits")
        )
        assert result.tokens == greedy_ids, f"prompt {i}"
        for found, ids, logits in zip(result.logprobs[0], top_ids, top_logits, strict=True):
            assert set(ids) <= set(found)
            ours = np.array([found[token].logprob for token in ids])
            np.testing.assert_allclose(ours - ours[0], np.array(logits) - logits[0], atol=TOLERANCE)
            assert found[ids[0]].rank == 1


@pytest.mark.parametrize("model", MODELS)
class TestGoldens:
    def test_one_request_at_a_time(self, model, goldens):
        golden = goldens(model)
        engine, results = loop(model), {}
        for request in requests(golden):
            results |= toy.run(engine, [request])
        check(golden, results)

    def test_in_a_batch_with_others(self, model, goldens):
        golden = goldens(model)
        rng = np.random.default_rng(7)
        vocab = toy.executor(model, budget=budget(model))[1].programs.context.config.vocab_size
        noise = [
            Request(
                f"noise-{i}",
                rng.integers(0, vocab, length),
                SamplingParams(max_tokens=int(tokens), seed=i, top_k=i),
            )
            for i, (length, tokens) in enumerate(
                zip(rng.integers(1, 90, 9), rng.integers(1, 40, 9), strict=True)
            )
        ]
        ours = requests(golden, max_tokens=FEW)
        joining = {3 * i: [request] for i, request in enumerate([*noise[4:], *ours[2:]], start=1)}
        check(golden, toy.run(loop(model), [*noise[:4], *ours[:2]], at_step=joining), FEW)

    @pytest.mark.parametrize("chunk", [1, 7, 16])
    def test_chunked_prefill(self, model, chunk, goldens):
        golden = goldens(model)
        results = toy.run(loop(model, policy=Hybrid(chunk)), requests(golden, max_tokens=FEW))
        check(golden, results, FEW)

    @pytest.mark.parametrize("cached", [True, False], ids=["pages-kept", "pages-lost"])
    def test_pre_empted_half_way(self, model, cached, goldens):
        golden = goldens(model)
        engine = loop(model, enable_prefix_caching=cached)
        results = toy.run(engine, requests(golden), preempt_at=(5, 6, 15, 25))
        check(golden, results)
        preempted = [result.finished[0].timings.preemptions for result in results.values()]
        assert sum(preempted) == engine.scheduler.num_preemptions == 4

    @pytest.mark.parametrize("tp", [1, 2])
    def test_through_host_and_disk(self, model, tp, goldens, tmp_path):
        """Few pages on the device, fewer on the host, pre-emptions at drawn steps: what leaves comes back,
        much of it as files.
        """
        golden, groups = goldens(model), toy.executor(model, tp, budget(model, tp))[1].groups
        rng = np.random.default_rng(tp)
        for restarted in (False, True):
            settings = {"tp": tp, "budget": budget(model, tp), "num_pages": (16,) * groups}
            settings |= {"fingerprint": b"a model", "disk_folder": tmp_path}
            engine: Any = toy.offloading_loop(model, 8, **settings)
            store = engine.scheduler.tiers.store
            check(
                golden,
                toy.run(engine, requests(golden), preempt_at=rng.choice(30, 5, replace=False).tolist()),
            )
            assert engine.scheduler.num_preemptions >= 2 and store.counters.stored > 0
            assert restarted or store.counters.evicted > 0
            engine.close()
            disk = store.lower.counters()
            assert (disk.hits > 0) >= restarted and disk.rejected == 0
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("jaxflow")
        ] and not list(tmp_path.rglob("*.tmp"))

    def test_warm_prefix_cache(self, model, goldens):
        golden = goldens(model)
        engine = loop(model)
        toy.run(engine, requests(golden, max_tokens=FEW))
        again = toy.run(engine, requests(golden, max_tokens=FEW))
        check(golden, again, FEW)
        cached = [again[f"golden-{i}"].started.cached_prompt_tokens for i in range(len(golden["prompts"]))]
        assert cached == [(len(p["prompt_ids"]) - 1) // 16 * 16 for p in golden["prompts"]]

    def test_tensor_parallel(self, model, goldens):
        golden = goldens(model)
        results = toy.run(toy.loop(model, tp=2, budget=ONE_SIZE), requests(golden, max_tokens=FEW))
        check(golden, results, FEW)

    def test_prompt_logprobs(self, model, goldens):
        golden = goldens(model)
        results = toy.run(loop(model), requests(golden, max_tokens=FEW, prompt_logprobs=0))
        check(golden, results, FEW)
        for i, prompt in enumerate(golden["prompts"]):
            found = results[f"golden-{i}"].started.prompt_logprobs
            assert found[0] is None
            ours = [
                entry[token].logprob for entry, token in zip(found[1:], prompt["prompt_ids"][1:], strict=True)
            ]
            np.testing.assert_allclose(ours, prompt["prompt_logprobs"], atol=TOLERANCE)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3_moe"])
def test_more_shards_than_key_value_heads(model, goldens):
    golden = goldens(model)
    results = toy.run(toy.loop(model, tp=4, budget=ONE_SIZE), requests(golden, max_tokens=FEW))
    check(golden, results, FEW)

"""The loop's laws: equal tokens in any batch, no compilation after warm-up, no page left in use."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxflow.bench.engine.policies import Hybrid
from jaxflow.bench.engine.steps import step_log
from jaxflow.engine.loop import NanLogits
from jaxflow.engine.loop_start import make_loop
from jaxflow.pipeline import plan as plans
from jaxflow.pipeline.handwritten import two_nano_batch_plan
from jaxflow.request import FinishReason, InvalidRequest, Request, SamplingParams

MODEL = "stories260K"
PAGE = 16
BUDGET = {1: 64, 2: 16}  # tokens of a step, by devices: on one device steps have two sizes


def vocab():
    return toy.executor(MODEL)[1].programs.context.config.vocab_size


def drawn_requests(count, seed, name="r", most=24):
    """Requests of random length with settings of every kind, all seeded."""
    rng = np.random.default_rng(seed)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"top_p": 0.8, "top_k": 30},
        {"min_p": 0.05, "repetition_penalty": 1.4},
        {"frequency_penalty": 0.8, "presence_penalty": -0.5, "min_tokens": 3},
        {"logit_bias": {9: 5.0, 400: -100.0}, "logprobs": 2},
        {"n": 3, "temperature": 0.9},
    ]
    return [
        Request(
            f"{name}{i}",
            rng.integers(3, vocab(), int(rng.integers(1, 80))),
            SamplingParams(
                seed=int(rng.integers(0, 2**63)),
                max_tokens=int(rng.integers(1, most)),
                **kinds[i % len(kinds)],
            ),
        )
        for i in range(count)
    ]


def answers(results, requests):
    return {
        r.request_id: (results[r.request_id].token_ids, results[r.request_id].finished[0].reason)
        for r in requests
    }


class TestSameSeedSameTokens:
    """Law 5: a function of the request's seed and the position."""

    requests = property(lambda self: drawn_requests(9, seed=2))

    @pytest.fixture(scope="class")
    def alone(self):
        engine, found = toy.loop(MODEL, enable_prefix_caching=False), {}
        for request in drawn_requests(9, seed=2):
            found |= answers(toy.run(engine, [request]), [request])
        return found

    @pytest.mark.parametrize("order", ["forwards", "backwards"])
    def test_in_any_batch(self, alone, order):
        ours = self.requests[:: 1 if order == "forwards" else -1]
        others = drawn_requests(12, seed=5, name="other", most=40)
        joining = {2 * i: [request] for i, request in enumerate([*ours[4:], *others[6:]], start=1)}
        results = toy.run(toy.loop(MODEL), [*others[:6], *ours[:4]], at_step=joining)
        assert answers(results, ours) == alone

    def test_of_two_dozen_requests_at_temperature_one(self):
        rng = np.random.default_rng(24)
        plain = [
            Request(
                f"t{i}",
                rng.integers(1, vocab(), rng.integers(2, 30)).tolist(),
                SamplingParams(temperature=1.0, max_tokens=8, seed=i, ignore_eos=True),
            )
            for i in range(24)
        ]
        engine, apart = toy.loop(MODEL, enable_prefix_caching=False), {}
        for request in plain:
            apart |= answers(toy.run(engine, [request]), [request])
        assert answers(toy.run(toy.loop(MODEL), plain), plain) == apart

    @pytest.mark.parametrize("cached", [True, False], ids=["pages-kept", "pages-lost"])
    def test_after_pre_emption(self, alone, cached):
        engine = toy.loop(MODEL, enable_prefix_caching=cached)
        results = toy.run(engine, self.requests, preempt_at=range(2, 60, 4))
        assert answers(results, self.requests) == alone
        assert (
            sum(end.timings.preemptions for result in results.values() for end in result.finished.values())
            >= 6
        )

    @pytest.mark.parametrize("chunk", [1, 7, 16])
    def test_at_any_chunking(self, alone, chunk):
        results = toy.run(toy.loop(MODEL, policy=Hybrid(chunk)), self.requests)
        assert answers(results, self.requests) == alone

    def test_with_a_warm_prefix_cache(self, alone):
        engine = toy.loop(MODEL)
        toy.run(engine, self.requests)
        again = toy.run(engine, self.requests)
        assert answers(again, self.requests) == alone
        assert any(result.started.cached_prompt_tokens for result in again.values())

    def test_on_two_devices(self, alone):
        assert (
            answers(toy.run(toy.loop(MODEL, tp=2, budget=BUDGET[2]), self.requests), self.requests) == alone
        )

    def test_on_an_overlapped_plan(self, alone, tmp_path):
        config = toy.executor(MODEL)[1].programs.context.config
        plans.save(two_nano_batch_plan(config, 64, 24), tmp_path / "plan.json")
        results = toy.run(toy.loop(MODEL, plan=str(tmp_path / "plan.json")), self.requests)
        assert answers(results, self.requests) == alone

    def test_another_seed_is_another_answer(self, alone):
        hot = [r for r in self.requests if r.sampling.temperature == 1.3]
        [changed] = [
            Request(r.request_id, r.prompt_token_ids, SamplingParams(temperature=1.3, max_tokens=20, seed=99))
            for r in hot[:1]
        ]
        [same] = [
            Request(r.request_id, r.prompt_token_ids, SamplingParams(temperature=1.3, max_tokens=20, seed=98))
            for r in hot[:1]
        ]
        found = [toy.run(toy.loop(MODEL), [r])[r.request_id].tokens for r in (changed, same)]
        assert found[0] != found[1]

    def test_without_a_seed_answers_differ_and_the_one_drawn_gives_them_again(self):
        prompt, s = [1, 400, 20], SamplingParams(max_tokens=20, ignore_eos=True)
        first, second = toy.run(toy.loop(MODEL), [Request("a", prompt, s), Request("b", prompt, s)]).values()
        assert first.tokens != second.tokens
        for result in (first, second):
            seed = result.started.seed
            seeded = SamplingParams(
                max_tokens=20, ignore_eos=True, seed=seed - 2**64 if seed >= 2**63 else seed
            )
            [again] = toy.run(toy.loop(MODEL), [Request("c", prompt, seeded)]).values()
            assert again.tokens == result.tokens


class TestManySequences:
    @pytest.mark.parametrize("cached", [True, False], ids=["cache", "no-cache"])
    def test_n_share_the_pages_of_their_prompt(self, cached):
        engine = toy.loop(MODEL, enable_prefix_caching=cached)
        prompt = np.arange(3, 53)  # three whole pages and two tokens
        request = Request("many", prompt, SamplingParams(n=4, seed=6, max_tokens=30, ignore_eos=True))
        engine.add(request, 0.0)
        sequences, result = engine._live["many"].sequences, toy.Result()
        shared = False
        while engine.has_work:
            for event in engine.step():
                result.take(event)
            if all(seq.slot >= 0 and seq.num_total > seq.num_prompt for seq in sequences):
                pages = [tuple(seq.pages[0][:3]) for seq in sequences]
                assert len(set(pages)) == 1
                assert len({seq.pages[0][3] for seq in sequences}) == 4
                shared = True
        assert shared
        assert [result.finished[i].usage.cached_prompt_tokens for i in range(4)] == [0, 48, 48, 48]
        assert result.started.cached_prompt_tokens == 0
        assert len({tuple(tokens) for tokens in result.token_ids.values()}) == 4
        [single] = toy.run(
            toy.loop(MODEL), [Request("one", prompt, SamplingParams(seed=6, max_tokens=30, ignore_eos=True))]
        ).values()
        assert single.tokens == result.token_ids[0]

    def test_sequences_that_end_apart(self):
        s = SamplingParams(n=8, seed=4, max_tokens=20, ignore_eos=True)
        [whole] = toy.run(toy.loop(MODEL), [Request("many", [1], s)]).values()
        stop = next(
            t for t in whole.tokens if 2 <= sum(t in tokens for tokens in whole.token_ids.values()) <= 6
        )
        [result] = toy.run(
            toy.loop(MODEL), [Request("many", [1], dataclasses.replace(s, stop_token_ids=[stop]))]
        ).values()
        assert sorted(result.finished) == list(range(8))
        for index, tokens in whole.token_ids.items():
            end = result.finished[index]
            expected = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
            assert result.token_ids[index] == expected
            assert end.reason is (FinishReason.STOP if stop in tokens else FinishReason.LENGTH)
            assert end.usage.completion_tokens == len(expected)


class TestEnds:
    def greedy(self, **more):
        """The story that follows <s>, and the loop it ran in."""
        engine = toy.loop(MODEL)
        s = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, **more})
        [result] = toy.run(engine, [Request("a", [1], s)]).values()
        return result

    def test_a_stop_token_is_the_last_one_told(self):
        story = self.greedy().tokens
        stop = story[10]
        at = story.index(stop)
        result = self.greedy(stop_token_ids=[stop])
        assert result.tokens == story[: at + 1]
        assert (result.finished[0].reason, result.finished[0].stop_token_id) == (FinishReason.STOP, stop)

    def test_min_tokens_holds_stop_tokens_off(self):
        story = self.greedy().tokens
        result = self.greedy(stop_token_ids=[story[0]], min_tokens=12)
        assert story[0] not in result.tokens[:12]
        assert len(result.tokens) >= 12

    def test_length(self):
        result = self.greedy(max_tokens=7)
        assert len(result.tokens) == 7
        assert result.finished[0].reason is FinishReason.LENGTH
        assert result.finished[0].stop_token_id is None

    def test_without_max_tokens_the_context_is_filled(self):
        config, _ = toy.executor(MODEL)
        prompt = np.arange(3, config.max_model_len - 20)
        request = Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
        result = toy.run(toy.loop(MODEL), [request])["a"]
        assert len(result.tokens) == config.max_model_len - len(prompt) == 23
        assert result.finished[0].reason is FinishReason.LENGTH

    def test_counters(self):
        engine = toy.loop(MODEL)
        prompt = np.arange(3, 43)
        toy.run(engine, [Request("a", prompt, toy.GREEDY)])
        toy.run(engine, [Request("b", prompt, toy.GREEDY)])
        stats = engine.stats(queued=0)
        assert stats.completion_tokens == 64
        assert stats.cached_prompt_tokens == 32
        assert stats.prompt_tokens == 40 + 8
        assert (stats.running_requests, stats.waiting_requests, stats.kv_pages_free) == (0, 0, stats.kv_pages)
        assert stats.steps == sum(stats.steps_by_plan.values())

    def test_a_refused_request_leaves_no_trace(self):
        engine = toy.loop(MODEL)
        with pytest.raises(InvalidRequest):
            engine.add(Request("a", [], toy.GREEDY), 0.0)
        assert not engine.has_work


class TestNoShapeSurprises:
    @pytest.mark.parametrize("tp", [1, 2])
    def test_nothing_compiles_after_warm_up(self, tp):
        """Law 6: every bucket, both samplers, prompt log-probabilities, pre-emption, page-table entries
        beyond the buffer.
        """
        config, executor = toy.executor(MODEL, tp, BUDGET[tp])
        if tp > 1:  # on one device every program is compiled already
            executor.warm_up()
        before = executor.compilations
        engine = make_loop(config, executor.programs.context.config, executor)
        rng = np.random.default_rng(3)
        requests = drawn_requests(40, seed=8)
        requests += [
            Request(
                f"scored{i}",
                rng.integers(0, vocab(), int(length)),
                SamplingParams(max_tokens=4, prompt_logprobs=i),
            )
            for i, length in enumerate((1, 2, 63, 64, 65, 300))
        ]
        requests.append(
            Request(
                "long", rng.integers(0, vocab(), 500), SamplingParams(max_tokens=12, frequency_penalty=1.0)
            )
        )
        with step_log(executor) as log:
            results = toy.run(
                engine,
                requests,
                at_step={60: [Request("late", [5], toy.GREEDY)]},
                preempt_at=range(10, 60, 7),
            )
        assert all(len(result.finished) for result in results.values())
        assert executor.compilations == before
        assert {step.bucket for step in log} == set(executor.layouts)
        assert engine.stats(0).steps_by_plan == {"sequential": len(log)}
        assert engine.scheduler.pages_free == math.prod(executor.num_pages)

    def test_a_step_compiled_late_is_noticed(self):
        """A shape outside the warm-up moves the compilation counter."""
        import jax
        import jax.numpy as jnp

        _, executor = toy.executor(MODEL)
        before = executor.compilations
        jax.jit(lambda x: x * 3 + 1)(jnp.zeros(1237))
        assert executor.compilations > before


class TestLogitsThatAreNan:
    """A request whose logits are NaN ends with an error, before a token of them is sent."""

    @pytest.mark.parametrize(
        "settings", [{"temperature": 0.0}, {"temperature": 1.3}, {"top_p": 0.8}, {"logprobs": 2}, {"n": 2}]
    )
    def test_the_request_ends_with_a_fault_and_the_next_is_served(self, settings, caplog):
        request = Request("a", [5, 6, 7], SamplingParams(seed=3, max_tokens=6, ignore_eos=True, **settings))
        loop = toy.loop(MODEL)
        executor = loop.executor
        expected = answers(toy.run(loop, [request]), [request])
        whole = executor.weights
        try:
            damaged = jax.tree.map(
                lambda a: jax.device_put(jnp.full_like(a, jnp.nan), a.sharding), whole["final_norm"]
            )
            executor.weights = whole | {"final_norm": damaged}
            result = toy.run(loop, [request])["a"]
        finally:
            executor.weights = whole
        assert not any(result.token_ids)
        assert len(result.finished) == request.sampling.n
        for event in result.finished.values():
            assert event.reason is FinishReason.ABORT and isinstance(event.error, NanLogits)
        assert "position 3 are NaN" in caplog.text
        stats = loop.stats(0)
        assert stats.kv_pages_free == stats.kv_pages and stats.running_requests == 0
        assert answers(toy.run(loop, [request]), [request]) == expected

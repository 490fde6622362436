"""Data-parallel ranks give the tokens of one device, whatever rank a request is
on and whatever the others do.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import hurry
import jax
import numpy as np
import paths
import pytest
import toy
from test_goldens import ONE_SIZE, check, requests

from jaxflow import LLM, SamplingParams
from jaxflow.bench.engine.steps import step_log
from jaxflow.config import ConfigError, EngineConfig, ParallelConfig
from jaxflow.engine import programs, ranked_loop, stage_programs
from jaxflow.engine.driver import Driver
from jaxflow.engine.executor import Executor
from jaxflow.engine.loop import Loop
from jaxflow.engine.ranked_loop import _on_host
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.checkpoints.fingerprint import kv_fingerprint
from jaxflow.model.weights import EXPERT_LEAVES
from jaxflow.parallel.mesh import place
from jaxflow.pipeline.handwritten import sequential_plan, two_nano_batch_plan, whole_experts_plan
from jaxflow.pipeline.plan import NanoOp, Plan, PlanError, save
from jaxflow.pipeline.program import RECEIVED_ROWS
from jaxflow.request import Event, Finished, FinishReason, Request

MIXTURES = ["tiny-qwen3_moe", "tiny-mixtral", "tiny-gpt_oss", "tiny-glm4_moe", "tiny-deepseek_v3"]
MODEL, VOCAB = "tiny-mixtral", 256


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MIXTURES)
def test_goldens(model, ranks, goldens):
    golden = goldens(model)
    engine = toy.ranked_loop(model, ranks)
    check(golden, toy.run(engine, requests(golden)))
    layer = engine.executor.weights["layers"][-1]
    for name, leaf in layer.items():
        if hasattr(leaf, "addressable_shards"):
            (whole, *rest) = leaf.shape
            held = whole // ranks if name in EXPERT_LEAVES else whole
            assert leaf.addressable_shards[0].data.shape == (held, *rest)


@pytest.mark.parametrize("model", MIXTURES)
def test_goldens_of_ranks_of_two_devices(model, goldens):
    """Each rank shares its heads, and all devices share the experts."""
    golden = goldens(model)
    engine = toy.ranked_loop(model, 2, tp=2)
    check(golden, toy.run(engine, requests(golden)))
    layer = engine.executor.weights["layers"][-1]
    assert [layer["expert_down"].addressable_shards[i].index[0].start or 0 for i in range(4)] == [
        i * layer["expert_down"].shape[0] // 4 for i in range(4)
    ]
    assert layer["out_proj"].addressable_shards[0].data.shape[1] * 2 == layer["out_proj"].shape[1]


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("model", MIXTURES)
def test_goldens_of_two_nano_batches(model, ranks, tp, goldens, tmp_path):
    """Each nano-batch gathers or exchanges its tokens while the other one computes."""
    golden, path = goldens(model), tmp_path / "two.json"
    config = open_checkpoint(str(paths.MODELS / model)).model_config
    save(two_nano_batch_plan(config, 16, 6, tp, ranks=ranks), path)
    engine = toy.ranked_loop(model, ranks, tp=tp, plan=str(path))
    check(golden, toy.run(engine, requests(golden)))
    assert {step.plan for step in engine.log.steps} == {"two nano-batches, 6 + 10"}


@pytest.mark.parametrize(
    ("model", "tp"), [*((model, 1) for model in MIXTURES), ("tiny-mixtral", 2), ("tiny-deepseek_v3", 2)]
)
def test_goldens_of_whole_experts(model, tp, goldens, tmp_path):
    """The experts take the rows of two gathers at once, and their outputs are scattered in two parts."""
    golden, path = goldens(model), tmp_path / "whole.json"
    config = open_checkpoint(str(paths.MODELS / model)).model_config
    save(whole_experts_plan(config, 16, 6, tp, ranks=2), path)
    engine = toy.ranked_loop(model, 2, tp=tp, plan=str(path))
    check(golden, toy.run(engine, requests(golden)))
    assert {step.plan for step in engine.log.steps} == {"whole experts, 6 + 10"}


def test_experts_take_the_rows_of_some_gathers(goldens, tmp_path):
    """Three gathers, of which the experts take the first two together."""
    golden, path = goldens(MODEL), tmp_path / "three.json"
    config = open_checkpoint(str(paths.MODELS / MODEL)).model_config
    sent, received = ((0, 3), (3, 9), (9, 16)), ((0, 9), (9, 16))
    nano_ops = tuple(
        NanoOp(f"{nano.op}.{start}", nano.op, start, stop)
        for nano in sequential_plan(config, 16, ranks=2).nano_ops
        for start, stop in (received if nano.op in RECEIVED_ROWS else sent)
    )
    save(Plan("three gathers", 16, nano_ops), path)
    engine = toy.ranked_loop(MODEL, 2, plan=str(path))
    check(golden, toy.run(engine, requests(golden)))


def drawn_requests(count: int = 12) -> list[Request]:
    """Return requests of every kind of sampling, with prompts of a few tokens to several steps."""
    rng = np.random.default_rng(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.0, "seed": 11, "top_k": 5, "logprobs": 2},
        {"temperature": 0.7, "seed": 12, "repetition_penalty": 1.3, "min_p": 0.01},
        {"temperature": 1.0, "seed": 13, "n": 3, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 3},
        {"temperature": 1.0, "seed": 14, "stop_token_ids": list(range(0, VOCAB, 9)), "min_tokens": 2},
    ]
    return [
        Request(
            f"r{i}",
            rng.integers(3, VOCAB, int(rng.integers(1, 50))),
            SamplingParams(**{"max_tokens": int(rng.integers(1, 30)), **kind}),
        )
        for i, kind in zip(range(count), itertools.cycle(kinds))
    ]


def test_the_step_log_counts_the_tokens_of_all_ranks():
    engine = toy.ranked_loop(MODEL, 2)
    with step_log(engine.executor) as log:
        toy.run(engine, drawn_requests(7))
    found = [(step.bucket, step.decode_tokens, step.prefill_tokens) for step in log]
    assert found == [(step.bucket, step.decode_tokens, step.prefill_tokens) for step in engine.log.steps]


def same(found: dict[str, toy.Result], wanted: dict[str, toy.Result]) -> None:
    """Compare tokens, log-probabilities, ends and usage."""
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        other = found[name]
        assert other.token_ids == one.token_ids, name
        for index, end in one.finished.items():
            there = other.finished[index]
            assert (there.reason, there.usage.completion_tokens) == (end.reason, end.usage.completion_tokens)
        for mine, theirs in (
            (other.started.prompt_logprobs, one.started.prompt_logprobs),
            *((other.logprobs[index], logprobs) for index, logprobs in one.logprobs.items()),
        ):
            assert (mine is None) == (theirs is None)
            for a, b in zip(mine or (), theirs or (), strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert list(a) == list(b)
                    np.testing.assert_allclose(
                        [one.logprob for one in a.values()], [one.logprob for one in b.values()], atol=1e-4
                    )


def routed(executor: Executor) -> np.ndarray:
    """Return the tokens of all ranks at each expert of each mixture layer, [L,
    E], since the executor was made.
    """
    (counts,) = executor.expert_counts
    return np.asarray(counts).reshape(executor.ranks, -1, counts.shape[1]).sum(0)


def drive(
    engine: ranked_loop.RankedLoop, given: list[Request], act: Callable[[int], list[Event]]
) -> dict[str, toy.Result]:
    """Run requests to their end. act: called before the step of a number; returns more events."""
    results = {one.request_id: toy.Result() for one in given}
    for one in given:
        engine.add(one, 0.0)
    for step in itertools.count():
        if not engine.has_work:
            return results
        for event in [*act(step), *engine.step()]:
            results[event.request_id].take(event)
    raise AssertionError


def of_one_device(given: list[Request]) -> dict[str, toy.Result]:
    return toy.run(toy.loop(MODEL, budget=ONE_SIZE), given)


def is_clean(engine: ranked_loop.RankedLoop) -> bool:
    """Return whether no rank holds a page or a slot."""
    return all(
        rank.scheduler.pages_free == sum(rank.scheduling.num_pages) and rank.scheduler.num_running == 0
        for rank in engine.ranks
    )


class TestTheTokensOfOneDevice:
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_for_every_kind_of_request(self, ranks):
        engine, given = toy.ranked_loop(MODEL, ranks), drawn_requests()
        same(toy.run(engine, given[:8], at_step={5: given[8:]}), of_one_device(given))
        assert is_clean(engine)
        assert all(rank.stats(0).completion_tokens for rank in engine.ranks)

    def test_for_every_kind_of_request_on_ranks_of_two_devices(self):
        engine, given = toy.ranked_loop(MODEL, 2, tp=2), drawn_requests()
        same(toy.run(engine, given[:8], at_step={5: given[8:]}), of_one_device(given))
        assert is_clean(engine)

    def test_when_ranks_pre_empt(self):
        """The ranks pre-empt at different times, and each of them takes back pages of its own pool."""
        engine, given = toy.ranked_loop(MODEL, 4, num_pages=(12,)), drawn_requests(20)

        def pre_empt(step: int) -> list[Event]:
            scheduler = engine.ranks[step % 4].scheduler
            if scheduler.num_running > 1:
                scheduler.preempt_youngest()
            return []

        same(drive(engine, given, pre_empt), of_one_device(given))
        assert all(rank.scheduler.num_preemptions for rank in engine.ranks) and is_clean(engine)

    def test_when_other_ranks_have_no_token(self):
        """One request at a time runs on one rank of four."""
        engine, found, given = toy.ranked_loop(MODEL, 4), {}, drawn_requests(6)
        for one in given:
            found |= toy.run(engine, [one])
        same(found, of_one_device(given))
        assert [rank.stats(0).steps for rank in engine.ranks] == [0] * 4  # ranks count no steps of their own

    def test_when_every_token_goes_to_one_rank(self, monkeypatch):
        """Equal scores choose the first two experts, which one of four ranks holds."""
        given, found = drawn_requests(6), []
        for engine in (toy.loop(MODEL, budget=ONE_SIZE), toy.ranked_loop(MODEL, 4)):
            layers = engine.executor.weights["layers"]
            flat = [
                layer
                | {"router": place(np.zeros(layer["router"].shape, np.float32), layer["router"].sharding)}
                for layer in layers
            ]
            monkeypatch.setitem(engine.executor.weights, "layers", flat)
            before = routed(engine.executor)
            found.append(toy.run(engine, given))
            counted = routed(engine.executor) - before
            assert counted[:, :2].min() > 0 and not counted[:, 2:].any()
        same(found[1], found[0])

    def test_with_a_request_that_is_cancelled(self):
        engine, given = toy.ranked_loop(MODEL, 2), drawn_requests(7)
        wanted = of_one_device(given)
        results = drive(engine, given, lambda step: engine.abort("r0") if step == 3 else [])
        gone = results.pop("r0")
        assert gone.finished[0].reason is FinishReason.ABORT and not engine.is_live("r0")
        assert gone.token_ids.get(0, []) == wanted.pop("r0").tokens[: len(gone.token_ids.get(0, []))]
        same(results, wanted)
        assert is_clean(engine)


def test_seeds_that_nobody_gave_are_those_of_one_device():
    rng = np.random.default_rng(0)
    given = [
        Request(f"r{i}", rng.integers(3, VOCAB, 9), SamplingParams(temperature=1.0, max_tokens=8))
        for i in range(6)
    ]
    same(toy.run(toy.ranked_loop(MODEL, 4), given), of_one_device(given))


def greedy(name: str, prompt: Any, tokens: int = 4) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))


def ranks_with(engine: ranked_loop.RankedLoop, count: Callable[[Loop], int]) -> list[int]:
    return [count(rank) for rank in engine.ranks]


class TestTheRankOfARequest:
    def test_is_the_one_with_the_fewest_tokens(self):
        engine = toy.ranked_loop(MODEL, 4)
        for i, length in enumerate([40, 30, 20, 10, 5, 6]):
            engine.add(greedy(f"r{i}", np.full(length, i + 3)), 0.0)
        assert ranks_with(engine, lambda rank: len(rank.request_ids)) == [1, 1, 1, 3]
        assert ranks_with(engine, lambda rank: rank.scheduler.num_tokens) == [40, 30, 20, 21]
        while engine.has_work:
            engine.step()
        assert ranks_with(engine, lambda rank: rank.scheduler.num_tokens) == [0] * 4

    def test_is_one_that_has_the_prefix(self):
        engine, prompt = toy.ranked_loop(MODEL, 2), np.arange(3, 53)
        first = toy.run(engine, [greedy("first", prompt)])
        other = greedy("other", np.full(20, 9), 40)  # runs on the first rank, which has the prefix
        again = toy.run(engine, [other], at_step={2: [greedy("again", prompt)]})["again"]
        assert again.tokens == first["first"].tokens
        assert again.started is not None and again.started.cached_prompt_tokens == 48

    def test_is_any_without_prefix_caching(self):
        engine = toy.ranked_loop(MODEL, 2, enable_prefix_caching=False)
        assert ranked_loop.reusable_page_names(engine.scheduling, greedy("r", np.arange(3, 53))) == []


def test_counts_are_those_of_all_ranks():
    engine = toy.ranked_loop(MODEL, 4)
    routed_before = routed(engine.executor)
    given = [greedy(f"r{i}", np.arange(3, 3 + 20), 6) for i in range(8)]
    for one in given:
        engine.add(one, 0.0)
    assert engine.waiting == 8 and engine.stats(2).waiting_requests == 10
    engine.step()
    before = engine.stats(0)
    assert (before.running_requests, before.waiting_requests) == (4, 4)  # a step of 16 tokens, prompts of 20
    assert before.kv_pages == 4 * 96 and before.kv_pages_free == 4 * 95
    while engine.has_work:
        engine.step()
    after = engine.stats(0)
    assert after.completion_tokens == 8 * 6 and after.kv_pages_free == after.kv_pages
    assert after.prompt_tokens + after.cached_prompt_tokens == 8 * 20
    steps, _ = engine.log.take()
    assert len(steps) == after.steps == sum(after.steps_by_plan.values())
    assert sum(step.new_tokens for step in steps) == 8 * 6
    assert sum(step.prefill_tokens for step in steps) == after.prompt_tokens
    assert all(step.decode_tokens + step.prefill_tokens <= step.bucket == 4 * ONE_SIZE for step in steps)
    counted = engine.expert_counter.read()
    computed = after.prompt_tokens + sum(step.decode_tokens for step in steps)
    assert counted is not None and ((counted.tokens - routed_before).sum(axis=1) == 2 * computed).all()


def test_a_fault_ends_every_request_once(monkeypatch):
    engine, posted = toy.ranked_loop(MODEL, 2), []
    run = engine.executor.run
    left = iter(range(4))

    def fails(*args: Any, **more: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("the device fell off the bus")
        return run(*args, **more)

    monkeypatch.setattr(engine.executor, "run", fails)
    box = type("Box", (), {"post": lambda _, events: posted.extend(events)})()
    driver = Driver(engine)
    for i in range(4):
        driver.submit(greedy(f"r{i}", np.arange(3, 23), 30), box)
    driver.start()
    driver._thread.join()
    ends = [event for event in posted if isinstance(event, Finished)]
    assert sorted(end.request_id for end in ends) == ["r0", "r1", "r2", "r3"]
    assert all(isinstance(end.error, RuntimeError) for end in ends)


def test_a_served_model_compiles_nothing_and_answers_as_one_device():
    given = drawn_requests()
    wanted = of_one_device(given)
    small: dict[str, Any] = {  # as in `toy.ranked_loop`, whose compiled programs the cache has
        "max_num_batched_tokens": 16,
        "step_sizes": "16",
        "max_num_seqs": 8,
        "num_kv_pages": 96,
        "block_size": 16,
        "plan": "sequential",
        "progress": False,
    }
    with LLM(str(paths.MODELS / MODEL), data_parallel_size=2, enable_expert_parallel=True, **small) as llm:
        found = llm.generate(
            [one.prompt_token_ids for one in given], [one.sampling for one in given], use_tqdm=False
        )
        stats = llm.driver.stats()
    for one, answer in zip(given, found, strict=True):
        for index, output in enumerate(answer.outputs):
            assert list(output.token_ids) == wanted[one.request_id].token_ids[index]
    assert stats.compilations_after_warmup == 0 and stats.kv_pages == 2 * 96


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"enable_expert_parallel": False}, "enable_expert_parallel"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"attention_spans": "spans.json"}, "attention_spans"),
        ({"batch_tpot_ms": 50.0}, "batch_tpot_ms"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
    ],
)
def test_what_ranks_lack_is_refused(settings, field):
    given = {"data_parallel_size": 2, "enable_expert_parallel": True} | settings
    with pytest.raises(ConfigError, match=f"{field}=.*with data.parallel|positive") as caught:
        EngineConfig("m", **given)
    assert caught.value.field == field


def test_ranks_of_several_processes_refuse_host_memory_for_pages():
    with pytest.raises(ConfigError, match="several processes") as caught:
        EngineConfig(
            "m",
            data_parallel_size=2,
            enable_expert_parallel=True,
            coordinator="auto",
            kv_offloading_size=1.0,
        )
    assert caught.value.field == "kv_offloading_size"


def test_every_device_has_what_the_host_of_several_processes_reads(monkeypatch):
    """Process 0 reads the tokens and the expert counts of all ranks from a device of its own."""
    monkeypatch.setattr(toy, "_executor", toy._executor.__wrapped__)  # counts of earlier tests are not wanted
    alone = toy.ranked_loop(MODEL, 2)
    wanted = toy.run(alone, drawn_requests())
    monkeypatch.setattr(hurry, "shares", False)
    monkeypatch.setattr(programs, "ranks_have_processes", lambda mesh: True)
    monkeypatch.setattr(stage_programs, "of_several_processes", lambda mesh: True)
    engine, read = toy.ranked_loop(MODEL, 2), []
    monkeypatch.setattr(ranked_loop, "_on_host", lambda pending: read.append(pending) or _on_host(pending))
    same(toy.run(engine, drawn_requests()), wanted)
    results = jax.tree.leaves([(one.tokens, one.logprobs, one.prompt) for one in read])
    assert read and all(array.is_fully_replicated for array in results)
    (each,), expected = engine.executor.expert_counts, alone.expert_counter.read()
    assert expected is not None
    for counts in np.split(np.asarray(each), 2):
        np.testing.assert_array_equal(counts, expected.tokens)


@pytest.mark.parametrize(("made_for", "ranks"), [(1, 2), (2, 1)])
def test_a_plan_for_another_number_of_ranks_is_refused(made_for, ranks, tmp_path):
    """Ranks send rows, and one rank sends none."""
    checkpoint = open_checkpoint(str(paths.MODELS / MODEL))
    config, path = checkpoint.model_config, tmp_path / "plan.json"
    save(two_nano_batch_plan(config, 16, 6, ranks=made_for), path)
    given = EngineConfig(
        checkpoint.name, plan=str(path), data_parallel_size=ranks, enable_expert_parallel=ranks > 1
    )
    with pytest.raises(PlanError, match="expert_dispatch"):
        choose_plans(resolve(given, config), config)


@pytest.mark.parametrize(
    ("model", "changes", "ranks", "tp", "setting", "accepted"),
    [
        ("tiny-mixtral", {"num_experts": 6}, 4, 1, "data_parallel_size=4", "a divisor of the 6"),
        ("tiny-mixtral", {"num_experts": 6}, 2, 2, "data_parallel_size=2", "a divisor of the 6 .* of tensor"),
        ("tiny-llama", {}, 2, 1, "enable_expert_parallel=True", "False for a model without experts"),
        ("tiny-mixtral", {}, 8, 1, "data_parallel_size=8", "at most the 4 devices"),
        ("tiny-mixtral", {}, 4, 2, "data_parallel_size=4", "at most 2: each rank takes tensor_parallel"),
    ],
    ids=["a remainder", "a remainder of four", "no experts", "too few devices", "too few for two a rank"],
)  # fmt: skip
def test_what_cannot_be_spread_is_refused_before_a_weight_is_read(
    model, changes, ranks, tp, setting, accepted, monkeypatch
):
    checkpoint = open_checkpoint(str(paths.MODELS / model))
    changed = dataclasses.replace(checkpoint.model_config, **changes)
    monkeypatch.setattr(type(checkpoint.source), "read", lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(
        "jaxflow.llm.open_model", lambda _: dataclasses.replace(checkpoint, model_config=changed)
    )
    with pytest.raises(ConfigError, match=f"{setting} is not supported: {accepted}"):
        LLM(
            str(paths.MODELS / model),
            data_parallel_size=ranks,
            tensor_parallel_size=tp,
            enable_expert_parallel=True,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            progress=False,
        )


def test_pages_and_plans_name_the_ranks():
    checkpoint = open_checkpoint(str(paths.MODELS / MODEL))
    one = EngineConfig("m", max_num_batched_tokens=16, max_num_seqs=4)
    two = dataclasses.replace(one, data_parallel_size=2, enable_expert_parallel=True)
    assert two.parallel == ParallelConfig(dp=2, ep=2) and two.parallel.devices == 2
    assert kv_fingerprint(one, checkpoint) != kv_fingerprint(two, checkpoint)

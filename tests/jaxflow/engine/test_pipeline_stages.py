"""Any number of pipeline stages gives the tokens of one device, and keeps
that many micro-batches in flight.
"""

import dataclasses
import os
import subprocess
import sys

import msgspec
import numpy as np
import paths
import pytest
import toy
from test_goldens import FEW, check, requests
from test_loop import answers, drawn_requests

from jaxflow.bench.engine.policies import Hybrid
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.start import start_engine
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxflow.pipeline import plan as plans
from jaxflow.pipeline.handwritten import two_nano_batch_plan
from jaxflow.request import FinishReason, Request, SamplingParams

# Most tests share the programs of a first, a middle and a last stage.
STAGES = 3
OTHERS = [pytest.param(stages, marks=pytest.mark.slow) for stages in (2, 4)]
SOME = dataclasses.replace(toy.GREEDY, max_tokens=16)
MODEL = "stories260K"  # five layers: no equal split, and tied embeddings on both end stages


@pytest.fixture(scope="module")
def alone():
    """The answers on one device, each request by itself."""
    engine, found = toy.loop(MODEL, enable_prefix_caching=False), {}
    for request in drawn_requests(9, seed=2):
        found |= answers(toy.run(engine, [request]), [request])
    return found


def on_an_overlapped_plan(folder):
    """Return an engine of two stages, of one and of four layers, and its plan."""
    model = open_checkpoint(str(paths.MODELS / MODEL)).model_config
    plan = msgspec.structs.replace(two_nano_batch_plan(model, 16, 6), stages=(1, 4))
    plans.save(plan, folder / "plan.json")
    return toy.staged_loop(MODEL, 2, plan=str(folder / "plan.json")), plan


def in_flight(engine):
    return [step.work for step in engine._in_flight if step is not None]


class TestSameTokens:
    """Law: P stages of T devices give the tokens of one device."""

    @pytest.mark.parametrize(
        ("model", "stages", "tp"),
        [
            (MODEL, 2, 1),
            (MODEL, 4, 1),
            (MODEL, 2, 2),
            ("tiny-gemma2", 2, 1),  # one stage has no layer with a window
            ("tiny-mixtral", 2, 2),
            ("tiny-opt", 2, 1),  # learned positions on the first stage
            ("tiny-deepseek_v3", 2, 2),  # a dense layer on the first stage, and copies of latent vectors
        ],
    )
    def test_goldens(self, model, stages, tp, goldens):
        golden = goldens(model)
        engine = toy.staged_loop(model, stages, tp=tp)
        check(golden, toy.run(engine, requests(golden, max_tokens=FEW, prompt_logprobs=0)), FEW)
        assert engine.scheduler.pages_free == sum(engine.scheduler.config.num_pages)

    @pytest.mark.parametrize("stages", [2, 4])
    def test_in_a_batch_with_others(self, alone, stages):
        ours, others = drawn_requests(9, seed=2), drawn_requests(8, seed=5, name="other")
        joining = {2 * i: [request] for i, request in enumerate([*ours[4:], *others[4:]], start=1)}
        results = toy.run(toy.staged_loop(MODEL, stages), [*others[:4], *ours[:4]], at_step=joining)
        assert answers(results, ours) == alone

    @pytest.mark.parametrize("cached", [True, False], ids=["pages-kept", "pages-lost"])
    def test_in_a_storm_of_pre_emptions(self, alone, cached):
        engine = toy.staged_loop(MODEL, STAGES, enable_prefix_caching=cached)
        results = toy.run(engine, drawn_requests(9, seed=2), preempt_at=range(2, 200, 5))
        assert answers(results, drawn_requests(9, seed=2)) == alone
        assert engine.scheduler.num_preemptions >= 6

    def test_with_few_pages(self, alone):
        engine = toy.staged_loop(MODEL, STAGES, num_pages=(16,))
        assert answers(toy.run(engine, drawn_requests(9, seed=2)), drawn_requests(9, seed=2)) == alone

    def test_on_an_overlapped_plan(self, alone, tmp_path):
        engine, plan = on_an_overlapped_plan(tmp_path)
        assert answers(toy.run(engine, drawn_requests(9, seed=2)), drawn_requests(9, seed=2)) == alone
        assert engine.stats(0).steps_by_plan[plan.name] > 0

    @pytest.mark.parametrize("chunk", [1, 7])
    def test_at_any_chunking(self, alone, chunk):
        engine = toy.staged_loop(MODEL, STAGES, policy=Hybrid(chunk))
        assert answers(toy.run(engine, drawn_requests(9, seed=2)), drawn_requests(9, seed=2)) == alone

    def test_with_a_warm_prefix_cache(self, alone):
        engine = toy.staged_loop(MODEL, STAGES)
        toy.run(engine, drawn_requests(9, seed=2))
        again = toy.run(engine, drawn_requests(9, seed=2))
        assert answers(again, drawn_requests(9, seed=2)) == alone
        assert any(result.started.cached_prompt_tokens for result in again.values())


def test_stages_have_the_layers_that_their_plan_gives_them(tmp_path):
    engine, _ = on_an_overlapped_plan(tmp_path)
    assert [len(stage.weights["layers"]) for stage in engine.executor.stages] == [1, 4]


class TestMicroBatches:
    @pytest.mark.parametrize("stages", [STAGES, *OTHERS])
    def test_as_many_as_stages_are_in_flight_and_none_shares_a_decode(self, stages):
        engine = toy.staged_loop(MODEL, stages)
        many = [Request(f"r{i}", [1, 5 + i], SOME) for i in range(8)]
        for request in many:
            engine.add(request, 0.0)
        most = 0
        while engine.has_work:
            engine.step()
            steps = in_flight(engine)
            decoding = [slot for work in steps for slot in work.decode_slots.tolist()]
            assert len(decoding) == len(set(decoding))
            if all(len(work.decode_slots) for work in steps):
                most = max(most, len(steps))
        assert most == stages

    @pytest.mark.parametrize("stages", [1, STAGES, *OTHERS])
    def test_one_step_more_than_stages_is_enqueued_when_the_host_waits(self, stages, monkeypatch):
        """So the device has the next step before the host has the tokens of the oldest step."""
        engine = toy.staged_loop(MODEL, stages) if stages > 1 else toy.loop(MODEL)
        enqueued, waits = [], []
        run, read = engine.executor.run, engine.read
        monkeypatch.setattr(
            engine.executor, "run", lambda *a, **k: enqueued.append(run(*a, **k)) or enqueued[-1]
        )

        def wait(step):
            waits.append(len(enqueued) - len(waits))  # steps are read in their order
            return read(step)

        monkeypatch.setattr(engine, "read", wait)
        toy.run(engine, [Request(f"r{i}", [1, 5 + i], SOME) for i in range(8)])
        assert max(waits) == stages + 1
        assert waits.count(stages + 1) > len(waits) / 2

    def test_a_long_prompt_is_computed_beside_decodes(self):
        """The chunks of a prompt and the decodes of others are in flight at the same time."""
        engine = toy.staged_loop(MODEL, STAGES)
        for i in range(4):
            engine.add(Request(f"r{i}", [1, 5 + i], dataclasses.replace(toy.GREEDY, max_tokens=60)), 0.0)
        for _ in range(4):
            engine.step()
        engine.add(Request("long", np.arange(3, 203), toy.GREEDY), 0.0)
        both = 0
        while engine.has_work:
            engine.step()
            steps = in_flight(engine)
            both += len(steps) == STAGES and all(work.chunks and len(work.decode_slots) for work in steps)
        assert both >= 5

    def test_a_single_request_runs_one_step_at_a_time(self):
        engine = toy.staged_loop(MODEL, STAGES)
        engine.add(Request("a", [1], toy.GREEDY), 0.0)
        while engine.has_work:
            engine.step()
            assert len(in_flight(engine)) <= 1


class TestEnds:
    def test_abort_frees_the_pages_at_once(self):
        engine = toy.staged_loop(MODEL, STAGES)
        for i in range(6):
            engine.add(Request(f"r{i}", np.arange(3, 40 + i), toy.GREEDY), 0.0)
        for _ in range(9):
            engine.step()
        for i in range(6):
            (end,) = engine.abort(f"r{i}")
            assert end.reason is FinishReason.ABORT
        assert engine.scheduler.pages_free == sum(engine.scheduler.config.num_pages)
        while engine.has_work:
            assert not engine.step()

    def test_stop_tokens(self):
        story = toy.run(toy.loop(MODEL), [Request("a", [1], toy.GREEDY)])["a"].tokens
        stop = dataclasses.replace(toy.GREEDY, stop_token_ids=[story[10]])
        result = toy.run(toy.staged_loop(MODEL, STAGES), [Request("a", [1], stop)])["a"]
        assert result.tokens == story[: story.index(story[10]) + 1]
        assert result.finished[0].reason is FinishReason.STOP

    def test_nothing_compiles_after_warm_up(self):
        engine = toy.staged_loop(MODEL, STAGES)
        engine.executor.warm_up()
        before = engine.executor.compilations
        toy.run(engine, drawn_requests(20, seed=8), preempt_at=range(10, 60, 7))
        prompts = [
            Request(f"p{n}", np.arange(n) % 400 + 3, SamplingParams(max_tokens=4, prompt_logprobs=1))
            for n in (1, 2, 15, 16, 17, 300)
        ]
        toy.run(engine, prompts)
        assert engine.executor.compilations == before


class TestRefusals:
    @pytest.mark.parametrize(
        ("model", "changes", "field"),
        [
            (MODEL, {"pipeline_parallel_size": 3, "tensor_parallel_size": 2}, "pipeline_parallel_size"),
            ("tiny-llama", {"pipeline_parallel_size": 3}, "pipeline_parallel_size"),  # of two layers
            (MODEL, {"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
            (MODEL, {"pipeline_parallel_size": 2, "kv_offloading_size": 1e-7}, "kv_offloading_size"),
            (MODEL, {"pipeline_parallel_size": 2, "kv_offloading_size": 1e6}, "kv_offloading_size"),
        ],
    )
    def test_sizes_that_cannot_run(self, model, changes, field, monkeypatch):
        checkpoint = open_checkpoint(str(paths.MODELS / model))
        monkeypatch.setattr(Checkpoint, "load", lambda *a, **k: pytest.fail("the weights were read"))
        with pytest.raises(ConfigError) as refused:
            start_engine(EngineConfig(model=str(paths.MODELS / model), **changes), checkpoint, progress=False)
        assert refused.value.field == field

    @pytest.mark.parametrize(
        ("stages", "number"), [((), 2), ((2, 3), 1), ((2, 2, 1), 2), ((2, 2), 2), ((0, 5), 2)]
    )
    def test_a_plan_of_other_stages(self, stages, number, tmp_path):
        checkpoint = open_checkpoint(str(paths.MODELS / MODEL))
        plan = two_nano_batch_plan(checkpoint.model_config, 16, 6)
        plans.save(msgspec.structs.replace(plan, stages=stages), tmp_path / "plan.json")
        config = EngineConfig(
            model=str(paths.MODELS / MODEL),
            plan=str(tmp_path / "plan.json"),
            pipeline_parallel_size=number,
            max_num_batched_tokens=16,
        )
        with pytest.raises(plans.PlanError, match="stages="):
            start_engine(config, checkpoint, progress=False)


@pytest.mark.slow
def test_four_stages_of_two_devices():
    """Eight devices need a process of their own."""
    code = """
import test_goldens, toy, json, paths
golden = json.loads((paths.GOLDENS / "stories260K.json").read_text())
test_goldens.check(golden, toy.run(toy.staged_loop("stories260K", 4, tp=2), test_goldens.requests(golden)))
"""
    folders = os.pathsep.join(
        [str(paths.ROOT / "tests"), str(paths.ROOT / "tests/jaxflow/engine"), str(paths.ROOT)]
    )
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": folders}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)

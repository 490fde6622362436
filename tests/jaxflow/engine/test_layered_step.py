"""A step of one program a layer computes the step of one program."""

import dataclasses

import jax
import numpy as np
import paths
import pytest
import toy
from hurry import compile_on_use
from test_goldens import FEW, check, requests

from jaxflow.config import EngineConfig
from jaxflow.engine import lowered_cache, stage_programs
from jaxflow.engine.deferred import DeferredProgram
from jaxflow.engine.executor_start import make_executor, make_staged_executor
from jaxflow.engine.layered_step import LayeredStep
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.lowered_cache import LoweredPrograms
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

SMALL = {
    "block_size": 16,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "num_kv_pages": 96,
    "step_sizes": "16",
}


@pytest.fixture
def make(monkeypatch):
    """Return a function that returns the resolved settings and a new executor of layered steps."""
    monkeypatch.setattr(stage_programs, "FEWEST_LAYERED", 1)

    def made(model, tp=1, pp=1, **settings):
        settings = EngineConfig(
            str(paths.MODELS / model),
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            **SMALL | settings,
        )
        checkpoint = open_checkpoint(settings.model)
        config = resolve(settings, checkpoint.model_config)
        plans = choose_plans(config, checkpoint.model_config)
        makes = make_executor if pp == 1 else make_staged_executor
        executor = makes(config, checkpoint, plans, progress=False)
        for stage in [executor] if pp == 1 else executor.stages:
            compile_on_use(stage)
        return config, executor

    return made


@pytest.mark.parametrize(
    ("model", "tp", "pp", "distinct"),
    [
        ("stories260K", 1, 1, 1),  # five equal layers
        ("tiny-gemma2", 1, 1, 2),  # one of two layers has a window
        ("tiny-gemma4_e2b", 1, 1, 4),  # two windows, with and without keys and values of their own
        ("tiny-mixtral", 2, 1, 1),  # weights and cache over two devices
        ("tiny-opt", 1, 2, 1),  # the second stage reads the residual stream of the first
    ],
)
def test_goldens(make, goldens, model, tp, pp, distinct):
    """Law: the golden tokens and logits. Equal layers are compiled once."""
    config, executor = make(model, tp, pp)
    golden = goldens(model)
    engine = make_loop(config, open_checkpoint(config.model).model_config, executor)
    check(golden, toy.run(engine, requests(golden, max_tokens=FEW)), FEW)
    first = executor if pp == 1 else executor.stages[0]
    (step,) = first._steps.values()
    assert isinstance(step, LayeredStep)
    assert len(step.layers) == first.programs.context.config.num_layers
    assert len(set(map(id, step.layers))) == distinct


@pytest.mark.parametrize(("model", "tp"), [("stories260K", 1), ("tiny-gemma4_e2b", 2)])
def test_a_step_of_one_program_gives_the_same_numbers(make, model, tp):
    """Both forms run a chunk of 9 tokens on the same cache. Sums may round apart by the compiler's order."""
    _, executor = make(model, tp)
    (layout,) = executor.layouts[16]
    buffer = np.zeros(layout.size, np.int32)
    fields = layout.views(buffer)
    fields["token_ids"][:9], fields["positions"][:9] = np.arange(3, 12), np.arange(9)
    fields["token_rows"][9:] = -1
    fields["row_slots"][1:] = executor.slots
    fields["lengths"][0], fields["sample_tokens"][0], fields["chunks"][0] = 9, 8, (0, 9, 0, 0)
    fields["page_appends"][:, 0] = executor.groups
    for group in range(executor.groups):
        fields["page_appends"][group] = group, 0, 0, 7
    whole = executor.compiler._compile(executor.lower.whole_step(layout, executor.num_pages))
    outputs = []
    for program in (executor.compiler.steps[layout.key], whole):
        hidden, x, rows = executor.run_program(program, jax.device_put(buffer, executor.replicated))
        cache = [np.asarray(a)[7] for a in jax.tree.leaves(executor.kv)]
        table = np.array(executor.page_table)  # a copy, because the next step donates the table
        outputs.append([hidden[:1], x[:9], *dataclasses.astuple(rows), table, *cache])
        executor.fill_kv(lambda _, array: array * 0)
    for layered, one in zip(*outputs, strict=True):
        np.testing.assert_allclose(np.asarray(layered), np.asarray(one), rtol=1e-5, atol=1e-6)


def test_a_deep_model_starts_with_the_steps_of_a_short_request(make, goldens):
    """The other steps are compiled by the requests that need one, and the tokens are the golden ones."""
    config, executor = make("tiny-llama", max_num_batched_tokens=96, step_sizes="4,64")
    executor.warm_up()
    deferred = {
        tokens for (tokens, *_), step in executor.compiler.steps.items() if isinstance(step, DeferredProgram)
    }
    assert deferred == {96}
    assert isinstance(executor.compiler.samplers[4, "full"], DeferredProgram)
    assert not isinstance(executor.compiler.samplers[4, "plain"], DeferredProgram)
    golden = goldens("tiny-llama")
    engine = make_loop(config, open_checkpoint(config.model).model_config, executor)
    results = toy.run(engine, requests(golden, logprobs=None))
    for i, prompt in enumerate(golden["prompts"]):
        assert results[f"golden-{i}"].tokens == prompt["greedy_ids"]
    assert executor.compiler.steps[96, "sequential", False].ready() and executor.compilations == 0


def test_its_programs_are_kept_from_start_to_start(make, tmp_path, monkeypatch):
    """A second start traces nothing: each program is read."""
    settings = LoweredPrograms(tmp_path, "settings")
    _, executor = make("stories260K")
    (layout,) = executor.layouts[16]
    executor.lower.lowered = settings
    lowered = executor.lower.step(layout, executor.num_pages)
    assert len(lowered.layers) == 1
    assert len(list(tmp_path.iterdir())) == 3  # the beginning, the layer and the end

    def refuse(*_, **__):
        raise AssertionError("a kept program was lowered again")

    monkeypatch.setattr(lowered_cache.export, "export", refuse)
    again = executor.lower.step(layout, executor.num_pages)
    assert again.kind_of == lowered.kind_of
    for one, other in [
        (lowered.begin, again.begin),
        (lowered.layers[0], again.layers[0]),
        (lowered.end, again.end),
    ]:
        assert one.as_text() == other.as_text()

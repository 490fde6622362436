"""An engine with `enforce_eager` compiles few programs, and draws the tokens of the default mode."""

import contextlib
import dataclasses
import gc
import threading
import types
from typing import Any

import h200
import jax
import jax.numpy as jnp
import paths
import pytest
import toy

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine import early_programs, executor_start, first_layouts, page_count, program_compiler
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.kernel_choice import choose_kernels
from jaxflow.engine.layered_step import LayeredStep, LoweredStep
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.program_lowering import ProgramLowering
from jaxflow.engine.settings import resolve
from jaxflow.engine.stage_programs import make_stage
from jaxflow.engine.stage_weights import weight_options
from jaxflow.engine.start_times import StartTimes
from jaxflow.engine.step_plans import choose_plans, eager_decodes
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.model.stage import stages_of
from jaxflow.model.weights import shapes, shardings
from jaxflow.request import Request, SamplingParams
from pallas_kernels import this_device

Team: Any = types.SimpleNamespace  # a stand-in for the processes of an engine
SMALL: dict[str, Any] = {
    "block_size": 16,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 6,
    "num_kv_pages": 40,
}
PROMPT = [5, 9, 2, 7] * 8  # two pages, in several steps
SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=6),
    SamplingParams(temperature=0.8, seed=3, max_tokens=6),
    SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=6),
)


def settings_of(model: str, **changes: Any) -> EngineConfig:
    return EngineConfig(str(paths.MODELS / model), dtype="float32", **SMALL | changes)


def executor_of(config: EngineConfig):
    checkpoint = open_checkpoint(config.model)
    config = resolve(config, checkpoint.model_config)
    plans = choose_plans(config, checkpoint.model_config)
    return (
        config,
        checkpoint.model_config,
        make_executor(config, checkpoint, plans, progress=False),
    )


def answers(config: EngineConfig) -> list[list[int]]:
    """Return the tokens of prompts alone, together, and after a prompt with the same prefix."""
    with LLM.from_config(config, progress=False) as llm:
        every = [llm.generate([PROMPT, PROMPT[:3], [8]], sampling) for sampling in SAMPLINGS]
        every.append(llm.generate([[*PROMPT, 4]], SAMPLINGS[0]))
        assert llm.executor.compilations == 0
        wait_until_compiled()
        return [out.outputs[0].token_ids for outs in every for out in outs]


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("tiny-gemma2", {}),  # layers with and without a window
        ("tiny-mixtral", {"tensor_parallel_size": 2}),
        ("tiny-opt", {"pipeline_parallel_size": 2}),
    ],
)
def test_the_tokens_are_those_of_the_default_mode(model, parallel):
    """Law."""
    config = settings_of(model, step_sizes="16", **parallel)
    eager = dataclasses.replace(config, step_sizes=None, enforce_eager=True)
    assert answers(eager) == answers(config)


@pytest.mark.parametrize("model", ["tiny-gemma2", "tiny-opt"])
def test_layouts_of_decodes_become_ready_while_a_gpu_serves(model, monkeypatch):
    """Law. The tokens are those of an engine that has compiled all of its steps."""
    stages = {"pipeline_parallel_size": 2} if model == "tiny-opt" else {}
    config = settings_of(model, enforce_eager=True, **stages)
    expected = answers(config)
    monkeypatch.setattr(first_layouts, "on_gpu", lambda: True)
    made, compile_layout = [], Executor.compile_layout
    served = threading.Event()

    def late(executor, layout):
        served.wait(60)
        made.append(layout.tokens)
        compile_layout(executor, layout)

    monkeypatch.setattr(Executor, "compile_layout", late)
    with LLM.from_config(config, progress=False) as llm:
        assert llm.executor.substitutes
        assert {layout.tokens for layout in llm.executor.unready()} == {1, 16}
        assert all(layout.decodes for layout in llm.executor.unready())
        early = [llm.generate([PROMPT, PROMPT[:3], [8]], sampling) for sampling in SAMPLINGS]
        assert not made
        served.set()
        wait_until_compiled()
        assert not llm.executor.unready() and set(made) == {1, 16}
        later = [llm.generate([PROMPT, PROMPT[:3], [8]], sampling) for sampling in SAMPLINGS]
    found = [[out.outputs[0].token_ids for outs in every for out in outs] for every in (early, later)]
    assert found == [expected[:-1]] * 2


@pytest.fixture(scope="module")
def eager():
    """Return the resolved settings, the model's config, and a compiled executor."""
    config, model, made = executor_of(settings_of("stories260K", enforce_eager=True))
    made.compile()
    return config, model, made


def test_a_start_compiles_three_steps_of_three_programs(eager):
    _, _, made = eager
    assert set(made.compiler.steps) == {
        (16, "sequential", False),
        (1, "sequential", True),
        (16, "sequential", True),
    }
    assert all(len(set(map(id, step.layers))) == 1 for step in made.compiler.steps.values())
    assert not made.substitutes
    of_one_row = [kind for rows, kind in made.compiler.samplers if rows == 1]
    assert of_one_row == ["plain"]  # a decode with filters runs the larger step


def test_a_deferred_step_may_time_its_products(eager, monkeypatch):
    """A GPU times products with weights in 4 bits, one program after another."""
    made = eager[2]
    monkeypatch.setattr(program_compiler, "on_gpu", lambda: True)
    monkeypatch.setattr(program_compiler, "needs_no_gpu", lambda options: False)
    turns = []
    monkeypatch.setattr(program_compiler._timing, "take", lambda: contextlib.nullcontext(turns.append(1)))
    job = next(job for job in made.compiler.jobs() if job.table is made.compiler.steps)
    assert isinstance(made.compiler._lower_and_compile(job, made.num_pages), LayeredStep) and turns == [1]


@pytest.mark.parametrize("faults", [0, 1])
def test_a_step_is_compiled_while_it_is_lowered(faults, monkeypatch):
    """The step is compiled again if a program of it found no memory beside the others."""
    _, _, made = executor_of(settings_of("stories260K", enforce_eager=True))
    compiles, lowers, begun, beginnings = made.compiler._compile, made.lower._lower, threading.Event(), []

    def lower(name, *given):
        if name.startswith("layer") and not faults:
            assert begun.wait(60)
        lowered = lowers(name, *given)
        if name.startswith("begin"):
            beginnings.append(lowered)
        return lowered

    def compile_one(lowered, options=None):
        if any(lowered is one for one in beginnings) and not begun.is_set():
            begun.set()
            if faults:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return compiles(lowered, options)

    monkeypatch.setattr(made.lower, "_lower", lower)
    monkeypatch.setattr(made.compiler, "_compile", compile_one)
    (largest,) = made.layouts[max(made.layouts)]
    made.compiler.compile_early((41,), first=[largest])
    assert isinstance(made.compiler.steps[largest.key], LayeredStep) and len(beginnings) == 1 + faults


@pytest.mark.parametrize(("decodes", "tokens"), [(1, 1), (2, 16), (6, 16)])
def test_a_step_of_decodes_runs_the_smallest_layout_that_holds_it(eager, monkeypatch, decodes, tokens):
    config, model, made = eager
    loop, ran, run = make_loop(config, model, made), [], made.run
    monkeypatch.setattr(
        made, "run", lambda layout, *given, **how: ran.append(layout) or run(layout, *given, **how)
    )
    toy.run(loop, [Request(f"{i}", [3 + i], SAMPLINGS[0]) for i in range(decodes)])
    assert {layout.tokens for layout in ran if layout.decodes} == {tokens}
    assert {layout.tokens for layout in ran if not layout.decodes} == {16}


def test_the_sizes_for_decodes_hold_all_sequences(monkeypatch):
    assert eager_decodes(6, 16) == (1, 16) and eager_decodes(70, 256) == (1, 128)
    monkeypatch.setattr("jaxflow.engine.step_plans.on_gpu", lambda: True)
    assert eager_decodes(640, 2048) == (64, 640) and eager_decodes(33, 2048) == (64,)


@pytest.mark.parametrize("guess", [1 << 23, 0, 1 << 24], ids=["good", "too small", "too large"])
def test_pages_leave_the_memory_that_the_programs_need(guess, monkeypatch):
    """After a guess that was too small, `compile` compiles the steps again."""
    config, model, made = executor_of(settings_of("stories260K", enforce_eager=True, num_kv_pages=None))
    monkeypatch.setattr(page_count, "_guessed_temporary_bytes", lambda *_: guess)
    made.compiler.defers = False  # as on a GPU
    compile_for, free, need = made.compiler.compile_for, (1 << 23) + (1 << 21), 1 << 23
    monkeypatch.setattr(made.compiler, "compile_for", lambda *given: max(need, compile_for(*given)))
    found = page_count._compiled_pages(config, model, [made], [free])
    compiled = dict(made.compiler.steps)
    made.allocate(found)
    made.compile()
    assert found <= page_count._fitting_pages(config, made, free - need)
    assert all((compiled[key] is step) == (guess == need) for key, step in made.compiler.steps.items())


def test_processes_compile_each_step_once_for_the_smallest_of_their_guesses(monkeypatch):
    config, model, made = executor_of(settings_of("stories260K", num_kv_pages=None, step_sizes="4,16"))
    monkeypatch.setattr(page_count, "on_gpu", lambda: True)
    monkeypatch.setattr(page_count, "memory_budget", lambda *_: free)
    made.compiler.defers = False  # as on a GPU
    compile_for, free, need, asked = made.compiler.compile_for, 1 << 25, 1 << 23, []
    monkeypatch.setattr(page_count, "_guessed_temporary_bytes", lambda *_: need)
    monkeypatch.setattr(made.compiler, "compile_for", lambda *given: max(need, compile_for(*given)))

    def least(name, own):
        asked.append(name)
        return tuple(pages - 1 for pages in own) if name == "guessed pages" else own

    found = page_count.count_pages(config, model, [made], Team(least=least))
    compiled = dict(made.compiler.steps)
    made.allocate(found)
    made.compile()
    assert asked == ["guessed pages", "pages"] and len(compiled) == len(made.layouts)
    assert compiled == made.compiler.steps
    guess = page_count.first_guess(config, model, [made], [free - made.state_bytes()])
    assert found == tuple(pages - 1 for pages in guess)


def test_the_programs_compiled_while_loading_serve():
    """A start with a known number of pages compiles no step after the loading."""
    _, _, made = executor_of(settings_of("stories260K", enforce_eager=True))
    early = {key: step for (_, key), step in made.compiler._measured.items()}
    assert early and made.compiler.early_pages == (SMALL["num_kv_pages"],)
    made.compile()
    assert early == made.compiler.steps


def test_the_pages_guessed_before_the_loading_are_those_after_it():
    config, model, made = executor_of(settings_of("stories260K", enforce_eager=True, num_kv_pages=None))
    made.compiler.defers = False  # as on a GPU
    free = 1 << 28
    early_programs.compile_early(config, model, [made], [free], lambda *_: None)
    of_weights = sum(-(-array.nbytes // 256) * 256 for array in jax.tree.leaves(made.weights))
    left = free - of_weights - made.state_bytes()
    assert made.compiler.early_pages == page_count.first_guess(config, model, [made], [left])
    steps = dict(made.compiler.steps)
    page_count._compiled_pages(config, model, [made], [left])
    assert steps == made.compiler.steps


def test_weights_of_other_shapes_get_other_programs(monkeypatch):
    """The settings do not tell every shape, for example of a checkpoint with some matrices in 8 bits."""
    config = settings_of("stories260K", enforce_eager=True)
    wanted, absent = answers(config), executor_start.absent_stage

    def other(*given):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding), absent(*given)
        )

    monkeypatch.setattr(executor_start, "absent_stage", other)
    assert answers(config) == wanted


@pytest.mark.parametrize("failing", [("weights",), ("programs",), ("weights", "programs")])
def test_a_failing_start_raises_its_error_and_leaves_no_thread(failing, monkeypatch):
    """An error of the weights comes before an error of the programs."""
    if "weights" in failing:
        monkeypatch.setattr(executor_start, "load_stage", failure(CheckpointError("weights")))
    if "programs" in failing:
        monkeypatch.setattr(ProgramLowering, "_lower", failure(ValueError("programs")))
    with pytest.raises((CheckpointError, ValueError), match=failing[0]):
        executor_of(settings_of("stories260K", enforce_eager=True))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]
    assert gc.isenabled()


def failure(error: Exception):
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("plan", "searched"),
        ("plan", "plans/some.json"),
        ("step_sizes", "8,16"),
        ("lowering_processes", 2),
        ("batch_tpot_ms", 20.0),
    ],
)
def test_what_does_not_combine_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"(?s){field}.*enforce_eager"):
        EngineConfig("m", enforce_eager=True, **{field: value})
    with pytest.raises(ConfigError, match="enforce_eager"):
        EngineConfig("m", enforce_eager=True, data_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_for_an_h200_copies_no_cache_and_makes_no_work_list(tp, monkeypatch):
    device = this_device.DeviceKind("gpu", "NVIDIA H200", "9.0", 132)
    monkeypatch.setattr(this_device, "_described", [device])
    checkpoint = open_checkpoint("llama-3.1-8b", load_format="dummy")
    pages = 512
    config = EngineConfig(
        "llama-3.1-8b", load_format="dummy", tensor_parallel_size=tp, max_num_batched_tokens=256,
        max_num_seqs=64, max_model_len=2048, num_kv_pages=pages, enforce_eager=True,
    )  # fmt: skip
    model = checkpoint.model_config
    config = resolve(config, model)
    mesh, options = h200.h200_mesh((tp,)), weight_options(config)
    weights = h200.abstract(
        mesh, shapes(model, tp, jnp.bfloat16, **options), shardings(model, mesh, **options)
    )
    (stage,) = stages_of((model.num_layers,))
    plans, kernels = choose_plans(config, model), choose_kernels(config, model)
    made = make_stage(
        config, model, plans, stage, mesh, weights, kernels, False, False, None, 0, StartTimes()
    )
    made.num_pages = (pages,)
    asked = {}

    def lower(name, fn, donated, *args):
        asked[name.partition(" ")[0]] = fn, *args
        return fn.lower(*args)

    monkeypatch.setattr(made.lower, "_lower", lower)
    layout = made.decode_layouts[64]
    lowered = made.lower.step(layout, made.num_pages)
    assert isinstance(lowered, LoweredStep) and len(lowered.layers) == 1
    compiled = h200.compile_for_h200(*asked["layer"], options=made.compiler.options_of(layout))
    assert compiled.machine_code and not compiled.graph_thunks
    assert compiled.copies((pages, 8 // tp, 64, 128)) == 0
    assert sum(thunk.kind == "kKernel" for thunk in compiled.thunks) <= 12, compiled.thunks

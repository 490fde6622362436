"""Lowered programs that are kept: the same program as one that was lowered just now, had again without
Python's part.
"""

import ast
import dataclasses
import logging
import os
import time

import h200
import hurry
import jax
import jax.numpy as jnp
import numpy as np
import paths
import planned
import pytest
import toy
from jax.experimental.compilation_cache import compilation_cache

from jaxflow.config import EngineConfig, Layer, ModelConfig, Rope
from jaxflow.engine import lowered_cache as lowered
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.lowered_cache import LoweredPrograms
from jaxflow.engine.programs import STEP_DONATES, Programs
from jaxflow.engine.settings import resolve
from jaxflow.engine.stage_programs import PROGRAM_FIELDS, program_settings
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import axis_of
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import phased_plan
from jaxflow.pipeline.plan import borders
from jaxflow.request import Request


@pytest.fixture(autouse=True)
def engines_share_no_programs(monkeypatch):
    monkeypatch.setattr(hurry, "shares", False)


@jax.jit
def doubled(x):
    return {"twice": 2 * x}


def refuse(*_, **__):
    raise AssertionError("a kept program was lowered again")


def lower(programs, name="double", shape=(4,)):
    return programs.lower(name, doubled, (), jax.device_put(np.arange(shape[0], dtype=np.float32)))


def files(folder):
    return sorted(path for path in folder.iterdir())


def test_it_is_lowered_once_and_damage_is_seen(tmp_path, monkeypatch, caplog):
    programs = LoweredPrograms(tmp_path / "lowered", "settings")
    assert lower(programs).compile()(np.arange(4, dtype=np.float32))["twice"].tolist() == [0, 2, 4, 6]
    (path,) = files(programs.folder)
    with monkeypatch.context() as patch:
        patch.setattr(lowered.export, "export", refuse)
        assert lower(programs).compile()(np.arange(4, dtype=np.float32))["twice"].tolist() == [0, 2, 4, 6]
        with pytest.raises(AssertionError, match="lowered again"):
            lower(programs, shape=(5,))
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content[:40] + bytes([content[40] ^ 1]) + content[41:]):
        path.write_bytes(damaged)
        caplog.clear()
        assert lower(programs).compile()(np.arange(4, dtype=np.float32))["twice"].tolist() == [0, 2, 4, 6]
        assert "damaged" in caplog.text
        assert path.read_bytes() == content and files(programs.folder) == [path]


def test_files_that_changed_places_are_seen(tmp_path, caplog):
    programs = LoweredPrograms(tmp_path / "lowered", "settings")
    lower(programs)
    lower(programs, shape=(5,))
    one, other = files(programs.folder)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert lower(programs).compile()(np.arange(4, dtype=np.float32))["twice"].tolist() == [0, 2, 4, 6]
    assert "another program's" in caplog.text


def test_swapped_entries_of_xlas_cache_are_compiled_again(tmp_path, caplog):
    def compiled(function, *args):
        return lowered.compile_program(jax.jit(function).lower(*args))(*args)

    def one(x):
        return x + 1

    def two(x, y):
        return x * y

    x = jnp.arange(3.0)
    kept = {
        name: getattr(jax.config, name)
        for name in (
            "jax_compilation_cache_dir",
            "jax_persistent_cache_min_compile_time_secs",
            "jax_persistent_cache_min_entry_size_bytes",
        )
    }
    try:
        for name, value in zip(kept, (str(tmp_path), 0.0, -1), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        compiled(one, x), compiled(two, x, x)
        (first,), (second,) = (list(tmp_path.glob(f"jit_{name}-*-cache")) for name in ("one", "two"))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        jax.clear_caches()
        assert compiled(one, x).tolist() == [1, 2, 3]
        assert compiled(two, x, x).tolist() == [0, 1, 4]
        assert caplog.text.count("compiled again") == 2
        assert jax.config.jax_enable_compilation_cache
    finally:
        for name, value in kept.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_other_settings_names_shapes_and_code_are_other_programs(tmp_path, monkeypatch):
    programs = LoweredPrograms(tmp_path, "settings")
    lower(programs)
    lower(programs, name="another")
    lower(programs, shape=(5,))
    lower(dataclasses.replace(programs, made_of="others"))
    monkeypatch.setattr(lowered, "code_digest", lambda: "changed")
    lower(programs)
    assert len(files(tmp_path)) == 5


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        found = lower(LoweredPrograms(tmp_path / "file" / "below", "settings"))
    assert found.compile()(np.arange(4, dtype=np.float32))["twice"].tolist() == [0, 2, 4, 6]
    assert "not kept" in caplog.text


def test_a_program_that_cannot_be_kept_is_lowered_all_the_same(tmp_path, caplog):
    @jax.jit
    def calling_python(x):
        return jax.pure_callback(lambda y: 2 * y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = jax.device_put(np.arange(4, dtype=np.float32))
    found = LoweredPrograms(tmp_path / "lowered", "settings").lower("calls", calling_python, (), x)
    assert found.compile()(x).tolist() == [0, 2, 4, 6]
    assert "'calls' cannot be kept" in caplog.text
    assert not (tmp_path / "lowered").exists()


@pytest.mark.parametrize(
    ("model", "quantization", "kv"),
    [
        *(("tiny-opt", None, "auto"), ("tiny-gemma3_text", None, "auto"), ("tiny-mixtral", "fp8", "auto")),
        *(("tiny-llama", "fp8", "fp8"), ("tiny-llama", "int4", "int8")),
        *(("tiny-gpt_oss", how, "auto") for how in ("mxfp4", "int4")),
    ],
)
def test_the_programs_of_all_kinds_of_weights_and_caches_can_be_kept(
    model, quantization, kv, tmp_path, caplog, monkeypatch
):
    settings = EngineConfig(
        str(paths.MODELS / model),
        block_size=16,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_kv_pages=32,
        plan="sequential",
    )
    checkpoint = open_checkpoint(settings.model)
    config = resolve(
        dataclasses.replace(settings, quantization=quantization, kv_cache_dtype=kv), checkpoint.model_config
    )
    made = make_executor(config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False)
    made.lower.lowered = LoweredPrograms(tmp_path, "settings")
    for again in (False, True):
        if again:
            monkeypatch.setattr(lowered.export, "export", refuse)
        made.lower.whole_step(made.layouts[16][0], made.num_pages)
        made.lower.sampler(4, "plain")
        made.lower.sampler(4, "full")
        made.lower.prompt(16)
    assert len(files(tmp_path)) == 4 and not caplog.records


def test_an_engine_of_kept_programs_draws_the_same_tokens(tmp_path, monkeypatch):
    """On two devices, with every kind of program: drawn logprobs, prompt logprobs; the second time without
    lowering any.
    """
    settings = EngineConfig(
        model=str(paths.MODELS / "tiny-llama"),
        block_size=16,
        tensor_parallel_size=2,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        num_kv_pages=32,
        step_sizes="16",
        plan="sequential",
    )
    checkpoint = open_checkpoint(settings.model)
    config = resolve(settings, checkpoint.model_config)
    sampling = dataclasses.replace(toy.GREEDY, max_tokens=6, prompt_logprobs=2)
    drawn = []
    for again in (False, True):
        made = make_executor(
            config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False
        )
        made.lower.lowered = LoweredPrograms(tmp_path, "settings")
        if again:
            monkeypatch.setattr(lowered.export, "export", refuse)
        made.warm_up()
        request = Request("a", list(range(3, 24)), sampling)
        drawn.append(toy.run(make_loop(config, checkpoint.model_config, made), [request])["a"])
    assert len(files(tmp_path)) == 7, "a step, two samplers, prompt log-probabilities, three small programs"
    monkeypatch.undo()  # the other engine keeps programs of its own
    alone = toy.run(toy.loop("tiny-llama", budget=16), [Request("a", list(range(3, 24)), sampling)])["a"]
    assert drawn[0].tokens == drawn[1].tokens == alone.tokens
    assert drawn[0].logprobs == drawn[1].logprobs


def test_a_kept_plan_is_compiled_as_the_plan(tmp_path):
    """Two nano-batches on two devices with side streams and all-reduces: equal schedule and memory, and
    aliased caches.
    """
    layers = (Layer(rope=Rope(1e4)),)
    model, tokens = ModelConfig("llama", 32000, 1024, 8, 2, 128, 2816, layers, 8192), 512
    plan = phased_plan(model, tokens, 192, tp=2)
    mesh = h200.h200_mesh((2,))
    specs = shardings(model, mesh)
    programs = Programs(Context(model, planned.SIMPLE, axis_of(mesh)), mesh, specs)
    forward = compile_plan(plan, model, 2)
    weights = h200.abstract(mesh, shapes(model, 2, jnp.bfloat16), specs)
    layout = StepLayout(tokens, 64, 64, 64, borders(plan), plan=plan.name)
    made = Executor(
        programs, weights, [layout], lambda _: forward, kv_dtype=jnp.dtype(jnp.bfloat16), max_model_len=4096
    )
    step = programs.step(layout, forward)
    args = (
        weights,
        *made.lower.state((1024,)),
        h200.abstract(mesh, jax.ShapeDtypeStruct((layout.size,), jnp.int32)),
    )
    options = xla_options(plan, 2, "streams")
    first = h200.compile_for_h200(step, *args, options=options)
    assert {thunk.stream for thunk in first.thunks} > {""}
    LoweredPrograms(tmp_path, "", ("cuda",)).lower("step", step, STEP_DONATES, *args)
    (path,) = files(tmp_path)
    content = lowered.read_signed(path)
    assert content is not None
    kept = lowered.unpack(content)
    again = h200.compile_for_h200(jax.jit(kept.call, donate_argnums=STEP_DONATES), *args, options=options)
    assert again.thunks == first.thunks
    assert again.memory.temp_size_in_bytes == first.memory.temp_size_in_bytes
    assert again.memory.alias_size_in_bytes == first.memory.alias_size_in_bytes > 0


@pytest.fixture
def cache_folder():
    """Sets XLA's, for a test."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda folder: jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_are_kept_beside_compiled_ones_if_these_are(tmp_path, cache_folder):
    cache_folder(None)
    assert lowered.open_lowered_programs(("settings",)) is None
    cache_folder(str(tmp_path))
    found, other = lowered.open_lowered_programs(("settings",)), lowered.open_lowered_programs(("others",))
    assert found is not None and other is not None
    assert found.folder == tmp_path / "lowered" and found.made_of != other.made_of


def test_only_the_modules_of_lowering_are_in_the_key():
    names = {str(path.relative_to(lowered._TREE)) for path in lowered.lowering_files()}
    assert {"jaxflow/pipeline/compiler.py", "jaxflow/model/ops.py", "jaxflow/model/sampling.py"} <= names
    assert any(name.startswith("pallas_kernels/gemm/") for name in names)
    rooms = (
        "jaxflow/bench",
        "jaxflow/text",
        "jaxflow/flexgen",
        "jaxflow/cli",
        "jaxflow/llm",
        "serving",
        "search",
    )
    assert not [name for name in names if name.startswith(rooms)]


def test_no_import_is_overlooked():
    def parsed(source: str) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return found

    odd = (
        "if x:\n    import a.b as c, d\nfrom e import (  # why\n    f as g,  # (h)\n    i,\n)\n"
        "\tfrom j import k as l, m\n"
    )
    assert lowered.imported_names(odd) >= {"a.b", "d", "e", "e.f", "e.i", "j", "j.k", "j.m"}
    sources = [path.read_text("utf-8") for path in lowered.lowering_files() if path.suffix == ".py"]
    assert len(sources) > 50
    assert all(parsed(source) <= lowered.imported_names(source) for source in sources)


def test_old_programs_are_deleted_by_age_and_size(tmp_path, monkeypatch):
    programs = LoweredPrograms(tmp_path, "settings")
    for n in (2, 3, 4):
        lower(programs, shape=(n,))
    oldest = files(tmp_path)[0]
    os.utime(oldest, (time.time() - lowered._MAX_AGE_S - 60,) * 2)
    lower(programs, shape=(5,))
    assert oldest not in files(tmp_path) and len(files(tmp_path)) == 3
    monkeypatch.setattr(lowered, "_MAX_BYTES", 1)
    lower(programs, shape=(6,))
    assert files(tmp_path) == []


OTHER_SETTINGS = {
    "batch_tpot_ms": 50.0,
    "tokenizer": str(paths.MODELS / "stories260K"),
    "load_format": "dummy",
    "seed": 7,
    "calibration": "",
    "compilation_cache_dir": "",
    "max_waiting": 3,
    "enable_prefix_caching": False,
    "kv_disk_path": None,  # refused without a host tier, of which the next is a part
    "kv_disk_size": None,
    "attention_spans": None,  # in the ModelConfig
    "model": "",  # its ModelConfig and the weights' shapes are in the key
    "lowering_processes": 3,
    "coordinator": None,  # the mesh is in the key
    "num_processes": None,
    "process_id": None,
    "join_timeout_s": 7.0,
    "step_timeout_s": 7.0,
    "eplb_step_interval": 7,
}


def test_every_setting_is_in_the_key_or_changes_no_program():
    """The programs of two engines are equal that differ in every setting outside of the key."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(PROGRAM_FIELDS) | set(OTHER_SETTINGS) == names
    assert not set(PROGRAM_FIELDS) & set(OTHER_SETTINGS)
    settings = EngineConfig(
        str(paths.MODELS / "tiny-llama"), block_size=16, max_num_batched_tokens=16, max_num_seqs=4,
        num_kv_pages=32, step_sizes="16", plan="sequential",
    )  # fmt: skip
    changes = {name: value for name, value in OTHER_SETTINGS.items() if value}
    changes |= {"enable_prefix_caching": False, "calibration": "", "compilation_cache_dir": ""}
    texts = []
    for config in (settings, dataclasses.replace(settings, **changes)):
        checkpoint = open_checkpoint(config.model, load_format=config.load_format)
        config = resolve(config, checkpoint.model_config)
        made = make_executor(
            config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False
        )
        step = made.lower.whole_step(made.layouts[16][0], made.num_pages)
        sampler = made.lower.sampler(4, "full")
        texts.append([getattr(one, "lowered", one).as_text() for one in (step, sampler)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("field", PROGRAM_FIELDS)
def test_a_setting_of_the_key_changes_it(field):
    settings = EngineConfig(
        "m",
        kv_offloading_size=0.0 if field == "pipeline_parallel_size" else 1.0,
        enable_expert_parallel=field in ("enable_eplb", "num_redundant_experts", "data_parallel_size"),
        enable_eplb=field == "num_redundant_experts",
    )
    others = {"dtype": "float32", "quantization": "fp8", "kv_cache_dtype": "fp8", "step_sizes": "8",
              "plan": "sequential", "kernels": "reference", "gpu_memory_utilization": 0.5,
          "enable_expert_parallel": True, "enable_eplb": True, "enforce_eager": True}  # fmt: skip
    changed = dataclasses.replace(settings, **{field: others.get(field, 17)})
    assert program_settings(changed) != program_settings(settings)


def test_only_commands_freeze_the_heap():
    """The Python API leaves the process's garbage collector alone."""
    sources = {
        str(path.relative_to(lowered._TREE)): path.read_text()
        for room in ("jaxflow", "serving")
        for path in (lowered._TREE / room).rglob("*.py")
    }
    assert [name for name, text in sources.items() if "gc.freeze()" in text] == ["jaxflow/engine/heap.py"]
    callers = [name for name, text in sources.items() if " freeze_heap()\n" in text]
    assert "serving/__main__.py" in callers
    assert all(
        name.startswith(
            ("serving/__main__", "serving/batch_engine", "serving/cluster/replica", "jaxflow/bench/")
        )
        for name in callers
    )

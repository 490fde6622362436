"""Processes that lower and compile the programs of a start: the programs of the engine
itself, and no harm where one fails.
"""

import contextlib
import dataclasses
import io
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest import mock

import h200
import hurry
import jax
import jax.export
import jax.numpy as jnp
import msgspec
import paths
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from jaxflow.config import EngineConfig, Layer, ModelConfig, Rope
from jaxflow.engine import executor_start, lowered_cache, lowering_processes, lowering_start
from jaxflow.engine.ahead_of_time import UNTIMED, needs_no_gpu, target_of
from jaxflow.engine.kernel_choice import choose_kernels
from jaxflow.engine.known_starts import KnownStarts
from jaxflow.engine.loop_start import make_loop, make_ranked_loop
from jaxflow.engine.lowered_cache import LoweredPrograms
from jaxflow.engine.lowering_processes import Description, LoweringProcesses, Wanted, number_of_processes
from jaxflow.engine.lowering_start import make_lowering
from jaxflow.engine.lowering_worker import Portable, answer
from jaxflow.engine.program_compiler import Job
from jaxflow.engine.settings import resolve
from jaxflow.engine.stage_programs import make_stage, stage_names
from jaxflow.engine.stage_weights import weight_options
from jaxflow.engine.start import start_engine
from jaxflow.engine.start_times import StartTimes
from jaxflow.engine.step_plans import choose_plans
from jaxflow.engine.weight_shapes import from_values, to_values
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.stage import stages_of
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import make_mesh, stage_meshes
from jaxflow.pipeline.handwritten import sequential_plan, two_nano_batch_plan
from jaxflow.request import Request
from pallas_kernels.this_device import DeviceKind, this_device

DEVICE = DeviceKind("cpu", "cpu")
AMPLE = 1 << 40  # bytes of host memory
SETTINGS = EngineConfig(
    str(paths.MODELS / "tiny-llama"), block_size=16, max_num_batched_tokens=16, max_num_seqs=4,
    num_kv_pages=32, plan="sequential", step_sizes="16",
)  # fmt: skip
RANKS = dataclasses.replace(
    SETTINGS, model=str(paths.MODELS / "tiny-mixtral"), data_parallel_size=2, enable_expert_parallel=True,
    enable_eplb=True, num_redundant_experts=2,
)  # fmt: skip
STAGES = dataclasses.replace(SETTINGS, pipeline_parallel_size=2)
ECHO = "import sys\nnext(sys.stdin), next(sys.stdin)\nfor line in sys.stdin:\n    "
LLAMA = ModelConfig("llama", 32000, 1024, 8, 2, 128, 2816, (Layer(rope=Rope(1e4)),) * 2, 8192)
MIXTURE = ModelConfig(
    "qwen3_moe", 32000, 1024, 8, 2, 128, 2816, (Layer(rope=Rope(1e4), experts=True),) * 2, 8192,
    num_experts=8, experts_per_token=2, expert_intermediate_size=512, qk_norm=True,
)  # fmt: skip
DESCRIPTION = Description(EngineConfig("m"), LLAMA, {}, False, None, 0, ({},), "folder")
EXPERTS = {"enable_expert_parallel": True}
ON_H200S: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "one": (LLAMA, {}),
    "tp": (LLAMA, {"tensor_parallel_size": 2}),
    "mixture": (MIXTURE, {}),
    "mixture tp": (MIXTURE, {"tensor_parallel_size": 2}),
    "mixture ep": (MIXTURE, {"tensor_parallel_size": 2} | EXPERTS),
    "mixture dp": (MIXTURE, {"data_parallel_size": 2} | EXPERTS),
    "stages tp": (LLAMA, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "equal stages": (dataclasses.replace(LLAMA, layers=LLAMA.layers[:1] * 4), {"pipeline_parallel_size": 4}),
}


@pytest.fixture(autouse=True)
def engines_share_no_programs(monkeypatch):
    monkeypatch.setattr(hurry, "shares", False)


@pytest.fixture
def cache():
    """Set XLA's folder for a test."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda folder: jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_dir", before)


@contextlib.contextmanager
def processes(folder: Path, script: str, count: int = 1, leaves: int = 0):
    """Yield processes of a Python script in place of the worker. leaves: of the described weights."""
    config = EngineConfig("m")
    made = LoweringProcesses(
        count, DEVICE, KnownStarts.of(folder, "settings"), (sys.executable, "-c", script)
    )
    made.start()
    weights = {"dict": dict.fromkeys(map(str, range(leaves)))}
    made.describe(Description(config, LLAMA, {}, False, None, 0, (weights,), str(folder)))
    try:
        yield made
    finally:
        made.close()


def drawn(config: EngineConfig) -> list[int]:
    """Return the tokens of an engine that has just started."""
    checkpoint = open_checkpoint(config.model)
    engine = start_engine(config, checkpoint, progress=False)
    engine.driver.close()
    make: Any = make_loop if config.data_parallel_size == 1 else make_ranked_loop
    loop = make(engine.config, checkpoint.model_config, engine.executor)
    tokens = toy.run(loop, [Request("a", list(range(3, 24)), toy.GREEDY)])["a"].tokens
    loop.close()
    return tokens


@pytest.mark.parametrize(
    "settings", [SETTINGS, RANKS, STAGES], ids=["one device", "ranks with moving experts", "stages"]
)
def test_an_engine_reads_what_a_process_lowered(settings, tmp_path, cache, monkeypatch, caplog):
    cache(str(tmp_path))
    cache_folder = tmp_path / "lowered"
    alone = drawn(dataclasses.replace(settings, compilation_cache_dir=""))
    by_engine = sorted(path.name for path in cache_folder.iterdir())
    for path in cache_folder.iterdir():
        path.unlink()
    lowered_here = []
    keep = LoweredPrograms.keep

    def record(self, name, fn, *args):
        if not (self.folder / self.digest(name, args)).exists():
            lowered_here.append(name.partition(" ")[0])
        return keep(self, name, fn, *args)

    monkeypatch.setattr(LoweredPrograms, "keep", record)
    with caplog.at_level(logging.WARNING):
        assert drawn(dataclasses.replace(settings, lowering_processes=1)) == alone
    by_process = sorted(path.name for path in cache_folder.iterdir() if path.suffix != ".starts")
    assert by_process == by_engine and not caplog.records
    # Programs of a few milliseconds, and those that a CPU needs later.
    assert (
        {"append_pages"}
        <= set(lowered_here)
        <= {"append_pages", "set_slot", "count_tokens", "move_experts", "full", "prompt"}
    )
    model = open_checkpoint(settings.model).model_config
    for pages, known in ((32, True), (33, False)):
        config = resolve(dataclasses.replace(settings, lowering_processes=1, num_kv_pages=pages), model)
        lowering = make_lowering(config, model, choose_plans(config, model))
        assert lowering is not None and lowering.started != known
        lowering.close()


def test_a_process_leaves_programs_with_timed_products_to_the_engine():
    unwritten: Any = Portable(mock.Mock(), "", mock.Mock(), (), RuntimeError("compiled"))
    jobs = [
        Job(name, {}, name, lambda num_pages: unwritten, options)
        for name, options in (("untimed", {**UNTIMED, "xla_gpu_x": 1}), ("timed", {"xla_gpu_x": 1}))
    ]
    lines = map(msgspec.json.encode, (DESCRIPTION, *(Wanted(job.name, ()) for job in jobs)))
    replies = io.BytesIO()
    executor = mock.Mock()
    executor.compiler.jobs = lambda: jobs
    executor.name = ""
    answer(lambda _: [executor], lines, replies)
    assert replies.getvalue() == b'"RuntimeError: compiled"\n""\n'


def test_sequential_steps_beside_overlapped_ones_need_no_timing():
    """On two GPUs, so that processes compile what an engine begins with."""
    mesh = h200.h200_mesh((2,))
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(jax, "devices", lambda *_: list(mesh.devices.flat)),
    ):
        config = EngineConfig(
            "m", dtype="bfloat16", kv_cache_dtype="bfloat16", max_model_len=4096, max_num_seqs=8,
            plan="sequential", max_num_batched_tokens=64, step_sizes="32,64", tensor_parallel_size=2,
        )  # fmt: skip
        two = two_nano_batch_plan(LLAMA, 64, 32, tp=2)
        plans = {32: (sequential_plan(LLAMA, 32, 2),), 64: (sequential_plan(LLAMA, 64, 2), two)}
        weights = h200.abstract(mesh, shapes(LLAMA, 2, jnp.bfloat16), shardings(LLAMA, mesh))
        (stage,) = stages_of((LLAMA.num_layers,))
        kernels = choose_kernels(config, LLAMA)
        executor = make_stage(
            config, LLAMA, plans, stage, mesh, weights, kernels, True, False, None, 0, StartTimes()
        )
        found = {job.key: needs_no_gpu(job.options) for job in executor.compiler.jobs() if not job.small}
    overlapped = {layout.key for layout in executor.layouts[64] if layout.plan != "sequential"}
    assert len(overlapped) == 1
    assert {key for key, untimed in found.items() if not untimed} == overlapped


def test_stages_that_differ_in_their_devices_only_have_the_same_programs():
    full, window = Layer(rope=Rope(1e4)), Layer(rope=Rope(1e4), window=64)
    model = dataclasses.replace(LLAMA, layers=(full, full, full, window, full, full))
    stages = stages_of([1] * 6)
    mesh = h200.h200_mesh((1,))
    weights = [
        to_values(
            h200.abstract(
                mesh,
                stage.weights(shapes(model, 1, jnp.bfloat16)),
                stage.weights(shardings(model, mesh)),
            )
        )
        for stage in stages
    ]
    first, second, third, fourth, fifth, last = stage_names(model, stages, weights)
    assert second == third == fifth and len({first, second, fourth, last}) == 4


@pytest.mark.parametrize("script", ["raise SystemExit(3)", ECHO + "print('\"no\"', flush=True)"])
def test_an_engine_starts_without_its_processes(script, cache, monkeypatch, caplog):
    """Without a cache, too: the folder of the processes is temporary."""
    cache(None)
    command = (sys.executable, "-c", script)
    monkeypatch.setattr(
        lowering_start,
        "LoweringProcesses",
        lambda *args, **more: LoweringProcesses(*args, command=command, **more),
    )
    with caplog.at_level(logging.WARNING):
        drawn(dataclasses.replace(SETTINGS, lowering_processes=2, compilation_cache_dir=""))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("case", ON_H200S)
def test_a_process_without_a_gpu_makes_the_programs_of_an_engine_on_h200s(case, tmp_path):
    """In a process of its own: Mosaic numbers the kernels of a process, and
    a kernel's code has its number.
    """
    path = os.pathsep.join(map(str, (paths.ROOT, paths.ROOT / "tests")))
    command = [sys.executable, __file__, case, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def compare_on_h200s(case: str, folder: Path) -> None:
    """Compare the programs that an engine lowers with those of a process without a
    GPU, which compiles them, too.

    case: of `ON_H200S`.
    """
    model, settings = ON_H200S[case]
    tp, ranks = settings.get("tensor_parallel_size", 1), settings.get("data_parallel_size", 1)
    number = settings.get("pipeline_parallel_size", 1)
    mesh = h200.h200_mesh((tp * number,)) if ranks == 1 else h200.h200_mesh((ranks, tp), ("dp", "tp"))
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(jax, "devices", lambda *_: list(mesh.devices.flat)),
    ):
        config = EngineConfig(
            "m", dtype="bfloat16", kv_cache_dtype="bfloat16", max_model_len=4096, max_num_seqs=8,
            plan="sequential", max_num_batched_tokens=64, step_sizes="64", **settings,
        )  # fmt: skip
        plans, memory, pages = choose_plans(config, model), 150_000_000_000, (4096,)
        options = weight_options(config)
        stages = stages_of([model.num_layers // number] * number)
        meshes = stage_meshes(tp, number) if ranks == 1 else (mesh,)
        weights = [
            h200.abstract(
                mesh,
                stage.weights(shapes(model, tp, jnp.bfloat16, **options)),
                stage.weights(shardings(model, mesh, **options)),
            )
            for stage, mesh in zip(stages, meshes, strict=True)
        ]
        kernels = choose_kernels(config, model)
        assert kernels.can_be_bounded  # Mosaic kernels
        values = tuple(map(to_values, weights))
        names = stage_names(model, stages, values)
        made = [
            [
                make_stage(
                    config,
                    model,
                    plans,
                    *of_stage,
                    kernels,
                    True,
                    True,
                    None,
                    memory,
                    StartTimes(),
                    own,
                    name,
                )
                for *of_stage, name in zip(stages, meshes, weights, names, strict=True)
            ]
            for own in (folder / "engine", folder / "process")
        ]
        for executor in itertools.chain(*made):
            assert executor.lower.lowered is not None
            as_on_a_gpu = dataclasses.replace(executor.lower.lowered, platforms=("cuda",))
            executor.lower.lowered = as_on_a_gpu
        lowering = LoweringProcesses(1, this_device(), KnownStarts.of(folder / "process", "settings"))
        lowering.start()
        target = target_of(meshes[0])
        assert target is not None
        lowering.describe(
            Description(config, model, plans, True, None, memory, values, str(folder / "process"), target)
        )
        jobs = [
            [(executor, job) for executor in executors for job in executor.compiler.jobs() if not job.small]
            for executors in made
        ]
        futures = [lowering.ask(Wanted(job.name + executor.name, pages)) for executor, job in jobs[1]]
        for _, job in jobs[0]:
            job.lower(pages)
        wait(futures)
        assert not lowering.failed
        lowering.close()
        files = [
            sorted(path.name for path in (folder / name).iterdir() if path.suffix != ".code")
            for name in ("engine", "process")
        ]
        different = {job.name + executor.name for executor, job in jobs[0]}
        assert files[0] == files[1] and len(files[0]) == len(different) > 1
        assert (len(different) < len(jobs[0])) == (case == "equal stages")
        for name in files[0]:
            own, other = (kept(folder / side / name) for side in ("engine", "process"))
            assert own is not None and other is not None
            assert text_of(own) == text_of(other)
            for field in (
                "in_avals",
                "out_avals",
                "in_tree",
                "out_tree",
                "nr_devices",
                "platforms",
                "fun_name",
            ):
                assert getattr(own, field) == getattr(other, field), field
        with mock.patch.object(lowered_cache.export, "export", side_effect=AssertionError("lowered again")):
            for executor, job in jobs[1]:
                assert executor.lower.lowered is not None
                executor.lower.lowered = dataclasses.replace(executor.lower.lowered, target=target)
                lowered = job.lower(pages)
                code = lowered_cache.read_signed(lowered.programs.code_path(lowered.digest, job.options))
                assert code is not None and b"\x7fELF" in code


def kept(path: Path) -> jax.export.Exported | None:
    """Return the program of a file."""
    content = lowered_cache.read_signed(path)
    return None if content is None else lowered_cache.unpack(content)


def text_of(program: jax.export.Exported) -> str:
    """Return a program's text, its Mosaic kernels' bytecode included,
    without the locations in the sources.
    """
    with mlir.make_ir_context():
        module = ir.Module.parse(program.mlir_module())
        return module.operation.get_asm(enable_debug_info=False)


def test_programs_go_to_all_processes_and_each_once(tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    script = f"""
import os, pathlib, sys, time
next(sys.stdin), next(sys.stdin)
for line in sys.stdin:
    pathlib.Path({str(begun)!r}, str(os.getpid())).touch()
    while len(os.listdir({str(begun)!r})) < 3:  # no process is done before each has a program
        time.sleep(0.01)
    print('"%s"' % os.getpid(), flush=True)
"""
    with processes(tmp_path, script, count=3) as made:
        futures = [made.ask(Wanted(f"step {i}", (i,))) for i in range(60)]
        assert made.ask(Wanted("step 7", (7,))) is futures[7]
        assert made.ask(Wanted("step 7", (8,))) is not futures[7]
        wait(futures)
        assert len(made.failed) == 60 and len(set(made.failed.values())) == 3


def test_a_second_description_ends_the_programs_of_the_first(tmp_path):
    """The process replies with the memory of the description that it has at a program."""
    script = """
import json, sys
next(sys.stdin)
for line in map(json.loads, sys.stdin):
    if "memory" in line:
        memory = line["memory"]
    else:
        print(json.dumps(f"{memory}"), flush=True)
"""
    with processes(tmp_path, script) as made:
        first = [made.ask(Wanted(f"step {i}", ())) for i in range(20)]
        made.guess = (7,)
        made.describe(msgspec.structs.replace(DESCRIPTION, memory=5))
        assert sum(not future.done() for future in first) <= 1 and made.guess is None  # one is being made
        second = [made.ask(Wanted(f"other {i}", ())) for i in range(3)]
        made.describe(msgspec.structs.replace(DESCRIPTION, memory=5))  # an equal one changes nothing
        assert not wait([*first, *second], 60).not_done
    assert {made.failed[f"other {i}"] for i in range(3)} == {"5"}


@pytest.mark.parametrize("fits", [True, False])
def test_programs_are_asked_for_while_the_weights_are_loaded(fits, cache, tmp_path, monkeypatch, caplog):
    """Weights of other shapes than expected are described again. The tokens are those of an engine alone."""
    cache(str(tmp_path))
    load, absent, described = executor_start.load_stage, executor_start.absent_stage, []
    asked = threading.Event()

    def slow(*args):
        assert asked.wait(60)
        return load(*args)

    def record(self, description):
        described.append(description)
        tell(self, description)
        asked.set()

    def other(config, model, mesh, stage):
        found = absent(config, model, mesh, stage)
        if fits:
            return found
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float16, sharding=a.sharding), found)

    tell = LoweringProcesses.describe
    alone = drawn(dataclasses.replace(SETTINGS, compilation_cache_dir=""))
    for path in (tmp_path / "lowered").iterdir():
        path.unlink()
    monkeypatch.setattr(executor_start, "load_stage", slow)
    monkeypatch.setattr(executor_start, "absent_stage", other)
    monkeypatch.setattr(LoweringProcesses, "describe", record)
    with caplog.at_level(logging.WARNING):
        assert drawn(dataclasses.replace(SETTINGS, lowering_processes=1)) == alone
    assert not caplog.records and (described[0] == described[-1]) == fits


def test_programs_of_withdrawn_pages_are_not_begun(tmp_path):
    """The process waits for a file, so that it has begun one program."""
    go = tmp_path / "go"
    waiting = f"import os, time\n    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n    "
    with processes(tmp_path, ECHO + waiting + "print('\"made\"', flush=True)") as made:
        begun = made.ask(Wanted("step 0", (7,)))
        while not made._taken:
            time.sleep(0.01)
        guessed = [made.ask(Wanted(f"step {i}", (7,)), urgent=False) for i in range(1, 4)]
        others = [made.ask(Wanted(f"step {i}", pages), urgent=False) for i, pages in ((1, (8,)), (2, ()))]
        made.withdraw((7,))
        assert all(one.done() for one in guessed) and not any(one.done() for one in [begun, *others])
        assert made.ask(Wanted("step 1", (7,))).done()
        go.touch()
        wait([begun, *others], 60)
    assert set(made.failed) == {"step 0", "step 1", "step 2"}  # the process answers with a reason


@pytest.mark.parametrize(
    "fault",
    [
        "raise SystemExit(3)",
        "import sys; sys.stdin.close(); sys.stdout.close()",
        ECHO + "print('no JSON', flush=True)",
        ECHO + "print('\"', end='', flush=True); sys.exit(0)",
        ECHO + "import time; time.sleep(1000)",
        "raise ImportError('no module named jaxflow')",
        "import time; time.sleep(1000)",
    ],
    ids=["exit", "closed", "garbage", "half a line", "hang", "import", "hang before it reads"],
)
def test_programs_of_lost_processes_are_left_to_the_engine(fault, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lowering_processes, "LIMIT_S", 0.5)
    with processes(tmp_path, fault, count=2, leaves=20_000) as made:  # more bytes than a pipe holds
        futures = [made.ask(Wanted(f"step {i}", ())) for i in range(9)]
        assert not wait(futures, 60).not_done
        assert made.ask(Wanted("a later one", ())).done()
    assert len(caplog.records) == 1
    if "ImportError" in fault:
        assert "no module named jaxflow" in caplog.text


def test_a_command_that_cannot_be_started_is_a_warning(tmp_path, caplog):
    made = LoweringProcesses(2, DEVICE, KnownStarts.of(tmp_path, "settings"), ("/nowhere/python",))
    made.start()
    assert not made.started and len(caplog.records) == 1
    made.close()


def test_processes_end_with_their_owner(tmp_path):
    """After `close`, with and without work, and where the owner never describes its programs."""
    for script, describes in ((ECHO + "print('\"\"', flush=True)", True), ("input(); input()", False)):
        made = LoweringProcesses(
            2, DEVICE, KnownStarts.of(tmp_path, "settings"), (sys.executable, "-c", script)
        )
        made.start()
        if describes:
            made.describe(DESCRIPTION)
            wait([made.ask(Wanted("step", ()))])
        made.close()
        for process, _ in made._processes:
            process.wait(60)


@pytest.mark.parametrize(
    ("steps", "asked", "layers", "cores", "found"),
    [(19, None, 32, 16, 8), (19, None, 32, 64, 9), (19, None, 32, 6, 3), (19, None, 32, 3, 0),
     (3, None, 16, 16, 8), (19, 0, 80, 16, 0), (1, 5, 80, 1, 5), (1, None, 32, 64, 4),
     (40, None, 32, 64, 20), (90, None, 32, 128, 32), (7, None, 32, 64, 8), (7, None, 80, 64, 14)],
)  # fmt: skip
def test_the_number_of_processes(steps, asked, layers, cores, found):
    assert number_of_processes(steps, asked, layers=layers, cores=cores, free_bytes=AMPLE) == found


@pytest.mark.parametrize(
    ("layers", "nano_ops", "measured"),
    [(20, 11, 866 << 20), (80, 11, 1912 << 20), (48, 24, 2_300_000_000), (32, 9, 1284 << 20)],
)
def test_a_process_takes_no_more_memory_than_is_counted(layers, nano_ops, measured):
    assert measured <= lowering_processes.process_bytes(layers, nano_ops) <= 1.5 * measured


@given(
    st.integers(1, 60), st.integers(0, 200), st.integers(1, 60), st.integers(1, 256),
    st.integers(0, 100 << 30), st.integers(0, 50), st.integers(0, 200 << 30),
)  # fmt: skip
def test_a_start_has_no_more_processes_than_programs_cores_and_memory(
    steps, layers, nano_ops, cores, free, more, more_bytes
):
    def number(steps: int, layers: int, cores: int, free: int, nano_ops: int = nano_ops, **how) -> int:
        return number_of_processes(
            steps, None, layers=layers, nano_ops=nano_ops, cores=cores, free_bytes=free, **how
        )

    found = number(steps, layers, cores, free)
    assert found != 1 and found <= min(lowering_processes.STEP_PROGRAMS * steps, cores)
    assert found * lowering_processes.process_bytes(layers, nano_ops) <= free
    assert number(steps, layers, cores, free, nano_ops + more) <= found
    assert found <= number(steps, layers, cores, free, waits=True) <= cores
    assert number(steps + more, layers, cores, free) >= found
    assert number(steps, layers, cores + more, free) >= found
    assert number(steps, layers, cores, free + more_bytes) >= found
    assert number(steps, layers + more, cores, AMPLE) >= number(steps, layers, cores, AMPLE)


@pytest.mark.parametrize(
    ("model", "quantization"),
    [("tiny-llama", None), ("tiny-llama", "int4"), ("tiny-mixtral", "fp8"), ("tiny-opt", None),
     ("tiny-deepseek_v3", None), ("tiny-gpt_oss", None), ("tiny-gpt_oss", "mxfp4"), ("tiny-gpt_oss", "int4")],
)  # fmt: skip
def test_a_process_knows_weights_settings_and_plans(model, quantization):
    checkpoint = open_checkpoint(str(paths.MODELS / model))
    settings = dataclasses.replace(SETTINGS, model=str(paths.MODELS / model), quantization=quantization)
    config, mesh = resolve(settings, checkpoint.model_config), make_mesh(1)
    options = weight_options(config)
    weights = h200.abstract(
        mesh,
        shapes(checkpoint.model_config, 1, jnp.dtype(config.dtype), **options),
        shardings(checkpoint.model_config, mesh, **options),
    )
    plans = choose_plans(config, checkpoint.model_config)
    given = Description(
        config, checkpoint.model_config, plans, True, {"x": "y"}, 7, (to_values(weights),), "f"
    )
    found = msgspec.json.decode(msgspec.json.encode(given), type=Description)
    for field in (
        "config",
        "model",
        "plans",
        "one",
        "graphs",
        "memory",
        "folder",
    ):  # the key of programs has reprs
        assert repr(getattr(found, field)) == repr(getattr(given, field))
    again = from_values(found.weights[0], mesh)
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    assert all(map(same, jax.tree.leaves(again), jax.tree.leaves(weights)))


def same(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> bool:
    return (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)


def test_known_starts(tmp_path):
    known, other = KnownStarts.of(tmp_path, "settings"), KnownStarts.of(tmp_path, "others")
    known.add([7, 100])
    known.add([7, 100])
    known.add([7, 101])
    assert known.sizes() == [[7, 100], [7, 101]] and other.sizes() == []
    assert len(list(tmp_path.iterdir())) == 1
    known.path.write_bytes(b"[[7, ")
    assert known.sizes() == []
    known.add([8, 1])
    assert known.sizes() == [[8, 1]]
    KnownStarts.of(tmp_path / "missing", "settings").add([1])  # a folder that cannot be written


if __name__ == "__main__":
    compare_on_h200s(sys.argv[1], Path(sys.argv[2]))

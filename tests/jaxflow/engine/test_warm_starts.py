"""A warm start reads its programs while the weights load, and draws the same tokens whatever goes wrong."""

import dataclasses
import functools
import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import hurry
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import paths
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.config import EngineConfig
from jaxflow.engine import executor_start, page_count
from jaxflow.engine.ahead_of_time import Target
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.lowered_cache import LoweredPrograms, NotKeptError, compile_program
from jaxflow.engine.program_compiler import ProgramCompiler
from jaxflow.engine.start import start_engine
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.request import Request

SETTINGS = EngineConfig(
    str(paths.MODELS / "tiny-llama"), block_size=16, max_num_batched_tokens=16, max_num_seqs=4,
    num_kv_pages=32, plan="sequential", step_sizes="16", lowering_processes=1,
)  # fmt: skip
STAGES = dataclasses.replace(SETTINGS, pipeline_parallel_size=2)


def drawn(config: EngineConfig) -> list[int]:
    """Return the tokens of an engine that has just started."""
    checkpoint = open_checkpoint(config.model)
    engine = start_engine(config, checkpoint, progress=False)
    engine.driver.close()
    loop = make_loop(engine.config, checkpoint.model_config, engine.executor)
    tokens = toy.run(loop, [Request("a", list(range(3, 24)), toy.GREEDY)])["a"].tokens
    loop.close()
    return tokens


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """Return the folder and the tokens of a first start, by the settings."""

    @functools.cache
    def first(config: EngineConfig) -> tuple[Path, list[int]]:
        folder = tmp_path_factory.mktemp("first")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hurry, "shares", False)
            jax.config.update("jax_compilation_cache_dir", str(folder))
            return folder, drawn(config)

    before = jax.config.jax_compilation_cache_dir
    yield first
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def warm(cold, tmp_path, monkeypatch):
    """Return the folder and the tokens of a copy of a first start.

    The next start reads the programs of the folder.
    """
    monkeypatch.setattr(hurry, "shares", False)

    def copied(config: EngineConfig = SETTINGS) -> tuple[Path, list[int]]:
        folder, tokens = cold(config)
        shutil.copytree(folder, tmp_path / "cache")
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
        return tmp_path / "cache" / "lowered", tokens

    return copied


@pytest.fixture
def read_early(monkeypatch):
    """Return a function that lets weights wait for `read_early`, and returns the list of its results."""

    def wait(for_it: bool = True) -> list[bool]:
        results, ended = [], threading.Event()
        read, load = executor_start.read_early, executor_start.load_stage

        def record(*given: Any) -> bool:
            try:
                results.append(read(*given))
                return results[-1]
            finally:
                ended.set()

        def late(*given: Any) -> Any:
            assert not for_it or ended.wait(60)
            return load(*given)

        monkeypatch.setattr(executor_start, "read_early", record)
        monkeypatch.setattr(executor_start, "load_stage", late)
        return results

    return wait


@pytest.mark.parametrize("config", [SETTINGS, STAGES], ids=["one device", "stages"])
def test_the_programs_are_read_before_there_are_weights(config, warm, read_early, monkeypatch):
    (_, tokens), read = warm(config), read_early()
    asked, keep = [], LoweredPrograms.keep

    def record(self, name, fn, *args):
        real = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(args))
        asked.append((name.partition(" ")[0], self.only_reads, real))
        return keep(self, name, fn, *args)

    monkeypatch.setattr(LoweredPrograms, "keep", record)
    assert drawn(config) == tokens and read == [True]
    early = [name for name, only_reads, real in asked if only_reads and not real]
    later = [name for name, only_reads, _ in asked if not only_reads]
    assert {"step", "plain", "append_pages"} <= set(early)
    assert set(later) <= {"full", "prompt"}  # the requests of the test ask for these


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("fault", [Path.unlink, damage])
def test_a_program_that_is_missing_or_damaged_is_made_again(fault, warm, read_early):
    (folder, tokens), read = warm(), read_early()
    for path in folder.iterdir():
        if path.suffix != ".starts":
            fault(path)
    assert drawn(SETTINGS) == tokens and read == [False]


@pytest.mark.parametrize(
    ("known", "reads"),
    [([[0, 33]], [False]), ([[], [0, 32, 1]], [True]), ([[1, 32]], [])],
)
def test_a_wrong_number_of_pages_changes_no_token(known, reads, warm, read_early):
    folder, tokens = warm()
    (path,) = folder.glob("*.starts")
    assert msgspec.json.decode(path.read_bytes()) == [[0, 32]]  # a CPU states no memory
    path.write_bytes(msgspec.json.encode(known))
    read = read_early(bool(reads))
    assert drawn(SETTINGS) == tokens and read == reads


def test_weights_of_other_shapes_get_other_programs(warm, read_early, monkeypatch):
    (_, tokens), read = warm(), read_early()
    absent = executor_start.absent_stage

    def other(*given: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding), absent(*given)
        )

    monkeypatch.setattr(executor_start, "absent_stage", other)
    assert drawn(SETTINGS) == tokens and read == [False]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CheckpointError("damaged"), None])
def test_a_start_that_ends_while_it_reads_leaves_no_thread(error, warm, monkeypatch):
    """None: the reading fails with an error of its own, and the start goes on."""
    _, tokens = warm()
    reading, keep = threading.Event(), LoweredPrograms.keep
    load, numbers = executor_start.load_stage, itertools.count()

    def fail(*given: Any) -> Any:
        reading.wait(60)
        if error is not None:
            raise error
        return load(*given)

    def slow(self, name, fn, *args):
        reading.set()
        if self.only_reads and error is None and next(numbers) == 1:
            raise RuntimeError("RESOURCE_EXHAUSTED: no memory beside the weights")
        return keep(self, name, fn, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LoweredPrograms, "keep", slow)
        patch.setattr(executor_start, "load_stage", fail)
        if error is None:
            assert drawn(SETTINGS) == tokens
        else:
            with pytest.raises(type(error)):
                drawn(SETTINGS)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prepare")]
    assert drawn(SETTINGS) == tokens


@pytest.fixture(scope="module")
def executor():
    return toy.executor("tiny-llama", budget=8, seqs=3, pages=12)[1]


@settings(max_examples=40, deadline=None)
@given(st.integers(300, 3000), st.floats(0.0, 3.0), st.floats(0.9, 1.1))
def test_known_pages_fit_and_are_nearly_all_that_fit(executor, megabytes, share, ratio):
    """Or the pages are found as in other starts."""
    config = dataclasses.replace(
        SETTINGS, dtype="float32", num_kv_pages=None, max_model_len=64, max_num_seqs=3,
        max_num_batched_tokens=8,
    )  # fmt: skip
    model = executor.programs.context.config
    need, free = int(share * page_count._guessed_temporary_bytes(config, model)), megabytes << 20
    fit = page_count._fitting_pages(config, executor, free + (1 << 20) - need)
    early = tuple(int(ratio * pages) for pages in fit)
    others = (5,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_count, "on_gpu", lambda: True)
        patch.setattr(page_count, "_fitting_pages", lambda *_: fit)
        patch.setattr(page_count, "memory_budget", lambda *_: free)
        patch.setattr(page_count, "_guessed_pages", lambda *_: others)
        patch.setattr(ProgramCompiler, "early_pages", early)
        patch.setattr(executor.compiler, "need_of_largest", lambda: need)
        found = page_count._own_num_pages(config, model, [executor], None)
    good = all(page_count.GOOD_GUESS * most <= pages <= most for pages, most in zip(early, fit, strict=True))
    assert found == (early if good else others)


def test_a_folder_that_is_only_read_makes_no_program(tmp_path):
    target = Target("device", (), "")
    programs = LoweredPrograms(tmp_path, "settings", target=target)
    reader = dataclasses.replace(programs, only_reads=True)
    x = jax.device_put(np.arange(4, dtype=np.float32))
    twice = jax.jit(lambda x: 2 * x)
    with pytest.raises(NotKeptError):
        reader.lower("twice", twice, (), x)
    programs.lower("twice", twice, (), x)
    kept = reader.lower("twice", twice, (), x)
    with pytest.raises(NotKeptError):
        compile_program(kept)
    assert compile_program(programs.lower("twice", twice, (), x))(x).tolist() == [0, 2, 4, 6]


def test_small_programs_need_no_machine_code_in_the_folder(executor, tmp_path, monkeypatch):
    """The engine compiles them itself, so a start that only reads the folder of a GPU finds none."""
    programs = LoweredPrograms(tmp_path, "settings", target=Target("device", (), ""))
    small = [job for job in executor.compiler.jobs() if job.small]
    for only_reads in (False, True):
        monkeypatch.setattr(executor.lower, "lowered", dataclasses.replace(programs, only_reads=only_reads))
        for job in small:
            compile_program(job.lower(executor.num_pages), job.options)
    assert {job.name for job in small} >= {"append_pages", "set_slot", "count_tokens"}

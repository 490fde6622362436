"""The tests' platform, set before anything imports JAX, and where their data is."""

import collections
import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hurry
import hypothesis
import paths
import pytest
import slow_cases
from hypothesis.internal.conjecture import providers
from own_flags import own_flags

from pallas_kernels.gemm import tuned_table as table
from serving.default_model import default_model

gc.disable()  # until `pytest_collection_finish`: imports make few cycles for the collector to find

assert "jax" not in sys.modules, "JAX was imported before the tests could choose its platform"

# Environment variables, not jax.config, so that the servers and tools which tests start as processes see the
# same machine.
os.environ.update(
    JAX_PLATFORMS="cpu",  # also keeps the CUDA plugin, installed only to compile, from looking for a GPU
    JAX_NUM_CPU_DEVICES="4",
    # threads for a program: workers are about as many as cores, and more threads would look for work that
    # there is none of
    NPROC="1",
    JAX_ENABLE_X64="0",
    JAX_COMPILATION_CACHE_DIR=str(paths.ROOT / ".cache" / "compiled-tests"),
    # shared by the workers, and by tests that build the same engine again
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0.05",
    # Operations without call stacks compile faster. They keep their names and scopes.
    JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0",
    HF_HUB_OFFLINE="1",
    TF_CPP_MIN_LOG_LEVEL="2",
    XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {hurry.FLAGS}",
)

# Keep and reuse the memory of freed arrays. By default glibc gives arrays above 128 KiB back to the kernel.
# That takes half of the kernel's time. glibc reads the setting when a worker starts.
HEAP = (
    "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=134217728:glibc.malloc.top_pad=4194304"
)
os.environ.setdefault("GLIBC_TUNABLES", HEAP)

# Dozens of tests start a process, and each would compile all its packages again: 3 s of its 5. Where none may
# be among the sources, apart.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(paths.ROOT / ".cache" / "bytecode"))

# The same examples every time, and no deadlines: a busy machine fails no test. A fifth of the usual number:
# there are many properties.
hypothesis.settings.register_profile(
    "jaxflow", max_examples=20, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("jaxflow")
# Hypothesis also draws constants of the imported modules. Each worker imports others, and reads them for 2 s.
providers._get_local_constants = providers.Constants

# The first part of the names of the project's loggers. The servers log by absl.
LOGGERS = ("jaxflow", "pallas_kernels", "search", "serving", "absl", "root", "__main__")

# Files of 10 s and more on two cores, the longest first. test_measure is left out: it measures times, and
# runs better next to short tests. test_pipeline_stages needs an engine of test_goldens. The workers begin
# with files of other programs, and find this engine's programs in the compilation cache later.
LONG_FILES = (
    "test_goldens", "test_compiler", "test_chunk_attention", "test_smollm2", "test_pipeline_stages",
    "test_compiled_plans", "test_offloaded_tokens", "test_data_parallel", "test_two_stage_search",
    "test_loop", "test_command", "test_8_bits", "test_compiled_step", "test_lowering_processes",
    "test_http_faults", "test_prefill_apart", "test_first_layouts", "test_spans", "test_decode_attention",
    "test_kv_offload", "test_fp8_gemm", "test_grouped_gemm", "test_layered_step", "test_swapped",
    "test_noise_of_draws", "test_sampling", "test_expert_load", "test_kernels", "test_sparse_values",
    "test_offload_calls", "test_offload_io", "test_scattered", "test_soak", "test_draws", "test_rope_append",
    "test_disk_engine", "test_eplb", "test_dense_gemm", "test_lowered", "test_triton", "test_commands",
    "test_demo", "test_offload_stages", "test_http_faults_engine", "test_end_to_end", "test_known_orders",
    "test_kernel_set", "test_sink_logits", "test_llm", "test_reuse_commands", "test_staged_tiers",
    "test_draw", "test_collective_bench", "test_search_commands", "test_span_engine", "test_offload_shards",
    "test_decode_layouts", "test_expert_parallel", "test_exchange", "test_build", "test_sarathi",
    "test_batch_replicas", "test_batch_budget", "test_executor", "test_compile", "test_int4_experts",
    "test_pdl", "test_scheduler", "test_issue_order", "test_portfolio", "test_reference_gemm",
    "test_tier_policy", "test_converted",
)  # fmt: skip


def pytest_configure(config: pytest.Config):
    """Workers get files in the order of `pytest_collection_modifyitems`: xdist itself would give out those of
    few tests last.
    """
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before pytest deselects the items marked `slow`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    """For workers the long files come first, then those of many tests: no worker is left with a long one when
    all others are done. The order is the same for workers that import the files in another order.
    """
    unmatched = slow_cases.mark(items)
    if unmatched and config.args == config.getini("testpaths"):
        raise pytest.UsageError(f"tests/slow_cases.py: patterns that match no test: {sorted(unmatched)}")
    if not hasattr(config, "workerinput"):
        return
    tests = collections.Counter(item.path for item in items)
    places = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), -tests[item.path], item.path))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """Let each worker begin to import the test files at another place.

    A clean checkout has no bytecode. Workers that import in one order would each compile every file, at the
    same time. Workers that begin at different places compile a part each and read the other parts.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", {"workerid": "gw0", "workercount": 1})
    if isinstance(collector, pytest.Directory):
        number = int(worker["workerid"].removeprefix("gw"))
        first = len(report.result) * number // worker["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_finish():
    """Let the garbage collector skip the modules, which live as long as the process, and run less often.

    With the usual thresholds the collector takes a fourteenth of the tests' CPU time. The last two thresholds
    keep a full collection every ten million objects, so that closed engines are freed.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
    gc.enable()


@contextlib.contextmanager
def calls_to(owner: Any, name: str, shared: Callable) -> Iterator[None]:
    """Call `shared` in place of a function of `owner`, with the function before its arguments."""
    function = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args: shared(function, *args))
        yield


@pytest.fixture(autouse=True, scope="session")
def samplers_run_often_and_are_shared():
    """Compile samplers with more care, and once for all engines of a worker.

    The full sampler searches the vocabulary, ten times as long in unoptimized code. The plain sampler
    must draw the very same tokens.
    """
    from jaxflow.engine.program_lowering import ProgramLowering  # not above: it imports JAX

    with calls_to(ProgramLowering, "sampler", hurry.shared_sampler):
        yield


@pytest.fixture(autouse=True, scope="session")
def programs_of_equal_engines_are_compiled_once():
    """Lower and compile the programs of equal engines once for a test file,
    without files of lowered programs.

    Tests of these files choose a folder of their own. Servers that tests start as
    processes write and read files.
    """
    from jaxflow.engine.lowered_cache import LoweredPrograms

    with calls_to(LoweredPrograms, "lower", hurry.shared_program):
        yield


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_file_are_freed():
    """Free the shared programs at the end of a file: those of all files would
    take gigabytes in each worker.
    """
    yield
    hurry.forget_programs()


@pytest.fixture(autouse=True, scope="session")
def offloaded_programs_are_lowered_once():
    """Lower the programs of equal offloaded runs once for a worker: dozens of tests start one."""
    from jaxflow.flexgen import programs  # not above: it imports JAX

    with calls_to(programs, "_over_devices", hurry.shared_lowering):
        yield


@pytest.fixture(autouse=True, scope="session")
def deferred_programs_are_compiled_on_use():
    """Start no thread that compiles the deferred programs of an engine: most tests need none of them.

    The first request that needs a deferred program compiles the program. Servers that tests
    start as processes run the thread.
    """
    from jaxflow.engine.executor import Executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "compile_deferred", lambda executor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def equal_layers_are_compiled_once():
    """Let the engines of the checkpoint with five layers have layered steps, which compile one layer.

    The steps of the checkpoints with two layers are one program.
    """
    from jaxflow.engine import stage_programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_programs, "FEWEST_LAYERED", 3)
        yield


@pytest.fixture(autouse=True)
def nothing_was_said_yet():
    """Reset the messages that kernels log once a process, so that each test sees its own."""
    table._warn_once.cache_clear()


@pytest.fixture(scope="session")
def models_dir() -> Path:
    return paths.MODELS


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    return paths.TRACES


@pytest.fixture(scope="session")
def ppl_dir() -> Path:
    return paths.PPL


@pytest.fixture(scope="session")
def goldens() -> Callable[[str], dict[str, Any]]:
    return paths.golden


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return default_model()


@pytest.fixture
def caplog(caplog):
    """Keep only the records of the project's loggers, so that a test can count them.

    A thread or a lost object of an earlier test may make another library log at any time.
    """
    caplog.handler.addFilter(is_of_the_project)
    yield caplog
    caplog.handler.removeFilter(is_of_the_project)


def is_of_the_project(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in LOGGERS


@pytest.fixture
def no_flags():
    with own_flags():
        yield

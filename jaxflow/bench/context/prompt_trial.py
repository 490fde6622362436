"""One prompt on an executor of exactly its pages, to find out whether the memory suffices."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import multiprocessing
import resource
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.bench.plans.steady import SteadyStep, StepWorkload, page_appends, step_work
from jaxflow.config import EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.kernel_choice import choose_kernels
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.program_memory import Need
from jaxflow.engine.programs import Programs
from jaxflow.engine.stage_programs import make_context
from jaxflow.engine.stage_weights import weight_options
from jaxflow.engine.start import prepare_process
from jaxflow.engine.step_plans import make_layouts
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.weights import shapes, shardings
from jaxflow.parallel.mesh import TP, make_mesh, on_gpu
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import sequential_plan
from pallas_kernels.kernel_set import KernelSet

# XLA would time GEMMs in twice the memory of their results, before the step itself takes its memory.
_UNTUNED = {"xla_gpu_autotune_level": 0}
_MIB = 2**20
ROUNDING = 4 * _MIB  # bytes that the allocator loses to rounding, and that small programs take
_EXHAUSTED = ("RESOURCE_EXHAUSTED", "Out of memory")  # messages of XLA's allocators, on a GPU and on a CPU


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model with its weights on the device. weights: arrays, or their shapes."""

    config: EngineConfig  # resolved
    checkpoint: Checkpoint
    mesh: Mesh
    kernels: KernelSet
    weights: Any

    @classmethod
    def of(cls, config: EngineConfig, checkpoint: Checkpoint, *, loaded: bool) -> "Bench":
        """Return the bench of a model. loaded: False for shapes instead of weights."""
        mesh, model = make_mesh(config.tensor_parallel_size), checkpoint.model_config
        if loaded:
            weights: Any = checkpoint.load(
                config.dtype, mesh, progress=False, seed=config.seed, **weight_options(config)
            )
        else:
            specs = shardings(model, mesh, **weight_options(config))
            weights = jax.tree.map(
                lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
                shapes(model, mesh.shape[TP], config.dtype, **weight_options(config)),
                specs,
            )
        return cls(config, checkpoint, mesh, choose_kernels(config, model), weights)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights on one device."""
        local = ((a.sharding.shard_shape(a.shape), a.dtype.itemsize) for a in jax.tree.leaves(self.weights))
        return sum(int(np.prod(shape)) * itemsize for shape, itemsize in local)

    def executor(self, tokens: int, length: int) -> Executor:
        """Return an executor of one step size for one sequence of `length` tokens, without its KV cache."""
        model, tp = self.checkpoint.model_config, self.mesh.shape[TP]
        config = dataclasses.replace(self.config, max_num_batched_tokens=tokens, max_num_seqs=1)
        plan = sequential_plan(model, tokens, tp)
        forward = compile_plan(plan, model, tp, quantized=config.quantization == "fp8")
        hidden_bytes = jnp.dtype(config.dtype).itemsize * model.hidden_size
        flags = xla_options(plan, tp, hidden_bytes=hidden_bytes) | _UNTUNED if on_gpu() else {}
        return Executor(
            Programs(
                make_context(config, model, self.kernels, self.mesh),
                self.mesh,
                shardings(model, self.mesh, **weight_options(config)),
            ),
            self.weights,
            make_layouts(config, model, [plan], decodes_alone=False),
            lambda _: forward,
            kv_dtype=jnp.dtype(config.kv_cache_dtype),
            max_model_len=length,
            options_of=lambda layout: flags,
            defers=True,  # a trial needs the step and the plain sampler
        )

    def need(self, tokens: int) -> Need:
        """Return the memory of the step of so many tokens, by XLA's account."""
        executor = self.executor(tokens, tokens)
        layout = _compile(executor, -(-tokens // self.config.block_size) + 1)
        return Need.of(executor.compiler.program(layout))


def _compile(executor: Executor, pages: int) -> StepLayout:
    """Compile the programs of an executor of one step size for a KV cache of so
    many pages, and return its layout.

    The cache is not allocated yet: its one page makes the shapes of the small programs.
    """
    executor.allocate((1,) * executor.groups)
    executor.num_pages = (pages,) * executor.groups
    executor.compile()
    ((layout,),) = executor.layouts.values()
    return layout


@dataclasses.dataclass(frozen=True)
class Trial:
    """A prompt of `length` tokens whose last step has `tokens` tokens.

    computed: tokens of the last step that are computed; the others are padding. A step's memory does not
    depend on this number, and a search is faster with few.
    """

    tokens: int
    length: int
    computed: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
      seconds: of the step.
      need: of the compiled step, None if it did not compile.
      failed_at: what asked for more memory than there was ("compiling", "KV cache", "first step", "second
        step" or "process"), and the message. None if the trial ran.
    """

    ran: bool
    seconds: float | None = None
    need: Need | None = None
    failed_at: str | None = None


def attempt(bench: Bench, trial: Trial, limit: int | None = None) -> Outcome:
    """Run the last step of a trial's prompt, with every page that the prompt fills.

    limit: bytes of this process for the KV cache and the step, see `_cap`; None for the device's own limit.
    """
    executor = bench.executor(trial.tokens, trial.length)
    pages = -(-trial.length // bench.config.block_size) + 1
    need, stage, steady = None, "compiling", None
    try:
        layout = _compile(executor, pages)
        need = Need.of(executor.compiler.program(layout))
        with _cap(limit):
            stage = "KV cache"
            with _kept_free(bench.mesh, need):
                executor.allocate(executor.num_pages)
            stage = "first step"
            steady = _placed(bench, executor, layout, trial)
            stage = "second step"
            begun = time.perf_counter()
            steady.enqueue().block_until_ready()
            seconds = time.perf_counter() - begun
        return Outcome(True, seconds, need)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _EXHAUSTED):
            raise
        return Outcome(False, None, need, f"{stage}: {_first_line(error)}{_free_memory(bench.mesh)}")
    finally:
        steady = None  # it holds the executor
        del executor
        gc.collect()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _free_memory(mesh: Mesh) -> str:
    """Return the free bytes of the first GPU and of its largest free block as text; empty on a CPU."""
    stats = mesh.local_devices[0].memory_stats()
    if not stats or "largest_free_block_bytes" not in stats:
        return ""
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return f" ({free:,} bytes free, {stats['largest_free_block_bytes']:,} of them in one block)"


@contextlib.contextmanager
def _kept_free(mesh: Mesh, need: Need) -> Iterator[None]:
    """Keep one block of each GPU free for the step's temporary arrays and results.

    XLA's allocator does not move arrays, and it takes the temporary arrays as one block. Without the kept
    block the KV cache may leave enough memory in pieces that are each too small. A block of the temporary
    arrays alone would not suffice: the allocator places the results first, in the smallest block that holds
    them, and the rest of the block is then too small. A CPU has virtual memory, so this function allocates
    nothing there.
    """
    if not on_gpu():
        yield
        return
    everywhere = NamedSharding(mesh, PartitionSpec())
    mebibytes = -(-(need.temporary + need.results) // _MIB) + 1
    block = jnp.zeros((mebibytes, _MIB), jnp.uint8, device=everywhere).block_until_ready()
    try:
        yield
    finally:
        block.delete()


def _placed(bench: Bench, executor: Executor, layout: StepLayout, trial: Trial) -> SteadyStep:
    """Run the trial's step once, wait for its end, and return the step for another run."""
    model = bench.checkpoint.model_config
    chunk = Composition(0, 0.0, ((trial.computed, trial.length - trial.computed),), 0)
    work = step_work(StepWorkload(1, 0, decodes=0), chunk, layout, model.vocab_size)
    steady = SteadyStep.of(executor, layout, work)
    steady.place(page_appends(work, executor.num_pages, model.windows, bench.config.block_size))
    jax.block_until_ready((executor.kv, executor.page_table))  # so that the next step does not overlap
    return steady


# ---- a memory limit for a CPU


@contextlib.contextmanager
def _cap(limit: int | None):
    """Limit the private memory that this process adds inside the block, in bytes (Linux)."""
    if limit is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int:
    """Return the private memory that this process has mapped, which Linux compares with RLIMIT_DATA."""
    text = Path("/proc/self/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


def attempt_capped(config: EngineConfig, max_position: int, trial: Trial, limit: int) -> Outcome:
    """Run a trial in a process of its own with a memory limit. A process that dies has not run it.

    config: resolved. max_position: replaces the model's. limit: bytes for the KV cache and the step.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_capped, config, max_position, trial, limit).result()
        except BrokenProcessPool:
            return Outcome(False, failed_at="process: the operating system ended it")


def _capped(config: EngineConfig, max_position: int, trial: Trial, limit: int) -> Outcome:
    prepare_process(config)
    checkpoint = with_positions(open_checkpoint(config.model, load_format=config.load_format), max_position)
    return attempt(Bench.of(config, checkpoint, loaded=True), trial, limit)


def with_positions(checkpoint: Checkpoint, max_position: int) -> Checkpoint:
    """Return a checkpoint for sequences of up to `max_position` tokens.

    Positions beyond the model's own limit give useless text, but they show what the memory holds.
    """
    model = dataclasses.replace(checkpoint.model_config, max_position=max_position)
    return dataclasses.replace(checkpoint, model_config=model)

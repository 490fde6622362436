"""Compiler options of the tests' programs on the CPU.

Most programs of the suite run once, and compilation would take most of its time. Unoptimized code in one
module, made by XLA's older emitters, compiles in a third of the time and runs at a tenth to a half of the
speed. Programs that run often are compiled with optimization.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

FLAGS = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
# The same as XLA has them, for one program.
AS_XLA_HAS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
OFTEN = {
    "xla_backend_optimization_level": 1
}  # a little more care, for one that runs a thousand times or over much


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledOnce:
    """A lowered program that is compiled once for each set of compiler options.

    defaults: compiler options, where `compile` gets no others.
    """

    lowered: Any  # jax.stages.Lowered
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compiled: dict[tuple, Any] = dataclasses.field(default_factory=dict)  # by options

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Any:
        options = {**self.defaults, **(compiler_options or {})}
        key = tuple(sorted(options.items()))
        if key not in self.compiled:
            self.compiled[key] = self.lowered.compile(compiler_options=options or None)
        return self.compiled[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


shares = True  # engines share programs, see `shared_sampler`
_samplers: dict[tuple, CompiledOnce] = {}


def shared_sampler(lower: Callable[..., Any], lowering: Any, rows: int, kind: str) -> CompiledOnce:
    """Return a sampler of a `ProgramLowering`, lowered and compiled once for all
    engines that have the same sampler.

    The full sampler takes half a second to lower, and many engines of the tests need the same few samplers.
    lower: `ProgramLowering.sampler`.
    """
    if not shares:
        return CompiledOnce(lower(lowering, rows, kind), OFTEN)
    import jax  # FLAGS must be set before

    programs = lowering.programs
    config = programs.context.config
    context = dataclasses.replace(programs.context, config=None, windows=None)
    head, tree = jax.tree.flatten(lowering.head)
    key = (
        rows,
        kind,
        lowering.slots,
        programs.mesh,
        programs.rows_at_once,
        context,
        (config.hidden_size, config.vocab_size, config.logits_soft_cap),
        lowering.dtype,
        tree,
        *((a.shape, a.dtype, a.sharding) for a in head),
    )
    if key not in _samplers:
        _samplers[key] = CompiledOnce(lower(lowering, rows, kind), OFTEN)
    return _samplers[key]


_programs: dict[tuple, CompiledOnce] = {}


def shared_program(
    lower: Callable[..., Any],
    programs: Any,
    name: str,
    fn: Any,
    donated: Sequence[int],
    *args: Any,
) -> Any:
    """Lower and compile the programs of equal engines once, and keep them in memory until `forget_programs`.

    The key is the digest by which a folder finds a program, and the devices. A folder would cost a second
    lowering of each program that is written or read. Programs of other folders are written and read.
    lower: `LoweredPrograms.lower`, and its arguments.
    """
    import jax  # FLAGS must be set before

    if (
        programs.folder != Path(os.environ["JAX_COMPILATION_CACHE_DIR"], "lowered")
        or programs.target is not None
    ):
        return lower(programs, name, fn, donated, *args)
    placements = tuple(leaf.sharding for leaf in jax.tree.leaves(args))
    key = programs.digest(name, args), placements, tuple(donated)
    if key not in _programs:
        _programs[key] = CompiledOnce(fn.lower(*args))
    return _programs[key]


def forget_programs() -> None:
    """Free the programs of `shared_program`."""
    _programs.clear()


_lowered: dict[tuple, Any] = {}


@dataclasses.dataclass(frozen=True)
class LoweredOnce:
    """A jitted function that is lowered once for all functions with the same key."""

    jitted: Any
    key: tuple

    def lower(self, *arguments: Any) -> Any:
        if self.key not in _lowered:
            _lowered[self.key] = self.jitted.lower(*arguments)
        return _lowered[self.key]

    def trace(self, *arguments: Any) -> Any:
        return self.jitted.trace(*arguments)


def shared_lowering(
    over_devices: Callable[..., Any],
    function: Callable,
    mesh: Any,
    arguments: tuple,
    made: Any,
    donate: tuple[int, ...],
) -> tuple[LoweredOnce, tuple]:
    """Share the lowered programs of offloaded runs that have the same geometry, and the samplers of all runs.

    Lowering takes more than half of a start, since the programs of equal text are compiled once.
    over_devices: `jaxflow.flexgen.programs._over_devices`.
    """
    import jax  # FLAGS must be set before

    jitted, arguments = over_devices(function, mesh, arguments, made, donate)
    leaves, tree = jax.tree.flatten(arguments)
    owner = getattr(function, "__self__", None)
    # A sampler depends on its arguments and on the context, which names the kernels.
    owner = owner.context if function.__name__ in ("sample", "sample_full") else owner
    held = tuple(cell.cell_contents for cell in function.__closure__ or ())
    shapes = tuple((a.shape, a.dtype, a.sharding) for a in leaves)
    return LoweredOnce(
        jitted, (function.__qualname__, owner, held, mesh, tree, shapes, made, donate)
    ), arguments


class OnUse(dict):
    """A table of programs that compiles each program at its first use."""

    def __init__(self, compiles: Mapping[Any, Callable[[], Any]]) -> None:
        super().__init__()
        self.compiles = compiles

    def __missing__(self, key: Any) -> Any:
        self[key] = program = self.compiles[key]()
        return program


def compile_on_use(executor: Any) -> None:
    """Compile an `Executor`'s programs at their first use.

    Most tests use half of the programs. `Executor.warm_up` compiles the other half.
    """
    compiler = executor.compiler
    jobs = compiler.jobs()
    for name in ("steps", "samplers", "prompt", "small"):
        table = getattr(compiler, name)
        compiles = {
            job.key: lambda job=job: compiler._compile(job.lower(executor.num_pages), job.options)
            for job in jobs
            if job.table is table
        }
        setattr(compiler, name, OnUse(compiles))
    executor._warm = True


@contextlib.contextmanager
def compiled_with(options: Mapping[str, Any]) -> Iterator[None]:
    """Compile the programs of engines with these options inside the block. Explicit options win."""
    from jaxflow.engine.program_compiler import ProgramCompiler  # FLAGS must be set before JAX is imported

    compiled = ProgramCompiler._compile
    with mock.patch.object(
        ProgramCompiler,
        "_compile",
        lambda self, lowered, given=None: compiled(self, lowered, {**options, **(given or {})}),
    ):
        yield

"""A process that lowers and compiles programs for a starting engine, see `jaxflow.engine.lowering_processes`.

The process has no GPU. It makes the engine's executor, or the executor of each pipeline stage, from shapes in
place of arrays, on a mesh of CPU devices. It takes the description of the engine's device wherever a program
depends on the device. It compiles for a mesh of described devices, too (`jaxflow.engine.ahead_of_time`).
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxflow.engine.ahead_of_time import Target, compile_for, machine_code, needs_no_gpu, target_meshes
from jaxflow.engine.executor import Executor
from jaxflow.engine.heap import collector_paused
from jaxflow.engine.kernel_choice import choose_kernels
from jaxflow.engine.lowered_cache import LoweredPrograms, callable_again, read_signed, write_signed
from jaxflow.engine.lowering_processes import Description, Wanted
from jaxflow.engine.program_compiler import Job
from jaxflow.engine.stage_programs import make_stage, stage_names
from jaxflow.engine.start_times import StartTimes
from jaxflow.engine.weight_shapes import from_values
from jaxflow.model.stage import stages_of
from jaxflow.parallel.mesh import make_rank_mesh, on_gpu, stage_meshes
from pallas_kernels.kernel_set import has_bounded
from pallas_kernels.this_device import DeviceKind, lower_for


@dataclasses.dataclass(frozen=True)
class Portable:
    """A program of the folder, to compile for the devices of `mesh`."""

    programs: LoweredPrograms
    digest: str
    fn: jax.stages.Wrapped
    args: tuple
    mesh: Mesh | Exception

    def compile(self, options: dict[str, Any]) -> None:
        """Write the machine code into the folder, unless the folder has it. options: XLA's."""
        if isinstance(self.mesh, Exception):
            raise self.mesh
        path = self.programs.code_path(self.digest, options)
        if read_signed(path) is None:
            compiled = compile_for(self.mesh, self.fn, self.args, options)
            write_signed(path, machine_code(compiled, self.mesh.size))


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Lowers into a folder. A program for a GPU cannot be lowered further on the mesh of this process.

    mesh: of described devices; None to lower only; the reason why there is none.
    """

    programs: LoweredPrograms
    mesh: Mesh | Exception | None

    def lower(
        self, name: str, fn: jax.stages.Wrapped, donated: tuple[int, ...], *args: Any
    ) -> Portable | None:
        exported = self.programs.keep(name, fn, *args)
        if exported is None or self.mesh is None:
            return None
        again = callable_again(exported, donated)
        return Portable(self.programs, self.programs.digest(name, args), again, args, self.mesh)


def describe_device(device: DeviceKind) -> None:
    """Lower for a device, and import its kernels. Call it before JAX's first use."""
    jax.config.update("jax_platforms", "cpu")
    lower_for(device)
    if on_gpu() and has_bounded(device.capability):
        import pallas_kernels.attention.decode.api  # noqa: F401  # the first import of Mosaic GPU takes a second


def make_executors(given: Description) -> list[Executor]:
    """Return the executor of each stage whose programs the engine compiles, for lowering only."""
    tp, ranks = given.config.tensor_parallel_size, given.config.data_parallel_size
    devices = tp * ranks * len(given.weights)
    if jax.config.jax_num_cpu_devices != devices:  # a second description has as many as the first
        jax.config.update("jax_num_cpu_devices", devices)
    meshes = stage_meshes(tp, len(given.weights)) if ranks == 1 else (make_rank_mesh(ranks, tp),)
    stages = stages_of([len(weights["dict"]["layers"]["list"]) for weights in given.weights])
    names = stage_names(given.model, stages, given.weights)
    made = [
        make_stage(
            given.config,
            given.model,
            given.plans,
            stage,
            mesh,
            from_values(weights, mesh),
            choose_kernels(given.config, given.model),
            True,
            given.one,
            given.graphs,
            given.memory,
            StartTimes(),
            Path(given.folder),
            name,
        )
        for stage, mesh, weights, name in zip(stages, meshes, given.weights, names, strict=True)
    ]
    if on_gpu():
        for executor, mesh in zip(made, _described(given.target, meshes), strict=True):
            assert executor.lower.lowered is not None
            programs = dataclasses.replace(executor.lower.lowered, target=given.target)
            executor.lower.lowered = _Writer(programs, mesh)  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _described(target: Target | None, meshes: Sequence[Mesh]) -> Sequence[Mesh | Exception | None]:
    """Return meshes of described devices. An environment without the compiler lowers only, and says why."""
    try:
        return [None] * len(meshes) if target is None else target_meshes(target, meshes)
    except Exception as error:
        return [error] * len(meshes)


def answer(
    make: Callable[[Description], Sequence[Executor]], lines: Iterable[bytes], replies: IO[bytes]
) -> None:
    """Make the executors of each `Description`. Lower the program of each `Wanted`, compile it if that needs
    no GPU, and reply to the line.
    """
    jobs: dict[str, Job] = {}
    for line in lines:
        wanted = msgspec.json.decode(line, type=Description | Wanted)
        if isinstance(wanted, Description):
            jobs = {job.name + one.name: job for one in make(wanted) for job in one.compiler.jobs()}
            continue
        try:
            job = jobs[wanted.name]
            with collector_paused():
                lowered = job.lower(wanted.num_pages)
            if isinstance(lowered, Portable) and needs_no_gpu(job.options):
                lowered.compile(job.options)
            reason = ""
        except Exception as error:  # the engine makes the program itself, and meets a fault of lowering again
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:500]
        replies.write(msgspec.json.encode(reason) + b"\n")
        replies.flush()


def main() -> None:
    """Serve the engine at the other end of standard input and output until it closes them."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that nothing else is written to the engine
    lines = sys.stdin.buffer
    describe_device(msgspec.json.decode(lines.readline(), type=DeviceKind))
    answer(make_executors, lines, replies)


if __name__ == "__main__":
    main()

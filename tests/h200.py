"""Compile JAX programs for an H200 or an H100 on a machine without a GPU, and read XLA's schedule.

The group `aot` is needed: JAX's CUDA plugin, ptxas and libdevice. No driver and no CUDA library is needed.
The results are facts of the compiler: issued kernels, their order and streams, copies and memory. GEMMs are
untuned here, so their tiles and libraries differ from those of a real run.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import paths
from hurry import AS_XLA_HAS
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.cards import card_of

REPLICATED = PartitionSpec()
TARGET = paths.DATA / "xla" / "h200.txtpb"


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"  # JAX's kinds of devices


def h200_mesh(
    shape: Sequence[int] = (1,), names: Sequence[str] = ("tp",), hosts: int = 1, device: str = H200
) -> Mesh:
    """Return descriptions of H200s, for the compiler only.

    hosts: each has a process with an equal share of them. device: H100 for descriptions of H100s.
    """
    text = TARGET.read_text("utf-8")
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=text if device == H200 else h100_target(text),
        topology=f"1x{hosts}x{math.prod(shape) // hosts}",
    )
    return Mesh(np.array(topology.devices).reshape(shape), names)


def h100_target(h200: str) -> str:
    """Return the description of an H100 from that of an H200: another name, and the memory of its card.

    The cores, caches and machine code of both are the same.
    """
    hardware = card_of(H100).hardware
    assert hardware is not None
    figures = {
        "memory_bandwidth": int(hardware["datasheet"]["memory_bytes_per_s"]),
        "device_memory_size": int(hardware["memory_bytes"]),
        "core_count": hardware["sms"],
    }
    for name, value in figures.items():
        h200 = re.sub(rf"^(  {name}: )\d+$", rf"\g<1>{value}", h200, count=1, flags=re.M)
    memory = f"{figures['device_memory_size']}B RAM, {figures['core_count']} cores"
    h200 = re.sub(r"\d+B RAM, \d+ cores", memory, h200)
    return h200.replace("NVIDIA H200 141GB HBM3e", H100)


def abstract(mesh: Mesh, shapes: Any, specs: Any = REPLICATED) -> Any:
    """Return arguments to compile with: the leaves of `shapes` on `mesh`, placed by `specs`.

    specs: one spec, or a tree of specs.
    """
    if isinstance(specs, PartitionSpec):
        specs = jax.tree.map(lambda _: specs, shapes)
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


@dataclasses.dataclass(frozen=True)
class Thunk:
    """One line of XLA's schedule, in issue order."""

    depth: int  # above 0: inside an asynchronous region, a CUDA graph or a loop's body
    kind: str  # kKernel, kGemm, kAllReduce, kAsyncStart, kCopy, ...
    name: str
    stream: str  # "" is the main compute stream; computation_stream[1], communication_stream[0], ...
    async_id: int | None  # the same of a start and its done


_THUNK = re.compile(r"^(?P<indent> *)\d+: (?P<kind>\w+)\s*(\[.*?\])?\s*(?P<rest>.*)$", re.M)


def read_thunks(dump: str) -> tuple[Thunk, ...]:
    """Return the thunks of an XLA dump.

    A nested thunk runs on the stream of its region unless it names another.
    """
    thunks: list[Thunk] = []
    enclosing: list[str] = []  # the streams of the regions around the line
    for line in _THUNK.finditer(dump):
        depth, rest = len(line["indent"]) // 4, line["rest"]
        del enclosing[depth:]
        named = re.search(r"\w+_stream\[\d+\]", rest)
        stream = named[0] if named else enclosing[-1] if enclosing else ""
        enclosing.append(stream)
        async_id = re.search(r"async_id=(\d+)", rest)
        thunks.append(
            Thunk(depth, line["kind"], rest.partition(" ")[0], stream, int(async_id[1]) if async_id else None)
        )
    return tuple(thunks)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as compiled for the H200."""

    thunks: tuple[Thunk, ...]
    graph_thunks: tuple[Thunk, ...]  # the same after CUDA graphs were formed; empty if none was
    hlo: str  # optimised
    memory: Any  # argument, output, temp and alias sizes in bytes: jax.stages.Compiled.memory_analysis()
    machine_code: bool  # whether ptxas made a binary

    def instructions(self, opcode: str) -> list[str]:
        """The results of every instruction of this opcode, fused ones too, as dtype and shape:
        `bf16[64,8,64,128]`.
        """
        return re.findall(rf"= \(?(\w+\[[\d,]*\])[^=\n]*? {re.escape(opcode)}\(", self.hlo)

    def copies(self, shape: Sequence[int]) -> int:
        """Return the number of copies of arrays of this shape, by an instruction or asynchronously."""
        wanted = "[" + ",".join(map(str, shape)) + "]"
        return sum(
            result.endswith(wanted)
            for opcode in ("copy", "copy-start")
            for result in self.instructions(opcode)
        )


def compile_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    donate_argnums: Sequence[int] = (),
    **jit_options: Any,
) -> Compiled:
    """Compiles `fn` (jitted already, or not) for arguments that `abstract` made. `options` are XLA flags, of
    Python's types.

    Where MOSAIC_GPU_DUMP_TO names a folder, the Mosaic kernels' PTX and what ptxas says of each are there
    afterwards.
    """
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn, donate_argnums=donate_argnums, **jit_options)
    with tempfile.TemporaryDirectory() as folder, unkept(), _little_dumped():
        compiled = jitted.lower(*args).compile(
            compiler_options={"xla_dump_to": folder, **AS_XLA_HAS, **(options or {})}
        )
        dumps = {
            path.name: path.read_text("utf-8", errors="replace")
            for path in Path(folder).iterdir()
            if path.suffix == ".txt"
        }

    def dump(part: str) -> str:
        return next((text for name, text in sorted(dumps.items()) if part in name), "")

    return Compiled(
        thunks=read_thunks(dump("thunk_sequence.txt")),
        graph_thunks=read_thunks(dump("after_thunk_passes")),
        hlo=compiled.as_text(),
        memory=compiled.memory_analysis(),
        machine_code=b"\x7fELF" in compiled.runtime_executable().serialize(),
    )


@contextlib.contextmanager
def unkept() -> Iterator[None]:
    """Compiled programs do not go to the persistent cache: from it they would come without their dumps."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


_NUMBERS = itertools.count()  # kernels with a dump


@contextlib.contextmanager
def _little_dumped() -> Iterator[None]:
    """Dump only PTX and ptxas' log of Mosaic kernels.

    A dump folder would also get the MLIR between all passes, 250 MB and 3 s a kernel.
    """
    target = os.environ.pop("MOSAIC_GPU_DUMP_TO", None)
    if target is None:
        yield
        return
    wanted = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS")  # to stdout
    stdio, stdout = ctypes.CDLL(None), os.dup(1)
    os.environ.update(dict.fromkeys(wanted, "1"))
    with tempfile.TemporaryFile() as said:
        stdio.fflush(None)
        os.dup2(said.fileno(), 1)
        try:
            yield
        finally:
            stdio.fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
            os.environ["MOSAIC_GPU_DUMP_TO"] = target
            for name in wanted:
                del os.environ[name]
        said.seek(0)
        text = said.read().decode(errors="replace")
    for kernel in re.split(r"^//\n// Generated by LLVM NVPTX", text, flags=re.M)[1:]:
        number = next(_NUMBERS)
        ptx, log = re.split(r"^(?=ptxas )", kernel, maxsplit=1, flags=re.M)
        name = re.findall(r"^\.visible \.entry (\w+)_mosaic_gpu_kernel", ptx, re.M)[0]
        Path(target, f"{name}_{number}.ptx").write_text(ptx)
        Path(target, f"{name}_{number}.ptxas").write_text(log)

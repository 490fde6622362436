"""Programs that a process without a GPU compiles for the GPU of an engine.

XLA compiles under a lock of the process, so threads of an engine do not compile side by side, and processes
do. XLA needs no GPU for this: a description of the device is enough, which the engine sends (`Target`). The
engine loads the machine code in milliseconds. JAX then makes the `jax.stages.Compiled` as for a program of
its own cache, with the checks of shapes and shardings, the donated arguments and the memory analysis.

Without a GPU no kernel is timed, so XLA's own GEMMs take the first choice of cuBLAS. An engine that compiles
such a program itself gives XLA the same options (`untimed`), and makes the same program. A program whose
GEMMs are worth the timing is left to the engine (`is_timed`).
"""

import importlib.metadata
import itertools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from jax._src import compilation_cache
from jax._src.lib import xla_client
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from jaxflow.engine import compiled_cache
from jaxflow.engine.kernel_threads import kernels_of, start_kernels
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.plan import Plan
from pallas_kernels.kernel_set import has_bounded

log = logging.getLogger(__name__)
# Without a measurement, XLA would take tiles of 16x8 for a GEMM of its Triton
# kernels, a tenth of cuBLAS's speed.
UNTIMED = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
UNTIMED_WEIGHTS = (None, "fp8", "fp8_per_block")  # XLA reads other formats of weights in its Triton kernels
_PACKAGES = ("jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt")
_COUNT = 4  # bytes before machine code: the number of devices
_offered = threading.local()  # machine code in place of the next compilation of a thread


class Target(msgspec.Struct, frozen=True):
    """The devices to compile for, and all else that machine code depends on
    besides a program and its options.

    Attributes:
      device: XLA's description of one device.
      versions: of the compiler.
      flags: XLA's, of the environment.
    """

    device: str
    versions: tuple[str, ...]
    flags: str


class NotLoaded(BaseException):
    """Machine code that does not load. JAX takes an `Exception` here for a miss, and would compile."""


def untimed(quantization: str | None, capability: str) -> dict[str, Any]:
    """Return the XLA options of programs that need no timing of GEMMs; {} where
    the timing is worth its seconds.

    On GPUs with Mosaic kernels these kernels do most products, and cuBLAS the others, as fast as after a
    timing.
    """
    return UNTIMED if has_bounded(capability) and quantization in UNTIMED_WEIGHTS else {}


def is_timed(plan: Plan, tp: int) -> bool:
    """Return True for a plan whose steps XLA times the GEMMs of: an overlapped plan over several GPUs.

    On four H200s such a plan of Llama-3-70B in fp8 took about 1.2 times as long when another process compiled
    it without timing. Sequential steps took as long as with timing.
    """
    return tp > 1 and (plan.sums == "copies" or not is_sequential(plan))


def needs_no_gpu(options: Mapping[str, Any]) -> bool:
    """Return True if a process without a GPU makes the program that the engine would make.

    options: XLA's, of the program.
    """
    return options.items() >= UNTIMED.items()


def target_of(mesh: Mesh) -> Target | None:
    """Return the target of this process's GPUs, or None with a line in the
    log if XLA cannot describe them.
    """
    try:
        topology: Any = xla_client.get_topology_for_devices(list(mesh.devices.flat[:1]))
        return Target(str(topology.target_config), _versions(), os.environ.get("XLA_FLAGS", ""))
    except (AttributeError, TypeError, jax.errors.JaxRuntimeError) as error:
        log.info("programs are compiled by the engine alone, because the GPU has no description: %s", error)
        return None


def target_meshes(target: Target, meshes: Sequence[Mesh]) -> tuple[Mesh, ...]:
    """Return meshes of described devices, of the same shapes as the meshes of one process's devices.

    The devices of the meshes are the first ones of the process, one mesh after another.

    Raises: an exception of JAX or XLA in an environment that cannot compile for the target.
    """
    if target.versions != _versions():
        raise ValueError(f"the compiler's versions are {_versions()}, and the engine's {target.versions}")
    stops = list(itertools.accumulate(mesh.size for mesh in meshes))
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target.device, topology=f"1x1x{stops[-1]}"
    )
    return tuple(
        Mesh(np.array(topology.devices[stop - mesh.size : stop]).reshape(mesh.devices.shape), mesh.axis_names)
        for mesh, stop in zip(meshes, stops, strict=True)
    )


def compile_for(
    mesh: Mesh, fn: jax.stages.Wrapped, args: tuple, options: dict[str, Any]
) -> jax.stages.Compiled:
    """Return a jitted function, compiled for a mesh of `target_meshes`. Its Mosaic kernels compile at once.

    args: arrays or shapes with `NamedSharding`s of a mesh of the same shape.
    """

    def placed(a: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, a.sharding.spec, memory_kind=a.sharding.memory_kind)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    lowered = fn.lower(*jax.tree.map(placed, args))
    start_kernels(mesh, kernels_of(lowered.compiler_ir("stablehlo")), options)
    return lowered.compile(compiler_options=options)


def machine_code(compiled: jax.stages.Compiled, devices: int) -> bytes:
    """Return what `load` takes, in any process with equal devices. devices: how many run the program."""
    code = compiled.runtime_executable().serialize()  # pyright: ignore[reportOptionalMemberAccess]
    return devices.to_bytes(_COUNT) + code


def load(lowered: jax.stages.Lowered, code: bytes, options: dict[str, Any]) -> jax.stages.Compiled:
    """Return the program with machine code of `machine_code`.

    Raises:
      NotLoaded: XLA refuses the code, or the code is for another number of devices.
      AssertionError, ValueError: the code is another program's.
    """
    _offered.code = code
    try:
        return lowered.compile(compiler_options=options)
    finally:
        _offered.code = None


def _find_offered(
    cache_key: str, compile_options: Any, backend: Any, executable_devices: Any, *more: Any, **named: Any
) -> tuple[Any, int | None]:
    """Return the program that this thread is offered, or the one of JAX's cache."""
    code = getattr(_offered, "code", None)
    if code is None:
        return compiled_cache.find(cache_key, compile_options, backend, executable_devices, *more, **named)
    devices = {device.id for device in executable_devices}
    made_for = int.from_bytes(code[:_COUNT])
    if made_for != len(devices):  # XLA would end the process, or run the program on one device
        raise NotLoaded(f"it is for {made_for} devices, and the program for {len(devices)}")
    try:
        loaded = backend.deserialize_executable(code[_COUNT:], executable_devices, compile_options)
        there = {device.id for device in loaded.local_devices()}
    except Exception as error:
        raise NotLoaded(f"{type(error).__name__}: {error}") from error
    if there != devices:
        raise NotLoaded(f"it runs on the devices {sorted(there)}, not on {sorted(devices)}")
    return loaded, 0


compilation_cache.get_executable_and_time = (
    _find_offered  # JAX has no public place for a program from elsewhere
)


def _versions() -> tuple[str, ...]:
    """Return the versions of the installed packages of XLA's compiler."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)

"""The Mosaic kernels of a program, compiled side by side, on threads.

XLA compiles the kernels of a program one after another, on one thread. In a step of Llama-3.1-8B these
kernels take two thirds of the compilation. JAX keeps each compiled kernel in the process, under a hash of its
code. So a program that only calls one kernel leaves the compiled kernel there, and every later program of the
process finds it.

A lock of LLVM's options lets several kernels compile at once, but no kernel beside XLA's own generation of
code. So all kernels begin together. XLA waits for them at this lock, after the optimisation of the program.
"""

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

log = logging.getLogger(__name__)
TARGET = "mosaic_gpu_v2"  # the custom call of Mosaic kernels
MOST_THREADS = 16  # a step of Llama-3.1-8B has 10 kernels
_started: set[bytes] = set()  # the hashes of kernels that this process has compiled or compiles
_lock = threading.Lock()


def kernels_of(module: Any) -> dict[bytes, bytes]:
    """Return the code of each Mosaic kernel of a StableHLO module, by the hash that names the kernel."""
    found: dict[bytes, bytes] = {}

    def visit(op: Any) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call":
            attributes = op.attributes
            if ir.StringAttr(attributes["call_target_name"]).value == TARGET:
                config = ir.DictAttr(attributes["mhlo.backend_config"])
                name = ir.StringAttr(config["kernel_hash"]).value_bytes
                if name not in found:
                    found[name] = ir.StringAttr(config["module"]).value_bytes
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def start_kernels(mesh: Mesh, kernels: Mapping[bytes, bytes], options: dict[str, Any]) -> list[Future]:
    """Compile kernels on threads, those excepted that this process has begun before. Return their futures.

    A future never raises. A kernel that does not compile is left to the program, which raises the error.

    Args:
      mesh: of the program.
      kernels: of `kernels_of`.
      options: XLA's, of the program.
    """
    with _lock:
        new = {name: code for name, code in kernels.items() if name not in _started}
        _started.update(new)
    if len(new) < 2:  # XLA compiles a single kernel in the same time
        return []
    alone = NamedSharding(Mesh(np.array(mesh.devices.flat[:1]), ("x",)), PartitionSpec())
    programs = [_program(alone, name, code) for name, code in new.items()]
    pool = ThreadPoolExecutor(min(MOST_THREADS, len(programs)), thread_name_prefix="kernel")
    futures = [pool.submit(_compile, program, options) for program in programs]
    pool.shutdown(wait=False)
    return futures


def _program(where: NamedSharding, name: bytes, code: bytes) -> jax.stages.Lowered:
    """Return a lowered program that only calls a kernel. The program cannot run: it lacks the arguments."""
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((1,), jnp.float32))

    def run() -> Any:
        return call(kernel_hash=name, module=code, use_custom_barrier=False)

    return jax.jit(run, out_shardings=where).lower()


def _compile(program: jax.stages.Lowered, options: dict[str, Any]) -> None:
    try:
        program.compile(compiler_options=options)
    except Exception as error:
        log.debug("a kernel is left to its program: %s", error)

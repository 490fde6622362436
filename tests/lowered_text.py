"""Compare the lowered text of the default Llama-3.1-8B programs of two commits.

    python tests/lowered_text.py digests OUT.json [DEVICES ...]
    python tests/lowered_text.py compare BEFORE.json AFTER.json

`digests` lowers every program that an engine with default settings compiles on an H200: each step of each
token bucket, both samplers and the prompt log-probabilities, for bfloat16 and fp8 weights. DEVICES are
numbers of devices; the default is 1 2 4. The command needs no GPU. A digest is the SHA-256 of a program's
StableHLO without locations and symbol names. The text includes each Mosaic kernel's MLIR, without locations
and symbol names, and the XLA options of the program.

`compare` prints the programs that differ, and fails if there is one. It reports programs of one file
only, and compares the others.
"""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))  # the sources: tests/jaxflow has the name of a package
import h200
import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from jaxflow.config import EngineConfig
from jaxflow.engine import executor_start
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model import weights
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

MODEL = "llama-3.1-8b"
PAGES = 4096
MEMORY = (
    150_000_000_000  # bytes of one H200 that JAX may use: the full sampler's rows at once follow from them
)
CACHES = {None: "bfloat16", "fp8": "fp8"}  # by weights


def main(command: str, *arguments: str) -> int:
    """Run a command of the module's docstring. Returns the exit status."""
    if command == "digests" and arguments:
        numbers = [int(number) for number in arguments[1:]] or [1, 2, 4]
        found = {name: value for devices in numbers for name, value in digests(devices)}
        Path(arguments[0]).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
        return 0
    if command == "compare" and len(arguments) == 2:
        before, after = (json.loads(Path(path).read_text("utf-8")) for path in arguments)
        both = sorted(before.keys() & after.keys())
        differing = [name for name in both if before[name] != after[name]]
        print(f"{len(both)} programs, {len(differing)} differ", *differing, sep="\n  ")
        print(
            f"{len(before.keys() ^ after.keys())} programs of one file only",
            *sorted(before.keys() ^ after.keys()),
            sep="\n  ",
        )
        return bool(differing)
    print(__doc__)
    return 2


def digests(devices: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each default program on so many devices."""
    for quantization, cache in CACHES.items():
        executor = abstract_executor(devices, quantization, cache)
        for name, lowered, options in programs(executor):
            key, begin = f"{MODEL} {quantization or 'bfloat16'} tp{devices}: {name}", time.perf_counter()
            text = normalized(lowered()) + json.dumps(options, sort_keys=True)
            yield key, hashlib.sha256(text.encode()).hexdigest()
            print(f"{time.perf_counter() - begin:5.1f} s  {key}", file=sys.stderr, flush=True)


def abstract_executor(devices: int, quantization: str | None, cache: str) -> Executor:
    """Return the executor that an engine with default settings makes on H200s, without arrays."""
    mesh = h200.h200_mesh((devices,))
    checkpoint = open_checkpoint(MODEL, load_format="dummy")
    config = EngineConfig(
        MODEL, load_format="dummy", quantization=quantization, kv_cache_dtype=cache, num_kv_pages=PAGES,
        tensor_parallel_size=devices, compilation_cache_dir="",
    )  # fmt: skip

    def load(self, dtype: str, mesh: jax.sharding.Mesh, **settings: Any) -> Any:
        how = {name: settings[name] for name in ("quantization", "kv_scales")}
        shapes = weights.shapes(self.model_config, devices, jnp.dtype(dtype), **how)
        specs = weights.shardings(self.model_config, mesh, **how)
        return h200.abstract(mesh, shapes, specs)

    def allocate(self, num_pages: tuple[int, ...]) -> None:
        self.num_pages = num_pages

    stats = {"bytes_limit": MEMORY, "bytes_in_use": 0}
    card = SimpleNamespace(
        device_kind="NVIDIA H200", compute_capability="9.0", platform="gpu", memory_stats=lambda: stats
    )
    nbytes = property(lambda shape: shape.size * shape.dtype.itemsize)
    with (
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        mock.patch.object(jax, "devices", lambda: [card] * devices),
        mock.patch.object(jax.sharding.Mesh, "local_devices", property(lambda mesh: [card] * devices)),
        mock.patch.object(jax.ShapeDtypeStruct, "nbytes", nbytes, create=True),
        mock.patch.object(executor_start, "stage_meshes", lambda size, stages: (mesh,)),
        mock.patch.object(executor_start, "open_pools", lambda devices: None),
        mock.patch.object(type(checkpoint), "load", load),
        mock.patch.object(Executor, "allocate", allocate),
    ):
        config = resolve(config, checkpoint.model_config)
        plans = choose_plans(config, checkpoint.model_config)
        return make_executor(config, checkpoint, plans, progress=False)


def programs(executor: Executor) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield each program that `Executor.warm_up` compiles: its name, a
    function that lowers it, its options.
    """
    steps = [layout for several in executor.layouts.values() for layout in several]
    steps += executor.decode_layouts.values()
    for layout in steps:
        name = f"step of {layout.tokens}, {layout.plan}{', decodes only' if layout.decodes else ''}"
        yield (
            name,
            lambda layout=layout: executor.lower.whole_step(layout, executor.num_pages),
            executor.compiler.options_of(layout),
        )
    for rows in sorted({layout.rows for layout in steps}):
        for kind in ("plain", "full"):
            yield (
                f"{kind} sampler of {rows}",
                lambda rows=rows, kind=kind: executor.lower.sampler(rows, kind),
                {},
            )
    for tokens in executor.layouts:
        yield f"prompt of {tokens}", lambda tokens=tokens: executor.lower.prompt(tokens), {}


def normalized(lowered: Any) -> str:
    """Return a lowered program's text without locations and symbol names, its Mosaic kernels' included."""
    module = lowered.compiler_ir("stablehlo")
    payloads: dict[str, str] = {}

    def replace(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes:
            config = op.attributes["mhlo.backend_config"]
            if isinstance(config, ir.DictAttr) and "module" in config:
                plain = {a.name: str(a.attr) for a in config if a.name not in ("module", "kernel_hash")}
                text = _kernel_text(ir.StringAttr(config["module"]).value_bytes) + repr(sorted(plain.items()))
                digest = hashlib.sha256(text.encode()).hexdigest()
                payloads[digest] = text
                with module.context:
                    op.attributes["mhlo.backend_config"] = ir.StringAttr.get(digest)
        return ir.WalkResult.ADVANCE

    module.operation.walk(replace)
    return _without_names(module.operation.get_asm(enable_debug_info=False))


_KERNELS: dict[bytes, str] = {}


def _kernel_text(bytecode: bytes) -> str:
    """Return the MLIR of a Mosaic kernel without locations and symbol names."""
    key = hashlib.sha256(bytecode).digest()
    if key not in _KERNELS:
        context = mlir.make_ir_context()
        context.allow_unregistered_dialects = True
        with context:
            kernel = ir.Module.parse(bytecode)
            _KERNELS[key] = _without_names(kernel.operation.get_asm(enable_debug_info=False))
    return _KERNELS[key]


def _without_names(text: str) -> str:
    """Number the symbols that a module defines by their first appearance, and drop its name."""
    defined = set(re.findall(r'func\.func(?: \w+)* @([\w.$-]+|"[^"]*")\(', text))
    defined |= set(re.findall(r'sym_name = "([^"]+)"', text))
    numbers: dict[str, str] = {}

    def number(found: re.Match) -> str:
        name = found[1] or found[2]
        bare = name.strip('"')
        if name not in defined and bare not in defined:
            return found[0]
        symbol = numbers.setdefault(bare, f"s{len(numbers)}")
        return f"@{symbol}" if found[1] else f'sym_name = "{symbol}"'

    text = re.sub(r'@([\w.$-]+|"[^"]*")|sym_name = "([^"]+)"', number, text)
    return re.sub(r"^module @\S+", "module", text)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

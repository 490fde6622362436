"""Keeps lowered programs from one start to the next.

XLA's own cache keeps what it has compiled under a hash of the lowered program. To have that program again
Python traces and lowers it, which for a step with Mosaic kernels takes one to three seconds: nearly all of a
warm start. Here it is kept itself, as StableHLO (`jax.export`), under a hash of what it was made of: JAX's
versions, our source, the engine's settings and the shapes of its arguments.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export

import pallas_kernels
from jaxflow.engine.programs import Rows
from jaxflow.model.logprobs import LogprobsOut
from jaxflow.model.slot_params import SlotParams
from pallas_kernels.quantized import Int4, Quantized

log = logging.getLogger(__name__)

# A kept program's versions are this process's own: no custom call needs to be stable for longer.
_ANY_CALL = (export.DisabledSafetyCheck.custom_call("ALL"),)
_DIGEST = hashlib.sha256().digest_size

for _type in (Rows, LogprobsOut, SlotParams):  # whose fields are all arrays
    export.register_pytree_node_serialization(
        _type,
        serialized_name=f"{_type.__module__}.{_type.__qualname__}",
        serialize_auxdata=lambda auxiliary: b"",
        deserialize_auxdata=lambda data: (),
    )
for _type in (Quantized, Int4):
    export.register_namedtuple_serialization(
        _type, serialized_name=f"{_type.__module__}.{_type.__qualname__}"
    )


@dataclasses.dataclass(frozen=True)
class LoweredPrograms:
    """A folder of lowered programs.

    made_of: everything but the arguments' shapes and our code that decides what they are. platforms:
    `jax.export`'s; None: this process's.
    """

    folder: Path
    made_of: str
    platforms: tuple[str, ...] | None = None

    def lower(
        self, name: str, fn: jax.stages.Wrapped, donated: Sequence[int], *args: Any
    ) -> jax.stages.Lowered:
        """`fn.lower(*args)`, from the folder if it is there.

        Args:
          name: what tells the program from others of these settings and arguments.
          fn: jitted. donated: its `donate_argnums`. args: arrays, or what has their shape, dtype and
          sharding.
        """
        path = self.folder / self._digest(name, args)
        exported = _read(path)
        if exported is None:
            try:
                exported = export.export(fn, platforms=self.platforms, disabled_checks=_ANY_CALL)(*args)
                _write(path, exported.serialize())
            except (NotImplementedError, ValueError) as error:  # it calls Python, say
                log.warning("program %r cannot be kept, and is lowered at each start: %s", name, error)
                return fn.lower(*args)

        def run(*args):
            return exported.call(*args)

        return jax.jit(run, donate_argnums=donated).lower(*args)

    def _digest(self, name: str, args: tuple) -> str:
        leaves, tree = jax.tree.flatten(args)
        described = (
            name,
            self.made_of,
            _code(),
            str(tree),
            [f"{a.shape} {a.dtype} {a.sharding}" for a in leaves],
        )
        return hashlib.sha256(repr(described).encode()).hexdigest()


def beside_compiled(made_of: tuple) -> LoweredPrograms | None:
    """Those of this device, in XLA's cache, if there is one. made_of: what decides what they are, of values
    whose repr says all.
    """
    cache = jax.config.jax_compilation_cache_dir
    return (
        LoweredPrograms(Path(cache) / "lowered", repr((made_of, jax.devices()[0].device_kind)))
        if cache
        else None
    )


@functools.cache
def _code() -> str:
    """A hash of what turns settings into programs: versions, and the source and tables of our packages that
    run in a step.
    """
    found = hashlib.sha256(repr([importlib.metadata.version(name) for name in ("jax", "jaxlib")]).encode())
    for root in (Path(__file__).parents[1], Path(pallas_kernels.__path__[0])):
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".json")):
            content = path.read_bytes()
            found.update(f"{root.name}/{path.relative_to(root)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _read(path: Path) -> export.Exported | None:
    """The program of a file; None where there is none, or none that is whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
        log.warning("%s is damaged: its program is lowered again", path)
        return None
    return export.deserialize(bytearray(zlib.decompress(content[_DIGEST:])))


def _write(path: Path, program: bytearray) -> None:
    """Whole or not at all; a folder that cannot be written to costs the next start its time, nothing else."""
    packed = zlib.compress(bytes(program), level=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(packed).digest() + packed)
            os.replace(beside, path)
        except OSError:
            os.unlink(beside)
            raise
    except OSError as error:
        log.warning("a lowered program is not kept: %s", error)

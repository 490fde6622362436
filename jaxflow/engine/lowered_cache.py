"""The cache of lowered programs, from one start to the next.

XLA's cache keeps compiled programs under a hash of the lowered program. Tracing and lowering a step with
Mosaic kernels takes one to three seconds in Python, nearly all of a warm start. This cache keeps the lowered
program, as StableHLO (`jax.export`), under a hash of its origin: the versions of JAX, the sources that
lowering runs, the engine's settings and the shapes of the arguments. Old programs are deleted, see `_evict`.

Beside a lowered program the folder may hold machine code that a process compiled
(`jaxflow.engine.ahead_of_time`).
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, Sharding

from jaxflow.engine import ahead_of_time
from jaxflow.engine.ahead_of_time import NotLoaded, Target
from jaxflow.engine.compiled_cache import write_whole
from jaxflow.engine.programs import Rows
from jaxflow.engine.start_times import count_loaded
from jaxflow.model.batch import Batch
from jaxflow.model.logprobs import LogprobsOut
from jaxflow.model.slot_params import SlotParams
from pallas_kernels.attention.chunk.work_list import ChunkWork
from pallas_kernels.attention.decode.work_list import DecodeWork
from pallas_kernels.attention.latent.work_list import LatentWork
from pallas_kernels.quantized import FORMATS
from pallas_kernels.this_device import described_device, this_device

log = logging.getLogger(__name__)

# A program is read by the versions that wrote it, so its custom calls need not be stable.
_ANY_CALL = (export.DisabledSafetyCheck.custom_call("ALL"),)
_DIGEST = hashlib.sha256().digest_size
_TREE = Path(__file__).parents[2]
_ROOTS = (
    "jaxflow.engine.programs",
    "jaxflow.engine.layered_step",
    "jaxflow.engine.layout",
    "jaxflow.engine.kernel_choice",
    "jaxflow.pipeline.compiler",
    "jaxflow.model.weights",
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]+)|import[ \t]+([^\n]+))", re.MULTILINE
)
_MAX_BYTES = 2 << 30  # the limit of the folder; an 8B model's programs take about 0.1 GB
_WITHOUT_CACHE = threading.Lock()
_MAX_AGE_S = 30 * 24 * 3600.0  # since the last use

for _type in (
    Rows,
    Batch,
    LogprobsOut,
    SlotParams,
    ChunkWork,
    DecodeWork,
    LatentWork,
):  # their fields are all arrays
    export.register_pytree_node_serialization(
        _type,
        serialized_name=f"{_type.__module__}.{_type.__qualname__}",
        serialize_auxdata=lambda auxiliary: b"",
        deserialize_auxdata=lambda data: (),
    )
for _type in FORMATS:
    export.register_namedtuple_serialization(
        _type, serialized_name=f"{_type.__module__}.{_type.__qualname__}"
    )


@dataclasses.dataclass(frozen=True)
class LoweredPrograms:
    """A folder of lowered programs.

    Attributes:
      made_of: everything that the programs depend on, except the arguments' shapes and the code.
      platforms: see `jax.export`; None for this process's platform.
      target: of machine code in the folder; None to use no such code.
      only_reads: raise `NotKeptError` for a program that the folder lacks, in place of making the program.
    """

    folder: Path
    made_of: str
    platforms: tuple[str, ...] | None = None
    target: Target | None = None
    only_reads: bool = False

    def lower(
        self, name: str, fn: jax.stages.Wrapped, donated: Sequence[int], *args: Any
    ) -> "jax.stages.Lowered | Kept":
        """Return `fn.lower(*args)`, from the folder if it has the program.

        Args:
          name: distinguishes programs of equal settings and arguments.
          fn: a jitted function.
          donated: the `donate_argnums` of `fn`.
          args: arrays, or objects with their shape, dtype and sharding.
        """
        exported = self.keep(name, fn, *args)
        if exported is None:
            return fn.lower(*args)
        lowered = callable_again(exported, donated).lower(*args)
        return lowered if self.target is None else Kept(lowered, self, self.digest(name, args))

    def keep(self, name: str, fn: jax.stages.Wrapped, *args: Any) -> export.Exported | None:
        """Return a program of the folder, which is lowered and written first if the folder lacks it.

        Arguments: see `lower`. The result is None for a program that cannot be kept.
        """
        path = self.folder / self.digest(name, args)
        packed = read_signed(path)
        exported = None if packed is None else unpack(packed)
        if exported is None and self.only_reads:
            raise NotKeptError(f"the folder has no program {name!r} of these settings and arguments")
        if exported is None:
            try:
                made = export.export(fn, platforms=self.platforms, disabled_checks=_ANY_CALL)(*args)
                exported = _on_described_device(made)
                write_signed(path, zlib.compress(exported.serialize(), level=1))
            except (NotImplementedError, ValueError) as error:  # for example a program that calls Python
                log.warning("program %r cannot be kept and is lowered at each start: %s", name, error)
                return None
        return exported

    def code_path(self, digest: str, options: dict[str, Any] | None) -> Path:
        """Return the file of a program's machine code. options: XLA's."""
        made_of = repr((digest, sorted((options or {}).items()), self.target)).encode()
        return self.folder / f"{hashlib.sha256(made_of).hexdigest()}.code"

    def digest(self, name: str, args: tuple) -> str:
        """Return the name of the file of a program. Arguments: see `lower`."""
        leaves, tree = jax.tree.flatten(args)
        described = (
            name,
            self.made_of,
            code_digest(),
            str(tree),
            [f"{a.shape} {a.dtype} {_placement(a.sharding)}" for a in leaves],
        )
        return hashlib.sha256(repr(described).encode()).hexdigest()


def callable_again(exported: export.Exported, donated: Sequence[int]) -> jax.stages.Wrapped:
    """Return a program of the folder as a jitted function."""

    def run(*args):
        return exported.call(*args)

    return jax.jit(run, donate_argnums=donated)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A lowered program. The folder may have its machine code."""

    lowered: jax.stages.Lowered
    programs: LoweredPrograms
    digest: str

    def compiler_ir(self, dialect: str) -> Any:
        """Return the program, see `jax.stages.Lowered`."""
        return self.lowered.compiler_ir(dialect)

    def load(self, options: dict[str, Any] | None) -> jax.stages.Compiled | None:
        """Return the program with the folder's machine code; None without it, or where it does not fit."""
        path = self.programs.code_path(self.digest, options)
        if not jax.config.jax_enable_compilation_cache:
            return None
        code = read_signed(path)
        if code is None:
            path.unlink(missing_ok=True)  # of a damaged file
            return None
        try:
            found = ahead_of_time.load(self.lowered, code, options or {})
        except (NotLoaded, AssertionError, ValueError) as error:
            log.warning(
                "the machine code of a process does not fit; the program is compiled again: %s", error
            )
            path.unlink(missing_ok=True)
            jax.clear_caches()  # the process keeps the wrong program in memory, too
            return None
        count_loaded()
        return found


class NotKeptError(Exception):
    """A program is not in a folder that is only read."""


def open_lowered_programs(made_of: tuple, folder: Path | None = None) -> LoweredPrograms | None:
    """Return the lowered programs of this device in a folder; None without a folder.

    Args:
      made_of: everything that the programs depend on, as values with a complete repr.
      folder: None for `lowered_folder`.
    """
    folder = folder or lowered_folder()
    described = described_device()
    platforms = None if described is None else ("cuda" if described.platform == "gpu" else "cpu",)
    return None if folder is None else LoweredPrograms(folder, repr((made_of, this_device().name)), platforms)


def lowered_folder() -> Path | None:
    """Return the folder of lowered programs, in the folder of XLA's cache; None without that cache."""
    cache = jax.config.jax_compilation_cache_dir
    return Path(cache) / "lowered" if cache else None


def _placement(sharding: Sharding) -> str:
    """Return the axes of an array over a mesh, in words that are the same for all devices."""
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    kind = "" if sharding.memory_kind in (None, "device") else sharding.memory_kind
    return f"{dict(sharding.mesh.shape)} {sharding.spec} {kind}"


def _on_described_device(exported: export.Exported) -> export.Exported:
    """Return a program with the device of `lower_for` in its shardings, in place of this process's device."""
    device = described_device()
    if device is None:
        return exported
    kind = jax.sharding.AbstractDevice(device.name, device.sms, device.platform)

    def placed(sharding: NamedSharding | None) -> NamedSharding | None:
        if sharding is None:
            return None
        mesh: Any = sharding.mesh
        return NamedSharding(
            mesh.update(abstract_device=kind), sharding.spec, memory_kind=sharding.memory_kind
        )

    return dataclasses.replace(
        exported,
        _in_named_shardings=tuple(map(placed, exported._in_named_shardings)),
        _out_named_shardings=tuple(map(placed, exported._out_named_shardings)),
    )


def compile_program(
    lowered: jax.stages.Lowered | Kept, options: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Return the compiled program.

    One of XLA's cache that does not fit is compiled again, without the cache.

    Raises:
      NotKeptError: see `LoweredPrograms`.
    """
    if isinstance(lowered, Kept):
        found = lowered.load(options)
        if found is not None:
            return found
        if lowered.programs.only_reads:
            raise NotKeptError("the folder has no machine code of a program")
        lowered = lowered.lowered
    try:
        return lowered.compile(compiler_options=options or None)
    except (AssertionError, ValueError) as error:
        if not (jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache):
            raise
        log.warning(
            "a program of the compilation cache is another program's; it is compiled again: %s", error
        )
    with _WITHOUT_CACHE:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX decides once whether it uses the cache
        jax.clear_caches()  # the process keeps the wrong program in memory, too
        try:
            return lowered.compile(compiler_options=options or None)
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()


@functools.cache
def code_digest() -> str:
    """Return a hash of the code that makes a step's programs: versions, and
    the sources of `lowering_files`.
    """
    found = hashlib.sha256(repr([importlib.metadata.version(name) for name in ("jax", "jaxlib")]).encode())
    for path in lowering_files():
        content = path.read_bytes()
        found.update(f"{path.relative_to(_TREE)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def lowering_files() -> list[Path]:
    """Return the files that lowering a step may run or read, sorted.

    They are `_ROOTS`, all modules of this project that those import, and the tables of the kernels.
    """
    found: set[Path] = set()
    waiting = [_module_file(name) for name in _ROOTS]
    while waiting:
        path = waiting.pop()
        if path is None or path in found:
            continue
        found.add(path)
        waiting += [_module_file(name) for name in imported_names(path.read_text("utf-8"))]
    tables = (_TREE / "pallas_kernels").rglob("*.json")
    return sorted(found | set(tables))


def imported_names(source: str) -> set[str]:
    """Return at least the modules that a source imports, anywhere in it, and the
    names that it takes from them.

    A search for import statements takes a tenth of the time of parsing, which
    was half a second of each start.
    """
    found: set[str] = set()
    for statement in _IMPORT.finditer(re.sub(r"#.*", "", source)):
        module, taken, modules = statement.groups()
        names = re.findall(r"([\w.]+)(?:[ \t]+as[ \t]+\w+)?", taken or modules)
        found |= {f"{module}.{name}" for name in names} | {module} if module else set(names)
    return found


def _module_file(name: str) -> Path | None:
    """Return the file of one of this project's modules; None for any other name."""
    if name.partition(".")[0] not in ("jaxflow", "pallas_kernels"):
        return None
    path = _TREE.joinpath(*name.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    if name == "jaxflow":  # the package imports the Python API, which lowers nothing
        return None
    return next((file for file in files if file.is_file()), None)


def read_signed(path: Path) -> bytes | None:
    """Return the content of a file of `write_signed`; None for a missing or damaged file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if _signature(path, content[_DIGEST:]) != content[:_DIGEST]:
        log.warning("%s is damaged or another program's; its program is made again", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # `_evict` deletes the programs that were not used for the longest time
    return content[_DIGEST:]


def unpack(packed: bytes) -> export.Exported:
    """Return the program of a file's content."""
    return export.deserialize(bytearray(zlib.decompress(packed)))


def _signature(path: Path, content: bytes) -> bytes:
    """Return a hash of a file's name and content, so that two files cannot change places."""
    return hashlib.sha256(path.name.encode() + content).digest()


def write_signed(path: Path, content: bytes) -> None:
    """Write a program completely or not at all. Log a warning where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _signature(path, content) + content)
        _evict(path.parent)
    except OSError as error:
        log.warning("a program is not kept: %s", error)


def _evict(folder: Path) -> None:
    """Delete programs that were not used for `_MAX_AGE_S`, and the least
    recently used beyond `_MAX_BYTES`.
    """
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process has deleted the file
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    now, total = time.time(), 0
    for used, size, path in sorted(files, reverse=True):
        total += size
        if total > _MAX_BYTES or now - used > _MAX_AGE_S:
            path.unlink(missing_ok=True)

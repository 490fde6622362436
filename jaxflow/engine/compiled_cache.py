"""JAX's folder of compiled programs, with whole entries only.

JAX writes an entry in place. A process that ends meanwhile leaves a part of the entry. JAX never replaces
an entry, so each later start would warn and compile the program again. A process that reads an entry while
another one writes it would read a part, too.

JAX writes entries in process 0 only. Each process of an engine keeps its programs here, because a process may
run on another host, or have programs of another pipeline stage.
"""

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler, distributed
from jax._src.lru_cache import LRUCache

log = logging.getLogger(__name__)
_find, _put = compilation_cache.get_executable_and_time, LRUCache.put
_keep = compiler._cache_write


def find(key: str, *args: Any, **named: Any) -> tuple[Any, int | None]:
    """Return a program of the folder and the seconds of its compilation; (None, None) if there is none.

    A damaged entry is deleted, so that JAX writes it again. Arguments: of JAX's `get_executable_and_time`.
    """
    try:
        return _find(key, *args, **named)
    except jax.errors.JaxRuntimeError:  # the entry is whole, and the device refuses the program
        raise
    except Exception as error:
        log.warning("a program that cannot be read is compiled again: %s: %s", type(error).__name__, error)
        with contextlib.suppress(OSError):
            _path(str(jax.config.jax_compilation_cache_dir), key).unlink()
        return None, None


def put(cache: LRUCache, key: str, value: bytes) -> None:
    """Write an entry by `write_whole`. See `LRUCache.put`."""
    if cache.eviction_enabled or not cache._is_local:
        return _put(cache, key, value)
    path = _path(cache.path, key)
    if path.exists():
        return None
    return write_whole(path, value)


def keep(key: str, seconds: float, name: str, backend: Any, program: Any) -> None:
    """Keep a compiled program in the folder, in any process of an engine.

    Log a warning where a process other than 0 cannot write it. seconds: of the compilation.
    """
    if not distributed.global_state.process_id:
        return _keep(key, seconds, name, backend, program)
    if seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
        return None
    try:
        return compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))
    except Exception as error:
        return log.warning("the program %s is not kept: %s: %s", name, type(error).__name__, error)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file completely or not at all. Other users may read it if the process's umask lets them.

    Raises: OSError.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _path(folder: str | os.PathLike, key: str) -> Path:
    return Path(folder, f"{key}-cache")


# JAX has no public place for other ways to write.
compiler._cache_write = keep
LRUCache.put = put  # pyright: ignore[reportAttributeAccessIssue]

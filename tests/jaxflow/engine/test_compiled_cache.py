"""JAX's folder of compiled programs: entries are whole, and damaged ones are replaced."""

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache import compilation_cache

import jaxflow.engine.ahead_of_time  # noqa: F401  # sets how JAX reads and writes

SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture
def folder(tmp_path):
    settings = SETTINGS | {"jax_compilation_cache_dir": str(tmp_path)}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_again():
    """Compile a program that this process has forgotten, and return its result for 3."""
    jax.clear_caches()
    return jax.jit(lambda x: jnp.sin(x) * 41)(np.float32(3))


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_damaged_entry_is_written_again_without_a_warning(folder, length):
    expected = compile_again()
    entries = {path: path.read_bytes() for path in folder.glob("*-cache")}
    assert entries
    for path, whole in entries.items():
        path.write_bytes(whole[:length])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_again() == expected
    for path, whole in entries.items():
        assert len(path.read_bytes()) > max(length, len(whole) // 2)
    assert compile_again() == expected


@pytest.mark.parametrize("process", [0, 1])
def test_each_process_keeps_its_programs(folder, monkeypatch, process):
    monkeypatch.setattr(distributed.global_state, "process_id", process)
    expected = float(compile_again())
    kept = {path: path.stat().st_ino for path in folder.glob("*-cache")}
    assert kept and float(compile_again()) == expected
    assert {path: path.stat().st_ino for path in folder.glob("*-cache")} == kept


def test_a_program_that_cannot_be_kept_runs(folder, monkeypatch, caplog):
    def fail(*paths):
        raise OSError("no space left")

    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    monkeypatch.setattr(os, "replace", fail)
    assert float(compile_again()) == float(compile_again())
    assert "no space left" in caplog.text and not list(folder.iterdir())


def test_a_write_that_ends_early_leaves_nothing(tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError("no space left")

    cache = LRUCache(str(tmp_path), max_size=-1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            cache.put("key", b"program")
    assert not list(tmp_path.iterdir()) and cache.get("key") is None
    cache.put("key", b"program")
    cache.put("key", b"other")
    assert cache.get("key") == b"program"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_umask_decides_who_reads_an_entry(tmp_path, umask):
    before = os.umask(umask)
    try:
        LRUCache(str(tmp_path), max_size=-1).put("key", b"program")
    finally:
        os.umask(before)
    (entry,) = tmp_path.iterdir()
    assert entry.stat().st_mode & 0o777 == 0o666 & ~umask

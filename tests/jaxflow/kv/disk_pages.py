"""Pages for the tests of the disk store, and failing disks."""

import os
import types
from collections.abc import Callable

import numpy as np

from jaxflow.kv.tiers import page_file
from jaxflow.kv.tiers.disk_store import DiskStore
from jaxflow.kv.tiers.page_file import HEADER_BYTES

PAGE = (512, 96)  # bytes of a page of each group
FILE = PAGE[0] + HEADER_BYTES
MODEL = b"a model"


def key(i: int, group: int = 0) -> bytes:
    return bytes([group]) + i.to_bytes(16, "big")


def page(i: int, group: int = 0) -> np.ndarray:
    return np.random.default_rng([i, group]).integers(0, 256, PAGE[group], dtype=np.uint8)


def parts(i: int, group: int = 0) -> Callable[[], list[np.ndarray]]:
    """Return a page as two shards."""
    return lambda: np.split(page(i, group).view(np.uint32), 2)


def put(tier: DiskStore, *numbers: int) -> None:
    """Write pages, one after another."""
    for i in numbers:
        assert tier.put(key(i), parts(i))
        settled(tier)


def settled(tier: DiskStore) -> None:
    """Wait for the writer."""
    tier._writer.submit(lambda: None).result(30)


def fetched(tier: DiskStore, name: bytes) -> np.ndarray | None:
    future = tier.prefetch(name)
    return None if future is None else future.result(30)


def same(found: np.ndarray | None, i: int, group: int = 0) -> bool:
    return found is not None and np.array_equal(found, page(i, group))


def holds(tier: DiskStore, i: int) -> bool:
    found = tier.get(key(i))
    assert found is None or same(found, i)
    return found is not None


class faults:
    """Replaced functions of `os` in `page_file`."""

    def __init__(self, monkeypatch, **functions):
        self._patch, self._functions = monkeypatch, functions

    def __enter__(self):
        every = {name: getattr(os, name) for name in dir(os)} | self._functions
        self._patch.setattr(page_file, "os", types.SimpleNamespace(**every))

    def __exit__(self, *_):
        self._patch.undo()


def fails(number):
    def raises(*_, **__):
        raise OSError(number, os.strerror(number))

    return raises

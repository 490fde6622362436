"""Fixture of disk stores that leave nothing behind."""

import threading

import pytest
from disk_pages import FILE, MODEL, PAGE

from jaxflow.kv.tiers.disk_store import DiskStore


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a store over one folder and closes the last store first."""
    tiers = []

    def make(pages: int = 100, fingerprint: bytes = MODEL, **settings) -> DiskStore:
        if tiers:
            tiers.pop().close()
        tiers.append(DiskStore(tmp_path, pages * FILE, fingerprint, PAGE, **settings))
        return tiers[-1]

    before = set(threading.enumerate())
    yield make
    for tier in tiers:
        tier.close()
    assert set(threading.enumerate()) <= before, "threads are left"
    assert not list(tmp_path.rglob("*.tmp")), "temporary files are left"

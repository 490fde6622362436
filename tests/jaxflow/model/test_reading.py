"""Reading side by side: the order, the memory in use, faults, and the memory that threads keep."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.model.checkpoints import reading
from jaxflow.model.checkpoints.reading import ReusedMemory, new_memory, read_ahead, read_side_by_side


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 6))
def test_the_order_stays_and_the_memory_is_bounded(sizes, threads):
    held, most, lock = [], [0], threading.Lock()

    def read(item):
        with lock:
            held.append(item[1])
            if len(held) > reading.FEWEST:
                most[0] = max(most[0], sum(held))
        time.sleep(1e-4)
        with lock:
            held.remove(item[1])
        return item

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "HELD_BYTES", 64)
        items = list(enumerate(sizes))
        assert list(read_side_by_side(read, items, lambda item: item[1], threads)) == items
    assert most[0] <= 64


def test_after_a_fault_nothing_more_is_read():
    done = []

    def read(item):
        done.append(item)
        time.sleep(0.001)
        if item == 3:
            raise OSError("no more")
        return item

    with pytest.raises(OSError, match="no more"):
        list(read_side_by_side(read, range(1000), lambda _: 1, 2))
    assert len(done) < 1000


@pytest.mark.parametrize("view", [slice(None), slice(1, 3), slice(None, None, 2)])
def test_an_array_that_is_read_ahead_stays_the_same(tmp_path, view):
    wanted = np.arange(50_000, dtype=np.float32).reshape(5, -1)
    wanted.tofile(tmp_path / "file")
    mapped = np.memmap(tmp_path / "file", np.float32, mode="r", shape=wanted.shape)
    np.testing.assert_array_equal(read_ahead(mapped[view]), wanted[view])
    np.testing.assert_array_equal(read_ahead(wanted[view]), wanted[view])


def test_a_thread_reuses_its_memory_and_no_other_thread_does(monkeypatch):
    monkeypatch.setattr(reading, "REUSED_BYTES", 4096)
    memory, found = ReusedMemory(), []
    first, second, large = (memory(shape, np.float32) for shape in ((4, 8), (32,), (2, 1024)))
    assert np.shares_memory(first, second) and not np.shares_memory(second, large)
    assert (first.shape, large.shape) == ((4, 8), (2, 1024))
    thread = threading.Thread(target=lambda: found.append(memory((4, 8), np.float32)))
    thread.start()
    thread.join()
    assert not np.shares_memory(first, found[0])


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
def test_a_cpu_device_takes_new_memory_as_it_is(shape):
    array = new_memory(shape, jnp.bfloat16)
    array[...] = 3
    placed = jax.device_put(array)
    assert placed.shape == shape and (placed == 3).all()
    if array.size:
        assert placed.unsafe_buffer_pointer() == array.ctypes.data

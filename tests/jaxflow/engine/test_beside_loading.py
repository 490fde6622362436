"""What a start does beside the loading of the weights."""

import threading
import types

import jax
import pytest

from jaxflow.engine.beside_loading import open_pools


@pytest.mark.parametrize("fault", [False, True])
def test_each_gpu_gets_an_array_and_a_fault_is_left_to_the_weights(fault, monkeypatch):
    devices = [types.SimpleNamespace(platform=name, id=i) for i, name in enumerate(("gpu", "cpu", "gpu"))]
    touched: list[tuple[int, bool]] = []

    def put(array, device):
        touched.append((device.id, threading.current_thread() is threading.main_thread()))
        if fault:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return array

    monkeypatch.setattr(jax, "device_put", put)
    open_pools(devices)
    for thread in threading.enumerate():
        if thread.name.startswith("pool-"):
            thread.join(60)
    assert sorted(touched) == [(0, False), (2, False)]

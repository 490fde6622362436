"""Fixtures of the kernels' tests."""

from typing import Any

import h200
import jax
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import shared_memory


@pytest.fixture(autouse=True, scope="module")
def unkept():
    """Disable the persistent compilation cache: a thread of the interpreter can read a program during its
    write and crash (jaxlib 0.11.2).


    """
    with h200.unkept():
        yield


@pytest.fixture(autouse=True, scope="module")
def callbacks_take_numpy_arrays():
    """Give the interpreter's callbacks copies in NumPy: JAX would put every argument on the device again.

    Each access of a kernel to memory is a callback.
    """

    def call(*arguments: Any, callback: Any, **_: Any) -> Any:
        return jax.tree.map(np.asarray, callback(*map(np.array, arguments)))

    def to_int(x: Any) -> Any:
        return x if isinstance(x, int | jax.core.Tracer) else x.item()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "io_callback_impl", call)
        patch.setattr(shared_memory, "_to_int", to_int)
        yield

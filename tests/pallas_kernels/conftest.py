"""Fixtures of the kernels' tests."""

import h200
import pytest


@pytest.fixture(autouse=True, scope="module")
def unkept():
    """Disable the persistent compilation cache: a thread of the interpreter can read a program during its
    write and crash (jaxlib 0.11.2).


    """
    with h200.unkept():
        yield

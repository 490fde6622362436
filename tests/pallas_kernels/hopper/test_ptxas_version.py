"""The cached version of ptxas."""

import types

import pytest
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_kernels.hopper import ptxas_version


@pytest.fixture
def asked(monkeypatch):
    calls = []
    extension = types.SimpleNamespace(_get_ptxas_isa_version=lambda: calls.append(1) or 90)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", types.SimpleNamespace(_mosaic_gpu_ext=extension))
    return extension, calls


def test_ptxas_runs_once(asked):
    extension, calls = asked
    ptxas_version.cache_version()
    ptxas_version.cache_version()
    assert [extension._get_ptxas_isa_version() for _ in range(3)] == [90] * 3
    assert calls == [1]


def test_a_jax_without_the_query_is_unchanged(monkeypatch):
    monkeypatch.setattr(fragmented_array, "mgpu_lib", None)
    ptxas_version.cache_version()

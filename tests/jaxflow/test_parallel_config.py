"""Tests of the sizes of the axes of parallelism."""

import dataclasses

import pytest

from jaxflow.config import ConfigError, EngineConfig, ParallelConfig


def test_an_engine_has_its_tensor_parallel_size_and_1_elsewhere():
    assert ParallelConfig() == ParallelConfig(1, 1, 1, 1) == EngineConfig("model").parallel
    assert EngineConfig("model", tensor_parallel_size=4).parallel == ParallelConfig(tp=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelConfig().tp = 2  # type: ignore[misc]


@pytest.mark.parametrize("tp", [0, -2])
def test_a_size_below_1_is_refused(tp):
    with pytest.raises(ConfigError, match=f"tp={tp} is not supported: a positive number of devices"):
        ParallelConfig(tp=tp)


@pytest.mark.parametrize("field", ["pp", "ep", "dp"])
@pytest.mark.parametrize("size", [0, 2])
def test_other_axes_than_tp_are_refused(field, size):
    with pytest.raises(ConfigError, match=f"{field}={size} is not supported: 1, the only size"):
        ParallelConfig(**{field: size})

"""Tests of the sizes of the axes of parallelism."""

import dataclasses

import pytest

from jaxflow.config import ConfigError, EngineConfig, ParallelConfig


def test_an_engine_has_its_sizes_and_1_elsewhere():
    assert ParallelConfig() == ParallelConfig(1, 1, 1, 1) == EngineConfig("model").parallel
    config = EngineConfig("model", tensor_parallel_size=4, pipeline_parallel_size=2)
    assert config.parallel == ParallelConfig(tp=4, pp=2)
    spread = dataclasses.replace(config, enable_expert_parallel=True).parallel
    assert spread == ParallelConfig(tp=4, pp=2, ep=4) and spread.devices == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelConfig().tp = 2  # type: ignore[misc]


@pytest.mark.parametrize("field", ["tp", "pp", "dp"])
@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_1_is_refused(field, size):
    with pytest.raises(ConfigError, match=f"{field}={size} is not supported: a positive number"):
        ParallelConfig(**{field: size})


@pytest.mark.parametrize("size", [0, 2, 8])
def test_experts_are_spread_over_all_devices_of_a_stage_or_over_none(size):
    for sizes in ({"tp": 4}, {"tp": 2, "dp": 2}):
        with pytest.raises(ConfigError, match=f"ep={size} is not supported: 1, or tp · dp = 4"):
            ParallelConfig(**sizes, ep=size)

"""The layouts of a replica and their names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.pipeline.splits import DeviceSplit, all_splits
from jaxflow.config import ConfigError


@given(split=st.sampled_from(all_splits(True)))
def test_a_name_gives_its_layout(split):
    assert DeviceSplit.parse(split.name) == split


def test_layouts_of_a_dense_model_have_no_experts_to_share():
    assert {split.expert_devices for split in all_splits(False)} == {1}
    assert set(all_splits(False)) < set(all_splits(True))
    assert len({split.name for split in all_splits(True)}) == len(all_splits(True))


@pytest.mark.parametrize(
    "name", ["16x1", "0x1", "1x0", "8", "1x1+ep", "dp1+overlap", "dp0", "2x1+overlap", "dp8+ep", "dp8x0", ""]
)
def test_an_impossible_layout_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="layouts"):
        DeviceSplit.parse(name)


def test_devices_of_different_tokens_share_no_layer_of_attention():
    with pytest.raises(ConfigError, match="layouts"):
        DeviceSplit(tp=2, dp=2)

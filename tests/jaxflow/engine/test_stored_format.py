"""The format that an engine gives weights without a setting: MXFP4 where a kernel reads it, or 16 bits."""

import paths
import pytest

from jaxflow.config import EngineConfig
from jaxflow.engine import stored_format
from jaxflow.model.checkpoints.checkpoint import convert, open_checkpoint
from pallas_kernels.this_device import DeviceKind

H200 = DeviceKind("gpu", "NVIDIA H200", "9.0")
FOLDER = str(paths.MODELS / "tiny-gpt_oss")


@pytest.fixture
def format_of(monkeypatch):
    def found(model, device=H200, load_format="auto", **settings):
        monkeypatch.setattr(stored_format, "this_device", lambda: device)
        config = EngineConfig(model, load_format=load_format, **settings)
        checkpoint = open_checkpoint(model, load_format=load_format)
        return stored_format.with_stored_format(config, checkpoint).quantization

    return found


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "mxfp4"),
        ({"load_format": "dummy"}, "mxfp4"),
        ({"tensor_parallel_size": 2}, "mxfp4"),
        ({"tensor_parallel_size": 4}, None),  # devices would cut groups of 32 columns
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, "mxfp4"),
        ({"kernels": "reference"}, None),
        ({"quantization": "fp8"}, "fp8"),
        ({"device": DeviceKind("cpu", "cpu")}, None),
        ({"device": DeviceKind("gpu", "NVIDIA A100-SXM4-80GB", "8.0")}, None),
    ],
)
def test_experts_stay_in_mxfp4_where_a_kernel_reads_them(settings, wanted, format_of):
    assert format_of(FOLDER, **settings) == wanted


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b"])
def test_shipped_configs_have_the_published_format(model, format_of):
    assert format_of(model, load_format="dummy") == "mxfp4"


def test_experts_in_16_bits_stay_in_16_bits(tmp_path, format_of):
    convert(FOLDER, tmp_path / "converted", "float32")
    assert format_of(str(tmp_path / "converted")) is None
    assert format_of("mixtral-8x7b", load_format="dummy") is None

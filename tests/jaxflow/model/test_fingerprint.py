"""Two models have one fingerprint only if they are one."""

import dataclasses
import os
import shutil

import paths
import pytest

from jaxflow.config import EngineConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.checkpoints.fingerprint import fingerprint, kv_fingerprint


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(paths.MODELS / "stories260K", tmp_path / "a")


def of(path, seed=0, load_format="auto"):
    return fingerprint(open_checkpoint(str(path), load_format=load_format), seed)


def test_the_same_files_elsewhere_are_the_same_model(folder, tmp_path):
    found = of(folder)
    folder.rename(tmp_path / "b")
    assert of(tmp_path / "b") == found == of(tmp_path / "b", seed=1) and len(found) == 16


def test_other_weights_of_the_same_size_and_time_are_another_model(folder):
    path, before = folder / "model.safetensors", of(folder)
    status, content = path.stat(), bytearray(path.read_bytes())
    content[-len(content) // 3 :] = bytes(len(content[-len(content) // 3 :]))
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert of(folder) != before


def test_a_file_written_again_is_another_model(folder):
    before = of(folder)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert of(folder) != before


def test_dummy_fingerprint_depends_on_architecture_and_seed(folder):
    dummy = of(folder, load_format="dummy")
    assert dummy == of(folder, load_format="dummy") and len({dummy, of(folder, 1, "dummy"), of(folder)}) == 3
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    other = dataclasses.replace(
        checkpoint, model_config=dataclasses.replace(checkpoint.model_config, norm_eps=1e-6)
    )
    assert fingerprint(other, 0) != dummy


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "fp8"},
        {"quantization": "mxfp4"},
        {"block_size": 32},
        {"tensor_parallel_size": 2},
    ],
)
def test_kv_fingerprint_depends_on_the_settings(folder, change):
    checkpoint = open_checkpoint(str(folder))
    config = EngineConfig(str(folder), dtype="float32", kv_cache_dtype="float32")
    same = dataclasses.replace(
        config, max_num_seqs=3, num_kv_pages=7, enable_prefix_caching=False, pipeline_parallel_size=2
    )
    assert kv_fingerprint(same, checkpoint) == kv_fingerprint(config, checkpoint)
    assert kv_fingerprint(dataclasses.replace(config, **change), checkpoint) != kv_fingerprint(
        config, checkpoint
    )


def test_a_single_file_has_a_fingerprint(smollm2_gguf):
    assert len({of(smollm2_gguf), of(smollm2_gguf)}) == 1

"""A random checkpoint loads as a published one does."""

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from benchmarks import random_checkpoint
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.weights import tensors


@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(2, 100))
def test_files_hold_all_tensors_in_order_and_no_more_bytes_than_allowed(sizes, most):
    shapes = {f"{i}": (size,) for i, size in enumerate(sizes)}
    files = random_checkpoint.shards(shapes, most)
    assert [name for file in files for name in file] == list(shapes)
    for file in files:
        size = sum(random_checkpoint.ITEM * rows for (rows,) in file.values())
        assert file and (size <= most or len(file) == 1)


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-gpt_oss"])
def test_a_random_checkpoint_loads_with_finite_weights(name, tmp_path, monkeypatch):
    (tmp_path / f"{name}.json").write_text((paths.MODELS / name / "config.json").read_text())
    monkeypatch.setattr(random_checkpoint, "CONFIGS", tmp_path)
    monkeypatch.setattr(random_checkpoint, "BLOCK", 4099)
    folder = tmp_path / "folder"
    size = random_checkpoint.write(name, folder, most=100_000)
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 1
    stored = {tensor: array for file in files for tensor, array in load_file(file).items()}
    checkpoint = open_checkpoint(str(folder))
    assert {tensor: array.shape for tensor, array in stored.items()} == tensors(checkpoint.model_config)
    assert sum(array.nbytes for array in stored.values()) == size
    assert checkpoint.stored_bytes() == sum(file.stat().st_size for file in files) > size
    assert random_checkpoint.forget(folder) > checkpoint.stored_bytes()
    weights = checkpoint.load(jnp.bfloat16, progress=False)
    for array in jax.tree.leaves(weights):
        assert np.isfinite(np.asarray(array, np.float32)).all()


@pytest.mark.parametrize("line", [["--out", "x"], ["--out", "x", "--forget", "--model", "opt-125m"]])
def test_one_of_writing_and_forgetting_is_wanted(line):
    with pytest.raises(SystemExit, match="2"):
        random_checkpoint.main(line)

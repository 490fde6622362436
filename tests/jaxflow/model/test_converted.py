"""Converted checkpoints equal their sources on every mesh, or are refused by name."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import paths
import pytest
from same_weights import same

from jaxflow.model.checkpoints import checkpoint as checkpoint_module
from jaxflow.model.checkpoints.checkpoint import CheckpointError, convert, main, open_checkpoint
from jaxflow.parallel.mesh import make_mesh
from jaxflow.text.tokenizer import load_tokenizer


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-glm4_moe", "tiny-opt", "tiny-gemma4_e2b"])
def test_a_converted_checkpoint_loads_the_same_on_every_mesh(name: str, tmp_path: Path) -> None:
    original = open_checkpoint(str(paths.MODELS / name))
    convert(str(paths.MODELS / name), tmp_path / "converted", "float32")
    converted = open_checkpoint(str(tmp_path / "converted"))
    assert (converted.name, converted.model_config) == (original.name, original.model_config)
    assert converted.generation_config == original.generation_config
    for mesh in (None, make_mesh(1), make_mesh(2), make_mesh(4)):  # 2 key/value heads: repeated on 4
        expected, weights = original.load("float32", mesh), converted.load("float32", mesh)
        same(weights, expected)
        for one, other in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    same(converted.load("bfloat16"), original.load("bfloat16"))


def test_a_vocabulary_padded_further_gets_zeros(folder: Callable[..., Path], tmp_path: Path) -> None:
    def shorten(tensors: dict[str, np.ndarray]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:450]

    path = folder("tiny-llama", shorten, vocab_size=450)
    convert(str(path), tmp_path / "converted", "float32")
    for tp in (1, 2, 4):
        same(
            *(
                open_checkpoint(str(one)).load("float32", make_mesh(tp))
                for one in (tmp_path / "converted", path)
            )
        )


def test_an_8_bit_mlp_is_padded_with_zeros(folder: Callable[..., Path], tmp_path: Path) -> None:
    def widen(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            axis = int("down" in name)
            tensors[name] = np.resize(
                tensors[name], [2016 if i == axis else size for i, size in enumerate(tensors[name].shape)]
            )

    path = folder("tiny-llama", widen, intermediate_size=2016)
    convert(str(path), tmp_path / "converted", "float32")
    loaded = [
        open_checkpoint(str(one)).load("float32", make_mesh(2), quantization="fp8")
        for one in (tmp_path / "converted", path)
    ]
    same(*loaded)
    assert loaded[0]["layers"][0]["down"].shape[1] == 2048


def test_convert_brings_the_tokenizer_and_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = paths.MODELS / "stories260K"
    target = tmp_path / "deep" / "converted"
    assert main(["convert", str(source), str(target)]) == 0
    opened = open_checkpoint(str(target))
    assert opened.model_config.eos_token_ids == (1, 2) and opened.tokenizer_path == target
    text = "Once upon a time"
    assert load_tokenizer(target).encode(text) == load_tokenizer(source).encode(text)
    same(opened.load("bfloat16"), open_checkpoint(str(source)).load("bfloat16"))
    assert open_checkpoint(str(target), load_format="dummy").source is None
    assert main(["convert", str(source), str(target)]) == 1  # never overwrite an existing folder
    assert main(["convert", str(target), str(tmp_path / "again")]) == 1
    assert main(["convert", "no-such-model", str(tmp_path / "again")]) == 1
    assert not (tmp_path / "again").exists()
    assert "exists; convert" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["convert", str(source), str(tmp_path / "file" / "converted")]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_a_conversion_that_breaks_off_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = checkpoint_module.assemble
    calls = iter(range(100))

    def breaks(*arguments: Any) -> np.ndarray:
        if next(calls) == 10:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(checkpoint_module, "assemble", breaks)
    with pytest.raises(KeyboardInterrupt):
        convert(str(paths.MODELS / "tiny-llama"), tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
    monkeypatch.undo()
    convert(str(paths.MODELS / "tiny-llama"), tmp_path / "converted")  # the remains are no obstacle
    assert [path.name for path in tmp_path.iterdir()] == ["converted"]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Orbax does not await all its reads that fail
def test_a_damaged_converted_checkpoint_is_named(tmp_path: Path) -> None:
    target = tmp_path / "converted"
    convert(str(paths.MODELS / "tiny-llama"), target, "float32")
    header = json.loads((target / "jaxflow.json").read_text())

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(target)).load("float32")

    for text in (
        "",
        "{}",
        "[]",
        json.dumps(header | {"version": "x"}),
        json.dumps(header | {"model_config": {"layers": []}}),
    ):
        (target / "jaxflow.json").write_text(text)
        refused(r"jaxflow\.json: ")
    (target / "jaxflow.json").write_text(json.dumps(header | {"version": 99}))
    refused("version=99")
    wider = json.loads(json.dumps(header))
    wider["model_config"]["intermediate_size"] = 256
    (target / "jaxflow.json").write_text(json.dumps(wider))
    refused(r"layer_00000: does not fit jaxflow.json: down is \(64, 128\) and should be \(64, 256\)")
    (target / "jaxflow.json").write_text(json.dumps(header))
    data = max(
        (path for path in (target / "layer_00001").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data.write_bytes(data.read_bytes()[:100])
    refused(r"layer_00001: cannot be read")
    gc.collect()
    shutil.rmtree(target / "layer_00001")
    refused(r"layer_00001: missing")

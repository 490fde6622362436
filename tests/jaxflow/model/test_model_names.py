"""The accepted names of a model, a folder, a hub id or a shipped config, and the model that each loads."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import paths
import pytest
from same_weights import same

from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint, shipped_configs
from jaxflow.parallel.mesh import make_mesh

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["no-such-model", "./nothing/here/at all", "a/b/c", "", "..x/y"])
def test_an_unknown_model_lists_the_shipped_configs(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"llama-3\.1-8b|config\.json is missing"):
        open_checkpoint(name)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"for a GGUF file give its path, as .*x\.gguf"):
        open_checkpoint(str(tmp_path))


def test_a_hub_id_without_a_connection_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"^nobody/nothing: not a folder.* hub"):
        open_checkpoint("nobody/nothing")


def test_a_hub_id_is_the_folder_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot(repo: str, **arguments: Any) -> str:
        asked.append({"repo": repo} | arguments)
        return str(paths.MODELS / "tiny-llama")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    opened = open_checkpoint("someone/tiny")
    assert opened.name == "someone/tiny"
    same(opened.load("float32"), open_checkpoint(str(paths.MODELS / "tiny-llama")).load("float32"))
    assert open_checkpoint("someone/tiny", load_format="dummy").source is None
    kept = [list(huggingface_hub.utils.filter_repo_objects(FILES, **_patterns(call))) for call in asked]
    configs = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ]
    assert kept == [[*configs, "model-00001-of-00002.safetensors", INDEX], configs]


FILES = [
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ),
    *(
        "model-00001-of-00002.safetensors",
        INDEX,
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/model.safetensors",
    ),
    *("modeling_custom.py", "README.md"),
]


def _patterns(call: dict[str, Any]) -> dict[str, Any]:
    return {key: call[key] for key in ("allow_patterns", "ignore_patterns")}


def test_shipped_configs_are_for_dummy_weights_alone() -> None:
    assert {"llama-3.1-8b", "llama-2-70b", "qwen2-72b", "mixtral-8x7b", "opt-30b"} <= {*shipped_configs()}
    with pytest.raises(CheckpointError, match="load_format=dummy"):
        open_checkpoint("llama-3.1-8b")
    opened = open_checkpoint("llama-3.1-8b", load_format="dummy")
    assert (opened.name, opened.tokenizer_path, opened.model_config.num_layers) == ("llama-3.1-8b", None, 32)
    with pytest.raises(ConfigError, match="load_format"):
        open_checkpoint("llama-3.1-8b", load_format="pickle")


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    shutil.copy(paths.MODELS / "tiny-llama" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(str(tmp_path / "config.json"))
    one = open_checkpoint(str(tmp_path), load_format="dummy").load("float32", make_mesh(2), seed=5)
    same(one, open_checkpoint(str(tmp_path / "config.json"), load_format="dummy").load("float32", seed=5))

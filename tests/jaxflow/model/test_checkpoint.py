"""Checkpoints from their files to their shards, and every kind of bad file."""

import dataclasses
import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from same_weights import same

from jaxflow.config import ConfigError
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.model.weight_spec import assemble
from jaxflow.model.weights import leaves
from jaxflow.parallel.mesh import make_mesh

# test_gpt_oss compares the tensors of gpt-oss, which are stored in 4 bits.
MODELS = (*(name for name in paths.TINY_MODELS if name != "tiny-gpt_oss"), "stories260K")


def read_all(folder: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_tensors_arrive_in_their_places_and_dtype(name: str) -> None:
    tensors = read_all(paths.MODELS / name)
    opened = open_checkpoint(str(paths.MODELS / name))
    expected = jax.tree.map(
        lambda leaf: assemble(leaf, tensors.__getitem__, np.float32), leaves(opened.model_config)
    )
    same(opened.load("float32"), expected)
    for path, array in jax.tree.leaves_with_path(opened.load(jnp.bfloat16)):
        assert array.dtype == (jnp.float32 if path[-1].key == "score_bias" else jnp.bfloat16)
    assert opened.name == name


def with_images(folder: Path, more: dict[str, np.ndarray]) -> Path:
    """Write tiny-gemma4_text in the form of the published files, whose model also takes images."""
    folder.mkdir()
    text = json.loads((paths.MODELS / "tiny-gemma4_text" / "config.json").read_text())
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision"},
        "audio_config": {"model_type": "gemma4_audio"},
        "image_token_id": 511,
        "eos_token_id": [2, 3],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = read_all(paths.MODELS / "tiny-gemma4_text")
    named = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    save_file(named | more, folder / "model.safetensors")
    return folder


def test_the_text_model_of_a_model_with_images_is_read(tmp_path: Path) -> None:
    unread = ("vision_tower.x", "embed_vision.y.weight", "audio_tower.x", "embed_audio.y.weight")
    more = {f"model.{name}": np.zeros(3, np.float32) for name in unread}
    opened = open_checkpoint(str(with_images(tmp_path / "model", more)))
    text = open_checkpoint(str(paths.MODELS / "tiny-gemma4_text"))
    changes = {"architecture": "gemma4", "eos_token_ids": (2, 3)}
    assert opened.model_config == dataclasses.replace(text.model_config, **changes)
    same(opened.load("float32"), text.load("float32"))
    other = with_images(tmp_path / "other", {"model.video_tower.x": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match="unexpected tensors"):
        open_checkpoint(str(other)).load("float32")


def test_keys_and_values_that_a_layer_does_not_use_are_not_read(tmp_path: Path) -> None:
    """Published files have them in the layers that share those of another."""
    path = paths.MODELS / "tiny-gemma4_e2b"
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    unused = {
        f"model.layers.3.self_attn.{name}.weight": np.zeros(3, np.float32)
        for name in ("k_proj", "v_proj", "k_norm")
    }
    save_file(read_all(path) | unused, tmp_path / "model.safetensors")
    same(open_checkpoint(str(tmp_path)).load("float32"), open_checkpoint(str(path)).load("float32"))
    used = {"model.layers.1.self_attn.k_norm_2.weight": np.zeros(3, np.float32)}
    save_file(read_all(path) | used, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unexpected tensors"):
        open_checkpoint(str(tmp_path)).load("float32")


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-mixtral", "tiny-opt"])
def test_each_array_is_placed_on_its_shards(name: str, tp: int) -> None:
    opened = open_checkpoint(str(paths.MODELS / name))
    tensors, mesh = read_all(paths.MODELS / name), make_mesh(tp)
    tree = leaves(opened.model_config, tp)
    weights = opened.load(jnp.float32, mesh, tp)
    same(weights, jax.tree.map(lambda leaf: assemble(leaf, tensors.__getitem__, np.float32), tree))
    for leaf, array in zip(jax.tree.leaves(tree), jax.tree.leaves(weights), strict=True):
        assert array.sharding.spec == leaf.spec
        cut = [
            size // (tp if axis == "tp" else 1)
            for size, axis in zip(leaf.shape, [*leaf.spec, None, None, None], strict=False)
        ]
        assert {tuple(part.data.shape) for part in array.addressable_shards} == {tuple(cut)}
        assert len(array.addressable_shards) == tp


def test_the_mesh_says_how_many_devices() -> None:
    opened = open_checkpoint(str(paths.MODELS / "tiny-llama"))
    for mesh, tp in ((None, 2), (make_mesh(2), 4)):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            opened.load("float32", mesh, tp)


def test_the_host_never_holds_more_than_a_few_arrays(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With device memory elsewhere (here: nowhere), loading needs the host memory of a few arrays, not of the
    model.
    """

    class Sent:
        def __init__(self, array: np.ndarray):
            self.array = array

        def block_until_ready(self) -> None:
            del self.array  # the array has left the host

    opened = open_checkpoint(str(paths.MODELS / "stories260K"))
    monkeypatch.setattr(jax, "device_put", lambda array, placed: Sent(array))
    opened.load("float32")  # exclude memory of imports and caches, which belongs to no model
    largest = max(
        array.size
        for array in jax.tree.leaves(
            jax.tree.map(lambda leaf: np.empty(leaf.shape), leaves(opened.model_config))
        )
    )
    tracemalloc.start()
    opened.load("float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4 * largest + 100_000 < 4 * 260_032 / 1.5


# ---- tensors that do not fit


@pytest.mark.parametrize("changes", [{"n_routed_experts": 16}, {"n_shared_experts": 1}])
def test_a_mixture_that_differs_from_its_config_is_refused(
    changes: dict[str, int], folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(str(folder("tiny-glm4_moe", **changes)))
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("a weight was placed"))
    with pytest.raises(CheckpointError, match=r"mlp\.(gate|shared_experts)"):
        opened.load("float32")


def test_layers_that_predict_further_tokens_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = paths.MODELS / "tiny-glm4_moe"
    tensors = read_all(source) | {"model.layers.2.eh_proj.weight": np.zeros((64, 128), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with caplog.at_level("INFO"):
        same(open_checkpoint(str(tmp_path)).load("float32"), open_checkpoint(str(source)).load("float32"))
    assert "model.layers.2." in caplog.text
    save_file(tensors | {"model.layers.3.eh_proj.weight": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.eh_proj\.weight"):
        open_checkpoint(str(tmp_path)).load("float32")


def test_missing_extra_and_misshapen_tensors_are_named(folder: Callable[..., Path]) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((128, 64), np.float32)
        tensors["model.norm.weight"] = np.zeros(65, np.float32)

    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder(change=change))).load("float32")
    text = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight" in text
    assert "unexpected tensors: model.layers.2.mlp.up_proj.weight" in text
    assert "wrong shapes: model.norm.weight is [65] and should be [64]" in text


def test_a_config_of_another_size_does_not_fit(folder: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"missing tensors: model.layers.2.* and \d+ more"):
        open_checkpoint(str(folder(num_hidden_layers=5))).load("float32")


def test_a_bias_that_the_config_lacks_is_refused(folder: Callable[..., Path]) -> None:
    path = folder(
        "tiny-llama",
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
    )
    with pytest.raises(
        CheckpointError, match=r"unexpected tensors: model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        open_checkpoint(str(path)).load("float32")


def test_stored_frequencies_are_harmless(folder: Callable[..., Path]) -> None:
    path = folder(
        change=lambda tensors: tensors.update(
            {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
        )
    )
    same(
        open_checkpoint(str(path)).load("float32"),
        open_checkpoint(str(paths.MODELS / "tiny-llama")).load("float32"),
    )


def test_a_tied_head_may_be_stored_but_not_differ(folder: Callable[..., Path]) -> None:
    path = folder(
        "tiny-opt",
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.decoder.embed_tokens.weight"]}),
    )
    assert "lm_head" not in open_checkpoint(str(path)).load("float32")
    tensors = read_all(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        open_checkpoint(str(path)).load("float32")


def test_names_without_the_outer_prefix_are_found(folder: Callable[..., Path]) -> None:
    def strip(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    same(
        open_checkpoint(str(folder("tiny-opt", strip))).load("float32"),
        open_checkpoint(str(paths.MODELS / "tiny-opt")).load("float32"),
    )


def test_quantised_tensors_are_refused(folder: Callable[..., Path]) -> None:
    path = folder(change=lambda tensors: tensors.update({"model.norm.weight": np.ones(64, np.int8)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight.* of dtype I8"):
        open_checkpoint(str(path))


# ---- files that are damaged


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_truncated_file_is_named(tmp_path: Path, data: st.DataObject) -> None:
    copy = tmp_path / "tiny-llama"
    shutil.copytree(paths.MODELS / "tiny-llama", copy, dirs_exist_ok=True)
    whole = (paths.MODELS / "tiny-llama" / "model.safetensors").read_bytes()
    cut = data.draw(st.one_of(st.integers(0, 4000), st.integers(0, len(whole) - 1)))
    (copy / "model.safetensors").write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cut short or damaged"):
        open_checkpoint(str(copy))


@given(st.integers(0, 4000), st.integers(0, 255))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_a_damaged_header_is_detected(tmp_path: Path, at: int, byte: int) -> None:
    """One byte of the header changed: the file is refused, or says the same in other words (a blank, an
    order).
    """
    copy = tmp_path / "tiny-llama"
    shutil.copytree(paths.MODELS / "tiny-llama", copy, dirs_exist_ok=True)
    damaged = bytearray((paths.MODELS / "tiny-llama" / "model.safetensors").read_bytes())
    (header_bytes,) = struct.unpack_from("<Q", damaged)
    damaged[at % (8 + header_bytes)] = byte
    (copy / "model.safetensors").write_bytes(damaged)
    try:
        weights = open_checkpoint(str(copy)).load("float32")
    except CheckpointError as error:
        assert str(copy) in str(error)
    else:
        # The order of tensors in a file may change silently. A missing tensor or another shape may not.
        tree = leaves(open_checkpoint(str(copy)).model_config)
        assert jax.tree.map(np.shape, weights) == jax.tree.map(lambda leaf: leaf.shape, tree)


def test_a_huge_header_length_allocates_nothing(folder: Callable[..., Path]) -> None:
    path = folder()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    with pytest.raises(CheckpointError, match="header too large"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": }', "\x00\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(folder: Callable[..., Path], text: str) -> None:
    path = folder()
    (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        open_checkpoint(str(path))


def test_a_config_in_another_encoding_is_named(folder: Callable[..., Path]) -> None:
    path = folder()
    (path / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        open_checkpoint(str(path))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "target",
    [
        "../tiny-llama/model.safetensors",
        "/etc/passwd",
        "..",
        "sub/model.safetensors",
        "..\\x.safetensors",
        "weights.bin",
        "",
        7,
        None,
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(folder: Callable[..., Path], target: Any) -> None:
    path = folder("tiny-mixtral")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = target
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError,
        match=r"weight_map\['lm_head.weight'\].* is not the name of a .safetensors file in the same folder",
    ):
        open_checkpoint(str(path))


def test_an_index_must_fit_its_files(folder: Callable[..., Path]) -> None:
    path = folder("tiny-mixtral")
    whole = json.loads((path / INDEX).read_text())

    def opened(weight_map: Any) -> None:
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        open_checkpoint(str(path)).load("float32")

    opened(whole["weight_map"])
    with pytest.raises(CheckpointError, match="has no tensor 'ghost'"):
        opened(whole["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="weight_map"):
        opened([])
    moved = dict.fromkeys(whole["weight_map"], "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor"):
        opened(moved)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: missing"):
        opened(whole["weight_map"])
    (path / INDEX).unlink()
    (path / "model-00002-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"2 safetensors files, but {INDEX} is missing"):
        open_checkpoint(str(path))


def test_pickled_weights_are_never_read(folder: Callable[..., Path], tmp_path: Path) -> None:
    path = folder()
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        open_checkpoint(str(path))
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model.bin\)"):
        open_checkpoint(str(path))
    with pytest.raises(CheckpointError, match="never read"):
        open_checkpoint(str(path / "pytorch_model.bin"))


# ---- generation settings


def test_generation_settings_and_end_tokens_are_merged(folder: Callable[..., Path]) -> None:
    path = folder("tiny-llama", eos_token_id=[2, 9])
    wished = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "eos_token_id": [7, 2],
        "do_sample": True,
        "transformers_version": "5",
    }
    (path / "generation_config.json").write_text(json.dumps(wished))
    opened = open_checkpoint(str(path))
    assert opened.generation_config == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "do_sample": True,
        "eos_token_ids": (7, 2, 9),
    }
    assert opened.model_config.eos_token_ids == (7, 2, 9)
    stories = open_checkpoint(str(paths.MODELS / "stories260K"))
    assert (
        stories.model_config.eos_token_ids == (1, 2)
        and stories.tokenizer_path == paths.MODELS / "stories260K"
    )


@pytest.mark.parametrize(
    "settings_",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 2},
        {"top_k": True},
        {"eos_token_id": "x"},
        {"min_p": float("nan")},
    ],
)
def test_generation_settings_out_of_range_are_named(
    folder: Callable[..., Path], settings_: dict[str, Any]
) -> None:
    path = folder()
    (path / "generation_config.json").write_text(json.dumps(settings_))
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(settings_))}="):
        open_checkpoint(str(path))

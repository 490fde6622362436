"""Calibration agrees with attention in float64, and an engine reads the file that calibration writes."""

import json
import shutil

import jax.numpy as jnp
import msgspec
import numpy as np
import paths
import pytest

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model.checkpoints import calibrate
from jaxflow.model.checkpoints.calibrate import main, softmax_range, text_windows
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.softmax_range import BOUND, default_path, layer_range, read

STEP = 1 / 8


def opened(name):
    checkpoint = open_checkpoint(str(paths.MODELS / name))
    return checkpoint, checkpoint.load("float32")


def first_layer_scores(config, weights, window):
    """[N, n, n] scores of layer 0 and which of them are visible: for a model without q/k norms, in numpy."""
    w, x = weights["layers"][0], np.asarray(weights["embed"], np.float64)[window] * config.embedding_scale
    norm = np.asarray(w["attn_norm"], np.float64) + config.norm_weight_offset
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * norm
    split = (h @ np.asarray(w["qkv"], np.float64).T).reshape(
        len(window), config.num_kv_heads, -1, config.head_dim
    )
    half = config.head_dim // 2
    angle = np.arange(len(window))[:, None] * config.layers[0].rope.theta ** (-np.arange(half) / half)

    def turned(a):  # [n, H]
        b, c = a[:, :half], a[:, half:]
        return np.concatenate(
            [b * np.cos(angle) - c * np.sin(angle), c * np.cos(angle) + b * np.sin(angle)], -1
        )

    scores = np.stack(
        [
            turned(split[:, k, g]) @ turned(split[:, k, -2]).T
            for k in range(config.num_kv_heads)
            for g in range(split.shape[2] - 2)
        ]
    )
    scores *= config.scale
    if config.attention_soft_cap:
        scores = np.tanh(scores / config.attention_soft_cap) * config.attention_soft_cap
    distance = np.subtract.outer(np.arange(len(window)), np.arange(len(window)))
    return scores, (distance >= 0) & (distance < (config.layers[0].window or len(window)))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2", "tiny-mistral"])
def test_score_ranges_equal_a_direct_computation(name):
    """Grouped heads, windows, soft caps: the layer's extremes to a step of the counting."""
    checkpoint, weights = opened(name)
    config = checkpoint.model_config
    windows = np.random.default_rng(3).integers(0, config.vocab_size, (2, 40)).astype(np.int32)
    found = softmax_range(name, config, weights, windows)
    assert found.windows == (2, 40) and len(found.layers) == config.num_layers and found.model == name
    scores = [first_layer_scores(config, weights, window) for window in windows]
    every = np.concatenate([s[:, visible].ravel() for s, visible in scores])
    tops = np.concatenate([np.where(visible, s, -np.inf).max(-1).ravel() for s, visible in scores])
    layer = found.layers[0]
    assert (layer.row_low, layer.row_high) == pytest.approx((tops.min(), tops.max()), abs=STEP + 1e-6)
    assert (layer.score_low, layer.score_high) == pytest.approx(
        (every.min(), every.max()), abs=STEP + 1e-6
    )  # so few scores have no tails
    assert layer.phi == pytest.approx((tops.min() + tops.max()) / 2, abs=STEP)


@pytest.mark.parametrize(
    ("found", "qualifies"),
    [
        ((-16.8, 6.5, -2.0, 6.5), True),  # Llama2-7B's range in the paper
        ((-50.0, 10.0, 0.0, 12.0), True),
        ((-150.0, 30.0, 0.0, 31.0), False),  # weights that underflow
        ((-20.0, 70.0, -10.0, 75.0), False),  # rows too far apart
    ],
)
def test_qualification_depends_on_the_range(found, qualifies):
    layer = layer_range(*found)
    assert layer.qualifies == qualifies and layer.bound == BOUND
    assert layer.row_low < layer.phi < layer.row_high


def test_a_wide_range_of_scores_is_detected():
    checkpoint, weights = opened("tiny-opt")
    windows = np.arange(64, dtype=np.int32).reshape(2, 32)
    assert softmax_range("opt", checkpoint.model_config, weights, windows).qualifies
    weights["layers"][1]["qkv"] = weights["layers"][1]["qkv"] * 30
    found = softmax_range("opt", checkpoint.model_config, weights, windows)
    assert [layer.qualifies for layer in found.layers] == [True, False] and not found.qualifies


@pytest.fixture
def model(tmp_path):
    """A folder of a model that may be written into."""
    folder = tmp_path / "tiny"
    shutil.copytree(paths.MODELS / "tiny-llama", folder)
    return folder


def test_a_model_with_a_wide_range_does_not_qualify(tmp_path, capsys):
    """stories260K looks away from keys at scores down to -70."""
    text, output = tmp_path / "text.txt", tmp_path / "found.json"
    text.write_text("Once upon a time there was a little dog. " * 20)
    assert (
        main(
            [
                str(paths.MODELS / "stories260K"),
                "--text",
                str(text),
                "--window",
                "32",
                "--windows",
                "2",
                "--output",
                str(output),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "stories260K: does not qualify for a unified max value" in out and ": too wide" in out
    found = read(output, 5)
    assert found.windows == (2, 32) and not found.qualifies and found.layers[0].qualifies


def test_the_command_writes_next_to_the_model_and_an_engine_reads_the_file(model, tmp_path, capsys, caplog):
    np.save(tmp_path / "ids.npy", np.arange(96).reshape(3, 32))
    assert main([str(model), "--tokens", str(tmp_path / "ids.npy"), "--windows", "2"]) == 0
    assert "tiny: qualifies for a unified max value" in capsys.readouterr().out
    written = read(default_path(model), 2)
    assert written.windows == (2, 32)

    def engine(**settings):
        config = EngineConfig(
            str(model), block_size=16, max_num_batched_tokens=32, max_num_seqs=4, num_kv_pages=32, **settings
        )
        checkpoint = open_checkpoint(str(model))
        config = resolve(config, checkpoint.model_config)
        return make_executor(
            config, checkpoint, choose_plans(config, checkpoint.model_config), progress=False
        ).weights["layers"]

    for layer, found in zip(engine(tensor_parallel_size=2), written.layers, strict=True):
        assert (
            layer["unified_max"].tolist() == [pytest.approx(found.phi), found.bound]
            and layer["unified_max"].dtype == jnp.float32
        )
    assert not any("unified_max" in layer for layer in engine(calibration=""))
    assert not any("unified_max" in layer for layer in engine(kv_cache_dtype="fp8"))
    assert not caplog.records
    assert not any(
        "unified_max" in layer for layer in engine(kv_cache_dtype="fp8", calibration=str(default_path(model)))
    )
    # The unified max value was requested.
    assert ["e4m3" in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        True
    ]
    assert all("unified_max" in layer for layer in engine(kv_cache_dtype="int8"))  # multiplied as bfloat16
    default_path(model).write_bytes(msgspec.json.encode(msgspec.structs.replace(written, qualifies=False)))
    assert not any("unified_max" in layer for layer in engine())
    with pytest.raises(ConfigError, match="calibration"):
        engine(calibration=str(model / "config.json"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "version 1, and this is 9"),
        ({"layers": []}, "5 layers, and this has 0"),
        ({"layers": [{"phi": 1}]}, "jaxflow.model.checkpoints.calibrate"),
        ({"more": 1}, "jaxflow.model.checkpoints.calibrate"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, change, message):
    layer = msgspec.to_builtins(layer_range(-1, 1, 0, 1))
    path = tmp_path / "softmax.json"
    path.write_text(
        json.dumps(
            {"version": 1, "model": "m", "windows": [1, 2], "qualifies": True, "layers": [layer] * 5} | change
        )
    )
    with pytest.raises(ConfigError, match=message) as caught:
        read(path, 5)
    assert caught.value.field == "calibration"
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json", 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--text", "x"], "nowhere"),
        (["{stories}", "--text", "{missing}"], "No such file"),
        (["{stories}", "--text", "{bad}"], "bad.npy' is not supported: a file of UTF-8 text"),
        (["{stories}", "--tokens", "{bad}"], "tokens=600 is not supported: 0 to 511"),
        (["{stories}", "--tokens", "{below}"], "tokens=-2 is not supported: 0 to 511"),
        (["{stories}", "--tokens", "{flat}"], "token ids"),
        (
            ["{stories}", "--tokens", "{none}"],
            "none.npy, int64 [0, 32]' is not supported: a .npy file of token ids [windows, tokens]",
        ),
        (["{stories}", "--tokens", "{text}"], "text.txt' is not supported: a .npy file of token ids"),
        (["{stories}", "--tokens", "{empty}"], "empty.npy' is not supported: a .npy file of token ids"),
        (["{stories}", "--tokens", "{objects}"], "objects.npy' is not supported: a .npy file of token ids"),
        (["{stories}", "--tokens", "{several}"], "several.npz' is not supported: a .npy file of token ids"),
        (["{stories}", "--tokens", "{bad}", "--windows", "0"], "windows=0 is not supported: at least 1"),
        (["{stories}", "--tokens", "{bad}", "--windows", "-5"], "windows=-5 is not supported: at least 1"),
        (["{stories}", "--text", "{text}", "--window", "1"], "window=1 is not supported: at least 2"),
    ],
)
def test_a_command_that_cannot_work(tmp_path, capsys, arguments, message):
    np.save(tmp_path / "bad.npy", np.array([[1, 600]]))
    np.save(tmp_path / "below.npy", np.array([[1, -2]]))
    np.save(tmp_path / "flat.npy", np.array([1, 2]))
    np.save(tmp_path / "none.npy", np.zeros((0, 32), np.int64))
    (tmp_path / "text.txt").write_text("Once upon a time there was a little dog.")
    places = {
        "stories": paths.MODELS / "stories260K",
        "missing": tmp_path / "m.txt",
        "text": tmp_path / "text.txt",
    }
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "several.npz", np.zeros((2, 2), np.int64))
    places |= {
        name: tmp_path / f"{name}.npy" for name in ("bad", "below", "flat", "none", "empty", "objects")
    } | {"several": tmp_path / "several.npz"}
    output = tmp_path / "found.json"
    assert main([*(argument.format(**places) for argument in arguments), "--output", str(output)]) == 1
    assert message in capsys.readouterr().err and not output.exists()


def test_an_unwritable_output_is_refused_before_the_model_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "softmax_range", lambda *_, **__: pytest.fail("the model ran"))
    np.save(tmp_path / "tokens.npy", np.ones((1, 4), np.int64))
    for output in (tmp_path / "none" / "x.json", tmp_path):
        assert (
            main(
                [
                    str(paths.MODELS / "stories260K"),
                    "--tokens",
                    str(tmp_path / "tokens.npy"),
                    "--output",
                    str(output),
                ]
            )
            == 1
        )
        assert (
            f"output={str(output)!r} is not supported: a file that can be written" in capsys.readouterr().err
        )


@pytest.mark.parametrize("shape", [(0, 32), (2, 0)])
def test_empty_windows_are_refused(shape):
    checkpoint = open_checkpoint(str(paths.MODELS / "stories260K"))
    with pytest.raises(
        ConfigError,
        match=r"windows=\[\d, \d+\] is not supported: token ids .*, at least one window and one token",
    ):
        softmax_range("stories", checkpoint.model_config, {}, np.zeros(shape, np.int32))


def test_windows_of_a_text():
    checkpoint = open_checkpoint(str(paths.MODELS / "stories260K"))
    whole = text_windows(checkpoint, "One day a cat ran. " * 10, 10_000)
    assert whole.shape[0] == 1
    cut = text_windows(checkpoint, "One day a cat ran. " * 10, 7)
    assert cut.shape == (whole.shape[1] // 7, 7)
    np.testing.assert_array_equal(cut.ravel(), whole[0, : cut.size])
    with pytest.raises(ConfigError, match="at least two tokens"):
        text_windows(checkpoint, "", 7)

"""`python -m search spans`: the choice, and the files."""

import re

import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import SPAN_UNITS, EngineConfig, Span
from jaxflow.engine.start import open_model
from jaxflow.model.attention_spans import keys_share, read_spans
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search import spans
from search.__main__ import main
from search.span_effects import Effects

MODEL = "tiny-llama"


def seen(span, position):
    """Return the keys that a query sees."""
    return [j for j in range(position + 1) if j < span.sinks or position - j < span.window(position)]


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40))
def test_seen_keys_counts_every_key_once(sinks, tokens, alpha):
    some = spans.candidates(Span(sinks, alpha, 0), tokens)
    counted = [sum(len(seen(span, p)) for p in range(tokens)) for span in some]
    assert spans.seen_keys(some, tokens).tolist() == counted == sorted(counted)


def of_64_tokens(share):
    """Return the candidates' keys in a text of 64 tokens, and the index of the uniform window."""
    start = spans.uniform(64, 4, share)
    some = spans.candidates(start, 64)
    return spans.seen_keys(some, 64), some.index(start)


@given(st.integers(0, 1000), st.sampled_from([0.3, 0.5, 0.8]), st.integers(1, 20))
def test_the_choice_keeps_the_keys_and_changes_less_than_equal_heads(seed, share, reach):
    keys, start = of_64_tokens(share)
    changes = np.random.default_rng(seed).normal(size=(12, len(keys)))
    near = np.full(12, start)
    chosen = spans.choose(changes, keys, keys[start], near, reach)
    assert keys[chosen].mean() <= keys[start]
    assert np.abs(chosen - start).max() <= reach
    used = keys[chosen].mean()
    equal = [changes[:, c].sum() for c in range(len(keys)) if keys[c] <= used and abs(c - start) <= reach]
    assert changes[np.arange(12), chosen].sum() <= min(equal, default=np.inf) + 1e-9


@given(st.integers(0, 1000), st.sampled_from([0.3, 0.5, 0.8]), st.floats(0.0, 2.0))
def test_the_descent_never_ends_above_its_start(seed, share, coupling):
    """Heads lose by their own amounts, and by each other's: the effects are then right only nearby."""
    keys, start = of_64_tokens(share)
    rng = np.random.default_rng(seed)
    lost = np.sqrt(1 - keys / keys[-1]) * rng.exponential(size=(12, 1))
    metric = np.eye(12) + coupling * rng.random((12, 12))

    def measure(choice):
        own = lost[np.arange(12), choice]
        gradient = (metric + metric.T) @ own
        return Effects(own @ metric @ own, gradient[:, None] * (lost - own[:, None]))

    chosen, loss, first = spans.descend(measure, start, 12, keys, 4)
    assert loss == measure(chosen).loss <= first == measure(np.full(12, start)).loss
    assert keys[chosen].mean() <= keys[start]
    if coupling == 0:
        assert loss < first


def test_a_uniform_window_sees_at_least_the_share():
    for share in (0.2, 0.5, 0.9):
        keys = spans.seen_keys([spans.uniform(64, 4, share), Span(4, 0, 1024)], 64)
        assert share <= keys[0] / keys[1] < share + 0.05


@pytest.mark.usefixtures("no_flags")
def test_the_command_writes_files_that_an_engine_takes(tmp_path, capsys):
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(3, 200, (3, 48)))
    model, folder = str(paths.MODELS / MODEL), tmp_path / "spans"
    command = ["search", "spans", "--model", model, "--tokens", str(tokens), "--sinks", "2", "--rounds", "1"]
    assert (
        main([*command, "--first_window", "1", "--keys_percent", "60,40", "--output_folder", str(folder)])
        == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 5
    for percent in (60, 40):
        shares = {}
        for kind in ("spans", "uniform"):
            path = str(folder / f"{kind}-{percent}.json")
            assert read_spans(path).sinks == 2
            config = open_model(EngineConfig(model, attention_spans=path)).model_config
            shares[kind] = keys_share(config, 48)
            assert keys_share(config, 48, held=True) >= shares[kind] - 1e-9
        assert percent / 100 <= shares["uniform"] and shares["spans"] <= shares["uniform"]


@given(st.sampled_from(["tiny-llama", "tiny-mixtral", "stories260K"]), st.floats(0.1, 0.5), st.floats(1, 12))
def test_spread_spans_see_the_share_at_every_layer(model, share, spread):
    config = open_checkpoint(str(paths.MODELS / model), load_format="dummy").model_config
    heads = config.num_kv_heads
    layers = np.array([span.beta for span in spans.spread_out(config, 2, share, spread)]).reshape(-1, heads)
    assert len(layers) == config.num_layers and heads > 1
    assert np.allclose(layers.mean(axis=1) / SPAN_UNITS, share, atol=1 / SPAN_UNITS)
    shortest, longest = layers.min(axis=1), layers.max(axis=1)
    assert np.all(longest - 0.5 <= spread * (shortest + 0.5))
    assert np.all(longest + 0.5 >= spread * (shortest - 0.5))
    assert spread < 2 or not np.array_equal(layers[0], layers[1])


@pytest.mark.usefixtures("no_flags")
def test_spread_spans_are_written_for_a_model_without_weights(tmp_path):
    written = tmp_path / "spans"
    command = "search spans --model llama-3.1-8b --spread 8 --keys_percent 50 --sinks 4 --output_folder"
    assert main([*command.split(), str(written)]) == 0
    path = str(written / "spread-50.json")
    config = EngineConfig("llama-3.1-8b", load_format="dummy", attention_spans=path)
    model = open_model(config).model_config
    for length in (1024, 32768):
        assert keys_share(model, length) == pytest.approx(0.5, abs=0.02)
    assert len(model.span_classes) == 4
    # The committed file, which timings name.
    shipped = paths.ROOT / "benchmarks/settings/llama-3.1-8b/spread-50.json"
    assert shipped.read_bytes() == (written / "spread-50.json").read_bytes()


@pytest.mark.usefixtures("no_flags")
@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("tokens", {"spread": "2"}),
        ("spread", {"spread": "3", "tokens": None, "keys_percent": "75"}),
        ("tokens", {"tokens": None}),
        ("keys_percent", {"keys_percent": "50,x"}),
        ("keys_percent", {"keys_percent": "100"}),
        ("keys_percent", {"keys_percent": "1"}),
        ("first_window", {"first_window": "3"}),
        ("tokens", {"tokens": "wild.npy"}),
        ("model", {"model": str(paths.MODELS / "tiny-gemma2")}),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path, capsys, monkeypatch, field, changes):
    monkeypatch.chdir(tmp_path)
    np.save("tokens.npy", np.full((3, 32), 5))
    np.save("wild.npy", np.full((3, 32), 10**6))
    given = {"model": str(paths.MODELS / MODEL), "tokens": "tokens.npy", "output_folder": "out"} | changes
    given = [f"--{name}={value}" for name, value in given.items() if value is not None]
    assert main(["search", "spans", *given]) == 2
    assert re.search(rf"error: {field}=", capsys.readouterr().err)

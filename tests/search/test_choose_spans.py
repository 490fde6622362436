"""`python -m search spans`: the measured attention, the choice, and the files."""

import re

import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import EngineConfig, Span
from jaxflow.engine.start import open_model
from jaxflow.model.attention_spans import keys_share, read_spans
from search import spans
from search.__main__ import main

MODEL = "tiny-llama"


def seen(span, position):
    """Return the keys that a query sees."""
    return [j for j in range(position + 1) if j < span.sinks or position - j < span.window(position)]


def test_lost_attention_is_what_queries_pay_outside_their_span():
    rng = np.random.default_rng(0)
    tokens, some = 24, spans.candidates(24, 3)
    q = rng.normal(size=(tokens, 4, 8)).astype(np.float32)
    k = rng.normal(size=(2, tokens, 8)).astype(np.float32)
    found = np.asarray(spans.lost_attention(some, jnp.asarray(q), jnp.asarray(k), 0.7, None, None))
    for head in range(2):
        for c, span in enumerate(some):
            lost = 0.0
            for p in range(tokens):
                for n in (2 * head, 2 * head + 1):
                    paid = np.exp(0.7 * k[head, : p + 1] @ q[p, n])
                    lost += 1 - paid[seen(span, p)].sum() / paid.sum()
            assert found[head, c] == pytest.approx(lost, abs=1e-3)
    assert np.all(np.abs(found[:, -1]) < 1e-3)  # full attention


@given(st.integers(0, 9), st.integers(1, 40))
def test_seen_keys_counts_every_key_once(sinks, tokens):
    some = spans.candidates(tokens, sinks)
    counted = [sum(len(seen(span, p)) for p in range(tokens)) for span in some]
    assert spans.seen_keys(some, tokens).tolist() == counted


@given(st.integers(0, 1000), st.sampled_from([0.3, 0.5, 0.8]))
def test_the_choice_keeps_the_share_and_loses_less_than_equal_heads(seed, share):
    keys = spans.seen_keys(spans.candidates(64, 4), 64)
    order = np.argsort(keys)
    rng = np.random.default_rng(seed)
    lost = np.zeros((12, len(keys)))  # more keys never lose more attention
    lost[:, order] = -np.sort(-rng.random((12, len(keys))), axis=1) * rng.random((12, 1))
    lost[:, -1] = 0.0
    chosen = spans.choose(lost, keys, share)
    assert keys[chosen].mean() <= share * keys[-1]
    used = keys[chosen].mean()
    equal = [lost[:, c].sum() for c in range(len(keys)) if keys[c] <= used]
    assert lost[np.arange(12), chosen].sum() <= min(equal) + 1e-9


def test_a_uniform_window_sees_at_least_the_share():
    for share in (0.2, 0.5, 0.9):
        keys = spans.seen_keys([spans.uniform(64, 4, share), Span(4, 0, 1024)], 64)
        assert share <= keys[0] / keys[1] < share + 0.05


@pytest.mark.usefixtures("no_flags")
def test_the_command_writes_files_that_an_engine_takes(tmp_path, capsys):
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(3, 200, (3, 48)))
    model, folder = str(paths.MODELS / MODEL), tmp_path / "spans"
    command = ["search", "spans", "--model", model, "--tokens", str(tokens), "--sinks", "2"]
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
        assert shares["spans"] <= percent / 100 and shares["spans"] <= shares["uniform"]


@pytest.mark.usefixtures("no_flags")
@pytest.mark.parametrize(
    ("field", "changes"),
    [
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
    assert main(["search", "spans", *(f"--{name}={value}" for name, value in given.items())]) == 1
    assert re.search(rf"error: {field}=", capsys.readouterr().err)

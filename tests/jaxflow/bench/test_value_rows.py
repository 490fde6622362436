"""`bench value_rows`: chunks that read few V rows, the last-word set, and the report."""

import json

import jax.numpy as jnp
import numpy as np
import paths
import pytest

from jaxflow.bench.__main__ import main
from jaxflow.bench.engine import value_rows
from jaxflow.config import ConfigError
from pallas_kernels.kernel_set import REFERENCE


@pytest.mark.parametrize(("window", "cap"), [(None, None), (9, 3.0)])
def test_chunks_that_read_all_rows_are_the_reference(window, cap):
    rng, size, pages = np.random.default_rng(3), 8, 4
    q = jnp.asarray(rng.standard_normal((24, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2 * pages, 2, size, 16)), jnp.float32) for _ in range(2))
    table = jnp.arange(2 * pages, dtype=jnp.int32).reshape(2, pages)
    chunks = jnp.array([[2, 10, 1, 14], [12, 7, 0, 0], [0, 0, 0, 0]], jnp.int32)
    settings = {"scale": 0.25, "window": window, "soft_cap": cap}
    expected = REFERENCE.chunk_attention(q, k, v, table, chunks, **settings)
    found = value_rows.kernels(99.99).chunk_attention(q, k, v, table, chunks, **settings)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    few = value_rows.kernels(20.0).chunk_attention(q, k, v, table, chunks, **settings)
    first = 12  # the first token of a sequence sees itself only
    np.testing.assert_allclose(few[first], expected[first], atol=1e-5)
    assert np.abs(few - expected)[[3, 18]].max() > 1e-3 and not few[jnp.array([0, 1, 20])].any()


def test_a_last_word_occurs_in_its_passage_and_ends_a_clause():
    filler = " ".join(f"w{i}" for i in range(40))
    text = f"The river {filler} . They went back to the river . Then nothing came of the mountain ."
    assert list(value_rows.last_words(text)) == [
        value_rows.LastWord(f"The river {filler} . They went back to the", "river")
    ]
    assert not list(value_rows.last_words("The river . They went to the river ."))  # too short


def test_other_percentages_are_refused():
    for wrong in (["0"], ["101"], ["nan"], ["x"], []):
        with pytest.raises(ConfigError, match="value_top_k_percents"):
            value_rows.parse_percents(wrong)


def test_the_report_has_a_row_for_each_percentage(no_flags, tmp_path, capsys):
    np.save(tmp_path / "ids.npy", np.arange(60, dtype=np.uint16).reshape(3, 20))
    report = tmp_path / "report.json"
    flags = ["--tokens", str(tmp_path / "ids.npy"), "--windows", "2", "--output_json", str(report)]
    model = str(paths.MODELS / "tiny-llama")
    command = ["bench", "value_rows", "--model", model, *flags, "--value_top_k_percents", "100,99.9,10"]
    assert main(command) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["value_top_k_percent"] for row in rows] == [100.0, 99.9, 10.0]
    assert rows[1]["max_change"] < 1e-3 < rows[2]["max_change"]
    assert "10 % of the V rows" in capsys.readouterr().out

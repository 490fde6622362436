"""SARATHI's tables and figures: their shape on the cost model, and the same figures on a small engine."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_engine import MODEL

from jaxflow.bench.__main__ import main
from jaxflow.bench.engine.sarathi import LLAMA_13B
from jaxflow.bench.sarathi.clock import EqualRequests, PredictedClock
from jaxflow.bench.sarathi.engine_clock import sized
from jaxflow.bench.sarathi.figures import (
    FIGURES,
    Setting,
    chunks_of,
    figure_3,
    figure_4,
    figure_8,
    figure_9,
    figure_10,
    figure_13,
    parts,
    step,
    table_2,
    table_4,
    without_keys,
)
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES

SETTING = Setting(LLAMA_13B, batches=(1, 2, 4, 18))


class RememberingClock(PredictedClock):
    """A clock that predicts each step and each run once for all tests: figures share them."""

    step_times: ClassVar[dict[Composition, float]] = {}
    run_times: ClassVar[dict[EqualRequests, float]] = {}

    def __init__(self, step_s: Callable[[Composition], float]):
        super().__init__(lambda step: remembered(self.step_times, step, step_s))

    def _run_s(self, run: EqualRequests) -> float:
        return remembered(self.run_times, run, super()._run_s)


def remembered(known: dict, key: Any, make: Callable[[Any], float]) -> float:
    """Return the value of a key, made at the first call."""
    if key not in known:
        known[key] = make(key)
    return known[key]


@pytest.fixture
def clock():
    return RememberingClock.of_model(LLAMA_13B, DEVICES["RTX A6000"].rates)


def test_a_decode_beside_a_chunk_is_about_ten_times_cheaper(clock):
    row = table_2(clock, SETTING)[-1]
    assert row["scheme"] == "decode-maximal"
    assert row["times_cheaper"] == pytest.approx(row["paper_times_cheaper"], rel=0.3)


def test_decodes_cost_as_many_prefill_tokens_as_in_the_paper(clock):
    compared = [row for row in figure_3(clock, SETTING) if row["paper_decode_over_prefill"]]
    assert [row["batch"] for row in compared] == [1, 2, 18]
    for row in compared:
        assert row["decode_over_prefill"] == pytest.approx(row["paper_decode_over_prefill"], rel=0.1)


def test_prefill_saturates_before_decodes(clock):
    rows = {(row["phase"], row["tokens"]): row for row in figure_4(clock, SETTING)}
    assert rows["prefill", 512]["of_best"] > 0.95 > rows["prefill", 128]["of_best"]
    assert rows["decode", 18]["linear_flops_per_byte"] < 20 < rows["prefill", 256]["linear_flops_per_byte"]


def test_the_speedup_of_decodes_falls_with_batch_and_length(clock):
    rows = [row for row in figure_8(clock, SETTING) if row["chunk"] == 256]
    found = {(row["length"], row["batch"]): row["speedup"] for row in rows}
    assert len(found) == 9
    for length in SETTING.lengths():
        assert found[length, 2] > found[length, 4] > found[length, 18] > 1
    assert found[1024, 4] > found[2048, 4] > found[3072, 4]


def test_the_gain_peaks_at_the_ratio_of_chunk_and_batch(clock):
    rows = figure_9(clock, SETTING)
    for chunk in SETTING.chunk_sizes:
        here = [row for row in rows if row["chunk"] == chunk]
        best = max(here, key=lambda row: row["gain"])
        assert best["pd_ratio"] == min(SETTING.ratios, key=lambda r: abs(r - best["expected_peak"]))
    (row,) = (row for row in rows if row["paper_gain"])
    assert row["gain"] == pytest.approx(row["paper_gain"], rel=0.05)


def test_every_length_gains_at_its_peak(clock):
    rows = table_4(clock, SETTING)
    assert [(row["length"], row["batch"]) for row in rows] == [(1024, 18), (2048, 10), (3072, 6)]
    assert all(1.1 < row["gain"] < 1.4 and row["decode_speedup"] > 2 for row in rows)


def test_only_linear_time_is_saved(clock):
    rows = figure_10(clock, SETTING)
    assert rows and all(row["linear_speedup"] > row["total_speedup"] > 1 for row in rows)
    by_chunk = {row["chunk"]: row["linear_speedup"] for row in rows if row["batch"] == 18}
    assert by_chunk[256] > by_chunk[512]


def test_small_chunks_cost_prefill_time_and_uneven_tiles_cost_gain(clock):
    rows = {row["chunk"]: row for row in figure_13(clock, SETTING)}
    assert rows[64]["prefill_over_whole"] > rows[128]["prefill_over_whole"] > rows[256]["prefill_over_whole"]
    assert rows[512]["prefill_over_whole"] < 1.1
    assert rows[256]["gain"] > rows[320]["gain"] and rows[256]["gain"] > 1.2


@given(st.integers(8, 5000), st.integers(1, 700))
def test_sampled_chunks_sum_to_the_prompt(length, chunk):
    """The weights count every token once, and they are exact for a time that is linear in the start."""
    found = chunks_of(length, chunk)
    assert sum(n * weight for n, _, weight in found) == pytest.approx(length)
    exact = sum(range(0, length, chunk))
    middle_is_exact = length // chunk <= 3 or (length // chunk) % 2
    if middle_is_exact:
        assert sum(start * weight for _, start, weight in found) == pytest.approx(exact)


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), max_size=4))
def test_a_step_without_keys_has_the_same_tokens(decodes, chunks):
    full = step(decodes, 700, chunks)
    short = without_keys(full)
    assert short.tokens == full.tokens and short.decode_tokens == full.decode_tokens
    assert short.count("chunk_pairs") <= full.count("chunk_pairs")


def test_the_parts_of_a_step_sum_to_its_time(clock):
    (one,) = parts(clock, {"": step(18, 1024, [(238, 512)])}).values()
    assert 0 < one.attention < one.linear and one.linear + one.attention == pytest.approx(one.total)


def test_the_engine_compiles_few_steps(clock):
    """All figures of the default setting need nine sizes; chunks without their decodes take the next one."""
    setting = Setting(LLAMA_13B, ratios=(14,))
    for figure in FIGURES.values():
        figure.rows(clock, setting)
    config = sized(EngineConfig("x"), LLAMA_13B, list(clock.steps), list(clock.runs))
    sizes = [int(size) for size in (config.step_sizes or "").split(",")]
    assert sizes == [8, 32, 64, 128, 256, 320, 512, 1024, 2048]
    assert config.max_num_seqs == 256 and config.max_model_len == LLAMA_13B.max_position


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"slots": 1}, "length"),
        ({"slots": 65}, "slots"),
        ({"ratios": ()}, "ratios"),
        ({"chunk_sizes": (4096,)}, "prefill_tokens"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(change, field):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(SETTING, **change)
    assert error.value.field == field


def test_settings_that_the_figures_decide_are_refused():
    for field, value in (("max_num_seqs", 4), ("step_sizes", "8"), ("plan", "searched")):
        with pytest.raises(ConfigError) as error:
            sized(EngineConfig("x", **{field: value}), LLAMA_13B, [step(1, 8)], [])
        assert error.value.field == field


@pytest.mark.slow
def test_the_command_measures_every_figure_on_the_engine(no_flags, tmp_path):
    """Rows of the engine's figures are those of the cost model; times are positive."""
    report, plot = tmp_path / "r.json", tmp_path / "r.png"
    flags = "--length 32 --slots 4 --requests 2 --prefill_tokens 64 --batches 1,4 --chunk_sizes 16"
    flags += " --ablation 16 --ratios 3 --seconds 0.01 --repeats 1"
    arguments = ["bench", "sarathi", "--engine", "--model", MODEL, *flags.split()]
    assert main([*arguments, "--output_json", str(report), "--plot", str(plot)]) == 0
    found = json.loads(report.read_text())
    assert plot.stat().st_size > 0 and list(found["figures"]) == list(FIGURES)
    assert found["programs"] == 4 and found["command_name"] == "sarathi"
    for name, figure in found["figures"].items():
        assert len(figure["rows"]) == len(figure["cost_model"]) > 0, name
    assert all(row["gain"] > 0 for row in found["figures"]["figure9"]["rows"])


def test_an_unknown_figure_is_refused(no_flags, capsys):
    assert main(["bench", "sarathi", "--figures", "figure99"]) == 1
    assert "figure99" in capsys.readouterr().err

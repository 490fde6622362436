"""Long windows of plans: the step of unlike lengths, who is compared with whom, and the cards' readings."""

import pytest

from benchmarks import plan_windows
from jaxflow.bench.workload.lengths import Item
from jaxflow.config import ConfigError
from jaxflow.pipeline.plan import NanoOp, Plan

ITEMS = (Item(100, 10), Item(20, 90))
MIX = plan_windows.Mix(ITEMS, "two")


def test_a_request_is_met_as_often_as_its_output_is_long():
    prompts, so_far = plan_windows.under_way(ITEMS, 20_000)
    assert (prompts == 20).mean() == pytest.approx(0.9, abs=0.01)
    assert so_far[prompts == 20].mean() == pytest.approx(44.5, abs=1)
    assert so_far[prompts == 100].max() == 9


def test_a_mixed_step_is_full_and_has_decodes_in_the_workloads_proportion():
    step, positions = plan_windows.mixed_step(MIX, 220, rows=220)
    assert step.tokens == 220 and step.decode_tokens == len(positions) == 100
    assert step.decode_keys == pytest.approx(positions.mean() + 1)
    assert all(start == 0 and size in (100, 20) for size, start in step.chunks[:-1])


def test_a_mixed_step_of_too_many_rows_names_the_limit():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        plan_windows.mixed_step(MIX, 220, rows=50)


def test_a_mix_is_read_from_its_text():
    mix = plan_windows.parse_mix("lognormal:246/322")
    assert mix.means == pytest.approx((246, 322), rel=0.02)
    assert (mix.like.prompt_tokens, mix.like.output_tokens) == pytest.approx((246, 322), abs=5)
    with pytest.raises(ConfigError, match="workload"):
        plan_windows.parse_mix("lognormal:246")


def test_only_a_step_of_whole_ops_on_the_main_stream_is_uncut():
    whole = Plan("s", 8, (NanoOp("a", "qkv", 0, 8), NanoOp("b", "down", 0, 8)), sums="copies")
    assert plan_windows.uncut(whole)
    for other in (NanoOp("a", "qkv", 0, 4), NanoOp("a", "qkv", 0, 8, stream=1)):
        assert not plan_windows.uncut(Plan("p", 8, (other,)))


ROWS = [
    {"plan": "sequential, 8", "uncut": True, "digest": "s8", "tokens_per_s": 10.0},
    {"plan": "sequential, 6", "uncut": True, "digest": "s6", "tokens_per_s": 11.0},
    {"plan": "found", "uncut": False, "digest": "f", "tokens_per_s": 12.0},
    {"plan": "two", "uncut": False, "digest": "t", "tokens_per_s": 12.5},
    {"plan": "three", "uncut": False, "digest": "u", "tokens_per_s": 9.0},
]


def test_the_rival_is_the_best_sequential_step_of_any_size():
    assert plan_windows.contenders(ROWS, "f") == {
        "best sequential": "sequential, 6",
        "found": "found",
        "best by hand": "two",
    }
    assert "found" not in plan_windows.contenders(ROWS, None)


def test_the_summary_has_medians_gains_and_the_predictions_error():
    survey = [row | {"tokens": 8, "predicted_ms": 9.0 if row["plan"] == "found" else None} for row in ROWS]
    parts = {"best sequential": "sequential, 6", "found": "found"}

    def window(rate):
        return {
            "tokens_per_s": rate,
            "step_ms": 100 / rate,
            "watts": [600.0, 700.0],
            "clock_mhz": [1500.0, 1600.0],
        }

    windows = {"sequential, 6": [window(10.0), window(9.0), window(11.0)], "found": [window(12.5)]}
    rival, found = plan_windows.summary(windows, survey, parts)
    assert rival["tokens_per_s"] == 10.0 and rival["spread"] == pytest.approx(0.2)
    assert found["against_best_sequential"] == 1.25
    assert found["prediction_error"] == pytest.approx(9 / 8 - 1)
    assert found["watts"] == [600.0, 700.0]

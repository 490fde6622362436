"""Figures of a report from records with known results, under vLLM's keys and lines."""

import errno
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.report import requests as report
from jaxflow.bench.report.requests import Record

# Sent at 10 s: tokens at 11, 11.5, 12, 12.5; done at 12.5. Sent at 11 s: one delivery of two tokens at 11.2,
# one at 11.4.
FIRST = Record(8, 10.0, [(11.0, 1), (11.5, 1), (12.0, 1), (12.5, 1)], 12.5)
SECOND = Record(4, 11.0, [(11.2, 2), (11.4, 1)], 11.4)
SHORT = Record(2, 11.0, [(11.1, 1)], 11.1)
FAILED = Record(100, 11.0, [(11.2, 1)], None, "RESOURCE_EXHAUSTED: full")


def test_figures_of_known_records():
    f = report.figures([FIRST, SECOND, SHORT, FAILED], 4.0)
    assert (f["completed"], f["failed"], f["errors"]) == (3, 1, {"RESOURCE_EXHAUSTED: full": 1})
    assert (f["total_input_tokens"], f["total_output_tokens"]) == (14, 8)
    assert f["request_throughput"] == 3 / 4
    assert f["output_throughput"] == 8 / 4
    assert f["total_token_throughput"] == 22 / 4
    assert f["mean_ttft_ms"] == pytest.approx((1000 + 200 + 100) / 3)
    assert f["median_ttft_ms"] == pytest.approx(200)
    assert f["mean_tpot_ms"] == pytest.approx((500 + 100) / 2)  # a single token has none
    assert f["median_itl_ms"] == pytest.approx(500)
    assert f["mean_itl_ms"] == pytest.approx((3 * 500 + 200) / 4)  # a delivery of two tokens is one
    assert f["mean_e2el_ms"] == pytest.approx((2500 + 400 + 100) / 3)
    assert f["mean_normalized_latency_ms"] == pytest.approx((2500 / 4 + 400 / 3 + 100) / 3)
    assert f["p99_e2el_ms"] == pytest.approx(np.percentile([2500, 400, 100], 99))
    assert f["max_concurrent_requests"] == 3
    assert f["max_output_tokens_per_s"] == 6  # in [11, 12): 1 + 1 + 3 + 1
    assert f["request_goodput"] is None


def test_the_keys_are_those_of_vllm_bench():
    keys = set(report.figures([FIRST], 1.0))
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", f"p99_{name}_ms"} <= keys
    assert keys >= {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput",
        "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    }  # fmt: skip


def test_the_layout_is_that_of_vllm_bench():
    lines = report.text("Serving Benchmark Result", report.figures([FIRST, SECOND], 4.0)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     2         " in lines
    assert "Benchmark duration (s):                  4.00      " in lines
    assert "Total token throughput (tok/s):          4.75      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    assert "----------------End-to-end Latency----------------" in lines
    assert "Mean TTFT (ms):                          600.00    " in lines
    assert any(line.startswith("P99 ITL (ms):") for line in lines)
    assert not any("goodput" in line for line in lines)


def test_goodput_counts_requests_within_every_limit():
    records = [FIRST, SECOND, SHORT, FAILED]
    for pairs, good in [
        (["ttft:500"], 2),
        (["tpot:499"], 2),
        (["tpot:500", "e2el:3000"], 3),
        (["e2el:100.1", "ttft:1"], 0),
    ]:
        assert report.figures(records, 2.0, report.parse_goodput(pairs))["request_goodput"] == good / 2


@pytest.mark.parametrize("pair", ["itl:5", "ttft", "ttft:x", "ttft:-1", "ttft:nan"])
def test_a_malformed_goodput_limit_is_named(pair):
    with pytest.raises(ValueError, match=pair):
        report.parse_goodput([pair])


def test_no_request_completed_is_a_report_of_zeros():
    f = report.figures([FAILED], 2.0)
    assert (f["completed"], f["failed"], f["total_token_throughput"], f["mean_ttft_ms"]) == (0, 1, 0.0, 0.0)
    assert json.loads(json.dumps(f)) == f


records = st.lists(
    st.builds(
        lambda prompt, sent, gaps: Record(
            prompt, sent, [(sent + t, 1) for t in np.cumsum(gaps).tolist()], sent + sum(gaps) + 0.01
        ),
        st.integers(1, 100), st.floats(0, 50), st.lists(st.floats(1e-3, 5), min_size=1, max_size=20),
    ), min_size=1, max_size=20,
)  # fmt: skip


@given(records)
def test_statistics_are_ordered_and_latencies_add_up(records):
    f = report.figures(records, 60.0)
    for key in report.METRICS:
        assert 0 <= f[f"median_{key}_ms"] <= f[f"p90_{key}_ms"] + 1e-9 <= f[f"p99_{key}_ms"] + 2e-9
    assert f["mean_ttft_ms"] <= f["mean_e2el_ms"]
    assert 1 <= f["max_concurrent_requests"] <= len(records)
    for record in records:
        one = record.latencies()
        assert one["ttft"] + one["tpot"] * (record.output_tokens - 1) == pytest.approx(
            one["e2el"] if record.output_tokens > 1 else one["ttft"]
        )


def test_the_steady_window_leaves_out_ramp_up_and_tail():
    """Ten slots and requests of a second each, 100 tokens a second: the window sees the full rate."""
    records = []
    for slot in range(10):
        for turn in range(8):
            sent = slot * 0.1 + turn
            records.append(Record(50, sent, [(sent + 0.01 * (i + 1), 1) for i in range(100)], sent + 1.0))
    steady = report.steady_state(records)
    assert steady is not None
    assert steady["start"] == pytest.approx(1.0)  # the first one's end
    assert steady["start"] + steady["duration"] == pytest.approx(7.91)  # the last one's first token
    assert steady["output_throughput"] == pytest.approx(1000, rel=0.01)
    assert steady["total_token_throughput"] == pytest.approx(1500, rel=0.01)
    whole = report.figures(records, 8.9)
    assert whole["total_token_throughput"] < steady["total_token_throughput"]


def test_no_steady_window_where_all_run_at_once():
    assert report.steady_state([FIRST, Record(1, 10.0, [(10.5, 1), (13.0, 1)], 13.0)]) is None
    assert report.steady_state([FAILED]) is None


def test_later_half_leaves_out_the_first_requests():
    """One request a second for ten seconds, with growing latencies: the requests due after the middle of the
    arrivals, late as the sixth was sent.
    """
    records = [Record(5, float(i), [(i + 0.5, 1), (i + 1.0 + i, 1)], i + 1.0 + i) for i in range(11)]
    records[5].sent_s = 5.2
    found = report.later_half([*records, Record(5, 10.0, error="full")], [*range(11), 10])
    assert found is not None and (found["after_s"], found["completed"]) == (5.0, 5)
    assert found["mean_normalized_latency_ms"] == pytest.approx(
        1e3 * np.mean([(1 + i) / 2 for i in range(6, 11)])
    )
    assert (
        found["p99_to_mean_normalized_latency"]
        == found["p99_normalized_latency_ms"] / found["mean_normalized_latency_ms"]
    )
    assert found["mean_ttft_ms"] == pytest.approx(500.0)
    assert report.later_half([FIRST, SECOND], [0.0, 0.0]) is None  # at once


def test_line_keeps_columns():
    assert report.line("a", 1.0) == "a" + " " * 39 + " 1.00      "
    assert math.isclose(float(report.line("b", 2.345).split()[1]), 2.35, abs_tol=0.01)


def test_write_json_makes_its_folder(tmp_path):
    path = tmp_path / "new" / "r.json"
    report.write_json(path, {"a": 1.5})
    assert json.loads(path.read_text()) == {"a": 1.5}


def test_an_interrupted_write_leaves_the_earlier_report(tmp_path, monkeypatch):
    path, write = tmp_path / "report.json", Path.write_text
    report.write_json(path, {"a": 1})

    def half(file, text, *args, **kwargs):
        write(file, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        report.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}

    def full(file, text, *args, **kwargs):
        write(file, text[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=re.escape(str(path))):
        report.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1} and not path.with_name(f"{path.name}.part").exists()
    monkeypatch.undo()
    link = tmp_path / "link.json"
    link.symlink_to(path)
    report.write_json(link, {"a": 3})
    assert link.is_symlink() and json.loads(path.read_text()) == {"a": 3}
    report.write_json("/dev/null", {"a": 4})
    assert not Path("/dev/null").is_file()

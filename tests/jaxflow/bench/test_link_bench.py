"""`bench link` on a toy model: the report is complete and consistent. The rates have no meaning here."""

import json
import math
import threading
import types

import paths
import pytest

from jaxflow.bench.__main__ import main
from jaxflow.bench.kv import link as link_rates


def test_the_command(tmp_path, no_flags, capsys):
    line = [
        "--model",
        str(paths.MODELS / "stories260K"),
        "--kv_offloading_size",
        "0.001",
        "--workload",
        "20/10",
        "--seconds",
        "0.01",
        "--step_seconds",
        "0.01",
    ]
    line += [
        "--pages",
        "5",
        "--max_num_batched_tokens",
        "32",
        "--max_num_seqs",
        "8",
        "--block_size",
        "16",
        "--num_kv_pages",
        "64",
    ]
    assert main(["bench", "link", *line, "--output_json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert all(value > 0 and math.isfinite(value) for value in result["link"].values())
    runs = {
        "to_host",
        "to_device",
        "both_to_host",
        "both_to_device",
        "pieces_to_host",
        "pieces_to_device",
        "loaded_to_its_place",
    }
    runs |= {
        f"{both}{form}_to_{way}"
        for both in ("", "both_")
        for form in ("one_call", "one_array")
        for way in ("host", "device")
    }
    assert {
        f"{way}_gb_per_s" for way in runs | {"train_to_host", "train_to_device", "both_in_turns_of_4"}
    } <= set(result["link"])
    rates = result["link"]
    for way in ("to_host", "to_device"):
        expected = rates[f"{way}_gb_per_s"] / rates[f"pieces_{way}_gb_per_s"]
        assert rates[f"contiguous_over_pieces_{way}"] == pytest.approx(expected)
    steps = result["steps"]
    assert list(steps) == ["no copies", "storing", "loading", "storing and loading", "storing x4"]
    assert all(
        row["slowdown"] == pytest.approx(row["ms"] / steps["no copies"]["ms"]) for row in steps.values()
    )
    assert result["pages_a_step"] == result["step_tokens"] // 16
    assert result["bytes_a_step"] == result["pages_a_step"] * result["page_bytes"][0]
    assert "slowdown" in capsys.readouterr().out
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxflow")]


def test_link_needs_host_memory(no_flags, capsys):
    assert main(["bench", "link", "--model", "x", "--kv_offloading_size", "0"]) == 1
    assert "kv_offloading_size" in capsys.readouterr().err


def test_a_malformed_workload_names_its_flag(no_flags, capsys):
    assert main(["bench", "link", "--model", "x", "--workload", "foo"]) == 1
    assert "error: workload='foo' is not supported" in capsys.readouterr().err


def test_a_rate_uses_the_median_time(monkeypatch):
    now, times = [0.0], iter([50.0, 1.0, 3.0, 2.0, 90.0])  # the first one warms

    def run():
        now[0] += next(times)

    monkeypatch.setattr(link_rates, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    assert link_rates.rate(run, 100, 6.0) == 100 / 2.0
    assert next(times) == 90.0


def test_both_directions_run_at_once():
    together = threading.Barrier(2, timeout=30)  # each waits for the other
    down, up = link_rates.both(together.wait, together.wait, 10, 0.0)
    assert down > 0 < up

"""The README's figures are those of the committed reports."""

import json
import re
import runpy

import paths
import pytest

from jaxflow.pipeline.plan import load

FOLDER = paths.ROOT / "benchmarks"
TABLE = runpy.run_path(str(FOLDER / "table.py"))

REPORT = {
    "command_name": "throughput",
    "model": "llama-3.1-8b",
    "device": "NVIDIA H200",
    "engine_config": {"dtype": "bfloat16", "kv_cache_dtype": "auto", "tensor_parallel_size": 1},
    "workload": {"kind": "constant", "mean_prompt_tokens": 1024.0, "mean_output_tokens": 512.0},
    "completed": 3,
    "total_input_tokens": 3 * 1024,
    "total_output_tokens": 3 * 512,
    "cached_input_tokens": 0,
    "duration": 4608 / 12345.6,
    "engine_stats": {"steps": 3},
    "total_token_throughput": 12345.6,
    "fraction_of_optimal": 0.3,
    "power": {"mean_watts": 689.4, "mean_sm_clock_mhz": 1503.2},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rivals.json").write_text((FOLDER / "rivals.json").read_text("utf-8"))
    return tmp_path


def test_the_readme_has_the_table_of_the_reports():
    readme = (paths.ROOT / "README.md").read_text("utf-8")
    assert TABLE["rewritten"](readme) == readme


def test_the_speeds_on_its_first_page_are_of_the_table():
    """Each in the row that its sentence speaks of."""
    readme = (paths.ROOT / "README.md").read_text("utf-8")
    said = readme.split("On one H200 Llama-3.1-8B makes ")[1].split("\n\n")[0]
    rows = [line for line in readme.splitlines() if line.startswith("| ") and "| 1024 / 512 |" in line]
    for device, model, ours, beside in (
        ("NVIDIA H200", "llama-3.1-8b, bfloat16", "28,339", "vLLM 0.24.0 25,378"),
        ("NVIDIA H200", "llama-3.1-8b, fp8, fp8 KV", "47,042", "vLLM 0.24.0 36,811"),
        ("4 × NVIDIA H200", "llama-3-70b, fp8, fp8 KV", "19,624", "its sequential plan 18,361"),
    ):
        assert any(
            row.startswith(f"| {device} | {model} |") and f"| {ours} |" in row and f"| {beside} |" in row
            for row in rows
        )
        said = said.replace(ours, "").replace(beside.split()[-1], "")
    assert not re.search(r"\d,\d", said), said


def test_the_plans_of_engines_that_were_checked_are_there():
    named = {
        json.loads(path.read_text("utf-8")).get("plan", "sequential")
        for path in FOLDER.glob("h200-check-engine*.json")
    }
    assert "benchmarks/plans/tp2/check-512-copied.json" in named
    assert {load(paths.ROOT / plan).tokens for plan in named - {"sequential"}} == {512}


def test_what_moves_memory_is_in_the_kernels_table_as_it_was_measured():
    """Norms, appends and sampling of docs/kernels.md's "Measured"; each figure is of one case."""
    doc = (paths.ROOT / "docs" / "kernels.md").read_text("utf-8").split("## What was wanted")[1]
    rows = json.loads((FOLDER / "h200-kernels.json").read_text("utf-8"))["rows"]
    cases = {(row["group"], row["case"]): row for row in rows}
    of = lambda start: next(line for line in doc.splitlines() if line.startswith(start))
    for start, group in (("| norms,", "add_norm"), ("| append,", "rope_append")):
        each = [cases[group, f"2048 tokens {form}"] for form in ("bf16", "fp8")]
        assert f"{', '.join(f'{row["ways"][group]["us"]:.1f}' for row in each)} µs" in of(start)
        assert f"{', '.join(f'{row["ratios"]["copy"]:.2f}' for row in each)} of a copy" in of(start)
        assert all(row["reached"] for row in each) and "| 0.8: reached |" in of(start)
    plain, full, flat, many = (row for (group, _), row in cases.items() if group == "sampling")
    figures = [
        f"{row['ways'][way]['us']:,.0f}"
        for row, way in ((plain, "plain"), (full, "full"), (flat, "full"), (many, "full"))
    ]
    assert "{}, {} µs (top-p 0.9 of a flat softmax {}, top-k 5000 {})".format(*figures) in of("| sampling,")


def test_a_report_becomes_a_line_beside_its_rival(folder):
    (folder / "a.json").write_text(json.dumps(REPORT))
    (folder / "b.json").write_text(json.dumps(REPORT | {"power": None}))
    (folder / "other.json").write_text(json.dumps(REPORT | {"command_name": "latency"}))
    line, of_a_cpu = TABLE["render"](folder).strip().splitlines()[2:]
    cells = [
        "NVIDIA H200",
        "llama-3.1-8b, bfloat16",
        "1024 / 512",
        "12,346",
        "30%",
        "29%, energy",
        "689 at 1503",
        "vLLM 0.24.0 25,378",
    ]
    assert line == f"| {' | '.join(cells)} | [json](benchmarks/a.json) |"
    assert "| 30% | 29%, energy | – |" in of_a_cpu


def test_a_sweep_becomes_a_line_for_each_point(folder):
    head = {key: REPORT[key] for key in ("model", "device", "engine_config")} | {"command_name": "sweep"}
    point = {key: value for key, value in REPORT.items() if key not in (*head, "command_name")}
    (folder / "a.json").write_text(
        json.dumps(head | {"kind": "length", "points": [point, point | {"total_token_throughput": 9.0}]})
    )
    figures = {"mean_normalized_latency_ms": 20.0, "p99_normalized_latency_ms": 25.0, "mean_ttft_ms": 1234.5}
    trace = {
        "kind": "trace",
        "trace": "sharegpt.csv",
        "mean_prompt_tokens": 223.0,
        "mean_output_tokens": 318.0,
    }
    rates = [
        {"request_rate": rate, "total_token_throughput": 500.0 * rate, **figures} for rate in (36.0, 44.0)
    ]
    rates[1]["settled"] = {"mean_normalized_latency_ms": 24.0, "p99_to_mean_normalized_latency": 1.07}
    (folder / "b.json").write_text(json.dumps(head | {"kind": "rate", "workload": trace, "points": rates}))
    lines = [line for line in TABLE["render"](folder).splitlines() if "H200" in line]
    assert [line.split(" | ")[3] for line in lines[:2]] == ["12,346", "9"]
    cells = [
        "NVIDIA H200",
        "llama-3.1-8b, bfloat16",
        "223 / 318 (sharegpt)",
        "44",
        "22,000",
        "20",
        "25",
        "1.25",
        "24",
        "1.07",
        "1,234",
    ]
    assert "| 1.25 | – | – |" in lines[2]
    assert lines[3] == f"| {' | '.join(cells)} | [json](benchmarks/b.json) |"


def test_the_hosts_cost_has_a_table_of_its_own(folder):
    host = [
        {"running": n, "mean_rows": 2048.0, "median_ms": ms, "p99_ms": 2 * ms}
        for n, ms in ((1, 0.111), (1024, 1.26))
    ]
    (folder / "host.json").write_text(json.dumps({"command_name": "host", "cpu": "a CPU", "host": host}))
    assert TABLE["render"](folder).strip().splitlines()[2:] == [
        "| a CPU | 1 | 2048 | 0.11 | 0.22 | [json](benchmarks/host.json) |",
        "| a CPU | 1024 | 2048 | 1.26 | 2.52 | [json](benchmarks/host.json) |",
    ]


def test_policies_of_a_model_that_does_not_fit(folder):
    row = {
        "name": "by-hand",
        "policy": {
            "weight_bits": 4,
            "kv_bits": 16,
            "num_gpu_batches": 3,
            "gpu_batch_size": 48,
            "prompt_tokens": 512,
            "output_tokens": 32,
        },
        "paper_tokens_per_s": 7.32,
        "latency_s": 10.0,
        "tokens_per_s": 8.123,
        "predicted": {"tokens_per_s": 9.0},
        "link": {
            "down_bytes": 512e9,
            "busy_share": 0.84,
            "decode_busy_share": 0.97,
            "bound_tokens_per_s": 9.67,
        },
    }
    report = {
        "command_name": "search offload",
        "device": "NVIDIA H200",
        "model": "opt-30b",
        "memory_gb": {"device": 16.0, "host": 100.0},
    }
    (folder / "a.json").write_text(json.dumps(report | {"rows": [row, {"name": "b", "failed": "no room"}]}))
    (line,) = TABLE["render"](folder).strip().splitlines()[2:]
    cells = [
        "NVIDIA H200: 16, 100",
        "opt-30b: 4, 16",
        "512 / 32",
        "3 × 48: by hand",
        "8.12",
        "9.00",
        "51.2",
        "84%, 97%",
        "9.7",
        "7.32",
    ]
    assert line == f"| {' | '.join([*cells, '[json](benchmarks/a.json)'])} |"
    del row["link"]["decode_busy_share"]  # as reports of single transfers have it
    (folder / "a.json").write_text(json.dumps(report | {"rows": [row]}))
    assert "| 51.2 | – | – | 7.32 |" in TABLE["render"](folder)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H100"},
        {"model": "llama-2-7b"},
        {"engine_config": REPORT["engine_config"] | {"kv_cache_dtype": "float8_e4m3fn"}},
        {"workload": REPORT["workload"] | {"kind": "lognormal"}},
    ],
)
def test_a_rival_is_shown_only_beside_the_same_work(folder, change):
    (folder / "a.json").write_text(json.dumps(REPORT | change))
    assert "not measured" in TABLE["render"](folder)


def test_a_stale_readme_is_seen(folder):
    readme = "x\n<!-- benchmarks -->\nold\n<!-- /benchmarks -->\ny\n"
    assert (
        TABLE["rewritten"](readme, folder)
        == "x\n<!-- benchmarks -->\n\nNo measurement has been committed yet.\n\n<!-- /benchmarks -->\ny\n"
    )
    with pytest.raises(ValueError, match="README"):
        TABLE["rewritten"]("no place", folder)


@pytest.mark.parametrize("run", ["mooncake", "1000-pages"])
def test_the_page_has_what_each_tier_found(run):
    report = json.loads((paths.ROOT / "benchmarks" / f"h200-kv-hierarchy-{run}.json").read_text("utf-8"))
    lines = []
    for name, way in report["ways"].items():
        found, tiers = way["conversations"], {"recompute": 0, "device": 1, "host": 2, "disk": 3}[name]
        shares = [
            f"{share:.0%}".replace("%", " %")
            for share in list(found["reuse_hit_rate_by_tier"].values())[:tiers]
        ]
        cells = (
            "none" if name == "recompute" else name,
            *shares,
            *("–" for _ in range(3 - tiers)),
            f"{found['reuse_hit_rate']:.0%}".replace("%", " %") if tiers else "–",
            f"{found['compute_saved']:.1%}".replace("%", " %"),
            f"{found['later_rounds']['median_ttft_ms']:.0f}",
            f"{found['median_tpot_ms']:.1f}",
            f"{way['no_reuse']['median']:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    text = (paths.ROOT / "docs" / "memory.md").read_text("utf-8")
    assert text.partition(f"<!-- {run} -->\n")[2].partition(f"\n<!-- /{run} -->")[0].splitlines()[2:] == lines

"""The reports under benchmarks/: their keys, their index, and the README's table."""

import json
import re
import statistics

import paths
import pytest

from benchmarks.results import index, main, rewritten
from benchmarks.tables.headline import headline_table
from benchmarks.tables.reports import KEYS, NOT_REPORTS, points, read_reports, unknown_keys
from jaxflow.model.cost import DEVICES, optimal_throughput
from jaxflow.model.energy import known_rate
from jaxflow.pipeline.plan import load

FOLDER = paths.ROOT / "benchmarks"
REPORTS = read_reports(FOLDER)
INCOMPLETE = json.loads((FOLDER / "incomplete.json").read_text("utf-8"))
MOST_INCOMPLETE = 121  # may only shrink: a new report knows every key

REPORT = {
    "command_name": "throughput",
    "model": "llama-3.1-8b",
    "device": "NVIDIA H200",
    "engine_config": {
        "dtype": "bfloat16",
        "quantization": None,
        "kv_cache_dtype": "auto",
        "tensor_parallel_size": 1,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 512,
        "plan": "sequential",
    },
    "workload": {"kind": "constant", "mean_prompt_tokens": 1024.0, "mean_output_tokens": 512.0},
    "total_token_throughput": 12345.6,
    "fraction_of_optimal": 0.3,
    "optimal_parameters": 8e9,
    "power": {"mean_watts": 689.4, "mean_sm_clock_mhz": 1503.2},
}


@pytest.fixture
def write(tmp_path):
    """Write reports into a folder of their own, and return the folder."""
    (tmp_path / "rivals.json").write_text((FOLDER / "rivals.json").read_text("utf-8"))
    (tmp_path / "h200" / "m").mkdir(parents=True)

    def written(**reports):
        for name, report in reports.items():
            (tmp_path / "h200" / "m" / f"{name}.json").write_text(json.dumps(report))
        return tmp_path

    return written


def rows(folder, title):
    """Return the table of a section of the index as lists of cells, without its head."""
    section = index(folder).split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


@pytest.mark.parametrize("path", REPORTS)
def test_a_report_has_every_key(path):
    missing = [key for key in KEYS if key not in REPORTS[path]]
    assert not missing
    assert unknown_keys(REPORTS[path]) == INCOMPLETE.get(path, [])


def test_the_list_of_incomplete_reports_only_shrinks():
    assert set(INCOMPLETE) <= set(REPORTS) and len(INCOMPLETE) <= MOST_INCOMPLETE


def test_every_json_file_is_a_report_a_plan_a_setting_or_a_list():
    others = {
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*.json")
        if path.relative_to(FOLDER).parts[0] not in NOT_REPORTS
    }
    assert others - set(REPORTS) == {"rivals.json", "incomplete.json"}


def test_a_command_without_a_commit_names_its_report_and_files_that_exist():
    """A command with a commit names the files of that commit."""
    for path, report in REPORTS.items():
        words = (report["command"] or "").replace("=", " ").replace(",", " ").split()
        named = [word for word in words if word.startswith("benchmarks/") and word.endswith(".json")]
        if report["commit"] is None:
            assert all((paths.ROOT / name).exists() for name in named), path
            if "--output_json" in words and "&&" not in words:
                assert words[words.index("--output_json") + 1] == f"benchmarks/{path}"


def test_the_index_is_what_the_script_writes():
    assert (FOLDER / "RESULTS.md").read_text("utf-8") == index()


@pytest.mark.parametrize(("argument", "status"), [("--help", 0), ("results.json", 2)])
def test_a_call_for_help_or_with_a_file_writes_nothing(argument, status):
    files = [FOLDER / "RESULTS.md", paths.ROOT / "README.md"]
    written = [file.stat().st_mtime_ns for file in files]
    with pytest.raises(SystemExit) as ended:
        main([argument])
    assert ended.value.code == status
    assert [file.stat().st_mtime_ns for file in files] == written


def test_the_readme_has_the_table_that_the_script_writes():
    readme = (paths.ROOT / "README.md").read_text("utf-8")
    assert rewritten(readme) == readme
    assert 2 < headline_table().count("\n") <= 2 + 8


def headlines(folder):
    """Return the README's rows as lists of cells."""
    return [line.strip("| \n").split(" | ") for line in headline_table(folder).splitlines()[2:]]


def linked(cell):
    """Return the text and the target of a link."""
    return re.fullmatch(r"\[(.+)\]\((.+)\)", cell).groups()


def in_turns(rates, turns=3, rival="LMDeploy", **change):
    """Return a comparison in turns of a rival and JaxFlow, each with its median tokens/s."""
    theirs = {"command_name": f"{rival.lower()}_bench", "versions": {rival.lower(): "9.8", "torch": "1"}}
    reports = {rival: theirs, "JaxFlow": REPORT | change}
    found = {
        name: {"values": [rate] * turns, "median": rate, "range": [rate] * 2, "ratio": rate / rates[0]}
        for name, rate in zip(reports, rates, strict=True)
    }
    return {
        "command_name": "in_turns",
        "device": REPORT["device"],
        "what": "",
        "figures": {"total_token_throughput": found},
        "runs": [{"side": name, "report": report} for name, report in reports.items()] * turns,
    }


def test_a_headline_is_what_its_linked_files_show():
    for device, _, _, rate, count, rival, ratio in headlines(FOLDER):
        number, path = linked(count)
        report = REPORTS.get(path.removeprefix("benchmarks/"))
        if " of each" in number:
            assert report is not None and report["device"] == device
            median = {
                name: one["median"] for name, one in report["figures"]["total_token_throughput"].items()
            }
            theirs = median[rival.split()[0]]
            assert rate == f"{median['JaxFlow']:,.0f}" and rival.endswith(f" {theirs:,.0f}")
            assert ratio == f"{median['JaxFlow'] / theirs:.3f}"
        else:
            assert ratio == "–" and (rival == "–" or (paths.ROOT / linked(rival)[1]).exists())
            plans = [one["engine_config"]["plan"] for one in (report,) if report is not None]
            shipped = ("/searched/", "jaxflow/pipeline/plans/")
            known = [
                plan in ("sequential", "searched") or any(one in plan for one in shipped) for plan in plans
            ]
            assert all(known)


def test_a_recorded_rival_has_the_rate_of_its_report():
    recorded = json.loads((FOLDER / "rivals.json").read_text("utf-8"))["results"]
    for rival in (one for one in recorded if "report" in one):
        report = json.loads((FOLDER / rival["report"]).read_text("utf-8"))
        name = rival["engine"].split()[0]
        if "figures" in report:
            rate = report["figures"]["total_token_throughput"][name]["median"]
        elif report.get("command_name") == "vllm_bench":
            rate = statistics.median(one["total_token_throughput"] for one in report["runs"])
        else:
            (rate,) = (one["total_tokens_per_s"] for one in report["runs"] if one["workload"] == "1024/512")
        assert round(rate) == rival["total_token_throughput"]


def test_a_comparison_in_turns_comes_before_runs_of_other_times(write):
    folder = write(a=REPORT, b=in_turns((10_000.0, 12_000.0)), c=in_turns((9_000.0, 9_900.0), turns=1))
    (row,) = headlines(folder)
    assert row[3:] == ["12,000", "[3 of each](benchmarks/h200/m/b.json)", "LMDeploy 9.8 10,000", "1.200"]


@pytest.mark.parametrize(
    ("model", "engine", "numbers"),
    [
        ("qwen3-30b-a3b", {"quantization": "fp8", "kv_cache_dtype": "fp8"}, "fp8, fp8 KV"),
        ("gpt-oss-20b", {"quantization": "mxfp4"}, "mxfp4"),
    ],
)
def test_vllm_in_turns_comes_before_its_recorded_rate(write, model, engine, numbers):
    own = REPORT | {"model": model, "engine_config": REPORT["engine_config"] | engine}
    turns = in_turns((10_000.0, 12_000.0), rival="vLLM", **own)
    (alone,) = headlines(write(a=own))
    recorded = json.loads((FOLDER / "rivals.json").read_text("utf-8"))["results"]
    best = max(
        (one for one in recorded if (one["model"], one["precision"]) == (model, numbers)),
        key=lambda one: one["total_token_throughput"] if one["workload"] == "1024 / 512" else 0,
    )
    assert linked(alone[5])[1] == f"benchmarks/{best.get('report', 'rivals.json')}" and alone[6] == "–"
    folder = write(a=own, b=turns)
    (row,) = headlines(folder)
    assert row[1:] == [
        f"{model}, {numbers}",
        "1024 / 512",
        "12,000",
        "[3 of each](benchmarks/h200/m/b.json)",
        "vLLM 9.8 10,000",
        "1.200",
    ]
    assert [line[2] for line in rows(folder, "Commands in turns")] == [
        "vLLM: total_token_throughput",
        "JaxFlow: total_token_throughput",
    ]


def test_a_comparison_of_other_work_or_without_a_rival_is_no_headline(write):
    other = in_turns((1.0, 2.0), device="NVIDIA H100")
    own = in_turns((1.0, 2.0))
    for run in own["runs"]:
        run["report"] = REPORT
    (row,) = headlines(write(a=REPORT, b=other, c=own))
    assert (
        row[3] == "12,346" and row[6] == "–" and linked(row[5])[0] == "LMDeploy 0.18.0 25,509 (512 sequences)"
    )


@pytest.mark.parametrize(("plan", "shown"), [("x/searched/a.json", "50,000"), ("x/tried/a.json", "12,346")])
def test_a_plan_that_is_not_shipped_makes_no_headline(write, plan, shown):
    engine = {"engine_config": REPORT["engine_config"] | {"plan": plan}, "total_token_throughput": 50_000.0}
    (row,) = headlines(write(a=REPORT, b=REPORT | engine))
    assert row[3:5] == [shown, f"[1](benchmarks/h200/m/{'b' if shown == '50,000' else 'a'}.json)"]


def test_the_plans_of_checked_engines_exist():
    named = {REPORTS[path]["plan"] for path in REPORTS if "/check-engine" in path} - {"sequential"}
    assert len(named) == 2 and {load(paths.ROOT / plan).tokens for plan in named} == {512}


def test_runs_of_the_same_work_share_a_row_with_their_median(write):
    rates = {"a": 9_000.0, "b": 30_000.0, "c": 20_000.0}
    folder = write(**{name: REPORT | {"total_token_throughput": rate} for name, rate in rates.items()})
    (cells,) = rows(folder, "Throughput")
    peak = known_rate(DEVICES["H200"], "bfloat16")
    assert peak is not None
    assert cells[:9] == [
        *("NVIDIA H200", "llama-3.1-8b, bfloat16", "1024 / 512", "sequential, 2048", "512"),
        *("20,000", "3", "9,000–30,000", f"{20_000 / optimal_throughput(peak.flops_per_s, 8e9):.0%}"),
    ]
    assert cells[9:12] == [
        *("689 at 1503", "–"),
        "LMDeploy 0.18.0 25,509 (512 sequences), vLLM 0.24.0 25,378 (tuned, 512 sequences), "
        "vLLM 0.24.0 23,230 (defaults)",
    ]
    assert "[c](h200/m/c.json)" in cells[12]


def test_each_run_of_a_report_counts(write):
    runs = [{"total_token_throughput": rate} for rate in (9_000.0, 20_000.0, 21_000.0)]
    several = REPORT | {"total_token_throughput": 20_000.0, "runs": runs}
    folder = write(several=several, one=REPORT | {"total_token_throughput": 8_000.0})
    (cells,) = rows(folder, "Throughput")
    assert cells[5:8] == ["14,500", "4", "8,000–21,000"]


def test_energy_is_the_median_of_the_runs_that_have_it(write):
    runs = [{"total_token_throughput": 1.0, "joules_per_token": joules} for joules in (0.03, 0.01, 0.02)]
    folder = write(a=REPORT, b=REPORT | {"joules_per_token": 0.02}, c=REPORT | {"runs": runs})
    assert [row[10] for row in rows(folder, "Throughput")] == ["20.0"]


def test_energy_times_the_rate_is_the_power_of_all_cards():
    for _, report in points(REPORTS, "throughput"):
        if report.get("joules_per_token"):
            watts = report["joules_per_token"] * report["total_token_throughput"]
            assert watts == pytest.approx(report["power"]["mean_watts"], rel=0.1)


def test_energy_of_steps_is_that_of_their_tokens(write):
    launch = {"us": 4000.0, "watts": 400.0, "mhz": 1980.0}
    step = {"requests": 64, "launches": {"graph": launch}}
    decode = {"command_name": "decode_step", "model": "m", "device": "NVIDIA H200", "precision": "bf16"}
    plans = [
        {
            "workload": "512/0",
            "plan": name,
            "sequential": name == "a",
            "prefill_tokens": 9,
            "tokens_per_s": 5.0,
        }
        | own
        for name, own in (("a", {"joules_per_token": 0.04}), ("b", {}))
    ]
    folder = write(a=REPORT | {"command_name": "plans", "plans": plans}, b=decode | {"steps": [step]})
    assert rows(folder, "Decode steps")[0][5] == "25.0"  # 400 W for 4 ms, over 64 tokens
    assert rows(folder, "Plans")[0][6] == "40.0 → –"


def test_each_plan_has_a_row_of_its_own(write):
    engines = [REPORT["engine_config"] | {"plan": plan} for plan in ("plans/half.json", "plans/third")]
    a, b = ({"engine_config": engine, "power": None} for engine in engines)
    folder = write(a=REPORT, b=REPORT | a, c=REPORT | b)
    assert {row[3]: row[9] for row in rows(folder, "Throughput")} == {
        "sequential, 2048": "689 at 1503",
        "overlapped by half, 2048": "–",
        "overlapped by third, 2048": "–",
    }


def test_other_numbers_of_requests_and_copies_to_the_host_have_rows_of_their_own(write):
    fewer = REPORT | {"workload": REPORT["workload"] | {"requests": 600}}
    copied = fewer | {"engine_config": REPORT["engine_config"] | {"kv_offloading_size": 48.0}}
    steps = [row[3] for row in rows(write(a=REPORT, b=fewer, c=copied), "Throughput")]
    assert steps == ["sequential, 2048", "sequential, 2048", "sequential, KV copied to the host, 2048"]


def test_each_way_to_share_work_has_a_row_of_its_own(write):
    ways = {
        "tp": ({"tensor_parallel_size": 2}, "2 × NVIDIA H200"),
        "ep": (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "2 × NVIDIA H200 (whole experts)",
        ),
        "pp": ({"pipeline_parallel_size": 2}, "2 × NVIDIA H200 (2 stages)"),
        "dp": ({"data_parallel_size": 2, "enable_expert_parallel": True}, "2 × NVIDIA H200 (2 ranks)"),
        "processes": (
            {"data_parallel_size": 2, "enable_expert_parallel": True, "num_processes": 2},
            "2 × NVIDIA H200 (2 ranks, 2 processes)",
        ),
        "grid": ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "4 × NVIDIA H200 (2 stages)"),
    }
    engine = REPORT["engine_config"]
    folder = write(**{name: REPORT | {"engine_config": engine | own} for name, (own, _) in ways.items()})
    assert {row[0] for row in rows(folder, "Throughput")} == {head for _, head in ways.values()}


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA H100"},
        {"model": "llama-2-7b"},
        {"engine_config": REPORT["engine_config"] | {"kv_cache_dtype": "float8_e4m3fn"}},
        {"engine_config": REPORT["engine_config"] | {"tensor_parallel_size": 2}},
        {"engine_config": REPORT["engine_config"] | {"pipeline_parallel_size": 2}},
        {"workload": REPORT["workload"] | {"kind": "lognormal"}},
    ],
)
def test_a_rival_stands_only_next_to_the_same_work(write, change):
    assert rows(write(a=REPORT | change), "Throughput")[0][11] == "–"


def test_the_points_of_a_sweep_have_a_row_each(write):
    head = {key: REPORT[key] for key in ("model", "device", "engine_config")} | {"command_name": "sweep"}
    figures = {"mean_normalized_latency_ms": 20.0, "p99_normalized_latency_ms": 25.0, "mean_ttft_ms": 1234.5}
    trace = {
        "kind": "trace",
        "trace": "sharegpt.csv",
        "mean_prompt_tokens": 223.0,
        "mean_output_tokens": 318.0,
    }
    points = [
        {"request_rate": rate, "total_token_throughput": 500.0 * rate, **figures} for rate in (36.0, 44.0)
    ]
    points[1]["later_half"] = {"mean_normalized_latency_ms": 24.0, "p99_to_mean_normalized_latency": 1.07}
    folder = write(a=head | {"kind": "rate", "workload": trace, "points": points})
    assert [row[2:10] for row in rows(folder, "Latency at a request rate")] == [
        ["223 / 318 (sharegpt)", "36", "18,000", "20", "1.25", "–", "–", "1,234"],
        ["223 / 318 (sharegpt)", "44", "22,000", "20", "1.25", "24", "1.07", "1,234"],
    ]


def test_a_failed_policy_has_no_row(write):
    row = {
        "name": "by-hand",
        "policy": {
            **{"weight_bits": 4, "kv_bits": 16, "num_gpu_batches": 3, "gpu_batch_size": 48},
            **{"prompt_tokens": 512, "output_tokens": 32},
        },
        "paper_tokens_per_s": 7.32,
        "latency_s": 10.0,
        "tokens_per_s": 8.123,
        "predicted": {"tokens_per_s": 9.0},
        "link": {"down_bytes": 512e9},
    }
    head = {"command_name": "search offload", "device": "NVIDIA H200", "model": "opt-30b"}
    memory = {"memory_gb": {"device": 16.0, "host": 100.0}}
    folder = write(a=head | memory | {"rows": [row, {"name": "b", "failed": "no room"}]})
    assert [cells[:8] for cells in rows(folder, "Offloaded inference")] == [
        [
            *("NVIDIA H200: 16, 100", "opt-30b: 4, 16", "512 / 32", "3 × 48: by hand"),
            *("8.12", "9.00", "51.2", "7.32"),
        ]
    ]


def test_a_readme_without_a_place_for_the_table_is_refused():
    with pytest.raises(ValueError, match="<!-- results -->"):
        rewritten("no place")

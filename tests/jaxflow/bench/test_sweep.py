"""`bench sweep`: rates, batch sizes and lengths over an engine, simulated curves, and charts."""

import json

import numpy as np
import pytest
from small_engine import MODEL

from jaxflow.bench.engine import latency, steps, sweep, throughput
from jaxflow.bench.report import plot
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.drive import drive

LATENCIES = ("mean", "median", "p99")


def test_sweeps_and_their_charts(llm, tmp_path):
    kept: list[tuple[str, int]] = []

    def keep(one) -> None:
        kept.append((one["kind"], len(one["points"])))

    found = [
        sweep.rates(llm, workload.constant(4, 8, 4), [50.0, 100.0], keep=keep),
        sweep.batch_sizes(llm, [1, 4], 8, 4, iterations=1, keep=keep),
        sweep.lengths(llm, [(8, 4), (16, 8)], 4, keep=keep),
    ]
    assert kept == [(kind, number) for kind in ("rate", "batch_size", "length") for number in (1, 2)]
    for one in found:
        rows = sweep.table(one)
        assert len(rows) == 3 and len({len(row) for row in rows}) == 1
        assert all(point["completed"] == 4 for point in one["points"]) or one["kind"] == "batch_size"
        plot.save(one, tmp_path / "new" / f"{one['kind']}.png")
        assert (tmp_path / "new" / f"{one['kind']}.png").read_bytes().startswith(b"\x89PNG")
    assert [point["workload"]["mean_prompt_tokens"] for point in found[2]["points"]] == [8.0, 16.0]
    assert all(
        0 < point["later_half"]["completed"] < 4 and "sequential" not in point for point in found[0]["points"]
    )
    assert found[0]["highest_rate"]["least_arrivals_s"] == min(
        point["arrivals_s"] for point in found[0]["points"]
    )


@pytest.mark.parametrize("kind", ["rate", "batch_size", "length"])
@pytest.mark.parametrize("joules", [(0.02, 0.03), (0.02, None)])
def test_a_chart_has_the_energy_that_every_point_has(kind, joules):
    names = ("request_rate", "batch_size", "input_len", "output_len", "total_token_throughput")
    times = ("mean_tpot_ms", "mean_ttft_ms", *(f"{one}_normalized_latency_ms" for one in LATENCIES))
    head = dict.fromkeys((*names, *times), 8.0)
    points = [
        head | {"request_rate": at, "batch_size": at, "input_len": at, "joules_per_token": one}
        for at, one in zip((4.0, 2.0), joules, strict=True)
    ]
    figure = plot.draw({"kind": kind, "points": points})
    drawn = [
        dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for axes in figure.axes
        if "energy" in axes.get_ylabel()
        for line in axes.lines
    ]
    labels = [f"{point['input_len']}/{point['output_len']}" for point in points]
    places = labels if kind == "length" else (4.0, 2.0)
    assert drawn == ([] if None in joules else [dict(zip(places, (20.0, 30.0), strict=True))])


def test_no_run_of_a_sweep_has_a_block_of_prompts_of_another(llm, monkeypatch):
    """Else the prefix cache spares the later run some work."""
    runs: list[set[bytes]] = []

    def seen(driver, requests, *args, **kwargs):
        heads = [np.asarray(request.prompt_token_ids[:8], np.int32).tobytes() for request in requests]
        assert len(set(heads)) == len(heads)
        runs.append(set(heads))
        return drive(driver, requests, *args, **kwargs)

    monkeypatch.setattr(throughput, "drive", seen)
    monkeypatch.setattr(latency, "drive", seen)
    monkeypatch.setattr(steps, "plans_of", lambda executor: {"sequential", "another"})
    sweeps = [
        lambda: sweep.rates(llm, workload.constant(3, 8, 2), [90.0, 99.0], compare_sequential=True),
        lambda: sweep.batch_sizes(llm, [1, 2], 8, 2, iterations=2, warm_up=1),
        lambda: sweep.lengths(llm, [(8, 2), (9, 2)], 3),
    ]
    for run, number in zip(sweeps, (4, 6, 2), strict=True):
        runs.clear()
        run()
        assert len(runs) == number and sum(map(len, runs)) == len(set.union(*runs))


def test_lengths_have_the_protocols_requests(monkeypatch):
    monkeypatch.setattr(sweep.throughput, "measure", lambda llm, items, **_: {"completed": len(items)})
    points = sweep.lengths(None, [(1000, 1000), (1024, 512)])["points"]
    assert [(point["completed"], point["workload"]["requests"]) for point in points] == [
        (1000, 1000),
        (1200, 1200),
    ]


def test_rates_compare_the_plans_with_the_sequential_plan(llm, tmp_path, monkeypatch):
    # The steps are sequential.
    monkeypatch.setattr(steps, "plans_of", lambda executor: {"sequential", "another"})
    found = sweep.rates(llm, workload.constant(3, 8, 4), [100.0], compare_sequential=True)
    (point,) = found["points"]
    assert (
        point["against_sequential"] > 0
        and point["sequential"]["later_half"]["completed"] == point["later_half"]["completed"]
    )
    assert found["highest_rate"]["sequential"] == 100.0 == found["highest_rate"]["requests_per_s"]
    legend = plot.draw(found).axes[0].get_legend()
    labels = [text.get_text() for text in legend.get_texts()] if legend else []
    assert {"mean", "mean, sequential plan", "mean, later half"} <= set(labels)


def test_highest_rate_stops_at_the_first_slow_rate():
    def point(rate, ms, later, alone):
        figures = [{"mean_normalized_latency_ms": one} for one in (ms, later, alone)]
        return {
            "request_rate": rate,
            "arrivals_s": 600 / rate,
            "later_half": figures[1],
            "sequential": figures[2],
            **figures[0],
        }

    points = [
        point(30.0, 190.0, 150.0, 250.0),
        point(10.0, 20.0, 20.0, 20.0),
        point(20.0, 100.0, 201.0, 300.0),
    ]
    found = sweep.highest_rate(points)
    assert found == {
        "limit_ms": 200.0,
        "requests_per_s": 30.0,
        "later_half": 10.0,
        "sequential": 10.0,
        "least_arrivals_s": 20.0,
    }
    assert sweep.highest_rate([point(10.0, 201.0, 1.0, 1.0)])["requests_per_s"] is None
    lone = [{name: value for name, value in one.items() if name != "sequential"} for one in points]
    assert "sequential" not in sweep.highest_rate(lone)


@pytest.mark.parametrize(
    ("kind", "values", "columns"),
    [("rate", "40,80", "norm. ms"), ("batch_size", "1,2", "TPOT"), ("length", "8/4,6/6", "output tok/s")],
)
def test_sweep_command(bench, tmp_path, capsys, kind, values, columns):
    settings = ["--num_requests", "3", "--input_len", "8", "--output_len", "4", "--num_iters", "1"]
    png, path = tmp_path / "a.png", tmp_path / "a.json"
    files = ["--output_png", str(png), "--output_json", str(path)]
    assert bench("sweep", "--sweep", kind, "--values", values, "--model", MODEL, *settings, *files) == 0
    assert columns in capsys.readouterr().out and png.exists()
    assert len(json.loads(path.read_text())["points"]) == 2


def test_rate_sweep_where_no_plan_gains(bench, tmp_path, capsys):
    settings = [
        "--num_requests",
        "3",
        "--input_len",
        "8",
        "--output_len",
        "4",
        "--compare_sequential",
        "--output_png",
        str(tmp_path / "a.png"),
    ]
    assert bench("sweep", "--sweep", "rate", "--values", "80", "--model", MODEL, *settings) == 0
    out = capsys.readouterr().out
    assert (
        "Highest rate with at most 200 ms mean latency per token" in out
        and "80 (all requests), 80 (the later half) requests/s" in out
    )
    assert "expects no plan to gain over the sequential plan" in out


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("pd_ratio", ["--chunk_sizes", "32", "--values", "3,6"]),
        ("tiles", ["--values", "128,256"]),
        ("policies", ["--model", "llama-3.1-8b"]),
    ],
)
def test_simulated_sweep_commands_need_no_engine(bench, tmp_path, kind, more):
    path = tmp_path / "out.json"
    small = [
        "--slots",
        "4",
        "--length",
        "64",
        "--output_json",
        str(path),
        "--output_png",
        str(tmp_path / "a.png"),
    ]
    assert bench("sweep", "--sweep", kind, "--optimal_device", "H100", *small, *more) == 0
    result = json.loads(path.read_text())
    assert result["kind"] == kind and result["bfloat16_flops_per_s"] == 989e12
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("rate", ("--values", "4,abc")),
        ("batch_size", ("--values", "1.5")),
        ("pd_ratio", ("--values", "x")),
        ("pd_ratio", ("--values", "0")),
        ("pd_ratio", ("--chunk_sizes", "x")),
        ("tiles", ("--values", "1.5")),
    ],
)
def test_a_list_without_numbers_names_its_flag(bench, capsys, kind, given):
    assert bench("sweep", "--sweep", kind, *given, "--model", MODEL) == 1
    assert f"error: {' '.join(given)}: accepted are positive, finite numbers" in capsys.readouterr().err

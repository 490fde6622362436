"""The commands, over one small engine that all of them share; and once as a process of its own."""

import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import types
from typing import Any

import msgspec
import numpy as np
import paths
import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st
from small_engine import ENGINE, MODEL

from jaxflow.bench.__main__ import main, without_weights
from jaxflow.bench.engine import batch_file, latency, perplexity, serve, steps, throughput
from jaxflow.bench.report import plot
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.drive import drive
from jaxflow.bench.workload.grpc_backend import GrpcBackend
from jaxflow.config import ConfigError, EngineConfig, ParallelConfig
from jaxflow.engine.settings import resolve
from jaxflow.engine.step_plans import choose_plans
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.pipeline.handwritten import two_nano_batch_plan
from jaxflow.pipeline.plan import Plan, Predictions, Target, save
from serving.client import Client
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc.server import Server

TRACE = str(paths.TRACES / "azure2023_conv_1000.csv")
SPREADS = (("input", "-1.0", 1, "cv=-1.0: accepted are"), ("output", "inf", 2, "output_cv=inf"))


def test_throughput_figures_match_the_requests_that_ran(llm):
    items = workload.lognormal(12, 20, 9, limits=workload.LengthLimits(60, 30, 90))
    result = throughput.measure(llm, items)
    prompt, output = sum(i.prompt_tokens for i in items), sum(i.output_tokens for i in items)
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (prompt, output)
    assert result["total_token_throughput"] == pytest.approx((prompt + output) / result["duration"])
    assert result["max_concurrent_requests"] == 12
    stats, steps = result["engine_stats"], result["steps"]
    assert (
        stats["completion_tokens"] == output
        and stats["running_requests"] == stats["compilations_after_warmup"] == 0
    )
    assert stats["kv_pages_free"] == stats["kv_pages"]
    assert steps["steps"] == stats["steps"] == sum(one["steps"] for one in steps["by_bucket"].values())
    assert steps["mean_tokens"] * steps["steps"] == pytest.approx(
        prompt + output - 12
    )  # each last token is sampled, not computed
    assert 0 <= steps["device_idle_share"] < 1
    steady = result["steady_state"]
    assert steady["duration"] < result["duration"]
    assert (
        steady["fraction_of_optimal"] == steady["total_token_throughput"] / result["optimal_token_throughput"]
    )
    assert json.loads(json.dumps(result)) == result


def test_the_fraction_of_the_optimum_is_eq_5s(llm):
    result = throughput.measure(llm, workload.constant(4, 24, 8), device="H200")
    assert result["optimal_flops_source"] == "H200 float32, datasheet"
    layers = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 172
    parameters = 5 * layers + 8 / 32 * 512 * 64
    assert result["optimal_parameters"] == pytest.approx(parameters)
    assert result["optimal_token_throughput"] == pytest.approx(494e12 / 2 / parameters)
    assert (
        result["fraction_of_optimal"] == result["total_token_throughput"] / result["optimal_token_throughput"]
    )
    assert result["fraction_of_bound"] is None  # an H200's joules are not known of float32


def test_a_batch_file_and_generate_do_the_same_work_in_turns(llm, tmp_path):
    before = llm.driver.stats().completion_tokens
    turns, used_tokens = [], []

    def on_turn(result):
        turns.append({way: len(each) for way, each in result["seconds"].items()})
        used_tokens.append(llm.driver.stats().completion_tokens - before)

    result = batch_file.measure(llm, workload.constant(7, 20, 9), tmp_path, turns=2, on_turn=on_turn)
    done = [(turn["generate"], turn["batch"]) for turn in turns]
    assert done == [(1, 0), (1, 1), (1, 2), (2, 2)]
    assert used_tokens == [63, 126, 189, 252]
    assert len(result["batch_rss_growth_bytes"]) == 2 and result["resume_s"] > 0
    assert llm.driver.stats().running_requests == 0
    assert result["total_tokens"] == 7 * 29
    assert {way: len(each) for way, each in result["seconds"].items()} == {"generate": 2, "batch": 2}
    lines = (tmp_path / "1" / "out.jsonl").read_text("utf-8").splitlines()
    used = [json.loads(line)["response"]["body"]["usage"] for line in lines]
    assert [(each["prompt_tokens"], each["completion_tokens"]) for each in used] == 7 * [(20, 9)]


def test_requests_arrive_at_their_times(llm):
    items = workload.poisson_arrivals(workload.constant(6, 8, 4), rate=20.0)
    result = throughput.measure(llm, items, arrive=True)
    assert result["completed"] == 6 and result["duration"] > items[-1].arrival_s


def test_latency_repeats_a_batch(llm):
    result = latency.measure(llm, 3, 10, 6, iterations=4, warm_up=1)
    assert len(result["latencies"]) == 4 and result["completed"] == 12
    assert result["avg_latency"] == pytest.approx(np.mean(result["latencies"]))
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(np.median(result["latencies"]))
    assert result["total_output_tokens"] == 4 * 3 * 6


@pytest.fixture(scope="module")
def target(llm):
    """host:port of a server of the shared engine, on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = Server(ServedModel(ServerConfig(port=0, admin_port=0)))
    for step in (server.start(), server.served.serve(llm)):
        asyncio.run_coroutine_threadsafe(step, loop).result(60)
    yield f"127.0.0.1:{server.port}"
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_serve_measures_a_running_server(llm, target):
    async def measured():
        async with Client(target) as client:
            good = workload.poisson_arrivals(workload.constant(6, 20, 5), 50.0)
            too_long = [workload.Item(200, 5)]
            served = await client.model()
            assert serve.find_model_config(MODEL) == llm.model_config and served.vocab_size == 512
            return await serve.measure(
                GrpcBackend(client), [*good, *too_long], served.vocab_size, slo={"e2el": 60.0}
            )

    result = asyncio.run(measured())
    assert (result["completed"], result["failed"]) == (6, 1)
    [(reason, count)] = result["errors"].items()
    assert "INVALID_ARGUMENT" in reason and count == 1
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 30)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]


def test_serve_command(bench, target, tmp_path, capsys):
    path = tmp_path / "out.json"
    trace = str(paths.TRACES / "azure2023_conv_1000.csv")
    work = [
        "--trace",
        trace,
        "--arrivals",
        "trace",
        "--request_rate",
        "40",
        "--num_requests",
        "5",
        "--goodput",
        "ttft:60000",
    ]
    assert bench("serve", "--target", target, "--model", MODEL, *work, "--output_json", str(path)) == 0
    result = json.loads(path.read_text())
    assert (result["completed"], result["request_rate"], result["arrivals"]) == (5, 40.0, "trace")
    assert result["duration"] > 0.1  # five arrivals at 40 a second
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert 0 < result["fraction_of_optimal"] < 1
    out = capsys.readouterr().out
    assert "Serving Benchmark Result" in out and "Request goodput (req/s):" in out and "40.0 (trace)" in out


def test_serve_command_without_a_model_configuration(bench, target, capsys):
    settings = ["--num_requests", "2", "--input_len", "5", "--output_len", "3"]
    assert bench("serve", "--target", target, "--model", "no-such-model", *settings) == 0
    assert "unknown: the model's configuration was not found" in capsys.readouterr().out


def test_rate_sweep_of_a_running_server(bench, target, tmp_path):
    path = tmp_path / "out.json"
    settings = ["--num_requests", "3", "--input_len", "5", "--output_len", "3", "--output_json", str(path)]
    assert bench("sweep", "--sweep", "rate", "--values", "50,500", "--target", target, *settings) == 0
    assert [point["completed"] for point in json.loads(path.read_text())["points"]] == [3, 3]


def test_throughput_command(bench, tmp_path, capsys):
    path = tmp_path / "out.json"
    trace = str(paths.TRACES / "lmsys_1000.csv")
    settings = ["--num_requests", "5", "--profiled_seconds", "0.05", "--output_json", str(path)]
    assert bench("throughput", "--model", MODEL, "--trace", trace, *settings) == 0
    result = json.loads(path.read_text())
    out = capsys.readouterr().out
    assert (
        0 <= result["profile"]["idle_share_between_steps"] <= result["profile"]["idle_share"] < 1
        and result["profile"]["programs"]
    )
    assert result["command_name"] == "throughput" and result["model"] == "stories260K"
    assert (
        result["workload"]["kind"] == "trace" and result["workload"]["requests"] == 5 == result["completed"]
    )
    assert result["workload"]["left_out"] > 0  # requests that are too long for this context
    assert result["total_num_tokens"] / result["elapsed_time"] == pytest.approx(result["tokens_per_second"])
    assert result["engine_config"]["enable_prefix_caching"] is False
    for line in (
        "Throughput Benchmark Result",
        "Optimal token throughput",
        "Fraction of optimal",
        "Device idle",
        "No kernel runs, between steps:",
        "Versions:",
        "Throughput: ",
    ):
        assert line in out


def test_repeats_report_the_median_run(bench, tmp_path, capsys):
    path = tmp_path / "out.json"
    settings = ["--num_requests", "3", "--input_len", "5", "--output_len", "4", "--repeats", "3"]
    assert bench("throughput", "--model", MODEL, *settings, "--output_json", str(path)) == 0
    found = json.loads(path.read_text())
    rates = [run["total_token_throughput"] for run in found["runs"]]
    assert len(rates) == 3 and found["total_token_throughput"] == sorted(rates)[1]
    assert found["tokens_per_second"] == found["total_token_throughput"]
    assert found["completed"] == 3 and all(run["failed"] == 0 for run in found["runs"])
    assert found["total_input_tokens"] / found["duration"] < found["total_token_throughput"]
    assert "Runs, median reported:" in capsys.readouterr().out


def a_run(rate: float, sequential: float | None) -> dict[str, Any]:
    names = ("output_throughput", "duration", "failed", "joules_per_token", "power")
    run = {"total_token_throughput": rate} | dict.fromkeys(names) | {"failed": 0, "errors": {}}
    return run if sequential is None else run | {"sequential": a_run(sequential, None)}


@given(st.lists(st.tuples(st.floats(1, 9), st.floats(1, 9)), min_size=1, max_size=7), st.booleans())
def test_the_median_of_runs_is_one_of_them(rates, compared):
    runs = [a_run(rate, alone if compared else None) for rate, alone in rates]
    found = throughput.median_of(runs)
    mine, alone = (statistics.median_low(each) for each in zip(*rates, strict=True))
    assert found["total_token_throughput"] == mine
    assert ("runs" in found) == (len(rates) > 1)
    assert [one["total_token_throughput"] for one in found.get("runs", runs)] == [rate for rate, _ in rates]
    assert ("sequential" in found) == compared
    if compared:
        assert found["sequential"]["total_token_throughput"] == alone
        assert found["against_sequential"] == mine / alone


@given(st.lists(st.tuples(st.floats(1, 9), st.integers(0, 3)), min_size=1, max_size=5))
def test_failed_requests_of_every_run_count(each):
    runs = [a_run(rate, None) | {"failed": n, "errors": {"lost": n} if n else {}} for rate, n in each]
    found = throughput.median_of(runs)
    lost = sum(n for _, n in each)
    assert found["failed"] == lost and found["errors"] == ({"lost": lost} if lost else {})
    assert found["repeats"] == len(each)


def test_no_run_has_the_prompts_of_another(monkeypatch, bench):
    """Else the prefix cache spares the later run some work, also the plan's run after the sequential one."""
    prompts = []

    def seen(driver, requests, *args, **kwargs):
        prompts.extend(bytes(np.asarray(request.prompt_token_ids, np.int32)) for request in requests)
        return drive(driver, requests, *args, **kwargs)

    monkeypatch.setattr(throughput, "drive", seen)
    monkeypatch.setattr(steps, "plans_of", lambda executor: {"sequential", "another"})
    settings = ["--num_requests", "2", "--input_len", "9", "--output_len", "3", "--repeats", "2"]
    assert bench("throughput", "--model", MODEL, *settings, "--compare_sequential") == 0
    assert len(prompts) == len(set(prompts)) == 1 + 2 * 2 * 2  # the first request alone, then each run


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_wrong_repeats_are_refused_before_a_model_loads(value, bench, capsys, monkeypatch):
    monkeypatch.setattr(LLM, "from_config", lambda config: pytest.fail("loaded"))
    assert bench("throughput", "--model", MODEL, "--repeats", value) == 2
    assert "--repeats" in capsys.readouterr().err


def test_runs_that_ended_outlive_a_later_one(llm, monkeypatch, bench, tmp_path):
    """A time limit may end the third run. The report then holds the two before."""
    path, ended = tmp_path / "out.json", []

    def stopping(*args, **kwargs):
        if len(ended) == 3:  # the request alone after the start, and two runs
            raise KeyboardInterrupt
        ended.append(drive(*args, **kwargs))
        return ended[-1]

    monkeypatch.setattr(throughput, "drive", stopping)
    settings = ["--num_requests", "2", "--input_len", "5", "--output_len", "4", "--repeats", "3"]
    with contextlib.suppress(KeyboardInterrupt):
        bench("throughput", "--model", MODEL, *settings, "--output_json", str(path))
    found = json.loads(path.read_text())
    assert len(found["runs"]) == found["repeats"] == 2 and found["completed"] == 2
    assert found["tokens_per_second"] == found["total_token_throughput"]


def test_requests_that_fail_under_the_profiler_are_reported(llm, monkeypatch):
    """The step after a profile may fail on the device without harm to the measured run."""

    def failing(*args, **kwargs):
        records, seconds = drive(*args, **kwargs)
        records[3].error = "RuntimeError: the profiler was here"
        return records, seconds

    monkeypatch.setattr(throughput, "drive", failing)
    found = throughput.profiled(
        llm, workload.constant(4, 20, 100), 0.05
    )  # half of it is long enough for a profiler to begin in
    assert found is not None and (found["failed"], found["error"]) == (
        1,
        "RuntimeError: the profiler was here",
    )


def test_throughput_compares_searched_plans_with_the_sequential_plan(
    bench, llm, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "out.json"
    settings = [
        "--num_requests",
        "2",
        "--input_len",
        "5",
        "--output_len",
        "3",
        "--compare_sequential",
        "--output_json",
        str(path),
    ]
    # The steps are sequential.
    monkeypatch.setattr(steps, "plans_of", lambda executor: {"sequential", "another"})
    assert bench("throughput", "--model", MODEL, *settings) == 0
    found = json.loads(path.read_text())
    assert found["completed"] == found["sequential"]["completed"] == 2
    for one in (found, found["sequential"]):  # one a run
        assert one["engine_stats"]["steps_by_plan"] == {"sequential": one["engine_stats"]["steps"]}
    assert (
        found["against_sequential"]
        == found["total_token_throughput"] / found["sequential"]["total_token_throughput"]
    )
    assert "Against the sequential plan" in capsys.readouterr().out
    layouts = {
        size: (dataclasses.replace(several[0], plan="its only one"),)
        for size, several in llm.executor.layouts.items()
    }
    named: Any = types.SimpleNamespace(layouts=layouts)
    with pytest.raises(ConfigError, match="plan='its only one'"), steps.sequential_alone(named):
        pass


@pytest.mark.parametrize("command", [["throughput"], ["sweep", "--sweep", "rate", "--values", "1"]])
@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_plan_without_predictions_is_refused_before_weights(
    processes, command, form, no_flags, llm, capsys, monkeypatch, tmp_path
):
    told = []

    @contextlib.contextmanager
    def telling_faults():
        try:
            yield
        except ConfigError as error:
            told.append(error)
            raise

    team = types.SimpleNamespace(
        resolve=lambda config, resolved: resolved(),
        compare=lambda *_: pytest.fail("compared"),
        telling_faults=telling_faults,
    )
    monkeypatch.setattr("jaxflow.llm.join_team", lambda config: team if processes == 2 else None)
    monkeypatch.setattr(Checkpoint, "load", lambda *_, **__: pytest.fail("loaded"))
    plan = made_for_this_device(llm)
    save(plan, tmp_path / "plan.json")
    asked = ["--plan", str(tmp_path / "plan.json" if form == "file" else tmp_path), "--compare_sequential"]
    lengths = ["--input_len", "5", "--output_len", "3"]
    assert main(["bench", *command, "--model", MODEL, *asked, *lengths]) != 0
    assert f"plan={plan.name!r} is not supported: plans with predictions" in capsys.readouterr().err
    assert len(told) == processes - 1


def made_for_this_device(llm, predictions: Predictions | None = None) -> Plan:
    target = Target(MODEL, "cpu", ParallelConfig(), "float32", "float32", 8, 24, 40)
    plan = two_nano_batch_plan(llm.model_config, 32, 16)
    return msgspec.structs.replace(plan, target=target, predictions=predictions)


def test_a_folder_is_refused_for_the_plans_that_fit_the_engine(llm, tmp_path):
    """Plans for other devices are not loaded, nor need plans with predictions be refused."""
    predicted = made_for_this_device(llm, Predictions((8,), (40,), ((1.0,),), ((2.0,),)))
    other = made_for_this_device(llm)
    assert other.target is not None
    save(predicted, tmp_path / "predicted.json")
    save(
        msgspec.structs.replace(other, target=msgspec.structs.replace(other.target, device="H200")),
        tmp_path / "other.json",
    )
    config = resolve(EngineConfig(MODEL, plan=str(tmp_path)), llm.model_config)
    steps.check_plans(choose_plans(config, llm.model_config))
    save(other, tmp_path / "predicted.json")
    with pytest.raises(ConfigError, match="plans with predictions"):
        steps.check_plans(choose_plans(config, llm.model_config))


def test_throughput_runs_once_if_no_plan_gains(bench, capsys):
    assert (
        bench(
            "throughput",
            "--model",
            MODEL,
            "--num_requests",
            "2",
            "--input_len",
            "5",
            "--output_len",
            "3",
            "--compare_sequential",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "expects no plan to gain" in out and "Against the sequential plan" not in out


def test_a_shipped_name_is_measured_with_random_weights(llm, no_flags, monkeypatch):
    """A shipped model has no other plans: `bench throughput --model llama-3.1-8b --plan searched` is enough.

    A folder's plans are loaded.
    """
    given = []
    monkeypatch.setattr(
        LLM,
        "from_config",
        classmethod(lambda cls, config, **_: given.append(config) or contextlib.nullcontext(llm)),
    )
    settings = ["--plan", "searched", "--num_requests", "1", "--input_len", "5", "--output_len", "3"]
    assert main(["bench", "throughput", "--model", "llama-3.1-8b", *settings]) == 0
    assert (given[0].load_format, given[0].plan) == ("dummy", "searched")
    flags.FLAGS.model, flags.FLAGS.load_format = MODEL, "auto"
    without_weights()
    assert flags.FLAGS.load_format == "auto"


def test_latency_command(bench, tmp_path, capsys):
    path = tmp_path / "out.json"
    settings = [
        "--batch_size",
        "2",
        "--input_len",
        "8",
        "--output_len",
        "4",
        "--num_iters_warmup",
        "0",
        "--num_iters",
        "2",
    ]
    assert bench("latency", "--model", MODEL, *settings, "--output_json", str(path)) == 0
    report = json.loads(path.read_text())
    assert report["avg_latency"] > 0
    phases = report["start"]
    parts = sum(phases[f"{name}_s"] for name in ("devices", "weights", "memory", "lowering", "compilation"))
    assert 0 < parts <= phases["total_s"] <= phases["until_first_token_s"] and phases["programs"] > 0
    assert "50% percentile latency" in capsys.readouterr().out


def test_host_command(bench, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert (
        bench(
            "host",
            "--running",
            "1",
            "--running",
            "32",
            "--max_num_batched_tokens",
            "64",
            "--steps",
            "40",
            "--output_json",
            str(path),
        )
        == 0
    )
    one, many = json.loads(path.read_text())["host"]
    assert one["running"] == 1 and many["running"] == 32
    assert one["steps"] == many["steps"] == 40
    assert many["mean_rows"] == pytest.approx(
        64, rel=0.2
    )  # as many decodes as requests, prefill for the rest of the budget
    assert 0 < one["median_ms"] <= one["p99_ms"]
    assert "CPU time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, ""),
        (["thruput"], 2, "unknown command 'thruput'"),
        (["throughput"], 2, "model"),
        (["throughput", "--model", "x", "--input_len", "0"], 2, "input_len"),
        (["throughput", "--model", "x", "stray"], 2, "stray"),
        (["throughput", "--model", MODEL, "--goodput", "itl:3"], 1, "itl:3"),
        (["throughput", "--model", MODEL, "--block_size", "0"], 1, "block_size"),
        (
            ["throughput", "--model", MODEL, "--input_len", "120", "--output_len", "20"],
            1, "a sum of at most 128 tokens",
        ),
        (
            ["throughput", "--model", MODEL, "--trace", "absent.csv"],
            1, "--trace absent.csv: accepted is an existing file",
        ),
        (
            ["throughput", "--model", MODEL, "--max_model_len", "128", "--lengths", "lognormal",
             "--input_len", "500"], 1, "500",
        ),
        (
            ["throughput", "--model", MODEL, "--output_json", "/"],
            1, "output_json='/' is not supported: a file that can be written",
        ),
        (
            ["latency", "--model", MODEL, "--output_json", "/dev/null/out.json"],
            1, "in a folder that can be created",
        ),
        (
            ["sweep", "--sweep", "tiles", "--output_png", "x.txt"],
            1, "output_png='x.txt' is not supported: a file of .png",
        ),
        (
            ["trace", "--model", MODEL, "--plot", "layer"],
            1, "plot='layer' is not supported: a file of .png, .svg, .pdf",
        ),
        (["latency", "--model", MODEL, "--input_len", "128"], 1, "--input_len 128"),
        (["sweep", "--sweep", "length", "--values", "8x4", "--model", MODEL], 1, "8x4"),
        (["sweep", "--sweep", "rate", "--model", MODEL], 1, "--values: required for --sweep rate"),
        (
            ["sweep", "--sweep", "rate", "--values", "4,inf", "--model", MODEL, "--num_requests", "2",
             "--input_len", "9"], 1, "4,inf",
        ),
        (["sweep", "--sweep", "tiles", "--model", "no-such-model"], 1, "no-such-model"),
        *(
            (["serve", "--trace", TRACE, "--arrivals", "trace", "--request_rate", rate], 1, f"rate={rate}")
            for rate in ("0.0", "-2.0")
        ),
        (["serve", "--arrivals", "trace"], 1, "accepted only together with --trace"),
        *(
            (["serve", f"--{flag}", "nan"], 2, f"--{flag}=nan")
            for flag in ("request_rate", "timeout_s", "think_time_s")
        ),
        *(
            (["serve", "--lengths", "lognormal", f"--{flag}_cv", cv], status, words)
            for flag, cv, status, words in SPREADS
        ),
        (["serve", "--trace", "absent.csv"], 1, "--trace absent.csv: accepted is an existing file"),
        (["serve", "--target", "127.0.0.1:1", "--wait_s", "0.2"], 1, "DEADLINE_EXCEEDED"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_error_line(bench, capsys, arguments, status, message):
    assert bench(*arguments) == status
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_lengths_and_numbers_follow_the_rivals_protocol(bench):
    main(["bench", "throughput", "--help"])  # defines the flags
    for words, number, prompt in [
        ([], 1200, 1024),
        (["--input_len", "1000", "--output_len", "1000"], 1000, 1000),
        (["--lengths", "lognormal", "--input_len", "246", "--output_len", "322"], 2000, 246),
    ]:
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["bench", "--model", "x", *words])
        items, described = options.items_from_flags(131072)
        assert len(items) == described["requests"] == number
        assert described["mean_prompt_tokens"] == pytest.approx(prompt, abs=1)


def test_the_command_as_a_process(tmp_path):
    path = tmp_path / "out.json"
    engine = [f"--{name}={value}" for name, value in ENGINE.items() if name != "enable_prefix_caching"]
    arguments = [
        "throughput",
        "--model",
        str(paths.MODELS / "tiny-llama"),  # of two layers, which compile quickly
        "--num_requests",
        "6",
        "--input_len",
        "10",
        "--output_len",
        "6",
        *engine,
    ]
    command = [sys.executable, "-m", "jaxflow.bench", *arguments, "--output_json", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=paths.ROOT, env=dict(os.environ), timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert result["completed"] == 6 and result["total_output_tokens"] == 36
    assert result["command"].startswith("python -m jaxflow.bench throughput --model ")
    assert done.stderr.count("kernels: ") == done.stderr.count("kernels: cpu, for every op\n") == 1


def test_perplexity_scores_every_precision(bench, tmp_path, capsys):
    """Over one engine for all ways, nothing moves."""
    np.save(tmp_path / "ids.npy", np.arange(60, dtype=np.uint16).reshape(3, 20))
    report = tmp_path / "report.json"
    assert (
        bench(
            "perplexity",
            "--model",
            MODEL,
            "--tokens",
            str(tmp_path / "ids.npy"),
            "--windows",
            "2",
            "--output_json",
            str(report),
        )
        == 0
    )
    found = json.loads(report.read_text())
    assert found["windows"] == [2, 20] and [one["precision"] for one in found["precisions"]] == list(
        perplexity.PRECISIONS
    )
    assert all(one["max_change"] < 1e-4 for one in found["precisions"])
    assert "fp8, fp8 KV:" in capsys.readouterr().out


def test_perplexity_scores_each_spans_file(bench, tmp_path, capsys):
    """Over one engine for all ways, nothing moves."""
    path, report = spans_file(tmp_path, alpha=8), tmp_path / "report.json"
    tokens = str(tmp_path / "ids.npy")
    command = ["perplexity", "--model", MODEL, "--tokens", tokens, "--span_files", path]
    assert bench(*command, "--output_json", str(report)) == 0
    found = json.loads(report.read_text())
    rows = found["spans"]
    assert [row["spans"] for row in rows] == [None, path]
    rows[1] |= {"spans": "folder/uniform-25.json", "keys_percent": 25.0, "perplexity": 9.0}
    lines = plot.draw(found).axes[0].lines
    assert lines[0].get_label() == "uniform" and list(lines[0].get_xdata()) == [25, 100]
    assert list(lines[0].get_ydata()) == [9, rows[0]["perplexity"]]
    assert rows[0]["keys_percent"] == rows[0]["held_percent"] == 100
    assert all(row["max_change"] < 1e-4 for row in rows)
    assert "full attention:" in capsys.readouterr().out


def test_perplexity_refuses_a_bad_spans_file(bench, tmp_path, capsys):
    path = spans_file(tmp_path, alpha=0)
    tokens = str(tmp_path / "ids.npy")
    assert bench("perplexity", "--model", MODEL, "--tokens", tokens, "--span_files", path) == 1
    assert "alpha[0][0]=0" in capsys.readouterr().err


def spans_file(folder, alpha):
    """Return the path of a spans file with one head. The folder also gets `ids.npy`."""
    np.save(folder / "ids.npy", np.arange(40, dtype=np.uint16).reshape(2, 20))
    fields = {"schema_version": 1, "model": "m", "layers": 1, "kv_heads": 1, "sinks": 0}
    (folder / "spans.json").write_text(json.dumps(fields | {"alpha": [[alpha]], "beta": [[0]]}))
    return str(folder / "spans.json")

"""Write the index of the reports, `benchmarks/RESULTS.md`, and the table of the README.

  python -m benchmarks.results

A report is a JSON file `benchmarks/<device>/<model>/<what>.json`. A command of JaxFlow wrote the report.
`rivals.json` holds the rates of other engines. `incomplete.json` lists the old reports with unknown keys.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxflow.engine.start_times import RATE
from jaxflow.model.cost import find_device, optimal_throughput
from jaxflow.model.energy import known_rate

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
INDEX = HERE / "RESULTS.md"
BLOCK = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- /results -->)", re.S)

KEYS = ("command", "commit", "versions", "driver", "device", "clock_mhz", "watts", "date")
NULL_ON_CPU = ("driver", "clock_mhz", "watts")
NOT_REPORTS = ("plans", "settings", "notes")
SHIPPED = Path("jaxflow/pipeline/plans")
WAYS = {"stages": "pipeline", "ranks": "data"}  # ways besides tensor parallelism, and the flag of each
SAME_SLOTS = 1.5
TRANSPORT_FIGURES = (("per_s", 0), ("per_cpu_s", 0), ("server_cores", 2))
TRANSPORT_LOADS = ("streamed_chunks", "bare_uvicorn_chunks", "plain_requests", "bare_uvicorn_requests")
FIRST_TOKEN_DELAYS = {
    "to_engine_ms": "from the caller to the engine",
    "to_caller_ms": "from the engine to the caller",
    "added_ms": "both",
}

Report = Mapping[str, Any]
Row = tuple[str, ...]

# The README's rows: number of devices, device, model, numbers, prompt and output tokens.
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
HEADLINES = (
    (1, H200, "llama-3.1-8b", "bfloat16", "1024 / 512"),
    (1, H200, "llama-3.1-8b", "fp8, fp8 KV", "1024 / 512"),
    (1, H100, "llama-3.1-8b", "fp8, fp8 KV", "1024 / 512"),
    (1, H200, "llama-3.1-8b", "bfloat16", "512 / 512"),
    (1, H200, "qwen3-30b-a3b", "fp8, fp8 KV", "1024 / 512"),
    (1, H200, "gpt-oss-20b", "mxfp4", "1024 / 512"),
    (2, H200, "llama-3-70b", "fp8, fp8 KV", "1024 / 512"),
    (4, H200, "llama-3-70b", "fp8, fp8 KV", "1024 / 512"),
)


def read_reports(folder: Path) -> dict[str, Report]:
    """Return every report under `folder` by its path relative to `folder`."""
    return {
        path.relative_to(folder).as_posix(): json.loads(path.read_text("utf-8"))
        for path in sorted(folder.glob("*/*/*.json"))
        if path.relative_to(folder).parts[0] not in NOT_REPORTS
    }


def of_command(reports: Mapping[str, Report], name: str) -> Iterator[tuple[str, Report]]:
    """Yield the reports of a command, with their paths."""
    return ((path, report) for path, report in reports.items() if report.get("command_name") == name)


def unknown_keys(report: Report) -> list[str]:
    """Return the required keys that are missing or null. Some may be null on a CPU."""
    required = [key for key in KEYS if report.get("device") != "cpu" or key not in NULL_ON_CPU]
    return [key for key in required if report.get(key) is None]


def lengths(workload: Mapping[str, Any]) -> str:
    """Return mean prompt and output tokens, with the kind of a workload of uneven lengths."""
    mean = f"{workload['mean_prompt_tokens']:.0f} / {workload['mean_output_tokens']:.0f}"
    kind = Path(workload["trace"]).stem if workload.get("trace") else workload["kind"]
    return mean if kind == "constant" else f"{mean} ({kind})"


def precision(engine: Mapping[str, Any]) -> str:
    """Return the number format of the weights, and of the KV cache where it differs."""
    kv = engine["kv_cache_dtype"]
    cache = "" if kv in ("auto", engine["dtype"]) else f", {'fp8' if kv == 'float8_e4m3fn' else kv} KV"
    return (engine.get("quantization") or engine["dtype"]) + cache


def devices_of(report: Report) -> int:
    """Return the number of devices of an engine."""
    engine = report["engine_config"]
    return math.prod(engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))


def machine(report: Report) -> str:
    """Return the device, with the number of devices above one, how they share the work, and the processes."""
    engine, devices = report["engine_config"], devices_of(report)
    if devices == 1:
        return report["device"]
    counts = {name: engine.get(f"{kind}_parallel_size", 1) for name, kind in WAYS.items()}
    how = [f"{number} {name}" for name, number in counts.items() if number > 1]
    how += ["whole experts"] if engine.get("enable_expert_parallel") and counts["ranks"] == 1 else []
    processes = engine.get("num_processes") or 1
    how += [f"{processes} processes"] if processes > 1 else []
    return f"{devices} × {report['device']}" + (f" ({', '.join(how)})" if how else "")


def model_of(report: Report) -> str:
    """Return the model and its number formats."""
    return f"{report['model']}, {precision(report['engine_config'])}"


def median(values: Iterable[float]) -> float:
    """Return the median as one of the values: the lower one of the two in the middle."""
    return statistics.median_low(values)


def links(paths: Iterable[str]) -> str:
    """Return a link to each report, once."""
    return ", ".join(f"[{Path(path).stem}]({path})" for path in dict.fromkeys(paths))


def points(reports: Mapping[str, Report], kind: str) -> Iterator[tuple[str, Report]]:
    """Yield (path, report) of throughput runs, or of a sweep's points with the sweep's own fields.

    kind: "throughput" for runs and sweeps of requests that arrive at once;
      "rate" for sweeps of request rates.
    """
    for path, report in reports.items():
        command = report.get("command_name")
        if command == "throughput" and kind == "throughput" and not Path(path).stem.startswith("start-"):
            yield path, report
        elif command == "sweep" and report["kind"] == {"throughput": "length", "rate": "rate"}[kind]:
            head = {key: value for key, value in report.items() if key != "points"}
            yield from ((path, head | point) for point in report["points"])


def throughput_groups(reports: Mapping[str, Report]) -> dict[tuple, list[tuple[str, Report]]]:
    """Return the runs of the same work by device, model, lengths, tokens of a step, plan, number of requests,
    and slots.

    Runs with up to SAME_SLOTS times the fewest slots share a group, under the fewest slots.
    """
    groups: dict[tuple, list[tuple[str, Report]]] = {}
    runs = sorted(points(reports, "throughput"), key=lambda run: run[1]["engine_config"]["max_num_seqs"])
    for path, report in runs:
        engine = report["engine_config"]
        plan = engine["plan"]
        plan = plan if plan == "sequential" else f"overlapped by {Path(plan).stem}"
        if engine.get("kv_offloading_size"):
            plan += ", KV copied to the host"
        work = (machine(report), model_of(report), lengths(report["workload"]))
        # Ramp-up and tail are in the clock, and weigh more in a run of fewer requests.
        key = (*work, engine["max_num_batched_tokens"], plan, report["workload"].get("requests", 0))
        slots = engine["max_num_seqs"]
        fewest = max((one[-1] for one in groups if one[:-1] == key), default=slots)
        groups.setdefault((*key, fewest if slots <= SAME_SLOTS * fewest else slots), []).append(
            (path, report)
        )
    return {
        key: sorted(group, key=lambda run: run[0])
        for key, group in sorted(groups.items(), key=lambda item: item[0])
    }


def rates_of(reports: Iterable[tuple[str, Report]]) -> list[float]:
    """Return the tokens/s of each run. A report may hold several runs."""
    return [run["total_token_throughput"] for _, report in reports for run in report.get("runs", [report])]


def millijoules(values: Iterable[float | None]) -> str:
    """Return the median of joules in mJ, or a dash without a known value."""
    known = [value for value in values if value is not None]
    return f"{1e3 * median(known):.1f}" if known else "–"


def card_joules(row: Mapping[str, Any]) -> float | None:
    """Return the joules a token of one card. Rows without `cards` have one card's joules."""
    joules = row.get("joules_per_token")
    return None if joules is None else joules / row.get("cards", 1)


def same_work(rivals: Iterable[Mapping[str, Any]], report: Report) -> list[Mapping[str, Any]]:
    """Return the recorded rates of other engines at the work of a report, the best first."""
    same = [
        rival
        for rival in rivals
        if rival["device"] == report["device"]
        and rival.get("devices", 1) == devices_of(report)
        and rival["model"] == report["model"]
        and rival["precision"] == precision(report["engine_config"])
        and rival["workload"] == lengths(report["workload"])
    ]
    return sorted(same, key=lambda rival: -rival["total_token_throughput"])


def rate_of(rival: Mapping[str, Any]) -> str:
    """Return the name, the tokens/s and the settings of a recorded rival."""
    return f"{rival['engine']} {rival['total_token_throughput']:,.0f} ({rival['settings']})"


def rivals_of(rivals: Iterable[Mapping[str, Any]], report: Report) -> list[str]:
    """Return the rates of others at the same work: other engines, the best
    first, then the sequential plan.
    """
    found = [rate_of(one) for one in same_work(rivals, report)]
    if "sequential" in report:
        found.append(f"sequential plan {report['sequential']['total_token_throughput']:,.0f}")
    return found or ["–"]


def share_of_optimum(report: Report) -> float:
    """Return the reached share of Eq. 5's optimum, at today's peak rate of the report's device.

    Reports of different ages may hold shares of different peak rates. A report of a device that the cost
    model lacks keeps its own share.
    """
    engine, device = report["engine_config"], find_device(report["device"])
    dtype = "float8_e4m3fn" if engine["quantization"] == "fp8" else engine["dtype"]
    rate = known_rate(device, dtype) if device else None
    if rate is None:
        return report["fraction_of_optimal"]
    optimum = optimal_throughput(devices_of(report) * rate.flops_per_s, report["optimal_parameters"])
    return report["total_token_throughput"] / optimum


def throughput_rows(folder: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the rates of requests that arrive at once."""
    rivals = json.loads((folder / "rivals.json").read_text("utf-8"))["results"]
    for (*work, rows, plan, _, _), runs in throughput_groups(reports).items():
        rates = rates_of(runs)
        slots = sorted({report["engine_config"]["max_num_seqs"] for _, report in runs})
        power = [report["power"] for _, report in runs if report["power"]]
        yield (
            *work,
            f"{plan}, {rows}",
            ", ".join(map(str, slots)),
            f"{median(rates):,.0f}",
            f"{len(rates)}",
            f"{min(rates):,.0f}–{max(rates):,.0f}" if len(rates) > 1 else "–",
            f"{median(map(share_of_optimum, (report for _, report in runs))):.0%}",
            f"{median(one['mean_watts'] for one in power):.0f} at "
            f"{median(one['mean_sm_clock_mhz'] for one in power):.0f}"
            if power
            else "–",
            millijoules(
                run.get("joules_per_token") for _, report in runs for run in report.get("runs", [report])
            ),
            ", ".join(rivals_of(rivals, runs[0][1])),
            links(path for path, _ in runs),
        )


def rate_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the latencies of requests that arrive at a rate."""
    for path, point in points(reports, "rate"):
        mean, p99 = point["mean_normalized_latency_ms"], point["p99_normalized_latency_ms"]
        late = point.get("later_half") or {}
        late_mean = late.get("mean_normalized_latency_ms")
        late_ratio = late.get("p99_to_mean_normalized_latency")
        yield (
            machine(point),
            model_of(point),
            lengths(point["workload"]),
            f"{point['request_rate']:g}",
            f"{point['total_token_throughput']:,.0f}",
            f"{mean:.0f}",
            f"{p99 / mean:.2f}",
            f"{late_mean:.0f}" if late_mean else "–",
            f"{late_ratio:.2f}" if late_ratio else "–",
            f"{point['mean_ttft_ms']:,.0f}",
            links([path]),
        )


def decode_step_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the times of decode steps through the engine's compiled programs."""
    for path, report in of_command(reports, "decode_step"):
        if "precision" in report:
            for step in report.get("steps", []) if isinstance(report.get("steps"), list) else []:
                launch = step["launches"]["graph"]
                figures = (
                    f"{launch['us'] / 1e3:.2f}",
                    f"{launch['watts']:.0f} at {launch['mhz']:.0f}",
                    millijoules([launch["watts"] * launch["us"] / 1e6 / step["requests"]]),
                )
                model = f"{report['model']}, {report['precision']}"
                yield report["device"], model, f"{step['requests']}", *figures, links([path])


def plan_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the best overlapped plan and the best sequential step of each workload with prefill."""
    for path, report in of_command(reports, "plans"):
        filled = [row for row in report["plans"] if row["prefill_tokens"]]
        for workload in dict.fromkeys(row["workload"] for row in filled):
            here = sorted(
                (row for row in filled if row["workload"] == workload), key=lambda row: -row["tokens_per_s"]
            )
            sequential, overlapped = (
                next((row for row in here if row["sequential"] is kind), None) for kind in (True, False)
            )
            if sequential and overlapped:
                ratio = overlapped["tokens_per_s"] / sequential["tokens_per_s"]
                cells = (f"{one['plan']}: {one['tokens_per_s']:,.0f}" for one in (sequential, overlapped))
                joules = (millijoules([card_joules(one)]) for one in (sequential, overlapped))
                figures = *cells, f"{ratio:.3f}", " → ".join(joules)
                yield machine(report), model_of(report), workload, *figures, links([path])


def kernel_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the geometric mean of each kernel group's speedup over its first rival."""
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for path, report in of_command(reports, "kernels"):
        for row in report["rows"]:
            for rival, ratio in list(row.get("ratios", {}).items())[:1]:
                found.setdefault((row["group"], rival), []).append((path, ratio))
    for (group, rival), cases in sorted(found.items()):
        ratios = [ratio for _, ratio in cases]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        yield group, rival, f"{len(ratios)}", f"{mean:.3f}", f"{min(ratios):.3f}", links(p for p, _ in cases)


def offload_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each measured policy of a model that does not fit the device."""
    for path, report in of_command(reports, "search offload"):
        memory = f"{report['memory_gb']['device']:g}, {report['memory_gb']['host']:g}"
        for row in (row for row in report["rows"] if "failed" not in row):
            policy, paper = row["policy"], row["paper_tokens_per_s"]
            yield (
                f"{report['device']}: {memory}",
                f"{report['model']}: {policy['weight_bits']}, {policy['kv_bits']}",
                f"{policy['prompt_tokens']} / {policy['output_tokens']}",
                f"{policy['num_gpu_batches']} × {policy['gpu_batch_size']}: {row['name'].replace('-', ' ')}",
                f"{row['tokens_per_s']:.2f}",
                f"{row['predicted']['tokens_per_s']:.2f}",
                f"{row['link']['down_bytes'] / row['latency_s'] / 1e9:.1f}",
                f"{paper:.2f}" if paper else "–",
                links([path]),
            )


def tier_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the reuse of KV pages by conversations, for each lowest tier of the KV cache."""
    for path, report in of_command(reports, "hierarchy"):
        for name, engine in report["lowest_tiers"].items():
            found = engine["conversations"]
            yield (
                report["device"],
                report["model"],
                "none" if name == "recompute" else name,
                f"{found['reuse_hit_rate']:.0%}",
                f"{found['compute_saved']:.1%}",
                f"{found['later_rounds']['median_ttft_ms']:.0f}",
                f"{found['median_tpot_ms']:.1f}",
                f"{engine['no_reuse']['median']:,.0f}",
                links([path]),
            )


def start_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the seconds from the begin of the process to the first token,
    and until all programs are ready. The rate is that of reading the files of a checkpoint.
    """
    for path, report in reports.items():
        if Path(path).stem.startswith("start-"):
            cache = "empty" if path.endswith("cold.json") else "filled"
            start = report["start"]
            seconds = start["until_first_token_s"], start["until_first_token_s"] + start["background_s"]
            read = f"{start[RATE]:.1f}" if RATE in start else "random weights"
            times = (f"{s:.1f}" for s in seconds)
            yield machine(report), model_of(report), cache, read, *times, links([path])


def first_answer_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the seconds of `python3 run.py`, from its start."""
    for path, report in of_command(reports, "first_answer"):
        for cache, name in (("empty", "cold"), ("filled", "warm")):
            one, cores = report[name], f"{report['device']}, {report['cpu_cores']} cores"
            figures = (f"{one['first_text_s']:.1f}", f"{one['whole_s']:.1f}", f"{len(one['runs'])}")
            load = f"{max(report['load_average']):.1f}"
            yield cores, report["model"], cache, *figures, load, links([path])


def host_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the CPU time of a step's host work."""
    for path, report in of_command(reports, "host"):
        for one in report["host"]:
            figures = (f"{one['mean_rows']:.0f}", f"{one['median_ms']:.2f}", f"{one['p99_ms']:.2f}")
            yield report["cpu"], f"{one['running']}", *figures, links([path])


def follower_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the host time of process 0 for the other processes of an engine, by step."""
    for path, report in of_command(reports, "followers"):
        yield (
            report.get("cpu", report["device"]),
            report["model"],
            f"{report['processes']}",
            f"{report['step_ms']:.0f}",
            f"{report['record_us']:.0f}",
            f"{report['sender_cpu_us']:.0f}",
            f"{report['overhead']:.3%}",
            f"{len(report['overheads'])}",
            links([path]),
        )


def transport_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the rates of the HTTP server without a device."""
    for path, report in of_command(reports, "transport"):
        for name in (load for load in TRANSPORT_LOADS if load in report):
            one = report[name]
            figures = (f"{one[key]:.{digits}f}" for key, digits in TRANSPORT_FIGURES)
            load = f"{max(report['load_average']):.1f}"
            yield report["cpu"], name.replace("_", " "), *figures, load, links([path])


def first_token_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the delays that the HTTP server adds to a first token while streams run."""
    for path, report in of_command(reports, "transport"):
        if "first_tokens" in report:
            for name, what in FIRST_TOKEN_DELAYS.items():
                one, work = report["first_tokens"][name], report["workload"]
                streams = f"{work['busy_streams']} of {1000 * work['busy_step_s']:.0f} ms a step"
                yield report["cpu"], streams, what, f"{one['median']:.1f}", f"{one['p99']:.1f}", links([path])


def batch_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the throughput of a batch file and that of `LLM.generate`."""
    for path, report in of_command(reports, "batch"):
        rates, one = report["total_token_throughput"], report["workload"]
        yield (
            machine(report),
            model_of(report),
            lengths(one),
            f"{one['requests']}",
            f"{rates['generate']:,.0f}",
            f"{rates['batch']:,.0f}",
            f"{report['ratio']:.3f}",
            f"{len(report['seconds']['batch'])}",
            f"{report['resume_s']:.2f}",
            links([path]),
        )


def ray_batch_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the lines a second of a batch over simulated engines on Ray."""
    for path, report in of_command(reports, "ray_batch"):
        work = report["workload"]
        for one in sorted(report["runs"], key=lambda one: one["replicas"]):
            over_one = report["speedup"] if one["replicas"] > 1 else 1.0
            engine = f"{work['sequences']} sequences, {1000 * work['step_s']:.0f} ms a step"
            figures = (f"{work['lines']}", f"{one['lines_per_s']:.1f}", f"{over_one:.2f}")
            yield f"{one['replicas']}", engine, *figures, f"{len(one['seconds'])}", links([path])


def router_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each rule of simulated replicas, and one engine with all memory."""
    for path, report in of_command(reports, "router"):
        model = f"{report['model']}, {report['cluster']['replicas']} × {report['cost_model_of']}"
        scaling = list(report["scaling"].values())[-1]["over_one_replica"]
        for name, one in report["balance"].items():
            yield (
                model,
                name,
                f"{scaling:.2f}" if name == "router" else "–",
                f"{one['hits_over_one_engine']:.3f}",
                f"{one['outstanding_max_over_mean']:.3f}",
                f"{one['median_ttft_ms']:.0f}",
                f"{one['p99_ttft_ms']:.0f}",
                links([path]),
            )


def apart_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each number of simulated prefill replicas."""
    for path, report in of_command(reports, "prefill_apart"):
        model = f"{report['model']}, {report['cluster']['replicas']} × {report['cost_model_of']}"
        for one in report["runs"]:
            yield (
                model,
                f"{report['workload']['request_rate']:g}",
                f"{one['prefill_replicas']}",
                f"{one['apart_share']:.2f}",
                *(f"{one[name]:.0f}" for name in ("median_ttft_ms", "p99_ttft_ms")),
                *(f"{one[name]:.1f}" for name in ("median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")),
                links([path]),
            )


def fault_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each fault of a replica."""
    for path, report in of_command(reports, "replica_faults"):
        for name, one in report["faults"].items():
            seconds = (one[key] for key in ("seen_s", "served_s", "again_s"))
            load = max(run["load_average"] for run in one["runs"])
            yield (
                f"{report['device']}, {report['cpu_cores']} cores",
                f"{report['model']}, {report['replicas']} replicas",
                name,
                *("–" if value is None else f"{value:.1f}" for value in seconds),
                f"{one['requests']}",
                f"{one['lost']}, {one['doubled']}",
                f"{len(one['runs'])}",
                f"{load:.1f}",
                links([path]),
            )


def message_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each way of tokens from a Ray actor to the router."""
    for path, report in of_command(reports, "ray_messages"):
        for name in ("message_a_step", "serve_stream_a_request"):
            one = report[name]
            figures = (f"{one['tokens_per_s']:,.0f}", f"{one['cpu_ms_per_1000_tokens']:.1f}")
            load = f"{max(report['load_average']):.1f}"
            yield name.replace("_", " "), f"{report['streams']}", *figures, load, links([path])


def sarathi_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the throughput with chunks of each size over separate prefill and decode steps, by P : D."""
    for path, report in of_command(reports, "sarathi"):
        if not report["engine"]:
            continue
        figure = report["figures"].get("figure9", {"rows": (), "cost_model": ()})
        for one, predicted in zip(figure["rows"], figure["cost_model"], strict=True):
            yield (
                machine(report),
                model_of(report),
                f"{one['chunk']}",
                f"{one['pd_ratio']:g}",
                f"{one['baseline_tokens_per_s']:,.0f}",
                f"{one['tokens_per_s']:,.0f}",
                f"{one['gain']:.2f}",
                f"{predicted['gain']:.2f}",
                f"{one['paper_gain']}" if one["paper_gain"] else "–",
                links([path]),
            )


def perplexity_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the perplexity of each number format."""
    for path, report in of_command(reports, "perplexity"):
        for one in report.get("precisions", ()):
            unquantized = one["precision"] == "unquantized"
            numbers = report["engine_config"]["dtype"] if unquantized else one["precision"]
            change = "–" if unquantized else f"{one['mean_change']:.3f}"
            yield report["model"], numbers, f"{one['perplexity']:.2f}", change, links([path])


def precision_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the cost of each format of weights and cache beside the wide precision."""
    for path, report in of_command(reports, "check_precision"):
        for name, way in report["heads"][report["head"]]["ways"].items():
            changed, above = report["experts"][name]["sets_changed"], way["same_above_floor"]
            yield (
                f"{report['model']}, {report['num_layers']} layers",
                report["against"],
                name,
                f"{100 * way['same']:.1f}",
                "–" if above is None else f"{100 * above:.1f}",
                f"{way['kl']['mean']:.1e}",
                f"{way['kl']['p99']:.1e}",
                "–" if changed is None else f"{100 * changed:.1f}",
                links([path]),
            )


def span_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the perplexity with each file of attention spans."""
    for path, report in of_command(reports, "perplexity"):
        for one in report.get("spans", ()):
            name = "full attention" if one["spans"] is None else Path(one["spans"]).stem
            shares = (f"{one[key]:.1f}" for key in ("keys_percent", "held_percent"))
            change = "–" if one["spans"] is None else f"{one['mean_change']:.3f}"
            yield report["model"], name, *shares, f"{one['perplexity']:.2f}", change, links([path])


def turn_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each side's figures in a comparison of commands in turns."""
    for path, report in of_command(reports, "in_turns"):
        for figure, sides in report["figures"].items():
            for side, found in sides.items():
                runs = [run["report"] for run in report["runs"] if run["side"] == side and run["report"]]
                power = [run["power"] for run in runs if run.get("power")]
                low, high = found["range"]
                yield (
                    report["device"],
                    report["what"],
                    f"{side}: {figure}",
                    f"{found['median']:,.5g}",
                    f"{len(found['values'])}",
                    f"{low:,.5g}–{high:,.5g}",
                    "–" if found["ratio"] is None else f"{found['ratio']:.3f}",
                    f"{median(one['mean_watts'] for one in power):.0f} at "
                    f"{median(one['mean_sm_clock_mhz'] for one in power):.0f}"
                    if power
                    else "–",
                    links([path]),
                )


def pipeline_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each ratio of the simulated pipeline studies, and the paper's ratio."""
    for path, report in reports.items():
        if "study" not in report or not report["paper"]:  # the paper has figures of its own setting only
            continue
        study = report["study"]
        devices = f"{study['stages'] * study['tp']} x {study['device']}"
        for name, ratio in report["ratios"].items():
            paper = report["paper"][name]
            yield (
                f"{study['model']} on {devices}",
                f"{study['requests']:,}",
                name.replace("_", " "),
                f"{ratio:.2f}",
                f"{paper:.2f}",
                f"{ratio / paper - 1:+.0%}",
                links([path]),
            )


def _mean(value: float | list[float] | None) -> float | None:
    """Return a number, the mean over several cards, or None for an unknown value."""
    if isinstance(value, list):
        return statistics.fmean(value) if value else None
    return value


def file_rows(folder: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield every report with its device, date, clock and watts."""
    for path, report in reports.items():
        clock, watts = (_mean(report.get(key)) for key in ("clock_mhz", "watts"))
        power = f"{watts:.0f} at {clock:.0f}" if clock and watts else "–"
        commit = report.get("commit") or "–"
        yield f"[{path}]({path})", str(report.get("device")), str(report.get("date"))[:10], commit[:10], power


# Title, a sentence about the columns, the columns, the rows.
SECTIONS = (
    (
        "Throughput",
        "All requests arrive at once. Tokens count prompts. A step is the plan and the tokens of a "
        "step. "
        "The optimum is NanoFlow's equation 5, at the rate of GEMMs that the power cap allows. Watts are the "
        "mean of a run, at the mean SM clock in MHz. The energy is that of all cards.",
        (
            *("device", "model", "tokens in / out", "step", "slots", "median tokens/s", "runs", "range"),
            *("of optimum", "watts at MHz", "mJ a token", "rivals", "reports"),
        ),
        throughput_rows,
    ),
    (
        "Latency at a request rate",
        "Latencies are normalized: milliseconds for each output token. Late requests arrive in the second "
        "half.",
        (
            *("device", "model", "trace: mean in / out", "requests/s", "tokens/s", "mean ms", "p99 / mean"),
            *("mean ms, late", "p99 / mean, late", "first token, ms", "report"),
        ),
        rate_rows,
    ),
    (
        "Decode steps",
        "A step of decodes with 1,100 tokens of context, as one CUDA graph.",
        ("device", "model", "requests", "ms", "watts at MHz", "mJ a token", "report"),
        decode_step_rows,
    ),
    (
        "Plans",
        "Each cell names a plan and its tokens/s. The ratio divides the overlapped rate by the sequential "
        "rate. The energy is that of one card, of the sequential step and of the overlapped plan.",
        (
            *("device", "model", "workload", "best sequential step", "best overlapped plan"),
            *("ratio", "mJ a token, one card", "report"),
        ),
        plan_rows,
    ),
    (
        "SARATHI's chunks",
        "Whole runs with decode-maximal steps of a chunk size, over separate prefill and decode steps, "
        "medians of three. The paper's figure is that of LLaMA-13B on an A6000.",
        (
            *("device", "model", "chunk", "P : D", "separate steps, tokens/s", "chunks, tokens/s", "gain"),
            *("predicted", "paper", "report"),
        ),
        sarathi_rows,
    ),
    (
        "Replicas behind a router, simulated",
        "Throughput is relative to one replica, when all requests arrive at once. Hits are relative to "
        "the prefix hits of one engine with all memory. Load is the largest mean load over the mean of "
        "all. First tokens are at 80 % of the capacity.",
        (
            *("model and replicas", "rule", "throughput", "hits", "load", "first token, ms"),
            *("p99 first token, ms", "report"),
        ),
        router_rows,
    ),
    (
        "Prefill apart from decode, simulated",
        "The replicas of both kinds together stay the same. A part of the prompts is computed apart. "
        "Milliseconds of first tokens, of the mean gap between the tokens of a request, and of all gaps.",
        (
            *("model and replicas", "requests/s", "of them prefill", "apart", "TTFT", "p99 TTFT", "TPOT"),
            *("p99 TPOT", "p99 gap", "report"),
        ),
        apart_rows,
    ),
    (
        "Faults of a replica",
        "Medians of seconds. `known` begins at the fault and ends when the router knows of the fault. "
        "`served` begins then, and ends when the replica's requests have their next token from another "
        "replica. `again` begins at the fault and ends when the replica serves. The load is that of the "
        "machine. A slow replica stays, and others serve new requests.",
        (
            *("device", "model", "fault", "known, s", "served, s", "again, s", "requests", "lost, doubled"),
            *("runs", "load", "report"),
        ),
        fault_rows,
    ),
    (
        "Tokens from a Ray actor to the router",
        "Medians, without an engine. CPU is that of the router's process.",
        ("way", "streams", "tokens/s", "CPU ms for 1,000 tokens", "load", "report"),
        message_rows,
    ),
    (
        "Batch files",
        "A file of requests and `LLM.generate` of the same requests, in turns, medians of tokens/s. Resume "
        "is the time to read a finished journal.",
        (
            *("device", "model", "tokens in / out", "requests", "generate", "batch", "ratio", "turns"),
            *("resume, s", "report"),
        ),
        batch_rows,
    ),
    (
        "Batches over replicas",
        "One file through a journal, over replicas on Ray on one machine. The steps of an engine take a "
        "fixed time by sleeping, so the figures show what Ray and the journal cost.",
        ("replicas", "engine", "lines", "lines a second", "over one", "runs", "report"),
        ray_batch_rows,
    ),
    (
        "Kernels",
        "The rival's time divided by the kernel's time. Both ran in turns in one process on one H200.",
        ("group", "rival", "cases", "geometric mean", "minimum", "reports"),
        kernel_rows,
    ),
    (
        "Offloaded inference",
        "Models that do not fit the device memory. Bits are those of weights and KV. The last rate is "
        "FlexGen's, on a T4.",
        (
            *("device: GB of device, host", "model: bits", "tokens in / out", "block and policy"),
            *("generated tokens/s", "predicted", "link GB/s", "FlexGen's paper", "report"),
        ),
        offload_rows,
    ),
    (
        "KV tiers",
        "Conversations of several rounds. The lowest tier holds the pages that the device evicts.",
        (
            *("device", "model", "lowest tier", "hit rate", "compute saved", "first token, later rounds, ms"),
            *("ms a token", "tokens/s without reuse", "report"),
        ),
        tier_rows,
    ),
    (
        "Start",
        "Seconds from the begin of the process. A filled cache holds the programs of an earlier start.",
        ("device", "model", "compilation cache", "files, GB/s", "first token", "all programs", "report"),
        start_rows,
    ),
    (
        "First answer",
        "Seconds from the start of `python3 run.py` to the first text of the answer and to the end of the "
        "process, medians.",
        (
            "device",
            "model",
            "compilation cache",
            "first text",
            "whole process",
            "runs",
            "load average",
            "report",
        ),
        first_answer_rows,
    ),
    (
        "Commands in turns",
        "`benchmarks/in_turns.py` ran the sides of a report in turns on one machine. The ratio divides the "
        "median by that of the first side.",
        (
            *("device", "comparison", "side: figure", "median", "runs", "range"),
            *("ratio", "watts at MHz", "report"),
        ),
        turn_rows,
    ),
    (
        "Host time",
        "CPU milliseconds of the engine's host work in one step.",
        ("CPU", "running requests", "tokens a step", "median ms", "p99 ms", "report"),
        host_rows,
    ),
    (
        "One engine of several processes",
        "Process 0 records each step for the others, and a thread sends the record while the step runs. The "
        "overhead is a recording over a step, the median of the batches.",
        (
            *("processor", "model", "processes", "step, ms", "recording, µs", "sender's CPU, µs"),
            *("overhead", "batches", "report"),
        ),
        follower_rows,
    ),
    (
        "HTTP transport",
        "Chunks of 256 streams, and plain requests, through the HTTP server on one core, with an engine "
        "of paced steps. Bare uvicorn answers the same clients with the same bytes, without JaxFlow and "
        "without an engine. The load average counts other programs of the machine.",
        ("CPU", "what", "a second", "a CPU second of the server", "cores of the server", "load", "report"),
        transport_rows,
    ),
    (
        "First tokens over HTTP",
        "The delay that the HTTP server on one core adds to the first token of single requests while streams "
        "run.",
        ("CPU", "streams", "delay", "median, ms", "p99, ms", "report"),
        first_token_rows,
    ),
    (
        "Perplexity",
        "WikiText-2. The last figure is the mean change of a token's log-probability.",
        ("model", "numbers", "perplexity", "mean change", "report"),
        perplexity_rows,
    ),
    (
        "Formats beside a wide precision",
        "Random weights, quantized, beside the wide precision with the same weights, on the same tokens. "
        "Equal tokens are those of all positions, and those of positions whose margin exceeds the noise of "
        "another step size, in %. The last figure is the share of choices whose set of experts changed, in "
        "%. The figures rank formats, and do not tell the loss of a trained model.",
        (
            "model",
            "beside",
            "numbers",
            "equal tokens",
            "above the noise",
            "KL mean",
            "KL p99",
            "sets of experts changed",
            "report",
        ),
        precision_rows,
    ),
    (
        "Attention spans",
        "Perplexity of WikiText-2 with a span for each KV head, and with one window for all heads. The keys "
        "are those that queries see, and those that the page groups hold, in % of full attention.",
        ("model", "spans", "keys seen", "keys held", "perplexity", "mean change", "report"),
        span_rows,
    ),
    (
        "Pipelines, simulated",
        "The engine's scheduler on virtual clocks, and the figures of SARATHI §5.3. Three constants of the "
        "simulation were fitted to the paper's speedups; see [notes/pipelines.md](notes/pipelines.md).",
        ("model and devices", "requests", "ratio", "simulated", "paper", "difference", "report"),
        pipeline_rows,
    ),
    (
        "All reports",
        "A dash marks an unknown value. `incomplete.json` lists the unknown keys of old reports.",
        ("report", "device", "date", "commit", "watts at MHz"),
        file_rows,
    ),
)

INTRODUCTION = """\
# Results

`python -m benchmarks.results` writes this file from the reports in this folder. Do not edit it.

A report is `<device>/<model>/<what>.json`. It holds the command, the commit, the versions, the driver, the
device, the SM clock, the watts and the date of its measurement. Where a table shows several runs, it shows
the median of the runs.
"""


def table(head: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *rows))


def index(folder: Path = HERE) -> str:
    """Return the text of RESULTS.md. A section without a report is left out."""
    reports = read_reports(folder)
    text = INTRODUCTION
    for title, about, head, section in SECTIONS:
        rows = list(section(folder, reports))
        if rows:
            text += f"\n## {title}\n\n{about}\n\n{table(head, rows)}"
    return text


def of_headline(report: Report, headline: tuple[int, str, str, str, str]) -> bool:
    """Return True for a throughput run of a headline's work with the sequential plan or a shipped plan."""
    devices, device, model, numbers, work = headline
    plan = report["engine_config"]["plan"]
    folder = Path(plan).parent
    return (
        (devices_of(report), report["device"], model_of(report), lengths(report["workload"]))
        == (devices, device, f"{model}, {numbers}", work)
        # `searched` chooses one of the shipped plans. They were in folders of this name.
        and (plan in ("sequential", "searched") or folder == SHIPPED or folder.name == "searched")
    )


def pairs_in_turns(
    reports: Mapping[str, Report], headline: tuple[int, str, str, str, str]
) -> Iterator[tuple[int, float, float, str, str]]:
    """Yield each comparison in turns of a headline's work with another engine.

    A comparison is the runs of a side, the rival's and JaxFlow's median tokens/s, the rival's name, the path.
    """
    for path, report in of_command(reports, "in_turns"):
        found = report["figures"].get("total_token_throughput", {})
        # A side's runs are alike: one run tells the side's engine.
        sides = {run["side"]: run["report"] for run in report["runs"] if run["report"]}
        own = [name for name, run in sides.items() if run.get("command_name") == "throughput"]
        others = [name for name in sides if name not in own and sides[name].get("device") is None]
        for ours in (name for name in own if name in found and of_headline(sides[name], headline)):
            for theirs in (name for name in others if name in found):
                runs = min(len(found[name]["values"]) for name in (ours, theirs))
                version = sides[theirs]["versions"].get(theirs.lower(), "")
                rates = found[theirs]["median"], found[ours]["median"]
                yield runs, *rates, f"{theirs} {version}".strip(), path


def headline_row(
    reports: Mapping[str, Report],
    rivals: Iterable[Mapping[str, Any]],
    headline: tuple[int, str, str, str, str],
) -> Row | None:
    """Return the README's row of a headline, or None without a report.

    A comparison in turns with another engine comes first, that with the most runs. Else the row has the step
    with the most runs, its median, and the best recorded rival without a ratio.
    """
    devices, device, model, numbers, work = headline
    name = device if devices == 1 else f"{devices} × {device}"
    head = (name, f"{model}, {numbers}", work)
    pair = max(pairs_in_turns(reports, headline), default=None)
    if pair:
        number, theirs, ours, rival, path = pair
        count = f"[{number} of each](benchmarks/{path})"
        return *head, f"{ours:,.0f}", count, f"{rival} {theirs:,.0f}", f"{ours / theirs:.3f}"
    named = [runs for runs in throughput_groups(reports).values() if of_headline(runs[0][1], headline)]
    if not named:
        return None
    best = max(named, key=lambda runs: (len(rates_of(runs)), median(rates_of(runs))))
    source = f"benchmarks/{best[0][0]}" if len(best) == 1 else "benchmarks/RESULTS.md#throughput"
    recorded = same_work(rivals, best[0][1])[:1]
    # A rival without a report of its own stands in the list alone.
    linked = [f"[{rate_of(one)}](benchmarks/{one.get('report', 'rivals.json')})" for one in recorded]
    (rival,) = linked or ["–"]
    rates = rates_of(best)
    return *head, f"{median(rates):,.0f}", f"[{len(rates)}]({source})", rival, "–"


def headline_table(folder: Path = HERE) -> str:
    """Return the README's table."""
    reports = read_reports(folder)
    rivals = json.loads((folder / "rivals.json").read_text("utf-8"))["results"]
    rows = (headline_row(reports, rivals, headline) for headline in HEADLINES)
    head = ("device", "model", "tokens in / out", "median tokens/s", "runs", "rival", "ratio in turns")
    return table(head, filter(None, rows))


def rewritten(readme: str, folder: Path = HERE) -> str:
    """Return the README with a new table.

    Raises: ValueError for a README without the comments `<!-- results -->` and `<!-- /results -->`.
    """
    if not BLOCK.search(readme):
        raise ValueError("README.md: the lines <!-- results --> and <!-- /results --> are missing")
    return BLOCK.sub(lambda _: f"\n{headline_table(folder)}\n", readme)


def main(arguments: Sequence[str]) -> None:
    """Write both tables. The command takes no arguments but --help."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=form).parse_args(arguments)
    INDEX.write_text(index(), "utf-8")
    README.write_text(rewritten(README.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

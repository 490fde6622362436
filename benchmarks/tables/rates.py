"""Tables of an engine's rates: throughput, request rates, decode steps, plans, chunks."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables.cells import (
    Report,
    Row,
    Section,
    devices_of,
    lengths,
    links,
    machine,
    millijoules,
    model_of,
)
from benchmarks.tables.reports import of_command, points, rate_of, rates_of, same_work, throughput_groups
from jaxflow.model.cost import find_device, optimal_throughput
from jaxflow.model.energy import known_rate


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


def card_joules(row: Mapping[str, Any]) -> float | None:
    """Return the joules a token of one card. Rows without `cards` have one card's joules."""
    joules = row.get("joules_per_token")
    return None if joules is None else joules / row.get("cards", 1)


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


SECTIONS: tuple[Section, ...] = (
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
)

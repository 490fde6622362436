"""The README's table: the rows of some devices and models."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables.cells import Report, Row, devices_of, lengths, model_of, table
from benchmarks.tables.reports import (
    HERE,
    of_command,
    rate_of,
    rates_of,
    read_reports,
    same_work,
    throughput_groups,
)

SHIPPED = Path("jaxflow/pipeline/plans")
# The README's rows: number of devices, device, model, numbers, prompt and output tokens.
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
HEADLINES = (
    (1, H200, "llama-3.1-8b", "bfloat16", "1024 / 512"),
    (1, H200, "llama-3.1-8b", "fp8, fp8 KV", "1024 / 512"),
    (1, H100, "llama-3.1-8b", "fp8, fp8 KV", "1024 / 512"),
    (1, H200, "llama-3.1-8b", "bfloat16", "380 / 233 (lognormal)"),
    (1, H200, "qwen3-30b-a3b", "fp8, fp8 KV", "1024 / 512"),
    (1, H200, "gpt-oss-20b", "mxfp4", "1024 / 512"),
    (2, H200, "llama-3-70b", "fp8, fp8 KV", "1024 / 512"),
    (4, H200, "llama-3-70b", "fp8, fp8 KV", "1024 / 512"),
)


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
        # All runs of a side have the same engine.
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
    # A rival without a report is only in the list.
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

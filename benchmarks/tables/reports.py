"""The reports of the benchmarks, read and grouped, and the recorded rates of other engines."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables.cells import Report, devices_of, lengths, machine, model_of, precision

HERE = Path(__file__).parent.parent  # benchmarks/
KEYS = ("command", "commit", "versions", "driver", "device", "clock_mhz", "watts", "date")
NULL_ON_CPU = ("driver", "clock_mhz", "watts")
NOT_REPORTS = ("plans", "settings", "notes")
SAME_SLOTS = 1.5


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

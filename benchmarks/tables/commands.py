"""Tables of whole commands: starts, first answers, and sides in turns."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from benchmarks.tables.cells import Report, Row, Section, links, machine, model_of
from benchmarks.tables.reports import of_command
from jaxflow.engine.start_times import RATE


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


SECTIONS: tuple[Section, ...] = (
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
)

"""The table of simulated pipelines."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.tables.cells import Report, Row, Section, links


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


SECTIONS: tuple[Section, ...] = (
    (
        "Pipelines, simulated",
        "The engine's scheduler on virtual clocks, and the figures of SARATHI §5.3. Three constants of the "
        "simulation were fitted to the paper's speedups; see [notes/pipelines.md](notes/pipelines.md).",
        ("model and devices", "requests", "ratio", "simulated", "paper", "difference", "report"),
        pipeline_rows,
    ),
)

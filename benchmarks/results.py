"""Write the index of the reports, `benchmarks/RESULTS.md`, and the table of the README.

  python -m benchmarks.results

A report is a JSON file `benchmarks/<device>/<model>/<what>.json`. A command of JaxFlow wrote the report.
`rivals.json` holds the rates of other engines. `incomplete.json` lists the old reports with unknown keys.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.tables import accuracy, commands, host, kernels_and_memory, pipelines, rates, replicas
from benchmarks.tables.cells import Report, Row, Section, table
from benchmarks.tables.headline import headline_table
from benchmarks.tables.reports import HERE, read_reports

README = HERE.parent / "README.md"
INDEX = HERE / "RESULTS.md"
BLOCK = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- /results -->)", re.S)


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


SECTIONS: tuple[Section, ...] = (
    *rates.SECTIONS,
    *replicas.SECTIONS,
    *kernels_and_memory.SECTIONS,
    *commands.SECTIONS,
    *host.SECTIONS,
    *accuracy.SECTIONS,
    *pipelines.SECTIONS,
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


def index(folder: Path = HERE) -> str:
    """Return the text of RESULTS.md. A section without a report is left out."""
    reports = read_reports(folder)
    text = INTRODUCTION
    for title, about, head, section in SECTIONS:
        rows = list(section(folder, reports))
        if rows:
            text += f"\n## {title}\n\n{about}\n\n{table(head, rows)}"
    return text


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

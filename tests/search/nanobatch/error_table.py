"""Print the errors of the predicted step times of each report on H200s, as a table in Markdown.

PYTHONPATH=.:tests:tests/search:tests/search/nanobatch python tests/search/nanobatch/error_table.py
"""

import statistics

from measured_reports import REPORTS, predicted_steps


def row(name: str, errors: list[float]) -> str:
    over = sum(error > 0.07 for error in errors)
    return f"| {name} | {len(errors)} | {statistics.mean(errors):.1%} | {max(errors):.1%} | {over} |"


def main() -> None:
    """Compare every committed measured step with its simulation."""
    print("| report | steps | mean error | largest | over 7 % |", "|---|---|---|---|---|", sep="\n")
    every = []
    for name, report in REPORTS.items():
        errors = [abs(step.error) for step in predicted_steps(report)]
        print(row(name, errors))
        every += errors
    print(row("all", every))


if __name__ == "__main__":
    main()

"""Pictures of `search.regimes`' heat maps."""

import sys
from pathlib import Path

import matplotlib
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from search.regimes import DOCS, Map, memory_map, network_map, rewritten

USAGE = (
    "usage: python -m search.heat_maps   (writes the tables of docs/cost-model.md and its two pictures "
    "anew; takes no arguments)"
)


def draw(shown: Map) -> Figure:
    """Yellow is bound by compute, blue by the other resource; 1 lies between."""
    figure = Figure(
        figsize=(1.6 + 0.9 * len(shown.columns), 1.1 + 0.32 * len(shown.rows)), layout="constrained"
    )
    axes = figure.add_subplot()
    values = [[float("nan") if value is None else value for value in row] for row in shown.values]
    axes.imshow(values, cmap="cividis_r", norm=LogNorm(0.1, 10), aspect="auto")
    axes.set_xticks(range(len(shown.columns)), shown.columns, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(shown.rows)), shown.rows, fontsize=8)
    axes.set_title(shown.title, fontsize=10)
    for i, row in enumerate(shown.values):
        for j, value in enumerate(row):
            dark = value is not None and value > 1.5
            axes.text(
                j,
                i,
                "–" if value is None else f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="w" if dark else "k",
            )
    return figure


def save(shown: Map, path: str | Path) -> None:
    """Draws a map into a file, the same for the same map."""
    with matplotlib.rc_context({"svg.hashsalt": "jaxflow", "svg.fonttype": "none"}):
        draw(shown).savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None)


def main(argv: list[str]) -> int:
    """Writes the page and its pictures anew; returns the exit status."""
    if argv[1:]:
        print(USAGE, file=sys.stdout if (helped := argv[1] in ("--help", "-h")) else sys.stderr)
        return 0 if helped else 2
    page = DOCS / "cost-model.md"
    page.write_text(rewritten(page.read_text("utf-8")), "utf-8")
    save(network_map(), DOCS / "network-over-compute.svg")
    save(memory_map(), DOCS / "memory-over-compute.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Tables of what number formats and attention spans cost in accuracy."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.tables.cells import Report, Row, Section, links
from benchmarks.tables.reports import of_command


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


SECTIONS: tuple[Section, ...] = (
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
)

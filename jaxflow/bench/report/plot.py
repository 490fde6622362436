"""Charts of sweeps, and of the perplexity with attention spans."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter


def draw(sweep: Mapping[str, Any]) -> Figure:
    """Return the chart of a sweep or of another report, by its kind."""
    draw_kind, panels = {
        "rate": (_rate, 2),
        "batch_size": (_batch_size, 2),
        "length": (_length, 1),
        "pd_ratio": (_pd_ratio, 1),
        "tiles": (_tiles, 1),
        "policies": (_policies, 1),
        "blocks": (_blocks, 1),
        "spans": (_spans, 1),
        "span_speeds": (_span_speeds, 1),
        "experts": (_experts, 1),
    }[sweep["kind"]]
    figure = Figure(figsize=(6.0 * panels, 4.2), layout="constrained")
    draw_kind(sweep, [figure.add_subplot(1, panels, i + 1) for i in range(panels)])
    return figure


def save(sweep: Mapping[str, Any], path: str | Path) -> None:
    """Draw a sweep into a file, creating its folder if needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    draw(sweep).savefig(path, dpi=130)


def _column(sweep: Mapping[str, Any], key: str) -> list[float]:
    return [point[key] for point in sweep["points"]]


def _label(axes: Axes, x: str, y: str, *, legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if legend:
        axes.legend(frameon=False)


def _energy(axes: Axes, places: Sequence[float | str], points: Sequence[Mapping[str, Any]]) -> None:
    """Draw the energy of a token on a second axis, if every point has it."""
    joules = [point.get("joules_per_token") for point in points]
    known = [1e3 * one for one in joules if one is not None]
    if known and len(known) == len(joules):
        right = axes.twinx()
        right.plot(places, known, "s:", color="tab:red")
        right.set_ylabel("energy per token (mJ)", color="tab:red")
        right.set_ylim(bottom=0)


def _rate(sweep: Mapping[str, Any], axes: list[Axes]) -> None:
    sweep = {**sweep, "points": sorted(sweep["points"], key=lambda point: point["request_rate"])}
    rates, points = _column(sweep, "request_rate"), sweep["points"]
    alone = [point["sequential"] for point in points if "sequential" in point]
    for key, label in (("mean", "mean"), ("median", "median"), ("p99", "99th percentile")):
        (line,) = axes[0].plot(rates, _column(sweep, f"{key}_normalized_latency_ms"), marker="o", label=label)
        if len(alone) == len(points):
            values = [point[f"{key}_normalized_latency_ms"] for point in alone]
            axes[0].plot(
                rates,
                values,
                marker="x",
                linestyle="--",
                color=line.get_color(),
                label=f"{label}, sequential plan",
            )
    later = [point.get("later_half") for point in points]
    if all(later):
        for key, color in (("mean", "tab:blue"), ("p99", "tab:green")):
            values = [one[f"{key}_normalized_latency_ms"] for one in later]
            axes[0].plot(
                rates,
                values,
                linestyle=":",
                color=color,
                label=f"{'mean' if key == 'mean' else '99th percentile'}, later half",
            )
    limit = sweep.get("highest_rate", {}).get("limit_ms", math.inf)
    if limit < axes[0].get_ylim()[1]:
        axes[0].axhline(limit, color="gray", linewidth=1)
    _label(axes[0], "offered requests per second", "latency per output token (ms)")
    if sweep.get("compare_sequential") and not alone:
        axes[0].set_title("no other plan is expected to gain: same as the sequential plan", fontsize=9)
    axes[1].plot(rates, _column(sweep, "total_token_throughput"), marker="o", label="reached")
    if len(alone) == len(points):
        axes[1].plot(
            rates, [point["total_token_throughput"] for point in alone], "x--", label="sequential plan"
        )
    optimal = [point.get("optimal_token_throughput") for point in sweep["points"]]
    if all(optimal) and max(_column(sweep, "total_token_throughput")) > 0.05 * max(optimal):
        axes[1].plot(rates, optimal, "--", color="gray", label="optimal (NanoFlow Eq. 5)")
    axes[1].set_ylim(bottom=0)
    _label(axes[1], "offered requests per second", "tokens per second")
    _energy(axes[1], rates, points)


def _batch_size(sweep: Mapping[str, Any], axes: list[Axes]) -> None:
    sizes = _column(sweep, "batch_size")
    axes[0].plot(sizes, _column(sweep, "mean_tpot_ms"), marker="o", label="per output token")
    axes[0].plot(sizes, _column(sweep, "mean_ttft_ms"), marker="o", label="to first token")
    _label(axes[0], "requests in the batch", "latency (ms)")
    axes[1].plot(sizes, _column(sweep, "total_token_throughput"), marker="o")
    _label(axes[1], "requests in the batch", "tokens per second", legend=False)
    _energy(axes[1], sizes, sweep["points"])
    for one in axes:
        one.set_xscale("log", base=2)
        one.xaxis.set_major_formatter(ScalarFormatter())


def _length(sweep: Mapping[str, Any], axes: list[Axes]) -> None:
    labels = [f"{point['input_len']}/{point['output_len']}" for point in sweep["points"]]
    axes[0].bar(labels, _column(sweep, "total_token_throughput"), color="tab:blue", label="whole run")
    steady = [
        (point.get("steady_state") or {}).get("total_token_throughput", 0.0) for point in sweep["points"]
    ]
    if all(steady):
        axes[0].plot(labels, steady, "o", color="tab:orange", label="steady state")
    _label(axes[0], "prompt / output tokens", "tokens per second")
    _energy(axes[0], labels, sweep["points"])


def _pd_ratio(sweep: Mapping[str, Any], axes: list[Axes]) -> None:
    for size, gains in sweep["gain_by_chunk_size"].items():
        (line,) = axes[0].plot(sweep["ratios"], gains, marker="o", label=f"chunks of {size}")
        axes[0].axvline(
            sweep["expected_peak_by_chunk_size"][size], color=line.get_color(), linestyle=":", linewidth=1
        )
    axes[0].axhline(1.0, color="gray", linewidth=1)
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_formatter(ScalarFormatter())
    axes[0].set_title("dotted: P : D = C / (B - 1)", fontsize=9)
    _label(axes[0], "P : D ratio", "throughput over prefill-only + decode-only steps")


def _tiles(sweep: Mapping[str, Any], axes: list[Axes]) -> None:
    axes[0].step(sweep["prefill_tokens"], sweep["step_ms"], where="post")
    _label(axes[0], "prefill tokens in the step", "time of the step (ms)", legend=False)


def _policies(sweep: Mapping[str, Any], axes: list[Axes]) -> None:
    rows = sweep["rows"]
    names = list(rows[0]["token_throughput"])
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [row + (i - (len(names) - 1) / 2) * width for row in range(len(rows))]
        base = [row["token_throughput"]["request-level"] for row in rows]
        axes[0].bar(
            places,
            [row["token_throughput"][name] / b for row, b in zip(rows, base, strict=True)],
            width,
            label=name,
        )
    axes[0].set_xticks(range(len(rows)), [f"{row['length']} tokens, B = {row['slots']}" for row in rows])
    axes[0].set_ylim(0.8, 1.15 * axes[0].get_ylim()[1])
    _label(axes[0], "sequence length", "throughput over request-level batches", legend=False)
    axes[0].legend(frameon=False, ncols=3, loc="upper center")


def _blocks(sweep: Mapping[str, Any], axes: list[Axes]) -> None:
    """Draw FlexGen's Figure 1: latency of a block and its throughput, with a line along the Pareto front."""
    points = sorted(sweep["points"], key=lambda point: point["latency_s"])
    front = [point for point in points if point["best"]]
    for chosen, style, label in ((points, ".", "blocks"), (front, "-o", "Pareto front")):
        axes[0].plot(
            [p["latency_s"] for p in chosen], [p["tokens_per_s"] for p in chosen], style, label=label
        )
    for point in points:
        name = f"{point['gpu_batch_size']}×{point['num_gpu_batches']}"
        axes[0].annotate(
            name,
            (point["latency_s"], point["tokens_per_s"]),
            fontsize=7,
            xytext=(3, -8),
            textcoords="offset points",
        )
    axes[0].set(xscale="log", yscale="log")
    axes[0].set_title(
        f"{sweep['model']}, {sweep['prompt_tokens']} in, {sweep['output_tokens']} out", fontsize=9
    )
    _label(axes[0], "latency of a block (s)", "tokens generated per second")


def _spans(report: Mapping[str, Any], axes: list[Axes]) -> None:
    """Draw the perplexity by the keys that queries see, a line for each kind of file:
    `spans-50.json` is of `spans`.
    """
    full, *files = sorted(report["spans"], key=lambda row: row["spans"] is not None)
    kinds = sorted({Path(row["spans"]).stem.rpartition("-")[0] for row in files})
    for kind in kinds:
        rows = [full, *(row for row in files if Path(row["spans"]).stem.rpartition("-")[0] == kind)]
        rows.sort(key=lambda row: row["keys_percent"])
        axes[0].plot(
            [row["keys_percent"] for row in rows], [row["perplexity"] for row in rows], "-o", label=kind
        )
    axes[0].axhline(full["perplexity"], color="gray", linewidth=1)
    windows, tokens = report["windows"]
    axes[0].set_title(f"{report['model']}, {windows} texts of {tokens} tokens", fontsize=9)
    _label(axes[0], "keys that queries see (%)", "perplexity")


def _span_speeds(report: Mapping[str, Any], axes: list[Axes]) -> None:
    """Draw how much faster attention with spans is than dense attention, in each order of the work.

    rows: cases of `bench kernels --only sparse_attention`.
    """
    rows = report["rows"]
    orders = {"spans": "equal pieces", "longest first": "longest first", "head order": "head order"}
    for i, (order, label) in enumerate(orders.items()):
        times = [row["implementations"] for row in rows]
        gains = [one["dense"]["us"] / one[order]["us"] for one in times]
        axes[0].bar([at + 0.27 * (i - 1) for at in range(len(rows))], gains, 0.25, label=label)
    goal = rows[0]["target"]["ratio"]
    axes[0].axhline(goal, color="gray", linewidth=1, label=f"goal {goal:g}")
    names = [row["case"].split(" half")[0].replace(" x mean ", " x\n") for row in rows]
    axes[0].set_xticks(range(len(rows)), names, fontsize=8)
    axes[0].set_ylim(0, 1.2 * axes[0].get_ylim()[1])
    _label(axes[0], "rows x mean keys", "speed over dense attention", legend=False)
    axes[0].legend(frameon=False, ncols=2, loc="upper center")


def _experts(found: Mapping[str, Any], axes: list[Axes]) -> None:
    """Draw the tokens at each expert over the mean of its layer."""
    tokens = np.asarray(found["tokens"], float)
    load = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
    picture = axes[0].imshow(load, aspect="auto", vmin=0, cmap="viridis", interpolation="nearest")
    axes[0].set_yticks(range(len(load)), [str(layer) for layer in found["layers"]])
    _label(axes[0], "expert", "layer", legend=False)
    axes[0].grid(visible=False)
    assert isinstance(axes[0].figure, Figure)
    axes[0].figure.colorbar(picture, label="tokens over the mean of the layer")

"""The picture of `bench trace`: for each plan a layer's kernels by stream, and the shares of the device's peaks below."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxflow.bench.trace_events import RESOURCES

_COLORS = {"compute": "tab:red", "memory": "tab:blue", "network": "tab:green"}
_KINDS = {"dense": "tab:red", "attention": "tab:blue", "network": "tab:green", "other": "tab:gray", None: "lightgray"}  # None: of no op
_LABELLED = 0.06  # of the layer's time: shorter kernels have no room for a name


def save(result: Mapping[str, Any], path: str | Path) -> None:
    """Draws a report into a file, making its folder if need be."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    draw(result).savefig(path, dpi=130)


def draw(result: Mapping[str, Any]) -> Figure:
    """A column for each plan, on one scale of time."""
    plans = result["plans"]
    figure = Figure(figsize=(6.5 * len(plans), 6.0), layout="constrained")
    longest = max(plan["layer_us"] for plan in plans)
    grid = figure.add_gridspec(2, len(plans), height_ratios=(1, 1.6))
    for column, plan in enumerate(plans):
        above, below = (figure.add_subplot(grid[row, column]) for row in (0, 1))
        _streams(above, plan["kernels"], plan["layer_us"])
        _shares(below, plan["shares"], plan["mean_shares"])
        above.set_title(_title(plan), fontsize=9)
        for axes in (above, below):
            axes.set_xlim(0, longest)
        below.set_xlabel("µs of one layer's time")
    return figure


def _title(plan: Mapping[str, Any]) -> str:
    title = f"{plan['plan']}: {plan['layer_us']:.0f} µs"
    if plan["watts"] is None:
        return title
    return f"{title}; {plan['watts']:.0f} W at {plan['sm_clock_mhz']:.0f} MHz, of steps of {plan['step_ms']:.1f} ms"


def _streams(axes: Axes, kernels: Sequence[Mapping[str, Any]], layer_us: float) -> None:
    streams = list(dict.fromkeys(kernel["stream"] for kernel in kernels))
    for kernel in kernels:
        row = streams.index(kernel["stream"])
        axes.barh(row, kernel["us"], left=kernel["start_us"], height=0.8, color=_KINDS[kernel["kind"]], edgecolor="white", linewidth=0.5)
        if kernel["op"] and kernel["us"] > _LABELLED * layer_us:
            label = kernel["op"] if kernel["blocks"] is None else f"{kernel['op']}, {kernel['blocks']} blocks"
            axes.text(kernel["start_us"] + kernel["us"] / 2, row, label, ha="center", va="center", fontsize=6, rotation=90)
    axes.set_yticks(range(len(streams)), [stream[:24] for stream in streams], fontsize=6)
    axes.invert_yaxis()


def _shares(axes: Axes, rows: Sequence[Mapping[str, float]], means: Mapping[str, float]) -> None:
    edges = [row["start_us"] for row in rows] + [rows[-1]["stop_us"]]
    for name in RESOURCES:
        if name == "network" and not any(row[name] for row in rows):
            continue  # one device
        axes.stairs([row[name] for row in rows], edges, color=_COLORS[name], label=f"{name}, mean {means[name]:.0%}", linewidth=1.2)
    axes.set_ylabel("share of the peak")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)

"""The chart of `bench trace`: a layer's kernels by stream, the resource utilization, and modeled watts, per
plan."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxflow.bench.report.trace_events import RESOURCES
from jaxflow.model.cost import FP8_PRODUCTS, find_device
from jaxflow.model.energy import Power, shipped_power
from jaxflow.model.graph import Work

_COLORS = {"compute": "tab:red", "memory": "tab:blue", "network": "tab:green"}
_KINDS = {
    "dense": "tab:red",
    "attention": "tab:blue",
    "network": "tab:green",
    "other": "tab:gray",
    None: "lightgray",
}  # None: no op
_LABELLED = 0.06  # share of the layer's time; shorter kernels have no room for a label


@dataclasses.dataclass(frozen=True)
class Watts:
    """Watts over a layer.

    `values`: one per row of a plan's `shares`. `scale`: factor of the dynamic watts to match the sensor's
    mean; 1 without a sensor.
    """

    values: tuple[float, ...]
    scale: float
    cap: float


def save(result: Mapping[str, Any], path: str | Path) -> None:
    """Draw a report into a file, creating its folder if needed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    draw(result).savefig(path, dpi=130)


def draw(result: Mapping[str, Any]) -> Figure:
    """Return a figure with one column per plan, on a common time scale."""
    plans = result["plans"]
    watts = [modelled(result, plan) for plan in plans]
    heights = (1, 1.6, 0.8) if any(watts) else (1, 1.6)
    figure = Figure(figsize=(6.5 * len(plans), 2.3 * sum(heights)), layout="constrained")
    longest = max(plan["layer_us"] for plan in plans)
    grid = figure.add_gridspec(len(heights), len(plans), height_ratios=heights)
    for column, (plan, drawn) in enumerate(zip(plans, watts, strict=True)):
        panels = [figure.add_subplot(grid[row, column]) for row in range(len(heights))]
        _streams(panels[0], plan["kernels"], plan["layer_us"])
        _shares(panels[1], plan["shares"], plan["mean_shares"])
        if drawn:
            _watts(panels[2], plan["shares"], drawn)
        panels[0].set_title(_title(plan), fontsize=9)
        for axes in panels:
            axes.set_xlim(0, longest)
        panels[-1].set_xlabel("µs of one layer's time")
    return figure


def _title(plan: Mapping[str, Any]) -> str:
    title = f"{plan['plan']}: {plan['layer_us']:.0f} µs"
    if plan["watts"] is None:
        return title
    return (
        f"{title}\n{plan['watts']:.0f} W at {plan['sm_clock_mhz']:.0f} MHz, of steps of "
        f"{plan['step_ms']:.1f} ms"
    )


def _streams(axes: Axes, kernels: Sequence[Mapping[str, Any]], layer_us: float) -> None:
    streams = list(dict.fromkeys(kernel["stream"] for kernel in kernels))
    for kernel in kernels:
        row = streams.index(kernel["stream"])
        axes.barh(
            row,
            kernel["us"],
            left=kernel["start_us"],
            height=0.8,
            color=_KINDS[kernel["kind"]],
            edgecolor="white",
            linewidth=0.5,
        )
        if kernel["op"] and kernel["us"] > _LABELLED * layer_us:
            label = kernel["op"] if kernel["blocks"] is None else f"{kernel['op']}, {kernel['blocks']} blocks"
            axes.text(
                kernel["start_us"] + kernel["us"] / 2,
                row,
                label,
                ha="center",
                va="center",
                fontsize=6,
                rotation=90,
                clip_on=True,
            )
    axes.set_yticks(range(len(streams)), [stream[:24] for stream in streams], fontsize=6)
    axes.invert_yaxis()


def _shares(axes: Axes, rows: Sequence[Mapping[str, float]], means: Mapping[str, float]) -> None:
    edges = [row["start_us"] for row in rows] + [rows[-1]["stop_us"]]
    for name in RESOURCES:
        if name == "network" and not any(row[name] for row in rows):
            continue  # only one device
        axes.stairs(
            [row[name] for row in rows],
            edges,
            color=_COLORS[name],
            label=f"{name}, mean {means[name]:.0%}",
            linewidth=1.2,
        )
    axes.set_ylabel("share of the peak")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)


def _watts(axes: Axes, rows: Sequence[Mapping[str, float]], watts: Watts) -> None:
    edges = [row["start_us"] for row in rows] + [rows[-1]["stop_us"]]
    axes.stairs(
        watts.values,
        edges,
        color="tab:purple",
        linewidth=1.2,
        label=f"by the model × {watts.scale:.2f}, for the sensor's mean",
    )
    axes.axhline(watts.cap, color="gray", linewidth=1, linestyle=":")
    axes.set_ylabel("watts, modelled")
    axes.set_ylim(0, 1.3 * max(watts.values))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def modelled(result: Mapping[str, Any], plan: Mapping[str, Any]) -> Watts | None:
    """Return the watts of one plan of a `bench trace` report, or None for a device or dtype with unknown
    joules."""
    device = find_device(result["device"])
    power = shipped_power(device.name) if device else None
    engine = result["engine_config"]
    products = "float8_e4m3fn" if engine["quantization"] == "fp8" else engine["dtype"]
    if power is None or not {products, engine["dtype"]} <= set(power.flop):
        return None
    clock = 1e6 * plan["sm_clock_mhz"] / power.highest_clock_hz if plan["sm_clock_mhz"] else 1.0
    joules = [
        _joules(kernel, power, products if kernel["op"] in FP8_PRODUCTS else engine["dtype"], clock)
        for kernel in plan["kernels"]
    ]
    rows = plan["shares"]
    dynamic = [_at(row["start_us"], row["stop_us"], plan["kernels"], joules) for row in rows]
    whole = (
        sum(watts * (row["stop_us"] - row["start_us"]) for watts, row in zip(dynamic, rows, strict=True))
        / plan["layer_us"]
    )
    scale = (plan["watts"] - power.idle_w) / whole if plan["watts"] and whole else 1.0
    return Watts(tuple(power.idle_w + scale * watts for watts in dynamic), scale, power.cap_w)


def _joules(kernel: Mapping[str, Any], power: Power, dtype: str, clock: float) -> float:
    work = Work(flops=kernel["flops"], activation_bytes=kernel["memory_bytes"])
    return float(power.dynamic_j(work, dtype, clock))


def _at(low: float, high: float, kernels: Sequence[Mapping[str, Any]], joules: Sequence[float]) -> float:
    """Return the sum over the kernels that run from `low` to `high`, in microseconds."""
    running = zip(kernels, joules, strict=True)
    return sum(
        1e6 * j / k["us"]
        for k, j in running
        if k["us"] and k["start_us"] < high and k["start_us"] + k["us"] > low
    )

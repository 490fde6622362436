"""Latency against throughput as the block grows: FlexGen's Figure 1, as data and as a picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from search.placement.solver import BlockCandidate

SCHEMA_VERSION = 1


class FrontPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The best placement of a block; `best`: no other block has more throughput in less time."""

    gpu_batch_size: int
    num_gpu_batches: int
    host_attention: bool
    latency_s: float
    tokens_per_s: float
    best: bool


class Front(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All blocks that fit, by latency."""

    model: str
    machine: str
    points: tuple[FrontPoint, ...]
    schema_version: int = SCHEMA_VERSION


def pareto(found: Iterable[BlockCandidate]) -> list[BlockCandidate]:
    """Return the blocks that no other block beats in both latency and throughput, by latency."""
    kept: list[BlockCandidate] = []
    for one in sorted(found, key=lambda one: (one.latency_s, -one.tokens_per_s)):
        if not kept or one.tokens_per_s > kept[-1].tokens_per_s:
            kept.append(one)
    return kept


def front(model: str, machine: str, found: Sequence[BlockCandidate]) -> Front:
    """Return the sweep over the blocks of `candidates`."""
    best = set(pareto(found))
    points = [
        FrontPoint(
            one.choice.gpu_batch_size,
            one.choice.num_gpu_batches,
            one.choice.host_attention,
            one.latency_s,
            one.tokens_per_s,
            one in best,
        )
        for one in sorted(found, key=lambda one: one.latency_s)
    ]
    return Front(model=model, machine=machine, points=tuple(points))


def save_front(made: Front, path: str | Path) -> None:
    """Write `path` (JSON) and a picture of the same name (PNG)."""
    path = Path(path)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    draw(made).savefig(path.with_suffix(".png"), dpi=130)


def draw(made: Front) -> Figure:
    figure = Figure(figsize=(6.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    others = [point for point in made.points if not point.best]
    axes.plot(
        [p.latency_s for p in others],
        [p.tokens_per_s for p in others],
        ".",
        color="lightgray",
        label="other blocks",
    )
    best = [point for point in made.points if point.best]
    axes.plot(
        [p.latency_s for p in best],
        [p.tokens_per_s for p in best],
        marker="o",
        label="best placement of a block",
    )
    for point in best[:: max(1, len(best) // 8)]:
        label = f"{point.gpu_batch_size}×{point.num_gpu_batches}"
        axes.annotate(
            label,
            (point.latency_s, point.tokens_per_s),
            fontsize=7,
            xytext=(3, -8),
            textcoords="offset points",
        )
    axes.set(
        xscale="log", yscale="log", xlabel="latency of a block (s)", ylabel="tokens generated per second"
    )
    if best:  # much slower blocks are not of interest
        axes.set_xlim(0.8 * best[0].latency_s, 3 * best[-1].latency_s)
    axes.set_title(f"{made.model} on {made.machine}, predicted", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure

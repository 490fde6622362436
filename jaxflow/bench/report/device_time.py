"""The busy time of a device, and its collectives that other kernels hide, from a profiler's kernel trace."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxflow.bench.report.trace_events import Kernel

Spans = list[tuple[float, float]]  # starts and stops, ordered and apart

# Kernels of NCCL and of XLA that send between devices, by the kernel's name or the instruction's.
_COLLECTIVE = re.compile(
    r"nccl|all.?reduce|all.?gather|reduce.?scatter|all.?to.?all|collective.?permute", re.IGNORECASE
)
_HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")  # they run beside the steps and compute nothing


def is_collective(kernel: Kernel) -> bool:
    """Return whether a kernel sends between devices."""
    return _COLLECTIVE.search(kernel.name) is not None or _COLLECTIVE.search(kernel.instruction) is not None


def covered(kernels: Iterable[Kernel]) -> Spans:
    """Return the times in which at least one of the kernels runs."""
    spans: Spans = []
    for start, stop in sorted((kernel.start_s, kernel.stop_s) for kernel in kernels):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
        else:
            spans.append((start, stop))
    return spans


def seconds_of(spans: Spans) -> float:
    """Return the length of spans."""
    return sum(stop - start for start, stop in spans)


def overlap_of(left: Spans, right: Spans) -> float:
    """Return the seconds that lie in both."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        total += max(0.0, stop - start)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def summary(devices: Sequence[Sequence[Kernel]]) -> list[dict[str, Any]]:
    """Return a row for each device with a kernel.

    All shares are of the time from the first kernel of any device to the last. A row's `collective_s` is the
    time in which a collective runs, also while it waits for another device. `hidden_s` is its part in which
    another kernel of the same device runs, and `hidden_share` the ratio of both; None without collectives.
    """
    own = [[kernel for kernel in each if not kernel.name.startswith(_HOST_COPIES)] for each in devices]
    every = [kernel for each in own for kernel in each]
    if not every:
        return []
    whole = max(kernel.stop_s for kernel in every) - min(kernel.start_s for kernel in every)
    return [_row(number, kernels, whole) for number, kernels in enumerate(own) if kernels]


def _row(number: int, kernels: Sequence[Kernel], whole_s: float) -> dict[str, Any]:
    collectives = [kernel for kernel in kernels if is_collective(kernel)]
    sending, computing = covered(collectives), covered(k for k in kernels if not is_collective(k))
    collective_s, hidden_s = seconds_of(sending), overlap_of(sending, computing)
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in collectives:
        by_name[f"{re.sub(r'([.][0-9]+)+$', '', kernel.instruction)}: {kernel.name}"].append(kernel.seconds)
    return {
        "device": number,
        "seconds": whole_s,
        "busy_share": seconds_of(covered(kernels)) / whole_s if whole_s else 0.0,
        "collective_s": collective_s,
        "hidden_s": hidden_s,
        "hidden_share": hidden_s / collective_s if collective_s else None,
        "collectives": {
            name: {"runs": len(each), "seconds": sum(each)} for name, each in sorted(by_name.items())
        },
    }

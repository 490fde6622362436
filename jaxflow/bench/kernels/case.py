"""Data classes of the kernel benchmark: a case, its rivals, and its target."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels.measure.peaks import Least


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation of a case's work.

    run: enqueues a program with `calls` calls. amount: bytes, FLOP or tokens of one call, for its rate.

    work: the useful work of a call, used for ratios if implementations differ in it; None means `amount`.

    least: the minimum work of a call, used to reject impossible times. None means `amount`, with FLOP counted
    in `dtype`.

    tuned: XLA times candidates on the GPU during compilation, and needs exclusive use of the GPU.
    """

    run: Callable[[], Any]
    calls: int
    amount: float
    work: float | None = None
    least: Least | None = None
    dtype: str = "bfloat16"
    tuned: bool = False

    def least_work(self, unit: str) -> Least:
        """Return the minimum work of a call, in the group's `unit`."""
        if self.least is not None:
            return self.least
        return {"TB/s": Least(moved=self.amount), "TFLOP/s": Least(flop=self.amount, dtype=self.dtype)}.get(
            unit, Least()
        )


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One benchmark case.

    prepare: makes inputs on the device and returns the implementations, ours first. rate: target rate of our
    kernel. ratio: target ratio to the first rival.

    recorded_us: earlier measured times, in microseconds, of rivals that cannot run here.
    """

    name: str
    prepare: Callable[[], Mapping[str, Implementation]]
    rate: float | None = None
    ratio: float | None = None
    recorded_us: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class KernelGroup:
    """The cases of one kernel.

    unit: the unit of the rates: TB/s, TFLOP/s or tok/s. geomean: the target geometric mean of the ratios.
    together: the cases share a model in memory, so one process runs all of them. on_request: the
    group runs only if --only names it.
    """

    name: str
    unit: str
    cases: tuple[KernelCase, ...]
    geomean: float | None = None
    together: bool = False
    on_request: bool = False

"""A case of the kernel bench, as data: what runs, beside what, and what it must reach."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from pallas_kernels.checks.peaks import Least


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to do a case's work.

    run: enqueues a program that makes `calls` calls. amount: bytes, FLOP or tokens of one call, for its rate.
    work: what a call accomplishes, where ways differ in that and ratios should count it; None: `amount`.
    least: what a call must do, so that no time is believed that the card cannot have met; None: `amount`,
    FLOP being of `dtype`. tuned: XLA times candidates on the GPU when the program is compiled, which wants
    the GPU to itself.
    """

    run: Callable[[], Any]
    calls: int
    amount: float
    work: float | None = None
    least: Least | None = None
    dtype: str = "bfloat16"
    tuned: bool = False

    def must(self, unit: str) -> Least:
        """What a call must do at least; `unit` is its group's."""
        if self.least is not None:
            return self.least
        return {"TB/s": Least(moved=self.amount), "TFLOP/s": Least(flop=self.amount, dtype=self.dtype)}.get(
            unit, Least()
        )


@dataclasses.dataclass(frozen=True)
class Case:
    """prepare: makes inputs on the device and returns the ways, ours first. rate: that ours must reach.
    ratio: to the first rival.

    recorded_us: rivals that cannot run here, by what they were measured to take.
    """

    name: str
    prepare: Callable[[], Mapping[str, Way]]
    rate: float | None = None
    ratio: float | None = None
    recorded_us: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Group:
    """The cases of one kernel. unit: of their rates, TB/s, TFLOP/s or tok/s. geomean: that their ratios must
    reach.

    together: the cases share a model in memory, which one process should make once. asked: measured only if
    it is named.
    """

    name: str
    unit: str
    cases: tuple[Case, ...]
    geomean: float | None = None
    together: bool = False
    asked: bool = False

"""A case of the kernel bench, as data: what runs, beside what, and what it must reach."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to do a case's work.

    run: enqueues a program that makes `calls` calls. amount: bytes, FLOP or tokens of one call, for its rate.
    work: what a call accomplishes, where ways differ in that and ratios should count it; None: `amount`.
    """

    run: Callable[[], Any]
    calls: int
    amount: float
    work: float | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """prepare: makes inputs on the device and returns the ways, ours first. rate: that ours must reach. ratio: to the first rival.

    recorded_us: rivals that cannot run here, by what they were measured to take.
    """

    name: str
    prepare: Callable[[], Mapping[str, Way]]
    rate: float | None = None
    ratio: float | None = None
    recorded_us: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Group:
    """The cases of one kernel. unit: of their rates, TB/s, TFLOP/s or tok/s. geomean: that their ratios must reach."""

    name: str
    unit: str
    cases: tuple[Case, ...]
    geomean: float | None = None

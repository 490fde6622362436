"""A worker process of `bench kernels`, which compiles and times cases on request.

    python -m jaxflow.bench.kernels.worker

Orders arrive as lines of JSON on stdin, and each answer is one line on stdout. All other output goes to
stderr. Mosaic compiles one kernel at a time per process, so several workers share one GPU. Only one worker
measures at a time.
"""

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxflow.bench.kernels.case import Case, Group, Way
from jaxflow.parallel.mesh import choose_platform
from pallas_kernels.measure.peaks import refuse_impossible
from pallas_kernels.measure.timing import Timing, interleaved

_THREADS = 4
Ways = Mapping[str, Way]


class Cases:
    """The cases that this process has compiled and not yet dropped.

    groups: all groups; a case is named group/case.
    """

    def __init__(self, groups: Iterable[Group]):
        self._named = {f"{group.name}/{case.name}": (group, case) for group in groups for case in group.cases}
        self._ready: dict[str, Ways | str] = {}  # implementations, or the error of preparing them

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run one order and return its answer.

        Orders: compile [names] without XLA's autotuned programs; tune, for the autotuned programs; measure a
        name for `seconds`; drop all cases.
        """
        if "compile" in order:
            units: dict[str, list[str]] = {}  # cases that share a model are prepared one after the other
            for name in order["compile"]:
                units.setdefault(
                    self._named[name][0].name if self._named[name][0].together else name, []
                ).append(name)
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(lambda names: [self._compile(name) for name in names], units.values()))
        elif "tune" in order:
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(self._tune, list(self._ready)))
        elif "measure" in order:
            return self._measured(order["measure"], order["seconds"])
        else:
            self._ready.clear()
            gc.collect()
        return {}

    def _compile(self, name: str) -> None:
        try:
            ways = self._named[name][1].prepare()
            self._ready[name] = ways
            _run_once(way for way in ways.values() if not way.tuned)
        except Exception as error:  # one failing kernel or rival must not stop the other rows
            self._ready[name] = _said(error)

    def _tune(self, name: str) -> None:
        ways = self._ready[name]
        try:
            if not isinstance(ways, str):
                _run_once(way for way in ways.values() if way.tuned)
        except Exception as error:
            self._ready[name] = _said(error)

    def _measured(self, name: str, seconds: float) -> dict[str, Any]:
        group, case = self._named[name]
        ways = self._ready.get(name, "case not compiled")
        try:
            if not isinstance(ways, str):
                return measure(group, case, ways, seconds)
        except Exception as error:
            ways = _said(error)
        return {"group": group.name, "case": case.name, "failed": ways}


def _run_once(ways: Iterable[Way]) -> None:
    for way in ways:
        jax.block_until_ready(way.run())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class NoReading(RuntimeError):
    """An implementation was measured for too short a time to read clock and power."""


def timed(ways: Ways, seconds: float) -> dict[str, Timing]:
    """Return the time of each implementation, with clock and watts.

    The measurement repeats once if a reading is missing. Raises: NoReading if a reading is still missing.
    """
    timings: dict[str, Timing] = {}
    unread = list(ways)
    for _ in range(2):
        timings = interleaved(
            {name: way.run for name, way in ways.items()},
            calls={n: w.calls for n, w in ways.items()},
            seconds=seconds,
        )
        unread = [name for name, t in timings.items() if t.mhz is None or t.watts is None]
        if not unread:
            return timings
    raise NoReading(
        f"no clock or watts for {', '.join(unread)}: measured "
        f"{min(timings[name].seconds for name in unread) * 1e3:.0f} ms, a longer --seconds is needed"
    )


def measure(group: Group, case: Case, ways: Ways, seconds: float) -> dict[str, Any]:
    """Return one case's row: the rate of each implementation, and our ratio to each rival.

    Raises: ImpossibleTime for a time below the GPU's minimum; NoReading for a measurement without clock and
    watts.
    """
    timings = timed(ways, seconds)
    for name, way in ways.items():
        refuse_impossible(
            f"{group.name}/{case.name} {name}",
            timings[name].us,
            way.must(group.unit),
            jax.devices()[0].device_kind,
        )
    ours = next(iter(ways))
    row: dict[str, Any] = {"group": group.name, "case": case.name, "unit": group.unit, "ways": {}}
    for name, way in ways.items():
        row["ways"][name] = {"rate": way.amount / timings[name].us * 1e6} | dataclasses.asdict(timings[name])
    speed = {
        name: (way.amount if way.work is None else way.work) / timings[name].us for name, way in ways.items()
    }
    row["ratios"] = {name: speed[ours] / speed[name] for name in ways if name != ours}
    row["recorded_us"] = dict(case.recorded_us)
    row["must"] = {"rate": case.rate, "ratio": case.ratio}
    row["reached"] = reached(row)
    return row


def reached(row: Mapping[str, Any]) -> bool | None:
    """Return True if our kernel reaches the case's targets, and None for a case without targets."""
    rate, ratio = row["must"]["rate"], row["must"]["ratio"]
    if rate is None and ratio is None:
        return None
    ours = next(iter(row["ways"].values()))["rate"]
    return (rate is None or ours >= rate) and (ratio is None or next(iter(row["ratios"].values())) >= ratio)


def main() -> None:
    """Run orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    choose_platform()
    from jaxflow.bench.kernels.command import GROUPS

    cases = Cases(GROUPS)
    for line in sys.stdin:
        print(json.dumps(cases.obey(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

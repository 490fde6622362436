"""The worker processes of `bench kernels`, which compile and time cases on request.

    python -m jaxflow.bench.kernels.workers

In each round all workers compile, then take turns to time their cases. No worker compiles while another
worker measures. A worker that does not answer in time, for example because of a hung kernel, is ended. Its
cases become failed rows, and a new worker takes its place.

A worker process reads orders as lines of JSON on stdin, and writes each answer as one line on
stdout. All other output goes to stderr. Mosaic compiles one kernel at a time per process, so
several workers share one GPU.
"""

import contextlib
import dataclasses
import gc
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxflow.bench.kernels.case import Implementation, KernelCase, KernelGroup
from jaxflow.config import EngineConfig
from jaxflow.parallel.mesh import choose_platform
from pallas_kernels.measure.peaks import refuse_impossible
from pallas_kernels.measure.timing import Timing, interleaved

AT_ONCE = 4  # cases that one process compiles in one round
COMMAND = (sys.executable, "-m", "jaxflow.bench.kernels.workers")
# time limits of an answer; the second is in addition to the measured seconds
COMPILE_S, MEASURE_S = 100.0, 20.0
# The reference rival is cuBLAS. XLA would need 5-20 s per shape to time Triton products as candidates.
_RIVAL = "--xla_gpu_enable_triton_gemm=false"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment variables.

    Workers share the GPU, so each allocates memory on demand, up to an engine's default. XLA's products use
    cuBLAS unless XLA_FLAGS is set.
    """
    flags = given.get("XLA_FLAGS", "")
    name = _RIVAL.partition("=")[0]
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{EngineConfig.gpu_memory_utilization:.3f}"}
    own = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": flags if name in flags else f"{flags} {_RIVAL}".strip(),
    }
    return {**memory, **given, **own}


def rounds(
    cases: Sequence[tuple[KernelGroup, KernelCase]], processes: int, at_once: int = AT_ONCE
) -> list[list[list[str]]]:
    """Return the group/case names for each process in each round, with the first cases in the first round.

    Cases that share a model go to the first process, one group per round.
    """
    name = lambda group, case: f"{group.name}/{case.name}"
    queues: list[list[list[str]]] = [[] for _ in range(processes)]
    together: dict[str, list[str]] = {}
    for group, case in cases:
        if group.together:
            together.setdefault(group.name, []).append(name(group, case))
    queues[0] += together.values()
    others = [name(group, case) for group, case in cases if not group.together]
    at_once = max(1, min(at_once, -(-len(others) // processes)))
    for first in range(0, len(others), at_once):
        min(queues, key=len).append(others[first : first + at_once])
    return [
        [queue[i] if i < len(queue) else [] for queue in queues]
        for i in range(max(map(len, queues), default=0))
    ]


class Worker:
    """One worker process, which answers every order. After its process has ended, the next order starts a new
    process."""

    def __init__(self):
        self._begin()

    def _begin(self) -> None:
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(os.environ)
        )

    def tell(self, **order: Any) -> None:
        if self._process.poll() is not None:
            self.end()
            self._begin()
        with contextlib.suppress(BrokenPipeError):  # the process has ended; `answer` reports the reason
            print(json.dumps(order), file=self._process.stdin, flush=True)

    def answer(self, limit_s: float | None = None) -> dict[str, Any] | str:
        """Return the answer to the last order, or an error text.

        The error is that the process ended, or that it gave no answer within `limit_s` and was ended.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[
            0
        ]:  # an order has one line of answer, so the buffer holds no further line
            self._process.kill()
            self._process.wait()
            return f"no answer within {limit_s:g} s"
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            return "its process ended"
        return json.loads(line)

    def end(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measured(
    plan: Sequence[Sequence[Sequence[str]]],
    workers: Sequence[Worker],
    seconds: float,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield each case of the plan (`rounds`) with its row; the row is None if the case would end after
    `limit_s`."""
    start, compiling, longest = clock(), 0.0, 0.0
    for wanted in plan:
        began = clock()
        late = began - start + compiling > limit_s
        failed: dict[str, str] = {}
        if not late:
            failed = _compile(wanted, workers)
            compiling = clock() - began
        for worker, names in zip(workers, wanted, strict=True):
            for name in names:
                began = clock()
                if name in failed:
                    yield name, _failed(name, failed[name])
                    continue
                if late or began - start + longest > limit_s:
                    yield name, None
                    continue
                worker.tell(measure=name, seconds=seconds)
                row = worker.answer(MEASURE_S + 20 * seconds)
                yield name, _failed(name, row) if isinstance(row, str) else row
                longest = max(longest, clock() - began)
        for worker in workers:
            worker.tell(drop=True)
            worker.answer(MEASURE_S)


def _failed(name: str, why: str) -> dict[str, Any]:
    group, case = name.split("/", 1)
    return {"group": group, "case": case, "failed": why}


def _compile(wanted: Sequence[Sequence[str]], workers: Sequence[Worker]) -> dict[str, str]:
    """Compile in all workers at once, then let XLA autotune on the GPU in one worker after another.

    Returns the errors of cases whose process did not answer.
    """
    failed: dict[str, str] = {}
    for worker, names in zip(workers, wanted, strict=True):
        worker.tell(compile=list(names))
    for worker, names in zip(workers, wanted, strict=True):
        answer = worker.answer(COMPILE_S)
        if isinstance(answer, str):
            failed |= dict.fromkeys(names, f"{answer}; order: compile {', '.join(names)}")
    for worker, names in zip(workers, wanted, strict=True):
        worker.tell(tune=True)
        answer = worker.answer(COMPILE_S)
        if isinstance(answer, str):
            failed |= dict.fromkeys(names, f"{answer}; order: tune {', '.join(names)}")
    return failed


_THREADS = 4
Implementations = Mapping[str, Implementation]


class Cases:
    """The cases that this process has compiled and not yet dropped.

    groups: all groups; a case is named group/case.
    """

    def __init__(self, groups: Iterable[KernelGroup]):
        self._named = {f"{group.name}/{case.name}": (group, case) for group in groups for case in group.cases}
        self._ready: dict[str, Implementations | str] = {}  # implementations, or the error of preparing them

    def obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run one order and return its answer.

        `compile` compiles the named cases, without the programs that XLA autotunes. `tune` compiles these
        programs. `measure` measures a named case for `seconds`. `drop` drops all cases.
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
            implementations = self._named[name][1].prepare()
            self._ready[name] = implementations
            _run_once(
                implementation for implementation in implementations.values() if not implementation.tuned
            )
        except Exception as error:  # one failing kernel or rival must not stop the other rows
            self._ready[name] = _message(error)

    def _tune(self, name: str) -> None:
        implementations = self._ready[name]
        try:
            if not isinstance(implementations, str):
                _run_once(
                    implementation for implementation in implementations.values() if implementation.tuned
                )
        except Exception as error:
            self._ready[name] = _message(error)

    def _measured(self, name: str, seconds: float) -> dict[str, Any]:
        group, case = self._named[name]
        implementations = self._ready.get(name, "case not compiled")
        try:
            if not isinstance(implementations, str):
                return measure(group, case, implementations, seconds)
        except Exception as error:
            implementations = _message(error)
        return {"group": group.name, "case": case.name, "failed": implementations}


def _run_once(implementations: Iterable[Implementation]) -> None:
    for implementation in implementations:
        jax.block_until_ready(implementation.run())


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class NoReading(RuntimeError):
    """An implementation was measured for too short a time to read clock and power."""


def timed(implementations: Implementations, seconds: float) -> dict[str, Timing]:
    """Return the time of each implementation, with clock and watts.

    The measurement repeats once if a reading is missing. Raises: NoReading if a reading is still missing.
    """
    timings: dict[str, Timing] = {}
    unread = list(implementations)
    for _ in range(2):
        timings = interleaved(
            {name: implementation.run for name, implementation in implementations.items()},
            calls={n: w.calls for n, w in implementations.items()},
            seconds=seconds,
        )
        unread = [name for name, t in timings.items() if t.mhz is None or t.watts is None]
        if not unread:
            return timings
    raise NoReading(
        f"no clock or watts for {', '.join(unread)}: measured "
        f"{min(timings[name].seconds for name in unread) * 1e3:.0f} ms, a longer --seconds is needed"
    )


def measure(
    group: KernelGroup, case: KernelCase, implementations: Implementations, seconds: float
) -> dict[str, Any]:
    """Return one case's row: the rate of each implementation, and our ratio to each rival.

    Raises: ImpossibleTime for a time below the GPU's minimum; NoReading for a measurement without clock and
    watts.
    """
    timings = timed(implementations, seconds)
    for name, implementation in implementations.items():
        refuse_impossible(
            f"{group.name}/{case.name} {name}",
            timings[name].us,
            implementation.least_work(group.unit),
            jax.devices()[0].device_kind,
        )
    ours = next(iter(implementations))
    row: dict[str, Any] = {"group": group.name, "case": case.name, "unit": group.unit, "implementations": {}}
    for name, implementation in implementations.items():
        row["implementations"][name] = {
            "rate": implementation.amount / timings[name].us * 1e6
        } | dataclasses.asdict(timings[name])
    speed = {
        name: (implementation.amount if implementation.work is None else implementation.work)
        / timings[name].us
        for name, implementation in implementations.items()
    }
    row["ratios"] = {name: speed[ours] / speed[name] for name in implementations if name != ours}
    row["recorded_us"] = dict(case.recorded_us)
    row["target"] = {"rate": case.rate, "ratio": case.ratio}
    row["reached"] = reached(row)
    return row


def reached(row: Mapping[str, Any]) -> bool | None:
    """Return True if our kernel reaches the case's targets, and None for a case without targets."""
    rate, ratio = row["target"]["rate"], row["target"]["ratio"]
    if rate is None and ratio is None:
        return None
    ours = next(iter(row["implementations"].values()))["rate"]
    return (rate is None or ours >= rate) and (ratio is None or next(iter(row["ratios"].values())) >= ratio)


def main() -> None:
    """Run orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    choose_platform()
    from jaxflow.bench.kernels.groups import GROUPS

    cases = Cases(GROUPS)
    for line in sys.stdin:
        print(json.dumps(cases.obey(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

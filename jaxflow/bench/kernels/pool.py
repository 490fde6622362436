"""The worker processes of `bench kernels`. In each round all workers compile, then take turns to time their
cases.

No worker compiles while another worker measures. A worker that does not answer in time, for example because
of a hung kernel, is ended. Its cases become failed rows, and a new worker takes its place.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxflow.bench.kernels.case import Case, Group
from jaxflow.config import EngineConfig

AT_ONCE = 4  # cases that one process compiles in one round
COMMAND = (sys.executable, "-m", "jaxflow.bench.kernels.worker")
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
    cases: Sequence[tuple[Group, Case]], processes: int, at_once: int = AT_ONCE
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

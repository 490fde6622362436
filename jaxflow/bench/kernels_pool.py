"""The processes of `bench kernels`: in every round all of them compile, then they time in turn, with nobody compiling."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxflow.bench.kernels_case import Case, Group

AT_ONCE = 4  # cases that a process compiles in one round
_RIVAL = (
    "--xla_gpu_enable_triton_gemm=false"  # the rival that counts is cuBLAS; to time Triton's products beside it takes XLA 5-20 s a shape
)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """A worker's: memory as it is needed, for several share the GPU, and XLA's products by cuBLAS unless XLA_FLAGS says otherwise."""
    flags = given.get("XLA_FLAGS", "")
    name = _RIVAL.partition("=")[0]
    return {**given, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags if name in flags else f"{flags} {_RIVAL}".strip()}


def rounds(cases: Sequence[tuple[Group, Case]], processes: int, at_once: int = AT_ONCE) -> list[list[list[str]]]:
    """What each process takes in each round, as group/case: the first cases in the first round. Cases that belong together go to the first
    process, a group a round."""
    name = lambda group, case: f"{group.name}/{case.name}"  # noqa: E731
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
    return [[queue[i] if i < len(queue) else [] for queue in queues] for i in range(max(map(len, queues), default=0))]


class Worker:
    """One process, which answers every order."""

    def __init__(self):
        command = [sys.executable, "-m", "jaxflow.bench.kernels_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(os.environ))

    def tell(self, **order: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended; the answer says so
            print(json.dumps(order), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any] | None:
        """None: the process ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

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
    """Each case of the plan (`rounds`) with its row; None for one that would end later than `limit_s` after the start."""
    start, compiling, longest = clock(), 0.0, 0.0
    for wanted in plan:
        began = clock()
        late = began - start + compiling > limit_s
        if not late:
            _compile(wanted, workers)
            compiling = clock() - began
        for worker, names in zip(workers, wanted, strict=True):
            for name in names:
                began = clock()
                if late or began - start + longest > limit_s:
                    yield name, None
                    continue
                worker.tell(measure=name, seconds=seconds)
                yield name, worker.answer() or dict(zip(("group", "case"), name.split("/", 1), strict=True), failed="its process ended")
                longest = max(longest, clock() - began)
        for worker in workers:
            worker.tell(drop=True)
            worker.answer()


def _compile(wanted: Sequence[Sequence[str]], workers: Sequence[Worker]) -> None:
    """All at once; then, one after the other, what XLA times on the GPU."""
    for worker, names in zip(workers, wanted, strict=True):
        worker.tell(compile=list(names))
    for worker in workers:
        worker.answer()
    for worker in workers:
        worker.tell(tune=True)
        worker.answer()

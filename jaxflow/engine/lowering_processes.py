"""Processes that lower and compile programs beside a starting engine.

Tracing and lowering a step with Mosaic kernels takes one to three seconds of Python, which runs on one core
of a process. So a start that finds no lowered programs starts several processes
(`jaxflow.engine.lowering_worker`). They have no GPU. Each imports JAX while the weights load, then lowers one
program after another into the folder of lowered programs. The engine reads a program from there by its
digest. A program that a process fails to lower is missing in the folder, so the engine lowers the program
itself.

Where the engine's GPU can be described (`jaxflow.engine.ahead_of_time`), a process also compiles
each program that it has lowered, into the same folder. The processes go on while the engine
serves, until all programs are there.

The wire is one line of JSON a message, over the pipes of the process:

- to the process: `DeviceKind`, then `Description`, then any number of `Wanted`, or another `Description`;
- from the process: a line for each `Wanted`, `""` or the reason of a failure.

The programs are described from the expected shapes of the weights before these are loaded, so that processes
prepare programs meanwhile. Weights of other shapes are a second description.
"""

import contextlib
import itertools
import logging
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import msgspec

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.ahead_of_time import Target
from jaxflow.engine.known_starts import KnownStarts
from jaxflow.kv.tiers.host_machine import free_host_bytes
from jaxflow.pipeline.plan import Plan
from pallas_kernels.this_device import DeviceKind

log = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]  # the folder of the packages, so that a process imports the same files
COMMAND = (sys.executable, "-m", "jaxflow.engine.lowering_worker")
PROGRAMS_A_PROCESS = 8  # One process more gains less than a second of a start with 50 programs.
AWAITED_A_PROCESS = 2  # where nothing is served before all programs are compiled
MOST_PROCESSES = 32
FEW_PROCESSES = 8  # where PROGRAMS_A_PROCESS gives fewer
# XLA's passes take longer for each layer. One process compiles a step of Llama-3-70B in fp8, of 80 layers, in
# 34 s on a host of two H200s. For 14 such steps, 8 processes take two turns, and 14 processes take one.
SHALLOW_LAYERS, DEEP_LAYERS = 32, 80
DEEP_PROGRAMS = 2  # programs of one step size that have all layers: with chunks, and of decodes alone
PROCESS_BYTES, NANO_OP_BYTES = 900 << 20, 1600 << 10  # of a process, and of each nano-op of each layer
DENSE_OPS = 11  # nano-ops of a dense layer in a sequential step over several devices
# Programs of one step size: with chunks, of decodes alone, the samplers, and the prompt log-probabilities.
STEP_PROGRAMS = 4
LIMIT_S = 120.0  # The limit of one program. A loaded machine takes ten times as long as an idle one.


class Description(msgspec.Struct, frozen=True, tag=True):
    """All that the programs of an executor, or of the stages of one, depend on, besides
    the device and the code.

    Attributes:
      config: resolved.
      plans: of each bucket.
      one, graphs, memory: see `jaxflow.engine.stage_programs.make_stage`.
      weights: of each stage, see `jaxflow.engine.weight_shapes`.
      folder: of the lowered programs.
      target: to compile for; None to lower only.
    """

    config: EngineConfig
    model: ModelConfig
    plans: dict[int, tuple[Plan, ...]]
    one: bool
    graphs: dict[str, str] | None
    memory: int
    weights: tuple[Any, ...]
    folder: str
    target: Target | None = None


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """A program to lower.

    Attributes:
      name: of the `Job`, then of the executor.
      num_pages: pages of each layer group; () for a program that does not depend on them.
    """

    name: str
    num_pages: tuple[int, ...]


def number_of_processes(
    steps: int,
    asked: int | None,
    *,
    layers: int = 0,
    nano_ops: int = DENSE_OPS,
    waits: bool = False,
    cores: int | None = None,
    free_bytes: int | None = None,
) -> int:
    """Return how many processes lower the programs of a start; 0 if the engine does.

    Args:
      steps: sizes of steps, times their plans and the pipeline stages.
      asked: the setting `lowering_processes`.
      layers: the most layers of one program.
      nano_ops: the most nano-ops of a layer.
      waits: the start waits for all programs, and not only for those that an engine begins with.
      cores: None for those of this process.
      free_bytes: of host memory, of which the processes take half at most; None for those of this machine.
    """
    if asked is not None:
        return asked
    if cores is None:  # only Linux knows the cores of a process
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if free_bytes is None:
        free_bytes = free_host_bytes()
    programs = STEP_PROGRAMS * steps
    few = min(programs, FEW_PROCESSES)
    share = AWAITED_A_PROCESS if waits else PROGRAMS_A_PROCESS
    useful = min(max(programs // share, few, _deep_programs(steps, layers)), MOST_PROCESSES)
    fit = min(useful, cores // 2, free_bytes // (2 * process_bytes(layers, nano_ops)))
    return fit if fit > 1 else 0


def _deep_programs(steps: int, layers: int) -> int:
    """Return how many processes the depth of a model asks for.

    The number is 0 up to `SHALLOW_LAYERS`. It grows to one process for each step's program at `DEEP_LAYERS`.
    """
    depth = min(max(layers, SHALLOW_LAYERS), DEEP_LAYERS) - SHALLOW_LAYERS
    return DEEP_PROGRAMS * steps * depth // (DEEP_LAYERS - SHALLOW_LAYERS)


def process_bytes(layers: int, nano_ops: int = DENSE_OPS) -> int:
    """Return the host memory that a process takes for a step of so many layers of so many nano-ops.

    A process that compiled one step of Llama-3-70B in fp8 for two H200s had at most 866 MiB at 20 layers,
    and 1,912 MiB at 80 layers. With two nano-batches, a step of 48 layers of Qwen3-30B-A3B on two ranks has
    24 nano-ops a layer. A process that compiled such a step had about 2,200 MiB. A process that compiled the
    step of 2,048 tokens of Llama-3.1-8B for one H200 had 910 MiB, and 1,284 MiB after 13 more programs.
    """
    return PROCESS_BYTES + layers * nano_ops * NANO_OP_BYTES


class LoweringProcesses:
    """The processes of one start, before and after `start`. Any thread may call
    `ask`; one owner calls the rest.
    """

    def __init__(
        self,
        count: int,
        device: DeviceKind,
        known: KnownStarts,
        command: Sequence[str] = COMMAND,
        on_close: Callable[[], None] = lambda: None,
    ):
        """Start nothing yet.

        known: the starts whose programs are all there, in the folder of lowered programs.
        command: of one process.
        """
        self._count, self._device, self._command, self.known = count, device, command, known
        self._on_close = on_close
        self._processes: list[tuple[subprocess.Popen, IO[bytes]]] = []  # each with its errors
        # In the order of urgency, then of arrival. A program that became urgent is
        # there twice. None ends a process.
        self._tasks: queue.PriorityQueue[tuple[int, int, Wanted | None]] = queue.PriorityQueue()
        self._arrivals = itertools.count()
        self._asked: dict[Wanted, Future] = {}
        self._taken: set[Wanted] = set()
        self._lock, self._alive, self._closed = threading.Lock(), 0, False
        self._description: Description | None = None
        # The pages that programs are prepared for before the weights are loaded; None without such programs.
        self.guess: tuple[int, ...] | None = None
        self._lost: str | None = None  # why the last process ended before `close`
        self.failed: dict[str, str] = {}  # the reason of each program that no process lowered

    @property
    def started(self) -> bool:
        """Return True after `start`."""
        return bool(self._processes)

    def knows(self, num_pages: tuple[int, ...]) -> bool:
        """Return True if a start with these pages has left all its programs in the
        folder. `describe` comes first.
        """
        return self._sizes(num_pages) in self.known.sizes()

    def latest_pages(self, memory: int) -> tuple[int, ...] | None:
        """Return the pages of each layer group of the latest start whose programs are all in the folder.

        The result is None without such a start on a device with this memory.

        memory: see `Description`.
        """
        found = [pages for size, *pages in filter(None, self.known.sizes()) if size == memory]
        return tuple(found[-1]) if found else None

    def remember(self, num_pages: tuple[int, ...]) -> None:
        """Note that all programs of a start with these pages are in the folder."""
        self.known.add(self._sizes(num_pages))

    def _sizes(self, num_pages: tuple[int, ...]) -> list[int]:
        assert self._description is not None
        return [self._description.memory, *num_pages]

    def start(self) -> None:
        """Start the processes, which import JAX and wait for `describe`.

        Log a warning where a process cannot be started.
        """
        inherited = os.environ.get("PYTHONPATH")
        environment = os.environ | {
            "PYTHONPATH": str(ROOT) + (os.pathsep + inherited if inherited else ""),
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
        try:
            for _ in range(self._count):
                errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
                process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,  # an interrupt of the terminal is the engine's to handle
                )
                self._processes.append((process, errors))
                with contextlib.suppress(OSError):  # `_serve` notices a process that has ended
                    _write(process, msgspec.json.encode(self._device) + b"\n")
        except OSError as error:
            log.warning("lowering: no further process can be started (%s)", error)
        if self._description is not None:
            self._begin()

    def describe(self, description: Description) -> None:
        """Describe the programs to the processes, now or at `start`.

        A description that differs from an earlier one ends the futures of its programs.
        """
        if description == self._description:
            return
        with self._lock:
            begun = self.started and self._description is not None
            self._description, self.guess = description, None
            if begun:
                self._give_up()
                self._asked, self._taken = {}, set()
        if self.started and not begun:
            self._begin()

    def _begin(self) -> None:
        self._alive = len(self._processes)
        for process, errors in self._processes:
            threading.Thread(target=self._serve, args=(process, errors), name="lowering", daemon=True).start()

    def ask(self, wanted: Wanted, urgent: bool = True) -> Future:
        """Return a future that ends when the program is in the folder, or when
        no process can make the program.

        urgent: before all programs that are not.
        """
        with self._lock:
            known = wanted in self._asked
            if known and not urgent:
                return self._asked[wanted]
            future = self._asked.setdefault(wanted, Future())
            if self._alive:
                self._tasks.put((0 if urgent else 1, next(self._arrivals), wanted))
            elif not known:
                future.set_result(None)
                if self._lost is not None:
                    self.failed[wanted.name] = self._lost
            return future

    def withdraw(self, num_pages: tuple[int, ...]) -> None:
        """End the futures of all programs for a number of pages that no process has begun."""
        with self._lock:
            for wanted in self._asked.keys() - self._taken:
                if wanted.num_pages == num_pages:
                    self._taken.add(wanted)
                    self._asked[wanted].set_result(None)

    def close(self) -> None:
        """End the processes: at once without work, and after its present program otherwise.

        A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            serving, self._alive, self._closed = self._alive, 0, True
            self._give_up()
            for _ in range(serving):
                self._tasks.put((0, next(self._arrivals), None))
        for process, _ in () if serving else self._processes:
            process.kill()
            _end(process)
        if self.failed:
            name, reason = next(iter(self.failed.items()))
            log.warning(
                "lowering: %d programs were lowered or compiled by the engine itself; %s: %s",
                len(self.failed),
                name,
                reason,
            )
        self._on_close()

    def _serve(self, process: subprocess.Popen, errors: IO[bytes]) -> None:
        """Give programs to one process until `close`, or until the process is lost."""
        task = told = None
        try:
            told = self._tell(process, told)
            while (task := self._next()) is not None:
                wanted, future = task
                told = self._tell(process, told)
                _write(process, msgspec.json.encode(wanted) + b"\n")
                if reason := msgspec.json.decode(_read_line(process), type=str):
                    self.failed[wanted.name] = reason
                future.set_result(None)
        except (OSError, msgspec.DecodeError, TimeoutError) as error:
            process.kill()
            reason = f"a process was lost ({_last_line(errors) or error})"
            with self._lock:
                if task is not None:
                    wanted, future = task
                    self.failed[wanted.name] = reason
                    future.set_result(None)
                if not self._closed:
                    self._alive -= 1
                    if not self._alive:
                        self._lost = reason
                        self._give_up(reason)
        finally:
            _end(process)

    def _tell(self, process: subprocess.Popen, told: Description | None) -> Description | None:
        """Write the present description, unless the process has it. Return it. told: what the process has."""
        description = self._description
        if description is not told:
            _write_within_limit(process, msgspec.json.encode(description) + b"\n")
        return description

    def _next(self) -> tuple[Wanted, Future] | None:
        """Return the next program for a process and its future; None to end the process."""
        while True:
            _, _, wanted = self._tasks.get()
            with self._lock:
                if wanted is None:
                    return None
                if wanted in self._asked and wanted not in self._taken:
                    self._taken.add(wanted)
                    return wanted, self._asked[wanted]

    def _give_up(self, reason: str = "") -> None:
        """End the futures of all programs that wait for a process. The caller holds the lock."""
        for wanted in self._asked.keys() - self._taken:
            self._taken.add(wanted)
            if not self._asked[wanted].done():
                self._asked[wanted].set_result(None)
                if reason:
                    self.failed[wanted.name] = reason


def _write(process: subprocess.Popen, lines: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(lines)
    process.stdin.flush()


def _write_within_limit(process: subprocess.Popen, lines: bytes) -> None:
    """Write more than a pipe holds. A process that does not read within
    `LIMIT_S` is killed. Raises: OSError.
    """
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    try:
        _write(process, lines)
    finally:
        limit.cancel()


def _read_line(process: subprocess.Popen) -> bytes:
    """Return the next line of a process. Raises: TimeoutError after `LIMIT_S`, OSError at the end."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], LIMIT_S)[0]:
        raise TimeoutError(f"no answer for {LIMIT_S:.0f} s")
    line = process.stdout.readline()
    if not line.endswith(b"\n"):
        raise OSError(f"exit status {process.wait(LIMIT_S)}")
    return line


def _end(process: subprocess.Popen) -> None:
    """Close the pipes of a process, which then ends, and wait for its end."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_line(errors: IO[bytes]) -> str:
    """Return the last line of a process's errors."""
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""

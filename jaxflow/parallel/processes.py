"""The processes of one engine: joined by `jax.distributed`, with equal settings before a weight is read.

Process 0 decides, and the others follow. A process's number is `jax.process_index()`. Small values go through
the key-value store of `jax.distributed`, whose server lives in process 0.
"""

import atexit
import concurrent.futures
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
from jax._src import distributed  # the key-value store has no public name

from jaxflow.parallel.launch import Launch
from jaxflow.parallel.rendezvous import meet

HEARTBEAT_TIMEOUT_S = 10  # JAX's default of 100 s leaves the others waiting for a dead process
_JOIN_S = 60  # for processes that have all met
_KEY_TIMEOUT_S = 120.0
_SHOWN = 5  # differences that an error lists


class ProcessesError(RuntimeError):
    """The processes of an engine cannot work together. The message names the process and the reason."""


class Processes:
    """All processes of one engine, as one of them sees them.

    Attributes:
      rank: the number of this process, `jax.process_index()`.
      count: the number of processes.
    """

    def __init__(self, launch: Launch):
        """Use `join`."""
        self.launch, self.rank, self.count = launch, jax.process_index(), launch.num_processes
        assert distributed.global_state.client is not None
        self._store = distributed.global_state.client

    def publish(self, name: str, value: str) -> None:
        """Store a value that every process can read. A name is used once."""
        self._store.key_value_set(f"jaxflow/{name}", value)

    def read(self, name: str, timeout_s: float = _KEY_TIMEOUT_S) -> str:
        """Return a published value. Raises: ProcessesError after the timeout."""
        try:
            return self._store.blocking_key_value_get(f"jaxflow/{name}", int(timeout_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0][:200]
            raise ProcessesError(f"process {self.rank} waited for {name!r} in vain: {reason}") from error

    def wait_for_others(self, name: str, goes_on: Callable[[], bool]) -> list[str]:
        """Return the values that the other processes publish as NAME/RANK, in their order.

        goes_on: asked every second; False ends the wait.

        Raises: CancelledError once `goes_on` is False, or once the store is gone.
        """
        found = []
        for rank in (rank for rank in range(self.count) if rank != self.rank):
            while goes_on():
                try:
                    found.append(self._store.blocking_key_value_get(f"jaxflow/{name}/{rank}", 1000))
                    break
                except jax.errors.JaxRuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise concurrent.futures.CancelledError(str(error)) from error
            else:
                raise concurrent.futures.CancelledError("the process ends")
        return found

    def of_first(self, name: str, value: str) -> str:
        """Return the value of process 0 in every process."""
        if self.rank == 0:
            self.publish(name, value)
            return value
        return self.read(name)

    def least(self, name: str, numbers: Sequence[int], timeout_s: float) -> tuple[int, ...]:
        """Return the smallest of each number over all processes. Raises: ProcessesError after the timeout."""
        self.publish(f"{name}/{self.rank}", json.dumps(list(numbers)))
        every = [json.loads(self.read(f"{name}/{rank}", timeout_s)) for rank in range(self.count)]
        return tuple(min(column) for column in zip(*every, strict=True))

    def wait_for_all(self, name: str, timeout_s: float) -> None:
        """Return once every process has made this call. Raises: ProcessesError after the timeout."""
        self.publish(f"{name}/{self.rank}", "")
        for rank in range(self.count):
            self.read(f"{name}/{rank}", timeout_s)

    def compare(self, values: Mapping[str, str]) -> None:
        """Check that every process has the same values as process 0.

        Raises:
          ProcessesError: in every process, with the names and values that differ.
        """
        self.publish(f"values/{self.rank}", json.dumps(dict(values)))
        if self.rank == 0:
            every = [json.loads(self.read(f"values/{rank}")) for rank in range(self.count)]
            self.publish("verdict", differences(every))
        if verdict := self.read("verdict"):
            raise ProcessesError(verdict)


def differences(every: Sequence[Mapping[str, str]]) -> str:
    """Return what differs between the values of process 0 and of the others; "" if nothing does."""
    first, found = every[0], []
    for rank, values in enumerate(every):
        for name in sorted({*first, *values}):
            ours, theirs = first.get(name, "absent"), values.get(name, "absent")
            if ours != theirs:
                found.append(f"{name} is {theirs} in process {rank} and {ours} in process 0")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"the processes differ: {'; '.join(found[:_SHOWN])}{more}" if found else ""


def join(launch: Launch, timeout_s: float) -> Processes:
    """Join the processes of an engine, before JAX's first use. Waits until all have come.

    Raises:
      ConfigError: the coordinator's port is taken.
      MissingProcesses: a process did not come within the timeout. ProcessesError: JAX cannot join them.
    """
    # Otherwise XLA shares the timing of kernels between the processes, and waits for each to
    # compile each program. A pipeline stage, a program from a cache and one that is compiled
    # later are programs of one process.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false".strip()
    # JAX's preemption service would take SIGTERM away from the server, which drains on it.
    jax.config.update("jax_enable_preemption_service", False)
    meet(launch, timeout_s)
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.num_processes,
            launch.process_id,
            cluster_detection_method="deactivate",
            initialization_timeout=_JOIN_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:300]
        raise ProcessesError(
            f"process {launch.process_id} cannot join the {launch.num_processes} processes at "
            f"{launch.coordinator}: {reason}"
        ) from error
    if jax.process_index() != launch.process_id:  # JAX's numbers decide, and the servers are chosen before
        raise ProcessesError(f"process {launch.process_id} became process {jax.process_index()}")
    return Processes(launch)


def leave() -> None:
    """Leave `jax.distributed` after the last step, once all processes do."""
    with contextlib.suppress(Exception):  # the work is done, and another process may be gone already
        jax.distributed.shutdown()


def end_with(status: int) -> None:
    """Let this process end with an exit status once its program ends, without leaving `jax.distributed`.

    The other processes are gone then. JAX would wait for them at the exit until it aborts this process.
    """

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    atexit.register(end)

"""The processes that run one engine together: who leads, what all must have in common, and how they end."""

import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import jax
import msgspec

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.deferred import main_runs
from jaxflow.engine.driver import Driver
from jaxflow.engine.executor import Executor
from jaxflow.engine.first_layouts import prepare_in_background
from jaxflow.engine.follow import follow
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.recorded_calls import CallRecorder
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.kv.tiers.disk_parts import ProcessPart, SharedDiskTier
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.model import softmax_range
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.model.checkpoints.fingerprint import fingerprint
from jaxflow.parallel.hand_over import ProcessHandOver
from jaxflow.parallel.launch import LOST, launch_of
from jaxflow.parallel.links import FAREWELL_S, Followers, Leader, fault_text
from jaxflow.parallel.processes import Processes, ProcessesError, end_with, join, leave
from jaxflow.pipeline.plan import Plan

log = logging.getLogger(__name__)
REFUSED = 1  # exit status after a setting or a checkpoint that is not supported: starting again does not help
START_TIMEOUT_S = 3600.0  # the end of a process is noticed before
# The settings that may differ between the processes.
OWN_FIELDS = ("coordinator", "process_id", "compilation_cache_dir", "lowering_processes")
_PACKAGES = ("jax", "jaxlib", "numpy")
_ROOT = Path(__file__).parents[2]


class Team:
    """One process among those of an engine.

    Attributes:
      processes: all processes.
      followers: the links of process 0; None in the others.
      leader: the link to process 0; None in process 0.
    """

    def __init__(self, processes: Processes, step_timeout_s: float):
        self.processes = processes
        self.followers = self.leader = None
        if processes.rank == 0:
            self.followers = Followers(processes, step_timeout_s, _stop_with_follower)
        else:
            self.leader = Leader(processes)

    def resolve(self, config: EngineConfig, resolve: Callable[[], EngineConfig]) -> EngineConfig:
        """Return the resolved settings of process 0, whose memory decides some defaults."""
        own = msgspec.json.encode(resolve()).decode() if self.processes.rank == 0 else ""
        found = msgspec.json.decode(self.processes.of_first("config", own), type=EngineConfig)
        return dataclasses.replace(found, **{field: getattr(config, field) for field in OWN_FIELDS})

    def compare(
        self,
        given: EngineConfig,
        config: EngineConfig,
        checkpoint: Checkpoint,
        plans: Mapping[int, Sequence[Plan]],
    ) -> None:
        """Check that all processes have the same program, settings, plans, weights and devices.

        Args:
          given: the settings before they were resolved.

        Raises:
          ProcessesError: naming what differs. ConfigError: the devices do not fill the mesh.
        """
        self.processes.compare(common_values(given, config, checkpoint, plans))
        check_mesh(config, [device.process_index for device in jax.devices()])

    def least(self, name: str, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the smallest of each number over all processes.

        One process may load weights or compile for minutes longer than another.
        """
        return self.processes.least(name, numbers, START_TIMEOUT_S)

    def wait_until_compiled(self) -> None:
        """Wait until every process has compiled its programs.

        The first collective operation waits for all processes, on a CPU for 30 s at most, and one host may
        have to compile what the others find in their caches.
        """
        self.processes.wait_for_all("compiled", START_TIMEOUT_S)

    def exchange(self) -> ProcessHandOver:
        """Return the hand-overs between the pipeline stages of the processes."""
        return ProcessHandOver(
            self.processes, self.processes.launch.host if self.leader is None else self.leader.own_host
        )

    def part(self, page_bytes: tuple[int, ...]) -> ProcessPart:
        """Return the part of every KV page that this process has, of these bytes in each page group."""
        return ProcessPart(self.processes.rank, self.processes.count, page_bytes)

    def follow_or_lead(
        self, executor: Executor | StagedExecutor, disk: Callable[[], DiskTier | None] = lambda: None
    ) -> None:
        """Record the calls of a warm executor in process 0. In the others, follow
        process 0 until its end, and exit.

        disk: make the disk tier of a follower; None without one.
        """
        if self.leader is not None:
            if executor.substitutes:
                self._prepare_for_first(executor)
            else:
                executor.compile_deferred()
            follow(executor, self.leader, disk())
            leave()
            raise SystemExit(0)
        assert self.followers is not None
        self.recorder = executor.recorder = CallRecorder(executor, self.followers)

    def _prepare_for_first(self, executor: Executor | StagedExecutor) -> None:
        """Compile the layouts that are not ready, in the background, and tell process 0 of each one."""

        def tell(layout: StepLayout, fault: str = "") -> None:
            try:
                self.processes.publish(f"{_name(layout)}/{self.processes.rank}", fault)
            except jax.errors.JaxRuntimeError as error:  # process 0 has left
                raise CancelledError(fault_text(error)) from error

        prepare_in_background(executor, tell, on_fault=tell)

    def wait_for_layout(self, layout: StepLayout) -> None:
        """Wait until the other processes have compiled a layout.

        Raises: RuntimeError, if one could not. CancelledError once this process ends.
        """
        faults = self.processes.wait_for_others(_name(layout), main_runs)
        for rank, fault in enumerate(faults, start=1):
            if fault:
                raise RuntimeError(f"process {rank}: {fault}")

    def share_disk(self, own: DiskTier) -> SharedDiskTier:
        """Return the disk tier of all processes, from the one of process 0."""
        assert self.followers is not None
        shared = SharedDiskTier(own, self.recorder, self.processes.count - 1)
        self.followers.on_answer = shared.answer
        return shared

    def watch(self, driver: Driver) -> None:
        """End all processes once the engine of process 0 fails, or makes no progress for too long."""
        assert self.followers is not None
        self.followers.watch_engine(driver.seconds_without_progress, lambda: driver.fault)

    def watch_closely(self) -> None:
        """End all processes once one is silent for seconds, because none of them compiles any more."""
        assert self.followers is not None
        self.followers.watch_closely()

    def close(self, fault: BaseException | None) -> None:
        """End all followers after the last call: in order, or with the fault
        that ended process 0's engine.
        """
        assert self.followers is not None
        if fault is None:
            self.followers.stop()
            leave()
        else:
            time.sleep(
                FAREWELL_S
            )  # a process that is lost is the cause, and its link ends all with that reason
            self.followers.dismiss(f"process 0 failed: {fault_text(fault)}", LOST)
            end_with(LOST)

    @contextlib.contextmanager
    def telling_faults(self) -> Iterator[None]:
        """End all processes if the body raises. Process 0 raises the error; the others exit with one line."""
        try:
            yield
        except Exception as error:
            status = REFUSED if type(error).__module__.startswith("jaxflow.") else LOST
            if self.leader is not None:
                if status == LOST and not isinstance(error, jax.errors.JaxRuntimeError):
                    log.exception("the start failed")
                self.leader.fail(error, status)
            assert self.followers is not None
            text = (
                str(error) if isinstance(error, ProcessesError) else f"process 0 failed: {fault_text(error)}"
            )
            self.followers.dismiss(text, status)
            end_with(status)
            raise


def _name(layout: StepLayout) -> str:
    """Return the name of a layout in the key-value store."""
    return f"layout {'-'.join(map(str, layout.key))}"


def join_team(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> Team | None:
    """Join the other processes of the engine, before JAX's first use; None for an engine of one process.

    Raises:
      ConfigError, ProcessesError
    """
    launch = launch_of(config, environ)
    if launch is None:
        return None
    return Team(join(launch, config.join_timeout_s), config.step_timeout_s)


def common_values(
    given: EngineConfig, config: EngineConfig, checkpoint: Checkpoint, plans: Mapping[int, Sequence[Plan]]
) -> dict[str, str]:
    """Return what all processes must have in common, by name.

    Large values are digests. Arguments: `Team.compare`.
    """
    fields = [field.name for field in dataclasses.fields(EngineConfig) if field.name not in OWN_FIELDS]
    kinds = collections.Counter(device.device_kind for device in jax.local_devices())
    return {
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "code": code_digest(),
        **{name: repr(getattr(given, name)) for name in fields},
        "plans": hashlib.sha256(repr(sorted(plans.items())).encode()).hexdigest()[:12],
        "weights": fingerprint(checkpoint, config.seed, times=False).hex()[:12],
        "calibration_file": _calibration_digest(config, checkpoint),
        "devices": ", ".join(sorted(kinds)),
    }


def code_digest() -> str:
    """Return a digest of this program's sources and tables."""
    found = hashlib.sha256()
    for package in ("jaxflow", "pallas_kernels"):
        folder = _ROOT / package
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json")):
            content = path.read_bytes()
            found.update(f"{path.relative_to(_ROOT)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


def _calibration_digest(config: EngineConfig, checkpoint: Checkpoint) -> str:
    path = Path(config.calibration) if config.calibration else None
    if config.calibration is None and checkpoint.source is not None:
        path = softmax_range.default_path(checkpoint.source.path)
    if path is None or not path.exists():
        return "none"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def check_mesh(config: EngineConfig, owners: Sequence[int]) -> None:
    """Refuse a mesh that leaves devices out: a process without a device of the mesh could not follow.

    owners: the process of each device.

    Raises:
      ConfigError
    """
    tp, pp, ranks = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
    if tp * pp * ranks != len(owners):
        of = f"data_parallel_size={ranks}" if ranks > 1 else f"pipeline_parallel_size={pp}"
        accepted = (
            f"{len(owners) / (pp * ranks):g} with {of}: the {len(set(owners))} processes have "
            f"{len(owners)} devices, and each device takes part"
        )
        raise ConfigError("tensor_parallel_size", tp, accepted)
    if pp > 1 and any(len(set(owners[first : first + tp])) > 1 for first in range(0, len(owners), tp)):
        raise ConfigError("tensor_parallel_size", tp, "a size whose stages each lie in one process")


def _stop_with_follower(rank: int) -> None:
    """End this process in order, as a signal would, because a follower was asked to stop."""
    print(f"process {rank} was asked to stop; all processes stop", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

"""Which process of an engine this is: from the settings, or from the variables that a launcher sets."""

import dataclasses
import re
from collections.abc import Mapping

from jaxflow.config import ConfigError, EngineConfig

LOST = 75  # exit status after another process was lost: EX_TEMPFAIL, start again
AUTO = "auto"
DEFAULT_PORT = 8476  # the port of the coordinator, where a launcher names only its host
LAUNCHERS = "JAXFLOW_*, Open MPI, PMI (MPICH, Intel MPI), LeaderWorkerSet, torchrun or Ray Train, Slurm"


@dataclasses.dataclass(frozen=True)
class Launch:
    """The place of one process among those of an engine.

    Attributes:
      coordinator: host and port of process 0, which all processes reach.
    """

    coordinator: str
    num_processes: int
    process_id: int

    @property
    def host(self) -> str:
        """Return the host of process 0."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Return the port of `jax.distributed` on the host of process 0."""
        return int(self.coordinator.rpartition(":")[2])


def launch_of(config: EngineConfig, environ: Mapping[str, str]) -> Launch | None:
    """Return the place of this process; None for an engine of one process.

    Settings come before `environ`. A launcher's variables count only if `coordinator` is set.

    Raises:
      ConfigError: a setting is missing, and no launcher's variable has the value.
    """
    given = (config.coordinator, config.num_processes, config.process_id)
    if config.coordinator is None:
        for field, value in zip(("num_processes", "process_id"), given[1:], strict=True):
            if value not in (None, 0 if field == "process_id" else 1):
                raise ConfigError(field, value, "unset without coordinator, the HOST:PORT of process 0")
        return None
    address, size, rank = launcher_of(environ)
    coordinator = address if config.coordinator == AUTO else config.coordinator
    size = size if config.num_processes is None else config.num_processes
    rank = rank if config.process_id is None else config.process_id
    for field, value in (("coordinator", coordinator), ("num_processes", size), ("process_id", rank)):
        if value is None:
            given_value = getattr(config, field)
            raise ConfigError(field, given_value, f"a value, because no launcher gives one: {LAUNCHERS}")
    assert coordinator is not None and size is not None and rank is not None
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):\d{1,5}", coordinator):
        raise ConfigError("coordinator", coordinator, "HOST:PORT of process 0, or auto")
    if size < 1:
        raise ConfigError("num_processes", size, "a positive number of processes")
    if not 0 <= rank < size:
        raise ConfigError("process_id", rank, f"0 to {size - 1}, below num_processes={size}")
    return None if size == 1 else Launch(coordinator, size, rank)


def launcher_of(environ: Mapping[str, str]) -> tuple[str | None, int | None, int | None]:
    """Return the coordinator, the number of processes and this process's number, as launchers name them.

    The first launcher that numbers its processes wins: one inside another comes first. None: no variable.
    """
    size = rank = None
    for names in (
        ("JAXFLOW_NUM_PROCESSES", "JAXFLOW_PROCESS_ID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
        ("WORLD_SIZE", "RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("SLURM_NTASKS", "SLURM_PROCID"),
    ):
        if all(environ.get(name, "").isdecimal() for name in names):
            size, rank = (int(environ[name]) for name in names)
            break
    return _coordinator(environ), size, rank


def _coordinator(environ: Mapping[str, str]) -> str | None:
    if address := environ.get("JAXFLOW_COORDINATOR"):
        return address
    if leader := environ.get("LWS_LEADER_ADDRESS"):
        return f"{leader}:{DEFAULT_PORT}"
    if master := environ.get("MASTER_ADDR"):
        return f"{master}:{environ.get('MASTER_PORT', DEFAULT_PORT)}"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes:
        # Two jobs may share a node, so the port follows the job, as in JAX's own detection.
        job = environ.get("SLURM_JOB_ID", "0")
        return f"{first_node(nodes)}:{61440 + int(job) % 4096 if job.isdecimal() else DEFAULT_PORT}"
    return None


def first_node(nodes: str) -> str:
    """Return the first host of Slurm's list, such as `gpu003` of `gpu[003-010,012],login1`."""
    found = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes

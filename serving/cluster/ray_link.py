"""Replicas as Ray actors: one actor is one process with one engine.

Ray places the processes on machines, gives them GPUs, and tells when one has died. An actor is never restarted or
called again by Ray itself: the router starts a new one, so a message arrives at most once.
"""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError, RayError, RayTaskError  # pyright: ignore[reportMissingImports]

from jaxflow.config import ConfigError, EngineConfig
from serving.cluster.link import LinkLost, Load, Named, Served, StartFailed
from serving.cluster.messages import Description

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 * 2**20  # messages go by value; Ray's own limit is 75 MiB
AGENT_TIMEOUT_MS = "120000"  # a busy machine takes longer than Ray's 15 s to start Ray


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Where the replicas run.

    Attributes:
      address: of a running Ray cluster; None starts Ray on this machine.
      cpus: CPU cores that a replica reserves.
      gpus: GPUs that a replica reserves; None for as many as its engine needs if the cluster has GPUs.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None


class RayCluster:
    """The connection to Ray. Call `close` to end it, with everything that it started.

    Args:
      load: loads the engine of a replica. The function is called in the replica's process.

    Raises:
      ConfigError: no Ray cluster at the address, or this machine has too few GPUs.
    """

    def __init__(self, config: RayConfig, replicas: int, devices: int, load: Load):
        self._config, self._load = config, load
        os.environ.setdefault("RAY_agent_register_timeout_ms", AGENT_TIMEOUT_MS)
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        local = {}
        if config.address is None:
            cores = max(os.cpu_count() or 1, int(config.cpus * replicas) + 1)
            local = {"num_cpus": cores, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        try:
            ray.init(
                address=config.address or "local",
                log_to_driver=True,
                logging_level=logging.WARNING,
                **local,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                "ray_address", config.address, f"the address of a Ray cluster ({text})"
            ) from error
        present = ray.cluster_resources().get("GPU", 0)
        self._gpus = config.gpus if config.gpus is not None else (devices if present else 0)
        if config.address is None and self._gpus * replicas > present:
            accepted = f"at most {int(present // self._gpus)} with {self._gpus:g} of {present:g} GPUs each"
            ray.shutdown()
            raise ConfigError("replicas", replicas, accepted)

    def launch(self, config: EngineConfig, index: int) -> "RayLink":
        """Start the process of a replica. See `serving.cluster.link.Launch`."""
        if config.kv_disk_path is not None:  # engines share no folder
            config = dataclasses.replace(
                config, kv_disk_path=str(Path(config.kv_disk_path) / f"replica-{index}")
            )
        options = {
            "num_cpus": self._config.cpus,
            "num_gpus": self._gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        actor = _Actor.options(**options, max_concurrency=16).remote()  # type: ignore[attr-defined]
        return RayLink(actor, config, self._load)

    def close(self) -> None:
        """Leave the cluster. Ray on this machine ends, if the connection started it."""
        ray.shutdown()


class RayLink:
    """The way to one actor, see `serving.cluster.link.Link`."""

    def __init__(self, actor, config: EngineConfig, load: Load):
        self._actor, self._config, self._load = actor, config, load

    async def describe(self) -> Description:
        """See `Link.describe`."""
        found = await _answer(self._actor.load.remote(self._config, self._load))
        if isinstance(found, str):
            raise StartFailed(found)
        return found

    async def take(self, orders: Sequence[Named], aborted: Sequence[str]) -> None:
        """See `Link.take`."""
        await _answer(self._actor.take.remote(list(orders), list(aborted)))

    async def poll(self, wait_s: float) -> Any:
        """See `Link.poll`."""
        return await _answer(self._actor.poll.remote(wait_s))

    async def close(self) -> None:
        """See `Link.close`."""
        await _answer(self._actor.close.remote())

    def kill(self) -> None:
        """See `Link.kill`. Ray kills a stopped process 5 s later."""
        try:
            ray.kill(self._actor)
        except (RayError, ValueError) as error:  # the actor or the connection has ended
            log.debug("kill: %s", error)


async def _answer(reference):
    """Return the result of an actor's method. Raises: LinkLost."""
    try:
        return await reference
    except RayTaskError as error:  # a fault of the replica's code
        raise LinkLost(f"{type(error.cause).__name__}: {error.cause}") from error
    except RayActorError as error:
        raise LinkLost("the process died") from error
    except RayError as error:
        raise LinkLost(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


@ray.remote
class _Actor:
    """A process with an engine. The event loop of the actor runs all methods."""

    def __init__(self) -> None:
        self._served: Served | None = None

    async def load(self, config: EngineConfig, load: Load) -> Description | str:
        """Load the model and describe it. Return one line if it cannot be loaded."""
        try:
            self._served = await load(config)
        except Exception as error:
            if type(error).__module__.startswith("jaxflow.") or isinstance(error, OSError):
                return str(error)
            log.exception("the model cannot be loaded")
            return f"{type(error).__name__}: {error}"
        return self._served.describe()

    async def take(self, orders: list[Named], aborted: list[str]) -> None:
        """See `Link.take`."""
        assert self._served is not None
        self._served.take(orders, aborted)

    async def poll(self, wait_s: float) -> Any:
        """See `Link.poll`."""
        assert self._served is not None
        return await self._served.poll(wait_s)

    async def close(self) -> None:
        """See `Link.close`."""
        if self._served is not None:
            await asyncio.to_thread(self._served.close)

"""Replicas as Ray actors: one actor is one process, and a replica is one process
or several that run one engine.

Ray places the processes on machines, gives them GPUs, and tells when one has died. An actor is never
restarted or called again by Ray itself: the router starts a new one, so a message arrives at most once.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError, RayError, RayTaskError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group, remove_placement_group  # pyright: ignore
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore

from jaxflow.config import ConfigError, EngineConfig
from serving.cluster.link import LinkLost, Load, Named, Served, StartFailed
from serving.cluster.messages import ReplicaModel

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 * 2**20  # messages go by value; Ray's own limit is 75 MiB
LEAST_CPUS = 0.001  # Ray refuses a bundle of nothing
AGENT_TIMEOUT_MS = "120000"  # a busy machine takes longer than Ray's 15 s to start Ray


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Where the replicas run.

    Attributes:
      address: of a running Ray cluster; None starts Ray on this machine.
      cpus: CPU cores that a replica reserves.
      gpus: GPUs that a replica reserves; None for as many as its engine needs if the cluster has GPUs.
      processes: of a replica's engine. Ray puts them on different machines, where it can.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float | None = None
    processes: int = 1


class RayCluster:
    """The connection to Ray. Call `close` to end it, with everything that it started.

    Args:
      load: loads the engine of a replica. The function is called in the replica's process.

    Raises:
      ConfigError: no Ray cluster at the address, too few GPUs on this machine, or processes that cannot
        share the devices of a replica.
    """

    def __init__(self, config: RayConfig, replicas: int, devices: int, load: Load):
        if devices % config.processes:
            accepted = (
                f"a divisor of {devices}: the product of tensor, pipeline and data_parallel_size, the "
                "devices of a replica, of which each process has the same number"
            )
            raise ConfigError("processes_per_replica", config.processes, accepted)
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
        size = self._config.processes
        cpus, gpus = self._config.cpus / size, self._gpus / size
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        actor = functools.partial(_Actor.options, **options, max_concurrency=16)  # type: ignore[attr-defined]
        if size == 1:
            return RayLink([actor().remote()], config, self._load)
        # Ray reserves the places of all processes together, so two replicas never wait for each other's.
        bundle = {"CPU": max(cpus, LEAST_CPUS)} | ({"GPU": gpus} if gpus else {})
        group = placement_group([bundle] * size, strategy="SPREAD")
        places = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(size)
        ]
        actors = [actor(scheduling_strategy=place).remote() for place in places]
        return RayLink(actors, config, self._load, group)

    def close(self) -> None:
        """Leave the cluster. Ray on this machine ends, if the connection started it."""
        ray.shutdown()


class RayLink:
    """The way to the actors of one replica, see `serving.cluster.link.Link`.

    The first one is process 0 of the engine, which takes the requests. It ends when another process ends.

    Args:
      group: the placement group of several actors.
    """

    def __init__(self, actors: Sequence, config: EngineConfig, load: Load, group=None):
        self._actors, self._first, self._config, self._load = actors, actors[0], config, load
        self._group = group

    async def describe(self) -> ReplicaModel:
        """See `Link.describe`."""
        configs = [self._config]
        if (size := len(self._actors)) > 1:
            address = await _answer(self._first.address.remote())
            configs = [
                dataclasses.replace(self._config, coordinator=address, num_processes=size, process_id=i)
                for i in range(size)
            ]
        for actor, config in zip(self._actors[1:], configs[1:], strict=True):
            actor.follow.remote(config)
        found = await _answer(self._first.load.remote(configs[0], self._load))
        if isinstance(found, str):
            raise StartFailed(found)
        return found

    async def take(self, orders: Sequence[Named], aborted: Sequence[str]) -> None:
        """See `Link.take`."""
        await _answer(self._first.take.remote(list(orders), list(aborted)))

    async def poll(self, wait_s: float) -> Any:
        """See `Link.poll`."""
        return await _answer(self._first.poll.remote(wait_s))

    async def close(self) -> None:
        """See `Link.close`."""
        await _answer(self._first.close.remote())

    def kill(self) -> None:
        """See `Link.kill`. Ray kills a stopped process 5 s later."""
        ends = [functools.partial(ray.kill, actor) for actor in self._actors]
        if self._group is not None:
            ends.append(functools.partial(remove_placement_group, self._group))
        for end in ends:
            try:
                end()
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

    async def address(self) -> str:
        """Return the address where the processes of the engine can meet."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as listener:
            return f"{host}:{listener.getsockname()[1]}"

    async def follow(self, config: EngineConfig) -> None:
        """Follow process 0 of the engine until its end, which process 0 reports."""
        await asyncio.to_thread(_follow, config)

    async def load(self, config: EngineConfig, load: Load) -> ReplicaModel | str:
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


def _follow(config: EngineConfig) -> None:
    from jaxflow.llm import LLM  # JAX takes seconds to import, and the router does not need it

    with contextlib.suppress(SystemExit):  # process 0 has ended in order
        LLM.from_config(config, progress=False)

"""The way from a router to one process of a replica."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from jaxflow.config import EngineConfig
from serving.cluster.messages import ReplicaModel


class LinkLost(RuntimeError):
    """The replica's process died, or cannot be reached."""


class StartFailed(RuntimeError):
    """The replica could not load its model. The message is one line."""


class Named(Protocol):
    """A request for a replica. `name`: at the replica."""

    @property
    def name(self) -> str: ...


class ReportedState(Protocol):
    """What every report of a replica has, see `serving.cluster.messages.Report`."""

    @property
    def longest_step_s(self) -> float: ...

    @property
    def stalled_s(self) -> float: ...

    @property
    def fault(self) -> str: ...


class Link[O: Named, R: ReportedState](Protocol):
    """One process of a replica, which takes orders and makes reports. Used from one event loop."""

    async def describe(self) -> ReplicaModel:
        """Wait until the model is loaded and warm, and describe the model. Raises: StartFailed, LinkLost."""
        ...

    async def take(self, orders: Sequence[O], aborted: Sequence[str]) -> None:
        """Hand over requests, and end others by their names. Raises: LinkLost."""
        ...

    async def poll(self, wait_s: float) -> R:
        """Return the next report, after at most `wait_s` without an event. Raises: LinkLost."""
        ...

    async def close(self) -> None:
        """End the engine in order. Raises: LinkLost."""
        ...

    def kill(self) -> None:
        """End the process at once, also a stopped or hung one."""
        ...


class Served[O: Named, R: ReportedState](Protocol):
    """The replica's side of a link: a loaded engine. Its methods run on one event loop."""

    def describe(self) -> ReplicaModel: ...

    def take(self, orders: Sequence[O], aborted: Sequence[str]) -> None: ...

    async def poll(self, wait_s: float) -> R: ...

    def close(self) -> None: ...


# Loads an engine, in the process of a replica.
Load = Callable[[EngineConfig], Awaitable[Served[Any, Any]]]
# Starts a process, which loads an engine: (settings, number of the replica).
Launch = Callable[[EngineConfig, int], Link[Any, Any]]

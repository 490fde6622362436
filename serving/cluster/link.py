"""The way from a router to one process of a replica."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxflow.config import EngineConfig
from serving.cluster.messages import Description, Order, Report


class LinkLost(RuntimeError):
    """The replica's process died, or cannot be reached."""


class StartFailed(RuntimeError):
    """The replica could not load its model. The message is one line."""


class Link(Protocol):
    """One process of a replica. A router uses it from one event loop."""

    async def describe(self) -> Description:
        """Wait until the model is loaded and warm, and describe the model. Raises: StartFailed, LinkLost."""
        ...

    async def take(self, orders: Sequence[Order], aborted: Sequence[str]) -> None:
        """Hand over requests, and end others by their names. Raises: LinkLost."""
        ...

    async def poll(self, wait_s: float) -> Report:
        """Return the next report, after at most `wait_s` without an event. Raises: LinkLost."""
        ...

    async def close(self) -> None:
        """End the engine in order. Raises: LinkLost."""
        ...

    def kill(self) -> None:
        """End the process at once, also a stopped or hung one."""
        ...


Launch = Callable[[EngineConfig, int], Link]  # (settings, number of the replica)

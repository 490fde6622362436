"""The replicas behind a server, as operations show them."""

from typing import Protocol

import msgspec


class ReplicaState(msgspec.Struct, frozen=True):
    """One replica.

    Attributes:
      state: starting, serving, draining or stopped.
      version: the name of its settings.
      requests: requests that run or wait there; `outstanding_tokens`: their tokens that are not computed yet.
      restarts: processes that were lost; `reason`: of the last loss.
      process_id: on the replica's machine; 0 while it starts.
      prefills: it computes prompts, and lends their KV pages to the replicas that answer.
      open_loans: prompts whose pages are lent and not acknowledged yet.
    """

    index: int
    state: str
    version: str
    requests: int
    outstanding_tokens: float
    restarts: int
    reason: str
    process_id: int
    prefills: bool = False
    open_loans: int = 0


class TransferCounts(Protocol):
    """The transfers of KV pages between replicas."""

    done: int
    failed: int
    bytes: int


class Fleet(Protocol):
    """The replicas of a router."""

    moved: int  # requests that changed their replica
    interrupted: int  # requests that ended with their replica

    @property
    def transfers(self) -> TransferCounts:
        """The transfers since the start."""
        ...

    @property
    def device(self) -> str:
        """The device of a replica."""
        ...

    def unready(self) -> str:
        """Return why no request is served; empty if some replica serves."""
        ...

    def replicas(self) -> list[ReplicaState]:
        """Return the state of each replica."""
        ...

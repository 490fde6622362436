"""The record of one call of a client, which the request log and the traces read at its end.

A server opens the record with an `Observe`. `ServedModel` fills the record that its task has, so no argument
is passed on. A record holds ids, counts and times, and no text. `new_id` makes the ids.
"""

import contextlib
import contextvars
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from jaxflow.request import Event, Finished, Request, SamplingParams

_PROCESS = f"{random.getrandbits(64):016x}"
_NUMBERS = itertools.count(random.getrandbits(63))


def new_id() -> str:
    """Return 32 hexadecimal digits that no other request of this process has. The ids are no secret."""
    return f"{_PROCESS}{next(_NUMBERS):016x}"


@dataclasses.dataclass
class Call:
    """One call.

    Attributes:
      protocol: grpc or http; `method`: the method or path.
      traceparent: the W3C trace context that the caller sent, or empty.
      name: the caller's own id, or else the engine's id.
      engine_ids: the engine's id of each request.
      ends: each ended sequence, with the nanoseconds since the epoch of its end.
      error: the exception that ended the call.
      status: the HTTP status, 0 with gRPC.
    """

    protocol: str
    method: str
    traceparent: str = ""
    begun_ns: int = dataclasses.field(default_factory=time.time_ns)
    name: str = ""
    engine_ids: list[str] = dataclasses.field(default_factory=list)
    sampling: SamplingParams | None = None
    prompt_tokens: int = 0
    ends: list[tuple[int, Finished]] = dataclasses.field(default_factory=list)
    error: BaseException | None = None
    status: int = 0

    def build(self, name: str, request: Request) -> None:
        """Note a request of the call."""
        self.name = self.name or name or request.request_id
        self.engine_ids.append(request.request_id)
        self.sampling = request.sampling
        self.prompt_tokens += len(request.prompt_token_ids)

    def take(self, events: Iterable[Event]) -> None:
        """Note the ended sequences among `events`."""
        for event in events:
            if type(event) is Finished:
                self.ends.append((time.time_ns(), event))

    def fail(self, error: BaseException) -> None:
        """Note the exception that ended the call. The first one counts."""
        self.error = self.error or error


CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("call", default=None)
Observe = Callable[[str, str, str], AbstractContextManager[Call | None]]  # (protocol, method, traceparent)


def unobserved(protocol: str, method: str, traceparent: str) -> AbstractContextManager[None]:
    """Open no record."""
    return contextlib.nullcontext()

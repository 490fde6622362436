"""The replica's side: an engine whose events wait for a router that asks for them.

One report carries the events of all requests since the report before. So the cost of a message is paid once a step or
less often, and not once a token of each request.
"""

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxflow.config import EngineConfig
from jaxflow.engine.live_request import refused
from jaxflow.request import Delta, Draining, Event, Finished, InvalidRequest, QueueFull, Request, Started
from serving.cluster.messages import Description, Order, Report
from serving.operations.status import device_kind

if TYPE_CHECKING:
    from jaxflow.engine.driver import Driver
    from jaxflow.llm import LLM


class RemoteFault(RuntimeError):
    """A fault of a replica's engine, by its type and message."""


class Outstanding:
    """The tokens that a replica still has to compute, by request."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._sequences: dict[str, int] = {}

    def add(self, order: Order) -> None:
        """Count a request."""
        self._tokens[order.name] = len(order.prompt_token_ids) + order.expected_tokens
        self._sequences[order.name] = order.sampling.n

    def take(self, event: Event) -> None:
        """Count an event. A sequence that outgrows its expected tokens has one more to compute."""
        name = event.request_id
        if name not in self._tokens:
            return
        if type(event) is Finished:
            self._sequences[name] -= 1
            if not self._sequences[name]:
                self.drop(name)
        else:
            done = event.prompt_tokens if type(event) is Started else len(event.token_ids)  # type: ignore[union-attr]
            self._tokens[name] = max(1.0, self._tokens[name] - done)

    def drop(self, name: str) -> None:
        """Forget a request."""
        self._tokens.pop(name, None)
        self._sequences.pop(name, None)

    @property
    def total(self) -> float:
        """Return the tokens of all requests."""
        return sum(self._tokens.values())


class Replica:
    """An engine that takes orders and makes reports. Its methods run on one event loop."""

    def __init__(self, llm: "LLM"):
        self._llm = llm
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._outstanding = Outstanding()
        self._last_number = 0

    def describe(self) -> Description:
        """Describe the model."""
        return describe(self._llm)

    def take(self, orders: Sequence[Order], aborted: Sequence[str]) -> None:
        """Submit requests, and end others. A refused request gets its end as an event."""
        for order in orders:
            self._last_number = max(self._last_number, order.number)
            self._outstanding.add(order)
            try:
                request = self._llm.request(
                    order.prompt_token_ids,
                    order.sampling,
                    request_id=order.name,
                    priority=order.priority,
                    cache_salt=order.cache_salt,
                )
                self._llm.driver.submit(request, self)
            except MemoryError:  # a fault of the process: its requests move to another replica
                raise
            except Exception as error:  # only this request fails
                self.post(refused(Request(order.name, order.prompt_token_ids, order.sampling), error))
        for name in aborted:
            self._outstanding.drop(name)
            self._llm.driver.abort(name)

    def post(self, events: list[Event]) -> None:
        """Keep the events of a step for the next report. Any thread may call it; it never blocks."""
        with self._lock:
            self._events += events
        self._loop.call_soon_threadsafe(self._wake.set)

    async def poll(self, wait_s: float) -> Report:
        """Return a report as soon as there is an event, and after `wait_s` without one."""
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            self._outstanding.take(event)
        driver = self._llm.driver
        steps, _ = driver.log.take()
        return Report(
            [portable(event) for event in events],
            steps,
            driver.stats(),
            self._outstanding.total,
            self._last_number,
            driver.seconds_without_progress(),
            time.monotonic(),
            fault_of(driver),
        )

    def close(self) -> None:
        """End the engine in order."""
        self._llm.close()


def describe(llm: "LLM") -> Description:
    """Return the description of a loaded model."""
    return Description(
        llm.name,
        llm.model_config,
        llm.engine_config,
        llm.driver.scheduling,
        dict(llm.generation_config),
        llm.max_model_len,
        llm.tokenizer,
        device_kind(),
        os.getpid(),
    )


def fault_of(driver: "Driver") -> str:
    """Return the fault that ended an engine, or an empty text."""
    return "" if driver.alive else f"the engine stopped: {type(driver.fault).__name__}"


def portable(event: Event) -> Event:
    """Return an event that another process can read, without the objects of a fault."""
    if type(event) is Delta or type(event) is Started:
        return event
    assert type(event) is Finished
    error = event.error
    if error is None or isinstance(error, InvalidRequest | QueueFull | Draining):
        return event
    return msgspec.structs.replace(event, error=RemoteFault(f"{type(error).__name__}: {error}"))


async def load_replica(config: EngineConfig) -> Replica:
    """Return the replica of a loaded and warm engine. Raises: ConfigError, OSError."""
    return Replica(await asyncio.to_thread(_load, config))


def _load(config: EngineConfig) -> "LLM":
    # JAX takes seconds to import, and the router does not need it.
    from jaxflow.engine.start import freeze_heap
    from jaxflow.llm import LLM
    from serving.operations.health import make_first_token

    llm = LLM.from_config(config, progress=False)
    make_first_token(llm)
    freeze_heap()
    return llm

"""The replica's side: an engine whose events wait for a router that asks for them.

One report carries the events of all requests since the report before. So the cost of a message is paid once a
step or less often, and not once a token of each request.
"""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxflow.config import EngineConfig
from jaxflow.engine.live_request import refused
from jaxflow.request import (
    Delta,
    Draining,
    Event,
    Finished,
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    Started,
)
from serving.cluster.messages import EndLoan, Fetched, Lent, Order, ReplicaModel, Report
from serving.cluster.page_exchange import PageExchange, TransferConfig
from serving.cluster.page_transport import TransferFailed
from serving.operations.status import device_kind

if TYPE_CHECKING:
    from jaxflow.engine.driver import Driver, Mailbox
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


class _Prefill:
    """The mailbox of an order to lend pages: it waits for the end of the prompt.

    `done` runs on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, done: Callable[[int, Finished], None]):
        self._loop, self._done = loop, done
        self._cached_tokens = 0

    def post(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is Started:
                self._cached_tokens = event.cached_prompt_tokens
            elif type(event) is Finished:
                self._loop.call_soon_threadsafe(self._done, self._cached_tokens, event)


class Replica:
    """An engine that takes orders and makes reports. Its methods run on one event loop.

    Args:
      exchange: lends and fetches KV pages; None if no order has to do with a loan.
    """

    def __init__(self, llm: "LLM", exchange: PageExchange | None = None):
        self._llm, self._exchange = llm, exchange
        self._fault = ""
        self._lent: list[Lent] = []
        self._fetched: list[Fetched] = []
        self._transfers: dict[str, asyncio.Task[None]] = {}  # under way, by the order's name
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._outstanding = Outstanding()
        self._last_number = 0

    def describe(self) -> ReplicaModel:
        """Describe the model."""
        described = describe(self._llm)
        if self._exchange is None:
            return described
        return msgspec.structs.replace(described, seconds_per_token=self._exchange.seconds_per_token())

    def take(self, orders: Sequence[Order | EndLoan], aborted: Sequence[str]) -> None:
        """Submit requests, end others, and end loans. A refused request gets its end as an event."""
        for order in orders:
            if type(order) is EndLoan:
                if self._exchange is not None:
                    self._exchange.end(order.number)
                continue
            assert type(order) is Order
            self._last_number = max(self._last_number, order.number)
            self._outstanding.add(order)
            if order.loan is not None:
                self._start(order.name, self._fetch(order))
            elif order.lends_after is not None:
                self._submit(order, _Prefill(self._loop, functools.partial(self._prefilled, order)))
            elif order.sampling.structured_outputs is not None:
                self._start(order.name, self._submit_with_masks(order))
            else:
                self._submit(order, self)
        for name in aborted:
            self._outstanding.drop(name)
            if name in self._transfers:
                self._transfers[name].cancel()
            self._llm.driver.abort(name)

    def _submit(self, order: Order, mailbox: "Mailbox") -> None:
        try:
            request = self._llm.request(
                order.prompt_token_ids,
                order.sampling,
                request_id=order.name,
                priority=order.priority,
                cache_salt=order.cache_salt,
            )
            self._llm.driver.submit(request, mailbox)
        except MemoryError:  # a fault of the process: its requests move to another replica
            raise
        except Exception as error:  # only this request fails
            mailbox.post(refused(Request(order.name, order.prompt_token_ids, order.sampling), error))

    async def _submit_with_masks(self, order: Order) -> None:
        """Submit an order with a form, once the engine can draw tokens of a form."""
        try:
            await asyncio.to_thread(self._llm.driver.prepare_masks)
        except Exception as error:  # only this request fails
            self.post(refused(Request(order.name, order.prompt_token_ids, order.sampling), error))
            return
        self._submit(order, self)

    # ---- pages of other engines

    def _start(self, name: str, transfer: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(transfer)
        self._transfers[name] = task
        task.add_done_callback(lambda _: self._transfers.pop(name, None))

    async def _fetch(self, order: Order) -> None:
        """Fetch the pages of an order's loan, then submit the order, with the pages or without them."""
        assert order.loan is not None
        began_s, reason = time.monotonic(), "the replica exchanges no pages"
        if self._exchange is not None:
            try:
                await self._exchange.borrow(order.loan)
                reason = ""
            except Exception as error:  # this engine computes the pages
                reason = _line(error)
        self._fetched.append(Fetched(order.name, order.loan, time.monotonic() - began_s, reason))
        self._wake.set()
        try:
            self._submit(order, self)
        except MemoryError:  # the next report has the fault, because no caller waits
            self._fault = "the process finds no memory"

    def _prefilled(self, order: Order, cached_tokens: int, end: Finished) -> None:
        self._outstanding.drop(order.name)
        self._start(order.name, self._lend(order, cached_tokens, end))

    async def _lend(self, order: Order, cached_tokens: int, end: Finished) -> None:
        """Lend the pages of a computed prompt, and tell the end of the order."""
        assert order.lends_after is not None
        loan, reason = None, "the replica exchanges no pages"
        if end.reason is FinishReason.ABORT:
            reason = "the prompt was not computed" if end.error is None else str(end.error)
        elif self._exchange is not None:
            try:
                loan = await self._exchange.lend(order.prompt_token_ids, order.cache_salt, order.lends_after)
            except Exception as error:  # the router sends the request without the pages
                reason = _line(error)
        self._lent.append(Lent(order.name, cached_tokens, loan, "" if loan is not None else reason))
        self._wake.set()

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
        lent, self._lent = self._lent, []
        fetched, self._fetched = self._fetched, []
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
            self._fault or fault_of(driver),
            lent,
            fetched,
            0 if self._exchange is None else self._exchange.open_loans,
        )

    def close(self) -> None:
        """End the engine in order."""
        self._llm.close()


def describe(llm: "LLM") -> ReplicaModel:
    """Return the description of a loaded model."""
    return ReplicaModel(
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


def _line(error: Exception) -> str:
    return (
        str(error).splitlines()[0]
        if isinstance(error, TransferFailed)
        else f"{type(error).__name__}: {error}"
    )


def portable(event: Event) -> Event:
    """Return an event that another process can read, without the objects of a fault."""
    if type(event) is Delta or type(event) is Started:
        return event
    assert type(event) is Finished
    error = event.error
    if error is None or isinstance(error, InvalidRequest | QueueFull | Draining):
        return event
    return msgspec.structs.replace(event, error=RemoteFault(f"{type(error).__name__}: {error}"))


async def load_replica(config: EngineConfig, transfers: TransferConfig | None = None) -> Replica:
    """Return the replica of a loaded and warm engine. Raises: ConfigError, OSError.

    transfers: how it exchanges KV pages with other replicas, if it has a host tier; None if it does not.
    """
    llm = await asyncio.to_thread(_load, config)
    if transfers is None or not llm.engine_config.kv_offloading_size:
        return Replica(llm)
    import ray  # pyright: ignore[reportMissingImports]

    from serving.cluster.page_transport import JaxTransport

    return Replica(llm, PageExchange(llm.driver, JaxTransport(ray.util.get_node_ip_address()), transfers))


def _load(config: EngineConfig) -> "LLM":
    # JAX takes seconds to import, and the router does not need it.
    from jaxflow.engine.heap import freeze_heap
    from jaxflow.llm import LLM
    from serving.operations.health import make_first_token

    llm = LLM.from_config(config, progress=False)
    make_first_token(llm)
    freeze_heap()
    return llm

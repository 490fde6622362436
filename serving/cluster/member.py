"""One replica of the router: its process, started again after each loss, and
the messages in both directions.
"""

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from jaxflow.config import EngineConfig
from serving.cluster.link import Launch, Link, LinkLost, Named, ReportedState, StartFailed
from serving.cluster.messages import ReplicaModel
from serving.operations.health import MIN_STALL_S, STALL_STEPS

log = logging.getLogger(__name__)

POLL_S = 0.25  # a replica without an event reports this often, or four times within `stall_s`
FIRST_WAIT_S, WAIT_GROWTH, LONGEST_WAIT_S = 0.1, 4, 60.0  # between two starts
CLOSE_S = 10.0  # for an engine to end in order


def restart_wait_s(failures: int) -> float:
    """Return the seconds before the next start, after so many failures in a row before the present loss."""
    return min(FIRST_WAIT_S * WAIT_GROWTH ** min(failures, 30), LONGEST_WAIT_S)


class Phase(enum.StrEnum):
    """The state of a replica."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"  # it finishes its requests, and gets no new ones
    STOPPED = "stopped"


class Owner[R: ReportedState](Protocol):
    """The driver, as its members see it."""

    def joined(self, member: "Member[Any, R]", description: ReplicaModel) -> None:
        """Send requests to the member. Raises: StartFailed for a model that is not the router's."""
        ...

    def heard(self, member: "Member[Any, R]", report: R) -> None:
        """Take a report."""
        ...

    def lost(self, member: "Member[Any, R]", reason: str) -> None:
        """Move the requests of a member whose process has ended. reason: empty for an ordered end."""
        ...


class Member[O: Named, R: ReportedState]:
    """One replica.

    Args:
      index: the replica's number in the router's books.
      config, version: the settings of its engine, and their name.
      stall_s: seconds without an answer or a step that make a loss; None for the larger of 10
        and 20 times the longest step.
      start_s: seconds that a process has to load its model.
      prefills: it computes prompts and lends their pages, and answers no request.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        version: str,
        *,
        launch: Launch,
        owner: Owner[R],
        stall_s: float | None,
        start_s: float,
        prefills: bool = False,
    ):
        self.prefills = prefills
        self.index, self.config, self.version = index, config, version
        self._launch, self._owner, self._stall_s, self._start_s = launch, owner, stall_s, start_s
        self.phase = Phase.STARTING
        self.description: ReplicaModel | None = None
        self.report: R | None = None
        self.names: set[str] = set()  # the names of the requests that it runs, see `Order.name`
        self.restarts = 0
        self.reason = ""  # the reason of the last loss
        self._longest_step_s = 0.0
        self._orders: list[O] = []
        self._aborted: list[str] = []
        self._orders_changed = asyncio.Event()
        self._leave = asyncio.Event()  # the driver wants the process to end
        self._finished = asyncio.Event()
        self._changed = asyncio.Event()
        self._ends = False

    # ---- what the driver asks

    def send(self, order: O) -> None:
        """Hand over a request."""
        self._orders.append(order)
        self.names.add(order.name)
        self._orders_changed.set()

    def abort(self, name: str) -> None:
        """End a request."""
        self.names.discard(name)
        self._orders = [order for order in self._orders if order.name != name]
        self._aborted.append(name)
        self._orders_changed.set()

    def done(self, name: str) -> None:
        """Note the end of a request."""
        self.names.discard(name)

    def leave(self, *, for_good: bool) -> None:
        """Finish the requests, then end the process. for_good: start no other one."""
        self._ends = self._ends or for_good
        if self.phase is Phase.SERVING:
            self._enter(Phase.DRAINING)
        self._leave.set()

    def stop(self) -> None:
        """End the process without waiting for its requests, which move."""
        self._ends = True
        self._leave.set()
        self.names.clear()

    async def until(self, *phases: Phase, lost: bool = False) -> None:
        """Wait for one of the phases. lost: also for a loss."""
        restarts = self.restarts
        while self.phase not in phases and not (lost and self.restarts > restarts):
            self._changed.clear()
            await self._changed.wait()

    @property
    def stall_s(self) -> float:
        """Return the seconds without an answer or a step that make a loss."""
        if self._stall_s is not None:
            return self._stall_s
        return max(MIN_STALL_S, STALL_STEPS * self._longest_step_s)

    @property
    def poll_s(self) -> float:
        """Return the seconds between two reports of a replica without an event."""
        return min(POLL_S, self.stall_s / 4)

    # ---- its life

    async def run(self, on_first: Callable[[Exception | None], None]) -> None:
        """Keep a process running until the member leaves for good.

        on_first: gets None once the first process serves, or the error of its start.
        """
        failures = 0  # losses in a row of processes that did not work
        while not self._ends:
            self._begin()
            began_s, reason = time.monotonic(), ""
            link: Link[O, R] | None = None
            try:
                link = self._launch(self.config, self.index)
                await self._serve(link, on_first)
            except (StartFailed, LinkLost) as error:
                reason = str(error)
                on_first(error)
            except Exception as error:  # one member's fault ends no other
                log.exception("replica %d", self.index)
                reason = f"{type(error).__name__}: {error}"
                on_first(error)
            finally:
                if link is not None:
                    link.kill()
            self._enter(Phase.STARTING)
            self.reason = reason or self.reason
            if reason:
                self.restarts += 1
                log.warning("replica %d was lost: %s", self.index, reason)
            self._owner.lost(self, reason)
            self.names.clear()
            self._changed.set()
            if reason and not self._ends:
                if self._longest_step_s or time.monotonic() - began_s > LONGEST_WAIT_S:
                    failures = 0  # the process has run a step, or has lived for long
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._leave.wait(), restart_wait_s(failures))
                failures += 1
        self._enter(Phase.STOPPED)

    def _begin(self) -> None:
        self._orders, self._aborted = [], []
        self._orders_changed.clear()
        self._leave.clear()
        self.description = self.report = None
        self._longest_step_s = 0.0

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._changed.set()

    async def _serve(self, link: Link[O, R], on_first: Callable[[Exception | None], None]) -> None:
        """Serve with one process until it is lost or has left in order. Raises: LinkLost, StartFailed."""
        describing = asyncio.ensure_future(link.describe())
        leaving = asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait(
                {describing, leaving}, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED
            )
            if leaving.done() and not describing.done():
                return  # it has no request yet
            if not describing.done():
                raise LinkLost(f"the model was not loaded within {self._start_s:.0f} s")
            self.description = describing.result()
        finally:
            describing.cancel()
            leaving.cancel()
        self._owner.joined(self, self.description)
        self._enter(Phase.SERVING)
        on_first(None)
        telling = asyncio.ensure_future(self._tell(link))
        listening = asyncio.ensure_future(self._listen(link))
        try:
            await asyncio.wait({telling, listening}, return_when=asyncio.FIRST_COMPLETED)
            for each in (telling, listening):
                if each.done():
                    each.result()
        finally:
            telling.cancel()
            listening.cancel()
        with contextlib.suppress(TimeoutError, LinkLost):
            await asyncio.wait_for(link.close(), CLOSE_S)

    async def _tell(self, link: Link[O, R]) -> None:
        """Hand over requests and ends in their order, all that wait in one message."""
        while True:
            await self._orders_changed.wait()
            self._orders_changed.clear()
            orders, self._orders = self._orders, []
            aborted, self._aborted = self._aborted, []
            await self._within(link.take(orders, aborted))

    async def _listen(self, link: Link[O, R]) -> None:
        """Take reports until the member may leave.

        Raises: LinkLost, also for an engine that does not advance.
        """
        while not (self._leave.is_set() and not self.names):
            report = await self._within(link.poll(self.poll_s))
            self._longest_step_s = max(self._longest_step_s, report.longest_step_s)
            self.report = report
            self._owner.heard(self, report)
            if report.fault:
                raise LinkLost(report.fault)
            if report.stalled_s + self.poll_s > self.stall_s:  # the next report would come too late
                raise LinkLost(f"no step advanced for {report.stalled_s:.0f} s")

    async def _within[T](self, answer: "asyncio.Future[T] | object") -> T:
        """Return an answer of the process.

        Raises: LinkLost, also without an answer, before `stall_s` are over.
        """
        limit_s = self.stall_s - self.poll_s
        try:
            return await asyncio.wait_for(answer, limit_s)  # type: ignore[arg-type]
        except TimeoutError:
            raise LinkLost(f"no answer for {limit_s:.0f} s") from None

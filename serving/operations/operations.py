"""The state behind the routes and the logs of operation."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import Token
from types import TracebackType

from jaxflow.engine.expert_load import ExpertTokens
from serving.frontend.call import CALL, Call
from serving.operations.fleet import Fleet
from serving.operations.health import Health, ServedState
from serving.operations.metrics import EngineCollector, exposition, make_registry
from serving.operations.recorder import Recorder
from serving.operations.request_log import ERROR, REFUSED, RequestLog, outcome, record
from serving.operations.status import Status
from serving.operations.tracing import Tracing

log = logging.getLogger(__name__)
PERIOD_S = 0.25


class Operations:
    """Health, metrics, logs, traces and status of one server. One object serves all of the server's ports.

    Args:
      stall_s: see `Health`.
      legacy_metric_names: see `EngineCollector`.
      request_log, tracing: get each call at its end; None for none.
      fleet: the replicas behind the server; None for one engine.
    """

    def __init__(
        self,
        served: ServedState,
        *,
        stall_s: float | None = None,
        legacy_metric_names: bool = False,
        request_log: RequestLog | None = None,
        tracing: Tracing | None = None,
        fleet: Fleet | None = None,
    ):
        self.served = served
        self.recorder = Recorder(served)
        self.health = Health(served, self.recorder.longest_step_s, stall_s, fleet)
        self.status = Status(served, self.recorder, self.health, fleet)
        self._registry = make_registry(
            EngineCollector(served, self.recorder, self.health, legacy_metric_names, fleet)
        )
        self._log, self._tracing = request_log, tracing

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return exposition(self._registry)

    def experts(self) -> ExpertTokens | None:
        """Return the tokens at each expert since the start; None without mixture
        layers and before the first step.
        """
        return self.served.llm.driver.expert_tokens() if self.served.loaded else None

    async def run(self, on_ready: Callable[[bool], Awaitable[None]] | None = None) -> None:
        """Take the engine's records and measure the event loop's lag until cancelled.

        `on_ready` is called with the answer of `Health.ready` each time the answer changes.
        """
        shown: bool | None = None
        while True:
            ready = self.health.ready().ok
            if on_ready is not None and ready != shown:
                shown = ready
                await on_ready(ready)
            asked_s = time.monotonic()
            await asyncio.sleep(PERIOD_S)
            self.recorder.loop_lag_s.observe(max(0.0, time.monotonic() - asked_s - PERIOD_S))
            self.recorder.update()

    def observe(self, protocol: str, method: str, traceparent: str = "") -> AbstractContextManager[Call]:
        """Record a call for its duration, then log, count and trace the call. See `serving.frontend.call`."""
        return _Observation(Call(protocol, method, traceparent), self._end)

    def close(self) -> None:
        """Write the last lines and spans."""
        if self._log is not None:
            self._log.close()
        if self._tracing is not None:
            self._tracing.close()

    def _end(self, call: Call) -> None:
        if self._log is None and self._tracing is None and call.error is None and call.status < 400:
            return  # neither refused nor failed
        result, reason = outcome(call)
        if result == REFUSED:
            name = reason.partition(":")[0]
            self.recorder.refuse(name)
            if name == "too_slow":
                self.recorder.drop_stream(call.name)
        elif result == ERROR and not call.ends:
            self.recorder.add_fault(f"call failed: {reason}", call.name)
        if self._log is None and self._tracing is None:
            return
        ended_ns = time.time_ns()
        trace_id = ""
        if self._tracing is not None:
            if self.served.loaded:
                self._tracing.model_name = self.served.llm.name
            trace_id = self._tracing.export(call, ended_ns)
        if self._log is not None:
            self._log.write(record(call, ended_ns, trace_id))


class _Observation(AbstractContextManager[Call]):
    """The record of one call, for a block. A class costs less than a generator, and each request has one."""

    def __init__(self, call: Call, end: Callable[[Call], None]):
        self._call, self._end = call, end
        self._token: Token[Call | None] | None = None

    def __enter__(self) -> Call:
        self._token = CALL.set(self._call)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._call.fail(error)
        assert self._token is not None
        CALL.reset(self._token)
        try:
            self._end(self._call)
        except Exception:  # a full disk or a missing collector ends no call
            log.exception("call %r could not be logged", self._call.name)

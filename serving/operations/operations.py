"""The state behind the routes and the logs of operation."""

import asyncio
import time

from serving.operations.health import Health, ServedState
from serving.operations.metrics import EngineCollector, exposition, make_registry
from serving.operations.recorder import Recorder

PERIOD_S = 0.25


class Operations:
    """Health, metrics and status of one server. One object serves all of the server's ports.

    Args:
      stall_s: see `Health`.
      legacy_metric_names: see `EngineCollector`.
    """

    def __init__(
        self, served: ServedState, *, stall_s: float | None = None, legacy_metric_names: bool = False
    ):
        self.served = served
        self.recorder = Recorder(served)
        self.health = Health(served, self.recorder.longest_step_s, stall_s)
        self._registry = make_registry(
            EngineCollector(served, self.recorder, self.health, legacy_metric_names)
        )

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return exposition(self._registry)

    async def run(self) -> None:
        """Take the engine's records and measure the event loop's lag until cancelled."""
        while True:
            asked_s = time.monotonic()
            await asyncio.sleep(PERIOD_S)
            self.recorder.loop_lag_s.observe(max(0.0, time.monotonic() - asked_s - PERIOD_S))
            self.recorder.update()

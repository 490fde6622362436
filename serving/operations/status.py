"""The content of the status page: one JSON object of this moment."""

import collections
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

import jaxflow
from jaxflow.engine.expert_load import ExpertTokens
from jaxflow.engine.step_log import StepRecord
from serving.operations.fleet import Fleet
from serving.operations.health import Health, ServedState
from serving.operations.recorder import Recorder

WINDOW_S = 10.0  # rates are means over this time


class RecentExperts:
    """The share of each expert in the tokens of the last seconds.

    A sample is kept a second, so that the shares cover `WINDOW_S` for any number of viewers.
    """

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, np.ndarray]] = collections.deque()

    def now(self, found: ExpertTokens, now_s: float) -> dict[str, Any]:
        """Return each expert's tokens over the mean of its layer. found: the tokens since the start."""
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - WINDOW_S:
            self._samples.popleft()
        if not self._samples or self._samples[-1][0] <= now_s - 1.0:
            self._samples.append((now_s, found.tokens))
        tokens = found.tokens - self._samples[0][1]
        if not tokens.any():  # the first answer, and an idle engine
            tokens = found.tokens
        load = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
        return {"layers": found.layers, "load": np.round(load, 2).tolist()}


class Status:
    """The source of the status page."""

    def __init__(self, served: ServedState, recorder: Recorder, health: Health, fleet: Fleet | None = None):
        self._served, self._recorder, self._health, self._fleet = served, recorder, health, fleet
        self._begun_s = time.monotonic()
        self._experts = RecentExperts()

    def now(self) -> dict[str, Any]:
        """Return the status."""
        self._recorder.update()
        ready = self._health.ready()
        status: dict[str, Any] = {
            "state": self._state(),
            "reason": ready.reason,
            "version": jaxflow.__version__,
            "uptime_s": round(time.monotonic() - self._begun_s),
            "faults": [
                {"time_s": fault.time_s, "kind": fault.kind, "request_id": fault.request_id}
                for fault in reversed(self._recorder.faults)
            ],
        }
        if self._fleet is not None:
            status["replicas"] = [msgspec.structs.asdict(replica) for replica in self._fleet.replicas()]
        return status | self._engine() if self._served.loaded else status

    def _state(self) -> str:
        if not self._served.loaded:
            return "loading"
        if not self._served.llm.driver.alive:
            return "failed"
        if self._health.stalled_for_s:
            return "stalled"
        if self._fleet is not None and self._fleet.unready():
            return "no replica"
        return "draining" if self._served.draining else "ready"

    def _engine(self) -> dict[str, Any]:
        llm, recorder = self._served.llm, self._recorder
        stats, config = llm.driver.stats(), llm.engine_config
        steps, window_s = recent(recorder.recent_steps, time.monotonic())
        ends = list(recorder.recent_ends)
        last = recorder.recent_steps[-1] if recorder.recent_steps else None
        experts = llm.driver.expert_tokens()
        intervals = [
            after.read_s - before.read_s
            for one in by_replica(steps)
            for before, after in itertools.pairwise(one)
            if after.new_decode_tokens
        ]
        return {
            "model": llm.name,
            "running": stats.running_requests,
            "waiting": stats.waiting_requests,
            "generated_per_s": sum(step.new_tokens for step in steps) / window_s,
            "prompt_per_s": sum(step.prefill_tokens for step in steps) / window_s,
            "steps_per_s": len(steps) / window_s,
            "kv": tiers(stats),
            "experts": None if experts is None else self._experts.now(experts, time.monotonic()),
            "step": {
                "device": device_kind() if self._fleet is None else self._fleet.device,
                "dtype": config.dtype,
                "kv_cache_dtype": config.kv_cache_dtype,
                "tensor_parallel_size": config.tensor_parallel_size,
                "plan": last.plan if last else config.plan,
                "tokens": f"{last.decode_tokens + last.prefill_tokens} of {last.bucket}"
                if last
                else "none yet",
            },
            "latencies_ms": {
                "queue": percentiles([end.timings.queued_s for end in ends]),
                "first token": percentiles([end.timings.time_to_first_token_s for end in ends]),
                "between tokens": percentiles(intervals),
                "whole request": percentiles([end.timings.total_s for end in ends]),
            },
        }


def recent(steps: collections.deque[StepRecord], now_s: float) -> tuple[list[StepRecord], float]:
    """Return the steps of the last seconds, oldest first, and the seconds that they cover.

    The seconds are `WINDOW_S`, or fewer if a full deque holds fewer.
    """
    full = len(steps) == steps.maxlen
    window_s = min(WINDOW_S, now_s - steps[0].read_s) if full else WINDOW_S
    return [step for step in steps if step.read_s > now_s - window_s], max(window_s, 1e-3)


def by_replica(steps: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Return the steps of each replica, in their order."""
    found: dict[int, list[StepRecord]] = {}
    for step in steps:
        found.setdefault(step.replica, []).append(step)
    return list(found.values())


def tiers(stats: Any) -> list[dict[str, Any]]:
    """Return the used and total pages of each tier. A total of None is not limited by pages."""
    found = [{"tier": "device", "used": stats.kv_pages - stats.kv_pages_free, "total": stats.kv_pages}]
    found += [
        {"tier": tier, "used": stats.kv_tiers[f"{tier}_pages"], "total": None}
        for tier in ("host", "disk")
        if f"{tier}_pages" in stats.kv_tiers
    ]
    return found


def percentiles(seconds: Sequence[float]) -> list[float] | None:
    """Return the median and the 99th percentile in milliseconds, or None without values."""
    if not seconds:
        return None
    if len(seconds) == 1:
        return [1e3 * seconds[0]] * 2
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    return [1e3 * hundredths[49], 1e3 * hundredths[98]]


def device_kind() -> str:
    """Return the kind of the device that runs the steps."""
    jax = sys.modules.get(
        "jax"
    )  # an engine imports JAX; importing it here would stop all streams for seconds
    return "none" if jax is None else f"{jax.device_count()} x {jax.devices()[0].device_kind}"

"""The measurements that metrics and the status page show, fed from the engine's step log."""

import collections
import dataclasses
import time

from jaxflow.engine.step_log import StepRecord
from jaxflow.request import Finished
from serving.frontend.refusal import Code
from serving.operations.health import ServedState
from serving.operations.histogram import SECONDS, STEP_SECONDS, TOKENS, Histogram

RECENT = 1000  # steps and sequences that the status page and the stall limit look at
FAULTS = 20


@dataclasses.dataclass(frozen=True)
class Fault:
    """A failure that the status page lists, without text of a caller."""

    time_s: float  # since the epoch
    kind: str
    request_id: str = ""


class Recorder:
    """Histograms and counts since the start. The event loop's thread uses the recorder."""

    def __init__(self, served: ServedState):
        self._served = served
        self.queue_s, self.prefill_s, self.decode_s, self.inference_s, self.total_s, self.first_token_s = (
            Histogram(SECONDS) for _ in range(6)
        )
        self.inter_token_s, self.time_per_output_token_s, self.step_s, self.loop_lag_s = (
            Histogram(STEP_SECONDS) for _ in range(4)
        )
        self.prompt_tokens, self.generation_tokens, self.step_tokens = (Histogram(TOKENS) for _ in range(3))
        self.sequences: collections.Counter[str] = collections.Counter(
            dict.fromkeys(("stop", "length", "abort", "error"), 0)
        )
        self.refusals: collections.Counter[str] = collections.Counter(dict.fromkeys(map(str, Code), 0))
        self.dropped_streams = 0
        self.device_wait_s = self.host_s = 0.0
        self.recent_steps: collections.deque[StepRecord] = collections.deque(maxlen=RECENT)
        self.recent_ends: collections.deque[Finished] = collections.deque(maxlen=RECENT)
        self.faults: collections.deque[Fault] = collections.deque(maxlen=FAULTS)
        self._last: dict[int, StepRecord] = {}  # by replica
        self._longest_s: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._engine_fault: BaseException | None = None

    def update(self) -> None:
        """Take the engine's new records."""
        if not self._served.loaded:
            return
        driver = self._served.llm.driver
        steps, ends = driver.log.take()
        for step in steps:
            self._take_step(step)
        for end in ends:
            self._take_end(end)
        if driver.fault is not None and driver.fault is not self._engine_fault:
            self._engine_fault = driver.fault
            self.add_fault(f"engine stopped: {type(driver.fault).__name__}")

    def refuse(self, reason: str) -> None:
        """Count a request that was not taken, by a short fixed name of the reason."""
        self.refusals[reason] += 1

    def drop_stream(self, request_id: str) -> None:
        """Count a stream that ended because its client read too slowly."""
        self.dropped_streams += 1
        self.add_fault("stream dropped: the client read too slowly", request_id)

    def add_fault(self, kind: str, request_id: str = "") -> None:
        """Add an entry to the last faults."""
        self.faults.append(Fault(time.time(), kind, request_id))

    def longest_step_s(self) -> float:
        """Return the seconds of the longest recent step, 0 before the first."""
        return max(self._longest_s, default=0.0)

    def _take_step(self, step: StepRecord) -> None:
        last, self._last[step.replica] = self._last.get(step.replica), step
        self.recent_steps.append(step)
        # The device runs one step after another: a step begins when the step before ends.
        begun_s = step.enqueued_s if last is None else max(step.enqueued_s, last.read_s)
        seconds = max(0.0, step.read_s - begun_s)
        self._longest_s.append(step.read_s - step.enqueued_s)
        self.step_s.observe(seconds)
        self.step_tokens.observe(step.decode_tokens + step.prefill_tokens)
        self.device_wait_s += step.wait_s
        self.host_s += max(0.0, seconds - step.wait_s)
        if last is not None and step.new_decode_tokens:
            # Every running sequence decodes in every step, so its tokens are one step apart.
            self.inter_token_s.observe(step.read_s - last.read_s, step.new_decode_tokens)

    def _take_end(self, end: Finished) -> None:
        self.recent_ends.append(end)
        self.sequences["error" if end.error is not None else str(end.reason)] += 1
        if end.error is not None:
            self.add_fault(f"request failed: {type(end.error).__name__}", end.request_id)
        usage, timings = end.usage, end.timings
        if not usage.completion_tokens:
            return  # the sequence ended before its first token, and its times mean nothing
        first_s, decode_s = timings.time_to_first_token_s, timings.total_s - timings.time_to_first_token_s
        self.queue_s.observe(timings.queued_s)
        self.prefill_s.observe(first_s - timings.queued_s)
        self.decode_s.observe(decode_s)
        self.inference_s.observe(timings.total_s - timings.queued_s)
        self.total_s.observe(timings.total_s)
        self.first_token_s.observe(first_s)
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generation_tokens.observe(usage.completion_tokens)
        if usage.completion_tokens > 1:
            self.time_per_output_token_s.observe(decode_s / (usage.completion_tokens - 1))

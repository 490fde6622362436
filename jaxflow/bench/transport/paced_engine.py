"""An engine without a model, of the shape of `jaxflow.llm.LLM`: each step gives
one token to each running row.

The tokens of an answer repeat the prompt, so that a client can check every answer.
The module does not import JAX.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxflow.bench.workload.byte_tokenizer import byte_tokenizer
from jaxflow.config import EngineConfig, Layer, ModelConfig
from jaxflow.engine.step_log import StepLog, StepRecord
from jaxflow.prompt import make_request
from jaxflow.request import (
    Delta,
    Draining,
    Event,
    Finished,
    FinishReason,
    QueueFull,
    Request,
    SamplingParams,
    Started,
    Timings,
    Usage,
)

if TYPE_CHECKING:
    from jaxflow.engine.driver import Mailbox
    from jaxflow.engine.loop import Stats

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 8192


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """A sequence that runs or waits. `begun_s`: the start of its first step."""

    request: Request
    mailbox: "Mailbox"
    prompt: list[int]
    limit: int
    arrived_s: float
    begun_s: float = 0.0
    sent: int = 0


class PacedDriver:
    """A driver with `rows` rows that starts a step every `step_s` seconds, or as
    soon as the last one has ended.

    Only requests of one sequence are served. They end after `max_tokens` tokens.

    Attributes:
      steps, tokens: counters since the start.
      first_tokens: of each request with a seed: when it arrived, and when its first token was made, in
        seconds of the monotonic clock.
    """

    fault: BaseException | None = None

    def __init__(self, rows: int, step_s: float, max_waiting: int):
        self.rows, self.step_s, self.max_waiting = rows, step_s, max_waiting
        self.steps = self.tokens = self.prompt_tokens = 0
        self.first_tokens: list[tuple[float, float]] = []
        self.log = StepLog()
        self._wake = threading.Condition()
        self._waiting: dict[str, _Row] = {}
        self._running: dict[str, _Row] = {}
        self._draining = self._closed = False
        self._advanced_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="paced-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return True while steps can run."""
        return self._thread.is_alive()

    def seconds_without_progress(self) -> float:
        """Return the seconds since the last step ended; 0 while there is no work."""
        advanced_s = self._advanced_s
        return 0.0 if advanced_s is None else time.monotonic() - advanced_s

    def expert_tokens(self) -> None:
        """Return None, since the engine has no experts."""

    def accept(self, request: Request) -> Request:
        """Return the request, which `submit` would take."""
        return request

    def submit(self, request: Request, mailbox: "Mailbox") -> None:
        """Queue a request. Raises: Draining, QueueFull."""
        prompt = list(request.prompt_token_ids)
        limit = request.sampling.max_tokens or MAX_MODEL_LEN - len(prompt)
        with self._wake:
            if self._draining:
                raise Draining("the engine is shutting down")
            if len(self._waiting) >= self.max_waiting:
                raise QueueFull(len(self._waiting), 1.0)
            self._waiting[request.request_id] = _Row(request, mailbox, prompt, limit, time.monotonic())
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request without further events."""
        with self._wake:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)

    def stats(self) -> "Stats":
        """Return the counters. A running request holds one of `rows` pages."""
        from jaxflow.engine.loop import Stats

        running = len(self._running)
        return Stats(
            running_requests=running,
            waiting_requests=len(self._waiting),
            kv_pages=self.rows,
            kv_pages_free=self.rows - running,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            cached_prompt_tokens=0,
            preemptions=0,
            compilations_after_warmup=0,
            steps_by_plan={"sequential": self.steps},
            kv_tiers={},
        )

    def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the others.

        Return the number that was aborted after `timeout_s`.
        """
        with self._wake:
            self._draining = True
            self._wake.wait_for(lambda: not (self._waiting or self._running), timeout_s)
            left = [*self._running.values(), *self._waiting.values()]
            self._running.clear()
            self._waiting.clear()
        for row in left:
            row.mailbox.post([_finished(row, FinishReason.ABORT)])
        return len(left)

    def close(self) -> None:
        """Stop the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    # ---- the engine's thread

    def _run(self) -> None:
        due_s = 0.0
        while True:
            with self._wake:
                if not (self._waiting or self._running):
                    self._advanced_s = None
                    self._wake.notify_all()  # a drain may wait for this
                self._wake.wait_for(lambda: self._waiting or self._running or self._closed)
                if self._closed:
                    return
            due_s = max(time.monotonic(), due_s + self.step_s)
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self._wake:
                posts = self._step()
            for mailbox, events in posts:
                mailbox.post(events)

    def _step(self) -> "list[tuple[Mailbox, list[Event]]]":
        """Give one token to each row. Return the events of each mailbox."""
        began_s = time.monotonic()
        while self._waiting and len(self._running) < self.rows:
            name = next(iter(self._waiting))
            row = self._running[name] = self._waiting.pop(name)
            row.begun_s = began_s
        by_mailbox: dict[int, tuple[Mailbox, list[Event]]] = {}
        ended, firsts, prefilled = [], 0, 0
        mailbox, events = None, []
        for name, row in self._running.items():
            if row.mailbox is not mailbox:  # most rows have the same one
                mailbox = row.mailbox
                events = by_mailbox.setdefault(id(mailbox), (mailbox, []))[1]
            prompt, sent = row.prompt, row.sent
            if not sent:
                firsts += 1
                if row.request.sampling.seed is not None:
                    self.first_tokens.append((row.arrived_s, time.monotonic()))
                prefilled += len(prompt)
                events.append(Started(name, len(prompt), 0, row.request.sampling.seed or 0))
            row.sent = sent + 1
            events.append(Delta(name, 0, (prompt[sent % len(prompt)],)))
            if row.sent >= row.limit:
                ended.append(name)
                end = _finished(row, FinishReason.LENGTH)
                events.append(end)
                self.log.ends.append(end)
        tokens = len(self._running)
        for name in ended:
            del self._running[name]
        self.steps += 1
        self.tokens += tokens
        self.prompt_tokens += prefilled
        self._advanced_s = time.monotonic()
        self.log.steps.append(
            StepRecord(
                plan="sequential",
                bucket=self.rows,
                decode_tokens=tokens - firsts,
                prefill_tokens=prefilled,
                new_tokens=tokens,
                new_decode_tokens=tokens - firsts,
                enqueued_s=began_s,
                wait_s=0.0,
                read_s=self._advanced_s,
            )
        )
        return list(by_mailbox.values())


def _finished(row: _Row, reason: FinishReason) -> Finished:
    now = time.monotonic()
    begun_s = row.begun_s or now
    return Finished(
        row.request.request_id,
        0,
        reason,
        Usage(len(row.prompt), 0, row.sent),
        Timings(begun_s - row.arrived_s, begun_s - row.arrived_s, now - row.arrived_s, 0),
    )


class PacedLLM:
    """The attributes of `LLM` that the servers use, around a `PacedDriver`. Its tokens are bytes.

    Args:
      rows, step_s, max_waiting: see `PacedDriver`.
    """

    def __init__(self, rows: int, step_s: float, max_waiting: int = 100_000):
        self.name = "paced"
        self.tokenizer = byte_tokenizer(VOCAB_SIZE)
        self.max_model_len = MAX_MODEL_LEN
        self.generation_config: Mapping[str, Any] = {}
        self.engine_config = EngineConfig(
            model=self.name, plan="sequential", max_num_seqs=rows, max_num_batched_tokens=rows
        )
        self.model_config = ModelConfig(
            architecture="llama",
            vocab_size=VOCAB_SIZE,
            hidden_size=8,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=8,
            layers=(Layer(),),
            max_position=MAX_MODEL_LEN,
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
        self.driver = PacedDriver(rows, step_s, max_waiting)

    def request(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Return the request of a prompt. Raises: InvalidRequest."""
        return make_request(
            request_id,
            prompt,
            sampling,
            self.tokenizer,
            VOCAB_SIZE,
            priority=priority,
            cache_salt=cache_salt,
        )

    def close(self) -> None:
        """Stop the driver."""
        self.driver.close()

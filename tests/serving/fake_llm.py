"""An engine without a model, of the shape of `jaxflow.LLM`: it repeats the prompt, and fails where a test
wants it to.
"""

import dataclasses
import threading
import time
import types

import paths

from jaxflow.config import EngineConfig, Layer, ModelConfig
from jaxflow.engine.step_log import StepLog, StepRecord
from jaxflow.request import (
    ContextLengthExceeded,
    Delta,
    Draining,
    Finished,
    FinishReason,
    InvalidRequest,
    Logprob,
    QueueFull,
    Request,
    SamplingParams,
    Started,
    Timings,
    Usage,
)
from jaxflow.request_output import detokenizer
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.text.tokenizer import load_tokenizer

PAGES, PAGE_TOKENS = 1000, 16
FAULT_TOKEN = (
    300  # a prompt with this token makes the engine fault when it is first run, unless a test says otherwise
)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif "
    "%}{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% "
    "endif %}"
)


@dataclasses.dataclass
class Running:
    """One sequence of a request."""

    request: Request
    index: int
    mailbox: object
    limit: int
    detokenizer: object
    sent: int = 0
    submitted: float = dataclasses.field(default_factory=time.monotonic)


class FakeDriver:
    """Steps on its own thread while `gate` is set, one token a sequence a
    step; each request holds one page.
    """

    def __init__(
        self,
        max_model_len: int,
        eos: int,
        *,
        step_s: float = 0.001,
        max_waiting: int = 1000,
        fault_token: int | None = FAULT_TOKEN,
    ):
        self.max_model_len, self.eos, self.step_s, self.max_waiting = max_model_len, eos, step_s, max_waiting
        self.scheduling = SchedulerConfig(
            token_budget=512,
            max_num_seqs=512,
            block_size=PAGE_TOKENS,
            windows=(None,),
            num_pages=(PAGES,),
            max_model_len=max_model_len,
            buckets=(512,),
            max_waiting=max_waiting,
        )
        self.fault_token = fault_token
        self.experts = None  # a test may set an `ExpertTokens`
        self.gate = threading.Event()
        self.gate.set()
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.steps = self.posts = self.completion_tokens = 0
        self.alive = True
        self.fault: BaseException | None = None
        self.log = StepLog()
        self._advanced_s: float | None = None
        self._lock = threading.Condition()
        self._running: list[Running] = []
        self._draining = self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request, mailbox) -> None:
        with self._lock:
            if self._draining:
                raise Draining("the engine is shutting down")
            if len(self._running) >= self.max_waiting:
                raise QueueFull(len(self._running), 1.5)
            self.submitted.append(request)
            sampling = request.sampling
            limit = sampling.max_tokens or self.max_model_len - len(request.prompt_token_ids)
            for index in range(sampling.n):
                text = request.make_detokenizer() if request.make_detokenizer else None
                self._running.append(Running(request, index, mailbox, limit, text))
            self._lock.notify_all()

    def seconds_without_progress(self) -> float:
        advanced_s = self._advanced_s
        return 0.0 if advanced_s is None else time.monotonic() - advanced_s

    def die(self, fault: BaseException) -> None:
        """End the engine with a fault, as `Driver` does."""
        with self._lock:
            self.fault, self.alive, self._closed = fault, False, True
            left, self._running = self._running, []
            self.gate.set()
            self._lock.notify_all()
        for run in left:
            self._end(run.mailbox, [self._finished(run, FinishReason.ABORT, error=fault)])

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            self._running = [run for run in self._running if run.request.request_id != request_id]
            self._lock.notify_all()

    def stats(self):
        live = {run.request.request_id for run in self._running}
        return types.SimpleNamespace(
            running_requests=len(live),
            waiting_requests=0,
            kv_pages=PAGES,
            kv_pages_free=PAGES - len(live),
            steps=self.steps,
            prompt_tokens=0,
            completion_tokens=self.completion_tokens,
            cached_prompt_tokens=0,
            preemptions=0,
            compilations_after_warmup=0,
            steps_by_plan={"sequential": self.steps},
            kv_tiers={},
        )

    def expert_tokens(self):
        return self.experts

    def drain(self, timeout_s: float) -> int:
        with self._lock:
            self._draining = True
            self._lock.wait_for(lambda: not self._running, timeout_s)
            left, self._running = self._running, []
        for run in left:
            self._end(run.mailbox, [self._finished(run, FinishReason.ABORT)])
        return len({run.request.request_id for run in left})

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.gate.set()
            self._lock.notify_all()
        self._thread.join()

    def _end(self, mailbox, events: list) -> None:
        self.log.ends.extend(event for event in events if isinstance(event, Finished))
        mailbox.post(events)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._running:
                    self._advanced_s = None
                self._lock.wait_for(lambda: self._running or self._closed)
                if self._closed:
                    return
                begun_s = self._advanced_s = time.monotonic()
            self.gate.wait()
            with self._lock:
                self.steps += 1
                firsts = sum(run.sent == 0 for run in self._running)
                decodes = len(self._running) - firsts
                by_mailbox: dict[int, tuple[object, list]] = {}
                for run in list(self._running):
                    by_mailbox.setdefault(id(run.mailbox), (run.mailbox, []))[1].extend(self._step(run))
                for mailbox, events in by_mailbox.values():
                    self.posts += 1
                    self._end(mailbox, events)
                self.completion_tokens += firsts + decodes
                read_s = self._advanced_s = time.monotonic()
                tokens = (decodes, firsts, firsts + decodes, decodes)
                self.log.steps.append(StepRecord("sequential", 512, *tokens, begun_s, 0.0, read_s))
                self._lock.notify_all()
            time.sleep(self.step_s)

    def _step(self, run: Running):
        request, sampling = run.request, run.request.sampling
        prompt = request.prompt_token_ids
        if self.fault_token in prompt:
            self._running.remove(run)
            return [
                self._finished(run, FinishReason.ABORT, error=ZeroDivisionError("a secret of the engine"))
            ]
        events = []
        if run.sent == 0 and run.index == 0:
            asked = sampling.prompt_logprobs is not None
            logprobs = (None, *({token: Logprob(-1.0, 1)} for token in prompt[1:])) if asked else None
            events.append(Started(request.request_id, len(prompt), 0, 2**64 - 7, logprobs))
        token = self.token(run)
        run.sent += 1
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = (
                {token: Logprob(-0.5, 2)}
                | {other: Logprob(-0.25, 1) for other in range(3, 3 + sampling.logprobs)},
            )
        events.append(Delta(request.request_id, run.index, (token,), logprobs))
        if run.detokenizer:
            run.detokenizer.push([token])
        stop = run.detokenizer.stopped_by if run.detokenizer else None
        if stop is not None:
            events.append(self._finished(run, FinishReason.STOP, stop_string=stop))
        elif token in sampling.stop_token_ids or (token == self.eos and not sampling.ignore_eos):
            events.append(self._finished(run, FinishReason.STOP, stop_token_id=token))
        elif run.sent >= run.limit:
            events.append(self._finished(run, FinishReason.LENGTH))
        if isinstance(events[-1], Finished):
            self._running.remove(run)
        return events

    def token(self, run: Running) -> int:
        """The next token of a sequence."""
        prompt = run.request.prompt_token_ids
        return int(prompt[run.sent % len(prompt)])

    def _finished(self, run: Running, reason: FinishReason, **more) -> Finished:
        seconds = time.monotonic() - run.submitted
        usage = Usage(len(run.request.prompt_token_ids), 0, run.sent)
        return Finished(
            run.request.request_id, run.index, reason, usage, Timings(0.0, seconds / 2, seconds, 0), **more
        )


class FakeLLM:
    """The surface of `jaxflow.LLM` that the services use, around a
    `FakeDriver`; the tokenizer is a real one.
    """

    def __init__(
        self,
        *,
        has_tokenizer=True,
        chat_template: str | None = None,
        generation_config=None,
        max_model_len=4096,
        **driver,
    ):
        tokenizer = load_tokenizer(paths.MODELS / "stories260K")
        tokenizer.chat_template = chat_template
        eos = tokenizer.eos_token_id
        self.name = "fake"
        self.tokenizer = tokenizer if has_tokenizer else None
        self.max_model_len = max_model_len
        self.generation_config = generation_config or {}
        self.engine_config = EngineConfig(
            model="fake", plan="sequential", max_num_seqs=64, max_num_batched_tokens=256
        )
        self.model_config = ModelConfig(
            architecture="llama",
            vocab_size=512,
            hidden_size=8,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=8,
            layers=(Layer(),),
            max_position=self.max_model_len,
            eos_token_ids=(eos,),
        )
        self.driver = FakeDriver(self.max_model_len, eos, **driver)

    def request(
        self, prompt, params: SamplingParams, *, request_id: str, priority: int = 0, cache_salt: str = ""
    ) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise InvalidRequest("prompt", [], "at least one token")
        for token in ids:
            if token >= self.model_config.vocab_size:
                raise InvalidRequest(
                    "prompt_token_ids", token, f"token ids 0 to {self.model_config.vocab_size - 1}"
                )
        if len(ids) + (params.max_tokens or 1) > self.max_model_len:
            accepted = f"prompt and output within {self.max_model_len} tokens"
            asked = params.max_tokens or 1
            raise ContextLengthExceeded("max_tokens", params.max_tokens, accepted, len(ids), asked)
        params.check_vocabulary(self.model_config.vocab_size)
        made = Request(request_id, ids, params, priority, cache_salt)
        if not params.stop:
            return made
        return dataclasses.replace(made, make_detokenizer=lambda: detokenizer(made, self.tokenizer))

    def close(self) -> None:
        self.driver.close()

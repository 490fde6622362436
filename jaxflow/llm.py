"""The Python API: `LLM` loads a model and generates, with the names and meanings of vLLM."""

import asyncio
import collections
import contextlib
import itertools
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from tqdm import tqdm

from jaxflow.config import EngineConfig, engine_config
from jaxflow.engine.executor import Executor
from jaxflow.engine.settings import resolve
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start import CheckPlans, Engine, open_model, prepare_process, start_engine
from jaxflow.engine.team import Team, join_team
from jaxflow.flexgen.config import OffloadConfig, check_engine, offload_config
from jaxflow.flexgen.policy import Policy
from jaxflow.flexgen.runtime import Runtime
from jaxflow.flexgen.start import prepare, start
from jaxflow.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxflow.prompt import Prompt, as_list, make_request, open_tokenizer, without_name
from jaxflow.request import Amount, Event, Finished, InvalidRequest, QueueFull, Request, SamplingParams
from jaxflow.request_output import CompletionOutput, OutputBuilder, RequestFailed, RequestOutput, collect
from jaxflow.structured.compiler import FormCompiler
from jaxflow.text.chat import encode_chat
from jaxflow.text.tokenizer import Tokenizer
from pallas_kernels.kernel_set import KernelSet

__all__ = ["LLM", "CompletionOutput", "Prompt", "RequestFailed", "RequestOutput"]

RETRY_S = 0.1  # seconds between two attempts to submit a request that found the queue full


class LLM:
    """A loaded and warm model.

    Args:
      model: a folder, a .gguf file, a converted checkpoint, a hub id, or the name of a shipped config, which
        gets dummy weights.
      progress: show the progress of loading and compiling.
      offload: for a model that does not fit the device: a policy, its file, or a
        `jaxflow.flexgen.config.OffloadConfig`. `generate` and `chat` then run FlexGen's offline runtime,
        block after block. There is no stream, and the calls of several threads wait for each other.
      config: an `EngineConfig`, instead of `settings`.
      kernels: the setting of this name, or the kernels instead of those that the settings choose.
      executor: the executor of an engine that has ended, with its weights and programs, see `start_engine`.
      check_plans: refuses plans before the weights are loaded, see `start_engine`.
      settings: other fields of `jaxflow.config.EngineConfig`. With `coordinator`, `num_processes` and
        `process_id`, several processes run one engine: the call returns in process 0 only, and in the others
        it raises SystemExit once process 0 closes the model. With `offload`, of
        `jaxflow.flexgen.config.ENGINE_FIELDS`.

    Raises:
      ConfigError, CheckpointError, TokenizerError, PolicyError, DiskError: naming the field or file.
    """

    def __init__(
        self,
        model: str,
        *,
        progress: bool = True,
        offload: OffloadConfig | Policy | str | os.PathLike | None = None,
        config: EngineConfig | None = None,
        kernels: KernelSet | str | None = None,
        executor: Executor | StagedExecutor | None = None,
        check_plans: CheckPlans | None = None,
        **settings: Any,
    ):
        if isinstance(kernels, str):
            settings, kernels = settings | {"kernels": kernels}, None
        config = engine_config(model, settings) if config is None else config
        self.runtime: Runtime | None = None
        if offload is None:
            prepare_process(config)
            team = join_team(config)
            with contextlib.nullcontext() if team is None else team.telling_faults():
                checkpoint = open_model(config)
                self.tokenizer: Tokenizer | None = open_tokenizer(config, checkpoint)
                engine = start_engine(
                    config,
                    checkpoint,
                    kernels=kernels,
                    executor=executor,
                    team=team,
                    progress=progress,
                    check_plans=check_plans,
                )
            self._backend: Backend = _Serving(engine, team)
            # The engine's thread holds the weights, so it ends with a model that nobody closed. A process
            # that exits needs no such end.
            weakref.finalize(self, engine.driver.end).atexit = False
            self.engine_config, self.driver, self.executor = engine.config, engine.driver, engine.executor
        else:
            placed = offload_config(offload, config.model)
            check_engine(config)
            prepare(placed, config)
            checkpoint = open_checkpoint(config.model, load_format=config.load_format)
            self.tokenizer = open_tokenizer(config, checkpoint)
            self.runtime = start(placed, config, checkpoint, progress=progress)
            self._backend = _Offloaded(self.runtime)
            # A model that nobody closed must not leave its files on the disk, also where the process exits.
            weakref.finalize(self, self.runtime.close)
            self.engine_config = resolve(config, checkpoint.model_config)
        self._describe(checkpoint)

    def _describe(self, checkpoint: Checkpoint) -> None:
        self.name, self.model_config = checkpoint.name, checkpoint.model_config
        self.generation_config: Mapping[str, Any] = checkpoint.generation_config
        self.max_model_len, self.warm_up_s = self._backend.max_model_len, self._backend.warm_up_s
        self.start = self._backend.start
        self._ids = itertools.count()
        self._forms: FormCompiler | None = None  # an offloaded model serves no structured outputs
        if self.runtime is None:
            vocab_size, ends = self.model_config.vocab_size, self.model_config.eos_token_ids
            self._forms = FormCompiler(self.tokenizer, vocab_size, ends)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        progress: bool = True,
        kernels: KernelSet | None = None,
        executor: Executor | StagedExecutor | None = None,
        check_plans: CheckPlans | None = None,
    ) -> "LLM":
        """Return the model of an `EngineConfig`."""
        return cls(
            config.model,
            config=config,
            progress=progress,
            kernels=kernels,
            executor=executor,
            check_plans=check_plans,
        )

    def close(self) -> None:
        """Abort what runs, and end the engine."""
        self._backend.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> Request:
        """Return a request that the engine accepts. Any thread may call it.

        Raises:
          InvalidRequest: for a request that cannot be served; it names the field.
        """
        if not isinstance(sampling, SamplingParams | None):
            raise InvalidRequest("sampling_params", sampling, "a SamplingParams, or None")
        request = make_request(
            request_id or f"request-{next(self._ids)}",
            prompt,
            SamplingParams() if sampling is None else sampling,
            self.tokenizer,
            self.model_config.vocab_size,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            forms=self._forms,
        )
        return self._backend.accept(request)

    # ---- offline

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the outputs of prompts, texts or lists of token ids, in their order.

        sampling_params: of all prompts, or one of each.

        Raises:
          InvalidRequest: before anything runs, if one of them cannot be served.
          RequestFailed: after a fault of the engine.
        """
        many = as_list(prompts)
        requests = self._requests(many, sampling_params)
        return self._run(requests, [p if isinstance(p, str) else None for p in many], use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **how: Any,
    ) -> list[RequestOutput]:
        """Return the answers to one conversation or several.

        Args:
          sampling_params: of all conversations, or one of each.
          how: `tools`, `template_kwargs` and the other settings of `jaxflow.text.chat.encode_chat`.

        Raises:
          As `generate`, and ChatTemplateError.
        """
        if self.tokenizer is None:
            accepted = "token ids, because this model has no tokenizer"
            raise InvalidRequest("messages", Amount("a conversation"), accepted)
        if isinstance(messages, str | Mapping):
            accepted = 'a list of messages, as [{"role": "user", "content": "Hello"}]'
            raise InvalidRequest("messages", messages, accepted)
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [encode_chat(self.tokenizer, m, **how) for m in many]  # type: ignore[arg-type]
        return self._run(self._requests(prompts, sampling_params), [None] * len(prompts), use_tqdm)

    def _requests(
        self, prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        """Return a request of each prompt. given: the parameters of all prompts, or one of each."""
        several = isinstance(given, Sequence) and not isinstance(given, str)
        each = list(given) if several else [given] * len(prompts)  # type: ignore[arg-type]
        if len(each) != len(prompts):
            accepted = f"one, or one for each of the {len(prompts)} prompts"
            raise InvalidRequest("sampling_params", Amount(f"{len(each)} of them"), accepted)
        return [self.request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]  # type: ignore[arg-type]

    def _run(
        self, requests: Sequence[Request], texts: Sequence[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        if any(request.make_constraint for request in requests):
            self.driver.prepare_masks()
        builders = [self._builder(r, text) for r, text in zip(requests, texts, strict=True)]
        hidden = not use_tqdm or self.runtime is not None  # the runtime shows its steps
        bar = tqdm(total=len(requests), desc="generating", disable=hidden, unit="request", delay=1.0)
        try:
            with contextlib.closing(self._backend.generate(requests, use_tqdm)) as events:
                return collect(builders, events, bar.update)
        finally:
            bar.close()

    def _builder(self, request: Request, prompt: str | None) -> OutputBuilder:
        return OutputBuilder(request, prompt, self.tokenizer, self.model_config.eos_token_ids)

    # ---- streaming

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the growing output of a prompt, a new object after each step. Closing it ends the request.

        Raises:
          InvalidRequest, QueueFull, Draining, RequestFailed
        """
        prompt = without_name(prompt)
        request = self.request(prompt, sampling_params, request_id=request_id)
        if self.runtime is not None:
            raise InvalidRequest(
                "prompt", prompt, "generate or chat, because an offloaded model has no stream"
            )
        if request.make_constraint is not None:
            await asyncio.to_thread(self.driver.prepare_masks)
        box = _AsyncQueue(asyncio.get_running_loop())
        builder = self._builder(request, prompt if isinstance(prompt, str) else None)
        self.driver.submit(request, box)
        try:
            while not builder.finished:
                for event in await box.events.get():
                    builder.take(event)
                yield builder.output()
        finally:
            if not builder.finished:
                self.driver.abort(request.request_id)


class Backend(Protocol):
    """An engine behind an `LLM`."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a sequence, prompt and output."""
        ...

    @property
    def warm_up_s(self) -> float:
        """Seconds of compiling; of an offloaded model, of the complete start."""
        ...

    @property
    def start(self) -> Mapping[str, float]:
        """Seconds by phase of the start, see `StartTimes.summary`; empty for an offloaded model."""
        ...

    def accept(self, request: Request) -> Request:
        """Return the request with its limit. Raises: InvalidRequest."""
        ...

    def generate(self, requests: Sequence[Request], progress: bool) -> Generator[Event]:
        """Yield the events of all requests. Closing the generator ends what still runs."""
        ...

    def close(self) -> None:
        """Abort what runs, and end the engine."""
        ...


class _Serving:
    """The serving engine."""

    def __init__(self, engine: Engine, team: Team | None):
        assert engine.config.max_model_len is not None
        self.max_model_len, self.warm_up_s = engine.config.max_model_len, engine.warm_up_s
        self.start = engine.start
        self._driver, self._team = engine.driver, team
        self.accept = engine.driver.accept

    def close(self) -> None:
        """See `Backend.close`."""
        self._driver.close()
        if self._team is not None:
            self._team.close(self._driver.fault)

    def generate(self, requests: Sequence[Request], progress: bool) -> Generator[Event]:
        """See `Backend.generate`."""
        box, waiting = _Queue(), collections.deque(requests)
        running: dict[str, int] = {}  # number of sequences that have not finished, by request
        try:
            while waiting or running:
                self._submit(waiting, running, box)
                # Other callers' requests may fill the queue, and the ends of those are not posted here.
                for event in box.take(RETRY_S if waiting else None):
                    if isinstance(event, Finished):
                        running[event.request_id] -= 1
                        if not running[event.request_id]:
                            del running[event.request_id]
                    yield event
        finally:
            for name in running:
                self._driver.abort(name)

    def _submit(self, waiting: collections.deque[Request], running: dict[str, int], box: "_Queue") -> None:
        """Submit requests until the queue is full."""
        with contextlib.suppress(QueueFull):
            while waiting:
                self._driver.submit(waiting[0], box)
                request = waiting.popleft()
                running[request.request_id] = request.sampling.n


class _Offloaded:
    """FlexGen's runtime. The calls of several threads run one after another."""

    def __init__(self, runtime: Runtime):
        self.max_model_len = runtime.policy.prompt_tokens + runtime.policy.output_tokens
        self.warm_up_s, self.start = runtime.load_s, {}
        self._runtime, self._turn = runtime, threading.Lock()
        self.accept, self.close = runtime.accept, runtime.close

    def generate(self, requests: Sequence[Request], progress: bool) -> Generator[Event]:
        """See `Backend.generate`."""
        # A block that is left halfway must end in order, so that the next one finds nothing of it.
        with self._turn, contextlib.closing(self._runtime.generate(requests, progress=progress)) as steps:
            for events in steps:
                yield from events


class _Queue:
    """A mailbox that a thread waits on."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()

    def post(self, events: list[Event]) -> None:
        """Add the events of one step."""
        self._events.put(events)

    def take(self, timeout_s: float | None) -> list[Event]:
        """Return the events of one step; [] after the timeout."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return []


class _AsyncQueue:
    """A mailbox that a coroutine waits on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.events: asyncio.Queue[list[Event]] = asyncio.Queue()

    def post(self, events: list[Event]) -> None:
        """Add the events of one step, on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the caller's event loop is closed
            self._loop.call_soon_threadsafe(self.events.put_nowait, events)

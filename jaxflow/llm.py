"""The Python API: `LLM` loads a model and generates, with the names and meanings that vLLM's users know."""

import asyncio
import contextlib
import itertools
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxflow.config import EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.start import prepare_process, resolve, start_engine
from jaxflow.flexgen.config import OffloadConfig, check_engine, offload_config
from jaxflow.flexgen.policy import Policy
from jaxflow.flexgen.runtime import Runtime
from jaxflow.flexgen.start import prepare, start
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.prompt import Prompt, as_list, open_tokenizer, token_ids
from jaxflow.request import Event, InvalidRequest, QueueFull, Request, SamplingParams
from jaxflow.request_output import Answer, CompletionOutput, RequestFailed, RequestOutput
from jaxflow.text.chat import encode_chat
from jaxflow.text.detokenizer import StopStrings
from jaxflow.text.tokenizer import Tokenizer
from pallas_kernels.kernel_set import KernelSet

__all__ = ["LLM", "CompletionOutput", "Prompt", "RequestFailed", "RequestOutput"]

RETRY_S = 0.1  # between two tries to submit a request that found the queue full


class LLM:
    """A model, loaded and warm.

    Args:
      model: a folder, a .gguf file, a converted checkpoint, a hub id, or the name of a shipped config (dummy
      weights). offload: for a model that does not fit the device: a policy, its file, or a
      `jaxflow.flexgen.config.OffloadConfig`. `generate` and
        `chat` then run through FlexGen's offline runtime, block after block; there is no stream, and calls of
        several threads wait in turn.
      settings: the other fields of `jaxflow.config.EngineConfig`, by name; with `offload`, of
      `jaxflow.flexgen.config.ENGINE_FIELDS`.

    Raises:
      ConfigError, CheckpointError, TokenizerError, PolicyError, DiskError: naming what is wrong.
    """

    def __init__(
        self,
        model: str,
        *,
        progress: bool = True,
        offload: "OffloadConfig | Policy | str | os.PathLike | None" = None,
        **settings: Any,
    ):
        config = EngineConfig(model=model, **settings)
        self._load(config, progress, offload=None if offload is None else offload_config(offload, model))

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        progress: bool = True,
        kernels: KernelSet | None = None,
        executor: Executor | None = None,
    ) -> "LLM":
        """The same, from settings that were read already. kernels: instead of those that the settings choose.
        executor: of an engine that has ended, with its weights and compiled programs (`start_engine`).
        """
        llm = cls.__new__(cls)
        llm._load(config, progress, kernels, executor=executor)
        return llm

    def _load(
        self,
        config: EngineConfig,
        progress: bool,
        kernels: KernelSet | None = None,
        offload: OffloadConfig | None = None,
        executor: Executor | None = None,
    ) -> None:
        if offload is None:
            prepare_process(config)
        else:
            check_engine(config)
            prepare(offload, config)
        checkpoint = open_checkpoint(config.model, load_format=config.load_format)
        self.name = checkpoint.name
        self.model_config = checkpoint.model_config
        self.generation_config: Mapping[str, Any] = checkpoint.generation_config
        self.tokenizer: Tokenizer | None = open_tokenizer(config, checkpoint)
        self._ids = itertools.count()
        self.runtime: Runtime | None = None
        self._turn = threading.Lock()  # held for a whole call of an offloaded model, which runs one at a time
        if offload is not None:
            self.engine_config = resolve(config, checkpoint.model_config)
            self.runtime = start(offload, config, checkpoint, progress=progress)
            return
        self._engine = start_engine(config, checkpoint, kernels=kernels, executor=executor, progress=progress)
        self.engine_config, self.driver = self._engine.config, self._engine.driver

    @property
    def max_model_len(self) -> int:
        if self.runtime is not None:
            return self.runtime.policy.prompt_tokens + self.runtime.policy.output_tokens
        assert self.engine_config.max_model_len is not None
        return self.engine_config.max_model_len

    @property
    def warm_up_s(self) -> float:
        """Seconds that compiling took; of an offloaded model, all that came before the first request."""
        return self._engine.warm_up_s if self.runtime is None else self.runtime.load_s

    @property
    def executor(self) -> Executor:
        """The device's side, for measurements: it is the engine's thread that runs it."""
        return self._engine.executor

    def close(self) -> None:
        """Ends the engine's thread; what runs is aborted."""
        if self.runtime is not None:
            self.runtime.close()
        else:
            self.driver.close()

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
        """A request the engine can take. Raises: InvalidRequest, naming the field, for one that it cannot."""
        sampling = SamplingParams() if sampling is None else sampling
        sampling.check_vocabulary(self.model_config.vocab_size)
        ids = token_ids(
            prompt, self.tokenizer, self.model_config.vocab_size, add_special_tokens=add_special_tokens
        )
        if sampling.stop and self.tokenizer is None:
            raise InvalidRequest(
                "stop", sampling.stop, "no stop strings: this model came without a tokenizer"
            )
        name, checker = request_id or f"request-{next(self._ids)}", self._stop_checker(ids, sampling)
        made = Request(
            name, ids, sampling, priority=priority, cache_salt=cache_salt, make_stop_checker=checker
        )
        if self.runtime is None:
            return self.driver.accept(made)
        self.runtime.check(made)
        return made

    def _stop_checker(self, ids: Sequence[int], s: SamplingParams) -> Callable[[], StopStrings] | None:
        """Makes what looks for stop strings in one of the n sequences."""
        tokenizer = self.tokenizer
        if not s.stop or tokenizer is None:
            return None
        return lambda: StopStrings(
            tokenizer, ids, s.stop, skip_special_tokens=s.skip_special_tokens, min_tokens=s.min_tokens
        )

    # ---- offline

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts, texts or lists of token ids; returns the outputs in their order.

        Raises:
          InvalidRequest: before anything runs, if one of them cannot be served. RequestFailed: a fault of the
          engine.
        """
        many = as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise InvalidRequest(
                "params", f"{len(each)} of them", f"one, or one for each of the {len(many)} prompts"
            )
        requests = [self.request(prompt, p) for prompt, p in zip(many, each, strict=True)]
        return self._run(requests, [p if isinstance(p, str) else None for p in many], use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several. Raises: as `generate`, and ChatTemplateError."""
        if self.tokenizer is None:
            raise InvalidRequest(
                "messages", "a conversation", "token ids: this model came without a tokenizer"
            )
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        requests = [self.request(encode_chat(self.tokenizer, m), params) for m in many]  # type: ignore[arg-type]
        return self._run(requests, [None] * len(requests), use_tqdm)

    def _run(
        self, requests: Sequence[Request], texts: Sequence[str | None], use_tqdm: bool
    ) -> list[RequestOutput]:
        building = {r.request_id: self._answer(r, text) for r, text in zip(requests, texts, strict=True)}
        if self.runtime is not None:
            # Closed whatever happens: a block that is left halfway must end in order, so that the next finds
            # nothing of it.
            with self._turn, contextlib.closing(self.runtime.generate(requests, progress=use_tqdm)) as steps:
                for event in itertools.chain.from_iterable(steps):
                    building[event.request_id].take(event)
                    building[event.request_id].raise_fault()
            return [building[r.request_id].output for r in requests]
        box: _Queue = _Queue()
        left, waiting = len(requests), iter(requests)
        bar = tqdm(total=left, desc="generating", disable=not use_tqdm, unit="request", delay=1.0)
        try:
            held = self._submit_some(waiting, box, None)
            while left:
                # What found no room may be kept out by the requests of others, whose ends are not told here.
                for event in box.take(None if held is None else RETRY_S):
                    one = building[event.request_id]
                    one.take(event)
                    if one.output.finished:
                        left -= 1
                        bar.update()
                        one.raise_fault()
                held = self._submit_some(waiting, box, held) if held is not None else None
        finally:
            bar.close()
            for one in building.values():
                if not one.output.finished:
                    self.driver.abort(one.output.request_id)
        return [building[r.request_id].output for r in requests]

    def _answer(self, request: Request, prompt: str | None) -> Answer:
        return Answer(request, prompt, self.tokenizer, self.model_config.eos_token_ids)

    def _submit_some(self, waiting, box: "_Queue", held: Request | None) -> Request | None:
        """Submits until the queue is full; returns the request that found no room, None when all are in."""
        for request in itertools.chain([] if held is None else [held], waiting):
            try:
                self.driver.submit(request, box)
            except QueueFull:
                return request
        return None

    # ---- streaming

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The growing output of one prompt, after each step that added to it. Closing the iterator ends the
        request.

        Raises: InvalidRequest, QueueFull, Draining, RequestFailed.
        """
        request = self.request(prompt, params, request_id=request_id)
        if self.runtime is not None:
            raise InvalidRequest(
                "prompt", prompt, "generate or chat: an offloaded model answers by the block, not in a stream"
            )
        box = _AsyncQueue(asyncio.get_running_loop())
        one = self._answer(request, prompt if isinstance(prompt, str) else None)
        self.driver.submit(request, box)
        try:
            while not one.output.finished:
                for event in await box.events.get():
                    one.take(event)
                one.raise_fault()
                yield one.output
        finally:
            if not one.output.finished:
                self.driver.abort(request.request_id)


class _Queue:
    """A mailbox that a thread waits on."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()

    def post(self, events: list[Event]) -> None:
        self._events.put(events)

    def take(self, timeout_s: float | None) -> list[Event]:
        """The events of one step; none if there is no step in that time."""
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
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self.events.put_nowait, events)

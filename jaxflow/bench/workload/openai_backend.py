"""Any server of OpenAI's API, as a backend of the load generator."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload.backend import ModelDescription, text_of
from jaxflow.bench.workload.batch_load import BatchLoad, batch_file
from jaxflow.bench.workload.http_connection import HttpClient
from jaxflow.bench.workload.lengths import Item

POLL_S = 0.25
MAX_REASON_CHARS = 200
DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    """The fields of a chunk that the load generator reads. Other fields are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class OpenAiBackend:
    """A server of OpenAI's API.

    Args:
      chat: ask /v1/chat/completions with texts, instead of /v1/completions.
      text: send prompts as text, see `text_of`. A chat always sends text.
      name: the model's name in requests; None for the first name that the server lists.
    """

    def __init__(self, http: HttpClient, *, chat: bool, text: bool = False, name: str | None = None):
        self._http, self._chat, self._text, self._name = http, chat, text or chat, name

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the server lists its models.

        Raises: ConnectionError, the last failure after `timeout_s`.
        """
        end_s = time.perf_counter() + timeout_s
        while True:
            try:
                await self.model()
                return
            except OSError as error:
                if time.perf_counter() >= end_s:
                    raise ConnectionError(f"no server was ready within {timeout_s:g} s: {error}") from error
            await asyncio.sleep(POLL_S)

    async def model(self) -> ModelDescription:
        """Return the served model. Raises: OSError, also for an answer that is no list of models."""
        status, data = await self._http.get("/v1/models")
        if status != 200:
            raise ConnectionError(_reason(status, data))
        try:
            first = msgspec.json.decode(data)["data"][0]
            name = str(first["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise ConnectionError("/v1/models: the answer is no list of models") from None
        self._name = self._name or name
        return ModelDescription(name, first.get("max_model_len") or float("inf"))

    def batch(self, items: Sequence[Item], prompts: Sequence[np.ndarray], count: int) -> BatchLoad:
        """Return a batch of `count` completions, which repeat the items, to run beside a load."""
        return BatchLoad(self._http, batch_file(self._name or "", items, prompts, count, text=self._text))

    async def ask(
        self, record: Record, prompt: np.ndarray, output_tokens: int, timeout_s: float | None
    ) -> list[int]:
        """See `Backend.ask`. A server sends no token ids, and tells the number of tokens at the end."""
        answer = _Answer()
        try:
            async with asyncio.timeout(timeout_s):
                path, body = self._body(prompt, output_tokens)
                status = await self._http.stream(path, body, answer.take)
            record.error = answer.problem(status)
        except TimeoutError:
            record.error = f"no whole answer within {timeout_s:g} s"
        except OSError as error:
            record.error = f"{type(error).__name__}: {error}"
        if record.error is None:
            record.finished_s = time.perf_counter()
        record.deliveries = answer.deliveries()
        usage = answer.usage
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
            details = usage.prompt_tokens_details
            record.cached_prompt_tokens = (details.cached_tokens or 0) if details is not None else 0
        return []

    def _body(self, prompt: np.ndarray, output_tokens: int) -> tuple[str, bytes]:
        fields: dict[str, Any] = {
            "model": self._name,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "seed": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        asked = text_of(prompt) if self._text else prompt.tolist()
        if self._chat:
            fields["messages"] = [{"role": "user", "content": asked}]
            return "/v1/chat/completions", msgspec.json.encode(fields)
        return "/v1/completions", msgspec.json.encode(fields | {"prompt": asked})


class _Answer:
    """The events of one answer, read as they arrive."""

    def __init__(self):
        self.usage: _Usage | None = None
        self._texts: list[tuple[float, int]] = []  # time, characters
        self._rest = self._raw = b""
        self._done = False
        self._error: str | None = None

    def take(self, data: bytes) -> None:
        """Read a part of the body."""
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for text in lines:
            if text.startswith(b"data:"):
                self._event(text[5:].strip(), now)
            elif text.strip() and not text.startswith(b":"):
                self._raw += text
        # The body of an error is JSON without an end of line.

    def _event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self._done = True
            return
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            self._error = self._error or f"an event is not a chunk: {error}"
            return
        if chunk.error is not None:
            self._error = self._error or _message(chunk.error)
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            delta = choice.delta
            texts = (
                (choice.text,)
                if delta is None
                else (delta.content, delta.reasoning or delta.reasoning_content)
            )
            characters = sum(len(text) for text in texts if text)
            if characters:
                self._texts.append((now, characters))

    def problem(self, status: int) -> str | None:
        """Return the reason for which the answer is not whole, or None."""
        if status != 200:
            return _reason(status, self._raw + self._rest)
        if self._error is not None:
            return f"error within the stream: {self._error}"[:MAX_REASON_CHARS]
        if not self._done:
            return "the stream ended without [DONE]"
        return None if self._texts else "the answer has no text"

    def deliveries(self) -> list[tuple[float, int]]:
        """Return the times of the chunks and their tokens.

        A chunk does not tell its tokens, so the tokens of the usage are spread over the chunks by their
        characters. A server without usage counts as one token a chunk.
        """
        total = self.usage.completion_tokens if self.usage is not None else 0
        if not total:
            return [(now, 1) for now, _ in self._texts]
        counts = spread(total, [characters for _, characters in self._texts])
        return [(now, count) for (now, _), count in zip(self._texts, counts, strict=True)]


def spread(total: int, weights: Sequence[int]) -> list[int]:
    """Return whole numbers of the sum `total`, in proportion to positive weights."""
    ends = [total * part // (sum(weights) or 1) for part in itertools.accumulate(weights)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _reason(status: int, body: bytes) -> str:
    """Return a short reason from the body of an error, without ids that differ from request to request."""
    try:
        message = _message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        message = body.decode("utf-8", "replace").strip()
    return f"HTTP {status}: {message}"[:MAX_REASON_CHARS]


def _message(error: Any) -> str:
    """Return the message of an error, which servers nest in different ways."""
    while isinstance(error, dict):
        error = error.get("error", error.get("message", error.get("detail", str(error))))
    return str(error)

"""A request of chat or completions on its way: its prompts' engine requests, and the parts of its answer.

The answer begins with a `Head`. Its pieces are written as they come, or joined in a `Collection`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from jaxflow.request import FinishReason, InvalidRequest, Logprob, Request, Started
from jaxflow.text.tokenizer import Tokenizer
from serving.frontend.answer_reader import Reading
from serving.frontend.refusal import aborted
from serving.frontend.served_model import ServedModel
from serving.frontend.transcript import Output, TextDelta
from serving.http.logprobs import TokenNames
from serving.http.responses import Usage, make_usage
from serving.http.token_texts import TextToken, TokenTexts


class Head(msgspec.Struct, frozen=True):
    """Fields of an answer that are known before its first token.

    `top`: candidates of a token that a chat answer lists. `with_logprobs`, `with_token_ids`: the caller asked
    for them. `usage_at_end`, `usage_in_chunks`: where a stream carries its usage.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    names: TokenNames
    n: int
    top: int = 0
    with_logprobs: bool = False
    with_token_ids: bool = False
    with_prompt_logprobs: bool = False
    usage_at_end: bool = False
    usage_in_chunks: bool = False
    skip_special_tokens: bool = True


class Begun(msgspec.Struct, frozen=True):
    """The first piece of a prompt's answer. `prompt_logprobs`: None unless requested."""

    prompt: int
    seed: int
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None


class AnswerPiece(msgspec.Struct, frozen=True, gc=False):
    """A part of choice `index`. `finish_reason` is not None in the last part of the choice."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    entries: tuple[TextToken, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


Pieces = list[Begun | AnswerPiece]
Take = Callable[[Pieces], Awaitable[None]]


class Direct(msgspec.Struct, frozen=True):
    """A way to write the pieces of a step without a change of tasks.

    `take` gets pieces only while `ready()`.
    """

    ready: Callable[[], bool]
    take: Callable[[Pieces], None]


class Job(msgspec.Struct, frozen=True):
    """The engine's requests of a body, one a prompt, in the order of the prompts.

    `echo_texts`: the text of each prompt, if the answer repeats it.
    `drop_output`: the answer has no new token.
    `reading`: of the text of the answer; None if all text is content.
    """

    requests: Sequence[Request]
    tokenizer: Tokenizer | None
    eos_token_ids: Sequence[int]
    echo_texts: Sequence[str] | None = None
    drop_output: bool = False
    reading: Reading | None = None

    @property
    def n(self) -> int:
        """Return the number of choices of a prompt."""
        return self.requests[0].sampling.n


class Answering:
    """The state of a job's answer. It turns the engine's outputs into pieces, and counts tokens."""

    def __init__(self, job: Job):
        self.job = job
        self._n = job.n
        sampling = job.requests[0].sampling
        self._eos = frozenset(job.eos_token_ids)
        ends = sampling.end_token_ids(job.eos_token_ids)
        self._texts: list[TokenTexts] | None = None
        if sampling.logprobs is not None:
            self._texts = [
                TokenTexts(job.tokenizer, request.prompt_token_ids, ends, sampling.skip_special_tokens)
                for request in job.requests
                for _ in range(job.n)
            ]
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in job.requests)
        self._cached = [0] * len(job.requests)
        self._completion_tokens = 0
        reading, tokenizer = job.reading, job.tokenizer
        made = (
            [] if reading is None or tokenizer is None else [reading.counter(tokenizer) for _ in range(job.n)]
        )
        self._reasoning = [counter for counter in made if counter is not None]  # of each choice of a chat

    @property
    def usage(self) -> Usage:
        """Return the tokens so far."""
        reasoning = sum(counter.count for counter in self._reasoning)
        return make_usage(self._prompt_tokens, sum(self._cached), self._completion_tokens, reasoning)

    def pieces(self, prompt: int, outputs: Iterable[Output]) -> Pieces:
        """Return the pieces of one prompt's outputs.

        Raises:
          Refusal: the server ended the sequence.
        """
        return [self._piece(prompt, output) for output in outputs]

    def _piece(self, prompt: int, output: Output) -> Begun | AnswerPiece:
        if isinstance(output, Started):
            self._cached[prompt] = output.cached_prompt_tokens
            return Begun(prompt, signed(output.seed), output.prompt_logprobs)
        if isinstance(output, TextDelta):
            index = prompt * self._n + output.index
            if self.job.drop_output:
                return AnswerPiece(index, "")
            self._completion_tokens += len(output.token_ids)
            if self._reasoning:
                self._reasoning[index].push(output.token_ids)
            if self._texts is None:
                return AnswerPiece(index, output.text, output.token_ids)
            entries = self._texts[index].push(output.token_ids, output.logprobs, output.text)
            return AnswerPiece(index, output.text, output.token_ids, tuple(entries))
        event = output.event
        if event.reason is FinishReason.ABORT:
            raise aborted()
        index = prompt * self._n + event.index
        if self.job.drop_output:
            return AnswerPiece(index, "", finish_reason="length")
        entries = ()
        if self._texts is not None:
            cut = event.stop_string is not None
            entries = tuple(self._texts[index].finish(output.text, event.stop_token_id, cut))
        stop = event.stop_string
        if stop is None and event.stop_token_id not in self._eos:
            stop = event.stop_token_id
        return AnswerPiece(index, output.text, (), entries, event.reason.value, stop)


class Collected:
    """The pieces of a whole choice."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.entries: list[TextToken] = []
        self.finish_reason = ""
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(self._texts)


class Collection:
    """The choices of an answer, by index, and the first pieces of the prompts.

    `take` is the sink of `job.run`.
    """

    def __init__(self, choices: int):
        self.choices = [Collected() for _ in range(choices)]
        self.begun: dict[int, Begun] = {}

    async def take(self, pieces: Pieces) -> None:
        """Add pieces."""
        for piece in pieces:
            if isinstance(piece, Begun):
                self.begun[piece.prompt] = piece
                continue
            choice = self.choices[piece.index]
            choice._texts.append(piece.text)
            choice.token_ids += piece.token_ids
            choice.entries += piece.entries
            if piece.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason


async def run(
    served: ServedModel,
    answering: Answering,
    take: Take,
    *,
    submitted: Callable[[], Awaitable[None]] | None = None,
    timeout_s: float | None = None,
    whole: bool = False,
    direct: Direct | None = None,
) -> None:
    """Run a job to its end.

    Args:
      take: gets the pieces that have arrived since its last call. A `take` that
        blocks holds the outputs back.
      submitted: is called once the engine has accepted all prompts.
      timeout_s: the seconds until the caller's deadline, or None.
      whole: the answer is not streamed, see `ServedModel.stream`.
      direct: takes the pieces of most steps instead of `take`, if the job has one prompt.

    Raises:
      As `ServedModel.stream`.
    """
    job = answering.job
    if len(job.requests) == 1:
        async with served.stream(job.requests[0], timeout_s=timeout_s, whole=whole) as stream:
            if submitted is not None:
                await submitted()
            if direct is not None:
                take_now = direct.take
                stream.take_deltas(direct.ready, lambda outputs: take_now(answering.pieces(0, outputs)))
            async for outputs in stream:
                await take(answering.pieces(0, outputs))
        return
    try:
        await _Merged(served, answering, take, submitted, timeout_s, whole).run()
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


class _Merged:
    """The streams of several prompts, joined to one: `take` gets what has arrived of all prompts."""

    def __init__(
        self,
        served: ServedModel,
        answering: Answering,
        take: Take,
        submitted: Callable[[], Awaitable[None]] | None,
        timeout_s: float | None,
        whole: bool,
    ):
        self._served, self._answering = served, answering
        self._take, self._submitted, self._timeout_s, self._whole = take, submitted, timeout_s, whole
        self._pieces: Pieces = []
        self._left = self._unsubmitted = len(answering.job.requests)
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()

    async def run(self) -> None:
        """Run all prompts. Raises: an exception group."""
        async with asyncio.TaskGroup() as group:
            for prompt, request in enumerate(self._answering.job.requests):
                group.create_task(self._read(prompt, request))
            while self._left:
                await self._wake.wait()
                self._wake.clear()
                if not self._unsubmitted and self._submitted is not None:
                    submitted, self._submitted = self._submitted, None
                    await submitted()
                if self._pieces:
                    pieces, self._pieces = self._pieces, []
                    taken, self._taken = self._taken, asyncio.Event()
                    taken.set()
                    await self._take(pieces)

    async def _read(self, prompt: int, request: Request) -> None:
        async with self._served.stream(request, timeout_s=self._timeout_s, whole=self._whole) as stream:
            self._unsubmitted -= 1
            self._wake.set()
            async for outputs in stream:
                self._pieces += self._answering.pieces(prompt, outputs)
                self._wake.set()
                # While the writer waits, the outputs stay in the stream's queue, which has a limit.
                await self._taken.wait()
        self._left -= 1
        self._wake.set()


def _first(failures: BaseExceptionGroup) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def signed(bits: int) -> int:
    """Return a 64-bit number as the signed number of the same bits, which `seed` accepts."""
    return bits - 2**64 if bits >= 2**63 else bits


def rename(error: InvalidRequest, names: Mapping[str, str]) -> None:
    """Give `error` the name that its field has in the body. Fields that `names` lacks keep their names."""
    for name, own in names.items():
        if error.field == name or error.field.startswith((f"{name}[", f"{name}.")):
            error.args = (str(error).replace(name, own, 1),)
            error.field = own + error.field[len(name) :]
            return

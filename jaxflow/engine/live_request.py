"""The events of a running request: what a token makes, and the end of each of its sequences."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

import numpy as np

from jaxflow.model.logprobs import LogprobsOut
from jaxflow.model.slot_params import BAD_WORD_TOKENS, SlotParams, slot_values
from jaxflow.request import (
    Constraint,
    Delta,
    Event,
    Finished,
    FinishReason,
    Logprob,
    Request,
    SamplingParams,
    Started,
    TextDecoder,
    Timings,
    Usage,
)
from jaxflow.scheduler.state import Chunk, Sequence


def needs_full_sampler(s: SamplingParams) -> bool:
    """Return True if a request needs more than greedy or temperature sampling."""
    filters = s.top_p < 1 or s.top_k > 0 or s.min_p > 0 or s.min_tokens > 0
    lists = bool(s.logit_bias) or bool(s.bad_words) or s.allowed_token_ids is not None
    return filters or lists or _looks_back(s) or s.logprobs is not None


def _looks_back(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def slot_settings(seq: Sequence, eos: frozenset[int]) -> tuple[SlotParams, np.ndarray, int]:
    """Return the arguments of `Executor.set_slot` for a sequence.

    They are its settings, the tokens that its penalties count, and the number of prompt tokens among those.
    """
    s = seq.request.sampling
    values = slot_values(
        top_k=s.top_k,
        top_p=s.top_p,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        min_position=seq.num_prompt + s.min_tokens,
        suppressed=sorted(s.end_token_ids(eos)),
        logit_bias=s.logit_bias,
        allowed=s.allowed_token_ids,
        bad_words=seq.request.bad_words_token_ids,
        recent=seq.token_ids[max(seq.num_prompt, seq.num_known - BAD_WORD_TOKENS) : seq.num_known],
    )
    known = seq.token_ids[: seq.num_known] if _looks_back(s) else np.zeros(0, np.int32)
    return values, known, seq.num_prompt


@dataclasses.dataclass(frozen=True)
class HostLogprobs:
    """The arrays of a `LogprobsOut`, on the host."""

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def of(cls, found: LogprobsOut) -> "HostLogprobs":
        """Copy the arrays to the host."""
        return cls(*(np.asarray(a) for a in (found.chosen, found.rank, found.top_ids, found.top_logprobs)))

    def row(self, row: int, token: int, k: int) -> dict[int, Logprob]:
        """Return the entry of the token, then those of the k likeliest tokens."""
        out = {token: Logprob(float(self.chosen[row]), int(self.rank[row]))}
        for place, (other, value) in enumerate(
            zip(self.top_ids[row, :k].tolist(), self.top_logprobs[row, :k].tolist(), strict=True)
        ):
            out.setdefault(other, Logprob(value, place + 1))
        return out


class LiveRequest:
    """A request from its arrival to the end of its last sequence.

    Args:
      eos: the model's end tokens.
      now: arrival in seconds.
    """

    def __init__(self, request: Request, sequences: Seq[Sequence], eos: frozenset[int], now: float):
        self.request, self.sequences = request, tuple(sequences)
        self.arrival_s = now
        self.first_token_s: float | None = None
        sampling, self._id = request.sampling, request.request_id
        self._logprobs, self._min_tokens = sampling.logprobs, sampling.min_tokens
        self._max_output = sequences[0].limit - sequences[0].num_prompt
        self._end_token_ids = sampling.end_token_ids(eos)
        make = request.make_detokenizer
        self._texts: list[TextDecoder] = [make() for _ in sequences] if sampling.stop and make else []
        constrain = request.make_constraint
        self.constraints: list[Constraint] = [constrain() for _ in sequences] if constrain else []
        self.is_plain = not (
            sampling.stop_token_ids
            or sampling.min_tokens
            or self._texts
            or self.constraints
            or sampling.logprobs is not None
        )
        self._first_s: list[float | None] = [None] * len(self.sequences)
        self._prompt: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None:
            self._prompt = [*itertools.repeat(None, len(request.prompt_token_ids))]

    def unfinished(self) -> list[Sequence]:
        """Return the sequences that have not ended."""
        return [seq for seq in self.sequences if not seq.finished]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the first token: by then every position of the prompt was computed."""
        return self._prompt is not None and self.first_token_s is None

    def add_prompt_logprobs(self, chunk: Chunk, first_row: int, found: HostLogprobs) -> None:
        """Add the log-probabilities of a chunk, which begin at row `first_row`;
        row t holds those of token t+1.
        """
        assert self._prompt is not None
        ids, k = self.request.prompt_token_ids, self.request.sampling.prompt_logprobs or 0
        for i in range(chunk.tokens):
            position = chunk.start + i + 1
            if position < len(ids):
                self._prompt[position] = found.row(first_row + i, int(ids[position]), k)

    def take(
        self,
        seq: Sequence,
        token: int,
        found: HostLogprobs | None,
        row: int,
        now: float,
        end: Callable[[Sequence, FinishReason], None],
    ) -> list[Event]:
        """Return the events of a token that was just committed to its sequence.

        Args:
          found, row: the log-probabilities of the step, and the token's row in them; None without.
          now: seconds.
          end: called when the sequence ends, before its last event is made.
        """
        events: list[Event] = []
        if self.first_token_s is None:
            events.append(self._started())
            self.first_token_s = now
        try:
            delta, reason, cause = self._draw(seq, token, found, row, now)
        except Exception as fault:  # of its text decoder or its constraint: the other sequences continue
            end(seq, FinishReason.ABORT)
            return [*events, self.finished(seq, FinishReason.ABORT, None, now, fault)]
        events.append(delta)
        if reason is not None:
            end(seq, reason)
            events.append(self.finished(seq, reason, cause, now))
        return events

    def _started(self) -> Started:
        first = self.sequences[0]
        prompt = None if self._prompt is None else tuple(self._prompt)
        return Started(self._id, len(self.request.prompt_token_ids), first.cached_tokens, first.seed, prompt)

    def _draw(
        self, seq: Sequence, token: int, found: HostLogprobs | None, row: int, now: float
    ) -> tuple[Delta, FinishReason | None, int | str | None]:
        """Return a token's delta, the reason if it ends its sequence, and the stop token or string."""
        index, output = seq.index, seq.num_known - seq.num_prompt
        if output == 1:
            self._first_s[index] = now
        logprobs = None
        if self._logprobs is not None and found is not None:
            logprobs = (found.row(row, token, self._logprobs),)
        ends = token in self._end_token_ids and output > self._min_tokens
        if self.constraints and not ends:
            self.constraints[index].push(token)
        text = None
        if self._texts:
            text = "" if ends else self._texts[index].push((token,))
        delta = Delta(self._id, index, (token,), logprobs, text)
        if ends:
            return delta, FinishReason.STOP, token
        if self._texts and (stop := self._texts[index].stopped_by) is not None:
            return delta, FinishReason.STOP, stop
        if self.constraints and self.constraints[index].complete:
            return delta, FinishReason.STOP, None
        if output >= self._max_output:
            return delta, FinishReason.LENGTH, None
        return delta, None, None

    def finished(
        self,
        seq: Sequence,
        reason: FinishReason,
        cause: int | str | None,
        now: float,
        error: BaseException | None = None,
    ) -> Finished:
        """Return the last event of a sequence. `cause`: the stop token or string that ended it."""
        first_s = self._first_s[seq.index]
        scheduled_s = now if seq.t_first_schedule is None else seq.t_first_schedule
        timings = Timings(
            queued_s=scheduled_s - self.arrival_s,
            time_to_first_token_s=0.0 if first_s is None else first_s - self.arrival_s,
            total_s=now - self.arrival_s,
            preemptions=seq.preemptions,
        )
        usage = Usage(len(self.request.prompt_token_ids), seq.cached_tokens, seq.num_known - seq.num_prompt)
        return Finished(
            self._id,
            seq.index,
            reason,
            usage,
            timings,
            stop_token_id=cause if isinstance(cause, int) else None,
            stop_string=cause if isinstance(cause, str) else None,
            error=error,
            text=self._texts[seq.index].finish() if self._texts and error is None else "",
        )


def refused(request: Request, fault: BaseException | None) -> list[Event]:
    """Return the last events of a request that was not queued.

    Without a fault the engine was shutting down.
    """
    usage, timings = Usage(len(request.prompt_token_ids), 0, 0), Timings(0.0, 0.0, 0.0, 0)
    return [
        Finished(request.request_id, i, FinishReason.ABORT, usage, timings, error=fault)
        for i in range(request.sampling.n)
    ]


class PlainSlots:
    """Deltas of the slots whose tokens need no inspection except for end tokens: those of most decodes.

    Arrays over slots say whether a slot is open, and hold the fields of its deltas. The tokens of an open
    slot pass without a Python loop, unless they are end tokens. A slot is open from its sequence's first
    token in it until it gets another sequence.
    """

    def __init__(self, slots: int, eos: Iterable[int]):
        self._eos = np.array(sorted(eos), np.int32)
        self._open = np.zeros(slots, bool)
        self._heeds_eos = np.zeros(slots, bool)
        self._request_ids = np.full(slots, None, object)
        self._indices = np.zeros(slots, np.int32)

    def open(self, seq: Sequence, *, heeds_eos: bool) -> None:
        """Open the slot of a sequence. `heeds_eos`: the model's end tokens end the sequence."""
        slot = seq.slot
        self._open[slot], self._heeds_eos[slot] = True, heeds_eos
        self._request_ids[slot], self._indices[slot] = seq.request.request_id, seq.index

    def close(self, slot: int) -> None:
        """Close a slot, for a new sequence."""
        self._open[slot] = False

    def pass_through(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return bool [n]: for each slot, whether its token, int32 [n], needs no inspection.

        A negative token stands for a row without one.
        """
        ends = (tokens[:, None] == self._eos).any(axis=1)
        return self._open[slots] & (tokens >= 0) & ~(ends & self._heeds_eos[slots])

    def deltas(self, slots: np.ndarray, tokens: np.ndarray) -> Iterator[Delta]:
        """Return the deltas of tokens, one a slot."""
        return map(
            Delta,
            self._request_ids[slots].tolist(),
            self._indices[slots].tolist(),
            zip(tokens.tolist(), strict=True),
        )

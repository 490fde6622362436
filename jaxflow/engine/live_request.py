"""What a caller is told of a request while it runs, and what ends each of its sequences."""

import dataclasses
import itertools
from collections.abc import Sequence as Seq

import numpy as np

from jaxflow.model.logprobs import LogprobsOut
from jaxflow.model.slot_params import SlotParams, slot_values
from jaxflow.request import (
    Delta,
    Event,
    Finished,
    FinishReason,
    Logprob,
    Request,
    SamplingParams,
    Started,
    StopChecker,
    Timings,
    Usage,
)
from jaxflow.scheduler.state import Chunk, Sequence


def needs_full_sampler(s: SamplingParams) -> bool:
    """Whether a request asks for more than greedy or temperature sampling."""
    filters = s.top_p < 1 or s.top_k > 0 or s.min_p > 0 or s.min_tokens > 0
    return filters or _looks_back(s) or bool(s.logit_bias) or s.logprobs is not None


def _looks_back(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def slot_settings(seq: Sequence, eos: frozenset[int]) -> tuple[SlotParams, np.ndarray, int]:
    """For `Executor.set_slot`: a sequence's settings, the tokens that its penalties look back on, and how
    many are prompt.
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
        suppressed=sorted({*s.stop_token_ids, *(() if s.ignore_eos else eos)}),
        logit_bias=s.logit_bias,
    )
    known = seq.token_ids[: seq.num_known] if _looks_back(s) else np.zeros(0, np.int32)
    return values, known, seq.num_prompt


@dataclasses.dataclass(frozen=True)
class HostLogprobs:
    """`LogprobsOut` on the host."""

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def of(cls, found: LogprobsOut) -> "HostLogprobs":
        return cls(*(np.asarray(a) for a in (found.chosen, found.rank, found.top_ids, found.top_logprobs)))

    def row(self, row: int, token: int, k: int) -> dict[int, Logprob]:
        """The token's own entry first, then those of the k likeliest."""
        out = {token: Logprob(float(self.chosen[row]), int(self.rank[row]))}
        for place, (other, value) in enumerate(
            zip(self.top_ids[row, :k].tolist(), self.top_logprobs[row, :k].tolist(), strict=True)
        ):
            out.setdefault(other, Logprob(value, place + 1))
        return out


class LiveRequest:
    """One request from its arrival to the end of its last sequence."""

    def __init__(self, request: Request, sequences: Seq[Sequence], eos: frozenset[int], now: float):
        self.request, self.sequences = request, tuple(sequences)
        self.arrival_s = now
        self.first_token_s: float | None = None
        sampling, self._id = request.sampling, request.request_id
        self._logprobs, self._min_tokens = sampling.logprobs, sampling.min_tokens
        self._most = sequences[0].limit - sequences[0].num_prompt
        self._ids_that_stop = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        make = request.make_stop_checker
        self._checkers: list[StopChecker] = [make() for _ in sequences] if sampling.stop and make else []
        self.is_plain = not (
            sampling.stop_token_ids or sampling.min_tokens or self._checkers or sampling.logprobs is not None
        )
        self._first_s: list[float | None] = [None] * len(self.sequences)
        self._prompt: list[dict[int, Logprob] | None] | None = None
        if sampling.prompt_logprobs is not None:
            self._prompt = [*itertools.repeat(None, len(request.prompt_token_ids))]

    def unfinished(self) -> list[Sequence]:
        return [seq for seq in self.sequences if not seq.finished]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until the first token is drawn: by then every position of the prompt was computed."""
        return self._prompt is not None and self.first_token_s is None

    def add_prompt_logprobs(self, chunk: Chunk, first_row: int, found: HostLogprobs) -> None:
        """Takes those of a chunk, whose first token is row `first_row`: row t tells of the token after t."""
        assert self._prompt is not None
        ids, k = self.request.prompt_token_ids, self.request.sampling.prompt_logprobs or 0
        for i in range(chunk.tokens):
            position = chunk.start + i + 1
            if position < len(ids):
                self._prompt[position] = found.row(first_row + i, int(ids[position]), k)

    def started(self) -> Started:
        first = self.sequences[0]
        prompt = None if self._prompt is None else tuple(self._prompt)
        return Started(
            self.request.request_id,
            len(self.request.prompt_token_ids),
            first.cached_tokens,
            first.seed,
            prompt,
        )

    def draw(
        self, seq: Sequence, token: int, found: HostLogprobs | None, row: int, now: float
    ) -> tuple[Delta, FinishReason | None, int | str | None]:
        """Looks at a token that was just committed: what to tell the caller, whether it ends its sequence,
        and the stop token or string that did.
        """
        index, drawn = seq.index, seq.num_known - seq.num_prompt
        if drawn == 1:
            self._first_s[index] = now
        logprobs = None
        if self._logprobs is not None and found is not None:
            logprobs = (found.row(row, token, self._logprobs),)
        delta = Delta(self._id, index, (token,), logprobs)
        if self._checkers:
            stop = self._checkers[index].push((token,))
            if stop is not None:
                return delta, FinishReason.STOP, stop
        if token in self._ids_that_stop and drawn > self._min_tokens:
            return delta, FinishReason.STOP, token
        if drawn >= self._most:
            return delta, FinishReason.LENGTH, None
        return delta, None, None

    def finished(
        self,
        seq: Sequence,
        reason: FinishReason,
        by: int | str | None,
        now: float,
        error: BaseException | None,
    ) -> Finished:
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
            self.request.request_id,
            seq.index,
            reason,
            usage,
            timings,
            stop_token_id=by if isinstance(by, int) else None,
            stop_string=by if isinstance(by, str) else None,
            error=error,
        )


def refused(request: Request, fault: BaseException | None) -> list[Event]:
    """What a caller is told of a request that the engine did not even queue; no fault: it was ending."""
    usage, timings = Usage(len(request.prompt_token_ids), 0, 0), Timings(0.0, 0.0, 0.0, 0)
    return [
        Finished(request.request_id, i, FinishReason.ABORT, usage, timings, error=fault)
        for i in range(request.sampling.n)
    ]

"""From requests to sequences of a block, and from tokens to events: the same that the engine tells, so that a
caller sees no difference.
"""

import random
import time
from collections.abc import Iterable, Sequence

from jaxflow.engine.live_request import HostLogprobs, LiveRequest
from jaxflow.flexgen.policy import Policy
from jaxflow.request import Event, Finished, FinishReason, InvalidRequest, Request
from jaxflow.scheduler.state import SEED_STEP
from jaxflow.scheduler.state import Sequence as Seq


def check_request(policy: Policy, request: Request) -> None:
    """Refuses what no block of a policy can hold. Raises: InvalidRequest."""
    prompt, sampling = len(request.prompt_token_ids), request.sampling
    if prompt > policy.prompt_tokens:
        raise InvalidRequest(
            "prompt", f"{prompt} tokens", f"at most {policy.prompt_tokens}, the policy's prompt_tokens"
        )
    if sampling.max_tokens is not None and sampling.max_tokens > policy.output_tokens:
        raise InvalidRequest(
            "max_tokens", sampling.max_tokens, f"at most {policy.output_tokens}, the policy's output_tokens"
        )
    if sampling.min_tokens > policy.output_tokens:
        raise InvalidRequest(
            "min_tokens", sampling.min_tokens, f"at most {policy.output_tokens}, the policy's output_tokens"
        )
    if sampling.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs", sampling.prompt_logprobs, "unset: an offloaded run does not compute them"
        )


class Answers:
    """The sequences of some requests, and what their callers are told as tokens come."""

    def __init__(self, requests: Sequence[Request], policy: Policy, eos: Iterable[int], seeds: random.Random):
        eos, now = frozenset(eos), time.perf_counter()
        self._live: dict[str, LiveRequest] = {}
        self.sequences: list[Seq] = []
        for arrival, request in enumerate(requests):
            sampling = request.sampling
            seed = seeds.getrandbits(64) if sampling.seed is None else sampling.seed
            limit = len(request.prompt_token_ids) + (sampling.max_tokens or policy.output_tokens)
            own = [
                Seq(
                    request,
                    i,
                    seed=(seed + i * SEED_STEP) % 2**64,
                    limit=limit,
                    arrival=arrival,
                    now=now,
                    salt=None,
                )
                for i in range(sampling.n)
            ]
            self._live[request.request_id] = LiveRequest(request, own, eos, now)
            self.sequences += own

    def begin(self, sequences: Iterable[Seq]) -> None:
        """Their block begins."""
        now = time.perf_counter()
        for seq in sequences:
            seq.t_first_schedule = now

    def tell(self, seq: Seq, token: int, found: HostLogprobs | None, row: int) -> list[Event]:
        """A sequence's next token; nothing if it ended before."""
        if seq.finished:
            return []
        seq.append(token)
        now, live = time.perf_counter(), self._live[seq.request.request_id]
        told: list[Event] = []
        if live.first_token_s is None:
            told.append(live.started())
            live.first_token_s = now
        try:
            delta, reason, by = live.draw(seq, token, found, row, now)
        except Exception as fault:  # its stop checker's: this sequence's fault alone
            seq.finished = True
            return [*told, live.finished(seq, FinishReason.ABORT, None, now, fault)]
        told.append(delta)
        if reason is not None:
            seq.finished = True
            told.append(live.finished(seq, reason, by, now, None))
        return told


def generated(events: Iterable[Event]) -> int:
    """Tokens of sequences that ended."""
    return sum(event.usage.completion_tokens for event in events if isinstance(event, Finished))

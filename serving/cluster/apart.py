"""Prefill apart from decode: the choice for each request, by predicted times.

Together, one replica computes the prompt and the answer. The requests that it decodes wait while the prompt
is computed. Apart, a prefill replica computes the prompt's full pages, and the replica that answers fetches
them. It computes the rest of the prompt, less than a page and one token.
"""

import dataclasses
import enum

FAILURE_PAUSE_S = 30.0  # after a failed transfer all requests stay together for this time
RATE_DECAY = 0.9  # weight of the earlier transfers after each one


class ApartRule(enum.StrEnum):
    """When a prompt is computed apart: where it is predicted to be sooner, or wherever it is possible."""

    PREDICTED = "predicted"
    ALWAYS = "always"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, as the two kinds of replicas would compute it, in tokens.

    Attributes:
      together: to compute at the replica that answers.
      apart: to compute at a prefill replica.
      moved: of the pages to transfer.
      rest: to compute at the replica that answers after the transfer.
    """

    together: int
    apart: int
    moved: int
    rest: int


@dataclasses.dataclass(frozen=True)
class Load:
    """The mean load of a replica of each kind.

    Attributes:
      queued_here, queued_apart: prompt tokens that wait at a replica that answers, and at a prefill replica.
      decoding: requests that a replica decodes.
    """

    queued_here: float
    queued_apart: float
    decoding: float


def saves_time(prompt: Prompt, load: Load, token_s: float, moved_token_s: float) -> bool:
    """Return True if a prefill apart is predicted to cost less waiting than a prefill together.

    The cost is the request's time to its first token, and the delay of the tokens of
    all requests that decode at the
    replica: a prompt computed between their steps delays each of them by its time.

    Args:
      token_s: time of a token's prefill.
      moved_token_s: time of the transfer of a token's share of a page.
    """
    together_s = token_s * (load.queued_here + prompt.together + load.decoding * prompt.together)
    apart_s = token_s * (load.queued_apart + prompt.apart + prompt.rest + load.decoding * prompt.rest)
    return apart_s + moved_token_s * prompt.moved < together_s


class TransferRecord:
    """The record of the transfers so far.

    Attributes:
      done, failed: their numbers since the start; `bytes`: of those done.
    """

    def __init__(self) -> None:
        self.done = self.failed = self.bytes = 0
        self._tokens = self._seconds = 0.0
        self._pause_end_s = float("-inf")

    def note(self, tokens: int, num_bytes: int, seconds: float) -> None:
        """Note a transfer that arrived."""
        self.done += 1
        self.bytes += num_bytes
        self._tokens = RATE_DECAY * self._tokens + tokens
        self._seconds = RATE_DECAY * self._seconds + seconds

    def note_failure(self, now_s: float) -> None:
        """Note a transfer that failed."""
        self.failed += 1
        self._pause_end_s = now_s + FAILURE_PAUSE_S

    def paused(self, now_s: float) -> bool:
        """Return True soon after a failure."""
        return now_s < self._pause_end_s

    @property
    def token_s(self) -> float:
        """Return the recent time of a token's share of a transfer; 0 before the first one."""
        return self._seconds / self._tokens if self._tokens else 0.0

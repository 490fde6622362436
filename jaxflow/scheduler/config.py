"""What the scheduler works with (`SchedulerConfig`), and which requests it could never serve (`limit_of`)."""

import dataclasses

from jaxflow.config import ConfigError
from jaxflow.request import InvalidRequest, Request
from jaxflow.scheduler.policies import POLICIES


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler works with.

    Attributes:
      token_budget: tokens of a step.
      max_num_seqs: sequences running at once (slots); no more than token_budget do.
      block_size: tokens a page.
      windows: of each layer group, its window in tokens, or None for full attention; all different.
      num_pages: of each layer group. A window group runs best with token_budget / block_size pages beyond
      what its windows
        hold, since a chunk has all of its own pages at once.
      max_model_len: tokens of a sequence, prompt and output.
      buckets: token counts that compiled steps have, ascending; the last holds the budget.
      policy: a name in `POLICIES`; `chunk_size` goes with "hybrid".
      max_waiting: requests not yet begun.
      seed: of the seeds drawn for requests that have none.
      fingerprint: of what the KV of equal tokens depends on, the model first of all: names of pages are made
      from it.

    Raises:
      ConfigError: naming the field.
    """

    token_budget: int
    max_num_seqs: int
    block_size: int
    windows: tuple[int | None, ...]
    num_pages: tuple[int, ...]
    max_model_len: int
    buckets: tuple[int, ...]
    policy: str = "decode-maximal"
    chunk_size: int | None = None
    enable_prefix_caching: bool = True
    max_waiting: int = 4096
    seed: int = 0
    fingerprint: bytes = b""

    @property
    def num_slots(self) -> int:
        """The number of slots: not more than a step has tokens, so that every decode gets its token."""
        return min(self.max_num_seqs, self.token_budget)

    def __post_init__(self) -> None:
        def check(field: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise ConfigError(field, getattr(self, field), accepted)

        for field in ("token_budget", "max_num_seqs", "block_size", "max_model_len", "max_waiting"):
            check(field, getattr(self, field) >= 1, "a positive number")
        check(
            "windows",
            len(self.windows) > 0 and len(set(self.windows)) == len(self.windows),
            "one entry for each distinct window",
        )
        check(
            "num_pages",
            len(self.num_pages) == len(self.windows) and min(self.num_pages) >= 1,
            "pages of each layer group",
        )
        check(
            "buckets",
            list(self.buckets) == sorted(set(self.buckets)) and len(self.buckets) > 0,
            "ascending token counts",
        )
        check(
            "buckets",
            max(self.buckets) >= self.token_budget,
            f"the last must hold token_budget={self.token_budget}",
        )
        check("policy", self.policy in POLICIES, " or ".join(POLICIES))
        chunked = POLICIES[self.policy].chunked
        check(
            "chunk_size",
            (self.chunk_size or 0) >= 1 if chunked else self.chunk_size is None,
            "a positive number, with policy hybrid only",
        )


def salt_of(config: SchedulerConfig, request: Request, arrival: int) -> bytes | None:
    """What the names of a request's pages are made from, beside their tokens; None if it shares none, not
    even among its own.

    Requests of another salt neither find them nor, by the time that an answer takes, find out whether they
    are there.
    """
    if config.enable_prefix_caching:
        return b"shared:" + config.fingerprint + request.cache_salt.encode("utf-8", "surrogatepass")
    return b"private:%d" % arrival if request.sampling.n > 1 else None


def window_pages(window: int, block_size: int) -> int:
    """Pages that one query of a window group can see, at most."""
    return -(-(window - 1) // block_size) + 1


def limit_of(config: SchedulerConfig, request: Request) -> int:
    """Tokens, prompt and output, that a request's sequences may grow to: what it asks for, if one of them
    could run alone.

    max_tokens=None asks for as many as the context and the pages hold.

    Raises:
      InvalidRequest: for an empty prompt, and for more than that.
    """
    prompt, most = len(request.prompt_token_ids), request.sampling.max_tokens
    # The last token is sampled, never computed: a pool of p positions holds a sequence of p + 1 tokens.
    longest = config.max_model_len
    for pages, window in zip(config.num_pages, config.windows, strict=True):
        if window is None or pages < window_pages(window, config.block_size):
            longest = min(longest, pages * config.block_size + 1)
    if prompt == 0:
        raise InvalidRequest("prompt_token_ids", [], "at least one token")
    if prompt >= longest:
        raise InvalidRequest(
            "prompt_token_ids",
            f"{prompt} tokens",
            f"at most {longest - 1} tokens, and room for one to follow",
        )
    if most is None:
        return longest
    if prompt + most > longest:
        raise InvalidRequest(
            "max_tokens", most, f"at most {longest - prompt} after a prompt of {prompt} tokens"
        )
    return prompt + most

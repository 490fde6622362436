"""The scheduler's settings, and the limits that they set for a request."""

import dataclasses

from jaxflow.config import ConfigError, Window
from jaxflow.kv.visible import most_pages
from jaxflow.request import Request, with_limit


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """The settings of a scheduler.

    Attributes:
      token_budget: maximum number of tokens in a step.
      max_num_seqs: maximum number of running sequences. At most `token_budget` run, one token each.
      block_size: tokens a page.
      windows: attention window of each page group: tokens, an elastic span, or None for full attention; all
        different.
      num_pages: pages of each layer group. A window group runs best with token_budget / block_size pages
        more than its windows hold, because a chunk holds all of its pages at once.
      max_model_len: maximum number of tokens of a sequence, prompt and output.
      buckets: token counts of the compiled steps, ascending; the last holds the budget.
      max_waiting: maximum number of requests in the waiting queue.
      seed: seed of the random seeds that requests without a seed get.
      stages: P, the pipeline stages. P micro-batches are in flight.
      decode_cost: the relative times of a decode: of one token, and of one KV token that it reads.
      fingerprint: digest of everything besides the tokens that KV depends on, such as the model. The content
        names of pages are made from it.

    Raises:
      ConfigError: naming the field.
    """

    token_budget: int
    max_num_seqs: int
    block_size: int
    windows: tuple[Window, ...]
    num_pages: tuple[int, ...]
    max_model_len: int
    buckets: tuple[int, ...]
    enable_prefix_caching: bool = True
    max_waiting: int = 4096
    seed: int = 0
    stages: int = 1
    decode_cost: tuple[float, float] = (1.0, 0.0)
    fingerprint: bytes = b""

    @property
    def num_slots(self) -> int:
        """The number of slots: not more than a step has tokens, so that every decode gets its token."""
        return min(self.max_num_seqs, self.token_budget)

    def __post_init__(self) -> None:
        def check(field: str, ok: bool, accepted: str) -> None:
            if not ok:
                raise ConfigError(field, getattr(self, field), accepted)

        for field in ("token_budget", "max_num_seqs", "block_size", "max_model_len", "max_waiting", "stages"):
            check(field, getattr(self, field) >= 1, "a positive number")
        distinct = len(set(self.windows)) == len(self.windows) > 0
        check("windows", distinct, "one entry for each distinct window")
        sizes = len(self.num_pages) == len(self.windows) and min(self.num_pages) >= 1
        check("num_pages", sizes, "a positive number of pages for each layer group")
        ascending = list(self.buckets) == sorted(set(self.buckets)) and len(self.buckets) > 0
        check("buckets", ascending, "ascending token counts")
        fits = max(self.buckets) >= self.token_budget
        check("buckets", fits, f"a last bucket of at least token_budget={self.token_budget}")


def prefix_salt(config: SchedulerConfig, request: Request, arrival: int) -> bytes | None:
    """Return the bytes that begin the content names of a request's pages; None if it shares no pages.

    Requests of different salts do not find each other's pages, so that response times do not tell whether
    another request has the same prompt. Without prefix caching only the n sequences of a request share.
    """
    if config.enable_prefix_caching:
        return b"shared:" + config.fingerprint + request.cache_salt.encode("utf-8", "surrogatepass")
    return b"private:%d" % arrival if request.sampling.n > 1 else None


def accept(config: SchedulerConfig, request: Request) -> Request:
    """Return the request with its `limit`: the tokens that each of its sequences may grow to.

    With max_tokens=None the limit is all that the context and the page pool hold. A request that has a limit
    is returned as it is, so that each request is checked once.

    Raises:
      InvalidRequest: for an empty prompt, and for a request that exceeds the context or the page pool.
    """
    if request.limit is not None:
        return request
    # The last token is sampled, never computed: a pool of p positions holds a sequence of p + 1 tokens.
    longest = config.max_model_len
    for pages, window in zip(config.num_pages, config.windows, strict=True):
        if pages < most_pages(config.max_model_len, window, config.block_size):
            longest = min(longest, pages * config.block_size + 1)
    return with_limit(request, longest - 1, longest - len(request.prompt_token_ids))

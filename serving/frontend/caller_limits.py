"""Limits of what one bearer token may have in work at once."""

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager

from jaxflow.request import Request
from serving.frontend.access import Caller
from serving.frontend.refusal import Code, Refusal

RETRY_S = 1.0
_UNCOUNTED = contextlib.nullcontext()


@dataclasses.dataclass
class _InWork:
    requests: int = 0
    tokens: int = 0


class CallerLimits:
    """The requests of each caller that run or wait, and their limits. Callers without a token have no limit.

    Args:
      max_requests: most requests of one caller at once; 0 for no limit.
      max_tokens: most tokens of these requests, prompt and longest output of each sequence; 0 for no limit.
    """

    def __init__(self, max_requests: int = 0, max_tokens: int = 0):
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._in_work: dict[str, _InWork] = {}

    def admit(self, caller: Caller, request: Request) -> AbstractContextManager[None]:
        """Count a request for the duration of the block.

        Raises:
          Refusal: the caller would have more in work than its limits.
        """
        return self._counted(caller, request) if caller.name else _UNCOUNTED

    @contextlib.contextmanager
    def _counted(self, caller: Caller, request: Request) -> Iterator[None]:
        tokens = (request.limit or len(request.prompt_token_ids)) * request.sampling.n
        mine = self._in_work.setdefault(caller.name, _InWork())
        if self._max_requests and mine.requests >= self._max_requests:
            raise _refused(f"{mine.requests} requests of this token are in work, and {self._max_requests}")
        if self._max_tokens and mine.tokens + tokens > self._max_tokens:
            raise _refused(
                f"this request can take {tokens} tokens, those of this token in work {mine.tokens}, and "
                f"{self._max_tokens} together"
            )
        mine.requests += 1
        mine.tokens += tokens
        try:
            yield
        finally:
            mine.requests -= 1
            mine.tokens -= tokens
            if not mine.requests:
                self._in_work.pop(caller.name, None)


def _refused(what: str) -> Refusal:
    return Refusal(Code.RATE_LIMITED, f"{what} are the maximum", retry_after_s=RETRY_S)

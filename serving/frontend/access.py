"""Bearer tokens: the check of a token, and the caller that it stands for."""

import dataclasses
import hashlib
import hmac
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Caller:
    """The sender of a request. `name` is a digest of its token, or empty without tokens. A log may show it."""

    name: str = ""


ANONYMOUS = Caller()


class BearerTokens:
    """The accepted bearer tokens. Without tokens every caller is accepted as `ANONYMOUS`."""

    def __init__(self, tokens: Sequence[str] = ()):
        self._known = [(token.encode(), Caller(_digest(token))) for token in tokens]

    def caller(self, authorization: str | bytes | None) -> Caller | None:
        """Return the caller of an `authorization` header, or None if the header has no valid token."""
        if not self._known:
            return ANONYMOUS
        given = authorization or ""
        scheme, _, token = (given.decode("latin-1") if isinstance(given, bytes) else given).partition(" ")
        candidate = token.strip().encode("utf-8", "surrogateescape")
        # Every token is compared in constant time, so the response time reveals nothing about the tokens.
        matches = [caller for known, caller in self._known if hmac.compare_digest(candidate, known)]
        return matches[0] if matches and scheme.lower() == "bearer" else None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()[:16]

"""Bearer tokens: the check of a token, and the caller that it stands for."""

import contextvars
import dataclasses
import hashlib
import hmac
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Caller:
    """The sender of a request.

    `name` is a digest of its token, or empty without tokens. A log may show it.
    """

    name: str = ""


ANONYMOUS = Caller()

# The caller of the running task. Each server sets it once the token of a call is checked.
CALLER: contextvars.ContextVar[Caller] = contextvars.ContextVar("caller", default=ANONYMOUS)


class BearerTokens:
    """The accepted bearer tokens. Without tokens every caller is accepted as `ANONYMOUS`."""

    def __init__(self, tokens: Sequence[str] = ()):
        self._known = [
            (_digest(token.encode()), Caller(_digest(token.encode()).hex()[:16])) for token in tokens
        ]

    @property
    def required(self) -> bool:
        """Return True if a caller needs a token."""
        return bool(self._known)

    def caller(self, authorization: str | bytes | None) -> Caller | None:
        """Return the caller of an `authorization` header, or None if the header has no valid token."""
        if not self._known:
            return ANONYMOUS
        given = authorization or ""
        scheme, _, token = (given.decode("latin-1") if isinstance(given, bytes) else given).partition(" ")
        # Digests of all tokens are compared in constant time. So the response time reveals
        # neither the tokens nor their lengths.
        candidate = _digest(token.strip().encode("utf-8", "surrogateescape"))
        matches = [caller for known, caller in self._known if hmac.compare_digest(candidate, known)]
        return matches[0] if matches and scheme.lower() == "bearer" else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()

"""Authentication of HTTP requests: a bearer token, or HTTP Basic with the token as the password.

Programs send bearer tokens. HTTP Basic lets a browser open the pages for people. A browser adds Basic
credentials to every request by itself, also to requests that pages of other sites make. So Basic is
accepted with GET and HEAD only.
"""

import base64
import binascii

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.frontend.access import CALLER, BearerTokens
from serving.frontend.refusal import Code, Refusal
from serving.http.errors import HttpError

# Paths that need no token, compared with the path by which the router chooses. All other paths need one.
OPEN = frozenset(("/health", "/health/live", "/health/ready", "/health/startup"))
BROWSER_METHODS = ("GET", "HEAD")
_MESSAGE = "this server requires the header `authorization: Bearer <token>` with a valid token"
# Chromium reads one challenge a header line, so a list with Bearer in it would
# show no question for a password.
_CHALLENGE = 'Basic realm="jaxflow", charset="UTF-8"'


class Authenticated:
    """An ASGI application that answers callers with a valid token, and everyone on the `OPEN` paths.

    Raises:
      Refusal, HttpError: no valid token, or several `authorization` headers.
    """

    def __init__(self, app: ASGIApp, tokens: BearerTokens):
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if get_route_path(scope) not in OPEN:
            caller = self._tokens.caller(credentials(scope))
            if caller is None:
                if scope["method"] in BROWSER_METHODS:
                    headers = {"www-authenticate": _CHALLENGE}
                    raise HttpError(401, _MESSAGE, code="invalid_api_key", headers=headers)
                raise Refusal(Code.UNAUTHENTICATED, _MESSAGE)
            CALLER.set(caller)  # each request has a task of its own
        await self._app(scope, receive, send)


def credentials(scope: Scope) -> bytes | None:
    """Return the `authorization` header, with a password of HTTP Basic as a bearer
    token; None without one header.
    """
    given = [value for key, value in scope["headers"] if key == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, value = given[0].partition(b" ")
    if scheme.lower() != b"basic" or scope["method"] not in BROWSER_METHODS:
        return given[0]
    try:
        password = base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None
    return b"Bearer " + password

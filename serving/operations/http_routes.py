"""The HTTP side of operation: `/health*`, `/metrics`, `/experts`, `/status`, and the record of each call."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.operations.health import Verdict
from serving.operations.metrics import CONTENT_TYPE
from serving.operations.operations import Operations

PAGE = (Path(__file__).parent / "status.html").read_bytes()
PAGE_HEADERS = {
    "cache-control": "no-store",
    # The page is one file. Nothing else is loaded, and no other page may frame it.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}
EVENTS_S = 1.0  # between two events of the status page
MAX_VIEWERS = 32  # open status pages; a further one is answered 503


def routes(operations: Operations) -> list[BaseRoute]:
    """Return the routes of operation. The caller mounts them beside its own, behind its authentication."""

    async def metrics(request: Request) -> Response:
        return Response(operations.metrics(), headers={"content-type": CONTENT_TYPE})

    async def experts(request: Request) -> Response:
        found = operations.experts()
        body = None if found is None else {"layers": found.layers, "tokens": found.tokens.tolist()}
        headers = {"cache-control": "no-store"}
        return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)

    async def page(request: Request) -> Response:
        return Response(PAGE, media_type="text/html", headers=PAGE_HEADERS)

    viewers = set()

    async def events(request: Request) -> Response:
        if len(viewers) >= MAX_VIEWERS:
            return Response("too many open status pages", status_code=503, headers={"retry-after": "10"})
        viewer = object()

        async def stream() -> AsyncIterator[bytes]:
            viewers.add(viewer)
            try:
                while True:
                    yield b"data: " + msgspec.json.encode(operations.status.now()) + b"\n\n"
                    await asyncio.sleep(EVENTS_S)
            finally:
                viewers.discard(viewer)

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    health = operations.health
    return [
        Route("/health", _probe(health.ready)),
        Route("/health/ready", _probe(health.ready)),
        Route("/health/live", _probe(health.live)),
        Route("/health/startup", _probe(health.startup)),
        Route("/metrics", metrics),
        Route("/experts", experts),
        Route("/status", page),
        Route("/status/events", events),
    ]


def _probe(verdict: Callable[[], Verdict]) -> Callable:
    """Return the endpoint of one question of health: 200, or 503 with the reason."""

    async def endpoint(request: Request) -> Response:
        found = verdict()
        body = {"status": "ok"} if found.ok else {"status": "unavailable", "reason": found.reason}
        return Response(
            msgspec.json.encode(body),
            status_code=200 if found.ok else 503,
            media_type="application/json",
            headers={"cache-control": "no-store"},
        )

    return endpoint


class ObservedCalls:
    """The ASGI middleware that gives each POST request a `serving.frontend.call.Call`."""

    def __init__(self, app: ASGIApp, operations: Operations):
        self._app, self._operations = app, operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        traceparent = next((value for key, value in scope["headers"] if key == b"traceparent"), b"")
        with self._operations.observe("http", scope["path"], traceparent.decode("latin-1")) as call:

            async def observed(message: Message) -> None:
                if message["type"] == "http.response.start":
                    call.status = message["status"]
                await send(message)

            await self._app(scope, receive, observed)

"""The HTTP routes of operation: `/health*`, `/metrics` and `/status`."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serving.operations.health import Verdict
from serving.operations.metrics import CONTENT_TYPE
from serving.operations.operations import Operations


def routes(operations: Operations) -> list[BaseRoute]:
    """Return the routes of operation. The caller mounts them beside its own, behind its authentication."""

    async def metrics(request: Request) -> Response:
        return Response(operations.metrics(), headers={"content-type": CONTENT_TYPE})

    health = operations.health
    return [
        Route("/health", _probe(health.ready)),
        Route("/health/ready", _probe(health.ready)),
        Route("/health/live", _probe(health.live)),
        Route("/health/startup", _probe(health.startup)),
        Route("/metrics", metrics),
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

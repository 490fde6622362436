"""The routes `/openapi.json` and `/docs`. The page is one file and loads nothing from other servers."""

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serving.http.openapi import document

PAGE = (Path(__file__).parent / "docs.html").read_bytes()
PAGE_HEADERS = {
    "cache-control": "no-store",
    # The page asks this server only, and no other page may frame it.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}


def docs_routes(root_path: str = "") -> list[BaseRoute]:
    """Return the routes of the document and the page."""
    text = msgspec.json.encode(document(root_path))

    async def openapi(request: Request) -> Response:
        return Response(text, media_type="application/json")

    async def page(request: Request) -> Response:
        return Response(PAGE, media_type="text/html", headers=PAGE_HEADERS)

    return [Route("/openapi.json", openapi), Route("/docs", page)]

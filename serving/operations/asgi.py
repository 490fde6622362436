"""The ASGI middleware that records the POST requests of an HTTP server."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.operations.operations import Operations


class ObservedCalls:
    """An ASGI application whose POST requests have a `serving.frontend.call.Call`."""

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

"""The ASGI application: routes, authentication, request ids and errors."""

from collections.abc import Sequence

import msgspec
from starlette._utils import get_route_path
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jaxflow
from serving.frontend.access import BearerTokens
from serving.frontend.call import CALL, new_id
from serving.http.authentication import Authenticated
from serving.http.endpoints import Endpoints
from serving.http.errors import HttpError
from serving.http.exchange import EXTENSION, Disconnected
from serving.http.generation import JsonRoute, send_json
from serving.http.limits import Limits
from serving.http.openapi import docs_routes
from serving.http.responses import Version
from serving.http.schema import KINDS
from serving.operations import Operations
from serving.operations import routes as operation_routes
from serving.operations.http_routes import ObservedCalls

MAX_ID_CHARS = 256
NOT_SERVED = {
    "/v1/embeddings": "the served model has no embedding head",
    "/pooling": "the served model has no pooling head",
    "/score": "the served model has no scoring head",
    "/v1/score": "the served model has no scoring head",
    "/rerank": "the served model has no reranking head",
    "/v1/rerank": "the served model has no reranking head",
    "/v2/rerank": "the served model has no reranking head",
    "/classify": "the served model has no classification head",
    "/v1/responses": "this server has no responses API: use /v1/chat/completions",
    "/v1/messages": "this server has OpenAI's API only: use /v1/chat/completions",
    "/v1/load_lora_adapter": "LoRA adapters are not served: merge the adapter into the checkpoint",
    "/v1/unload_lora_adapter": "LoRA adapters are not served: merge the adapter into the checkpoint",
    "/v1/audio/transcriptions": "the served model reads text only",
    "/v1/audio/translations": "the served model reads text only",
    "/v1/images/generations": "the served model writes text only",
    # Of llama.cpp, SGLang, TGI and Ollama.
    "/completion": "this server has OpenAI's API: use /v1/completions",
    "/completions": "this server has OpenAI's API: use /v1/completions",
    "/chat/completions": "this server has OpenAI's API: use /v1/chat/completions",
    "/generate": "this server has OpenAI's API: use /v1/completions",
    "/generate_stream": "this server has OpenAI's API: use /v1/completions with stream",
    "/infill": "this server has no infill API: use /v1/completions with the model's prompt for it",
    "/api/generate": "this server has OpenAI's API: use /v1/completions",
    "/api/chat": "this server has OpenAI's API: use /v1/chat/completions",
}


class HttpApp:
    """The application of a served model.

    Args:
      operations: gives the routes of health, metrics and status, and records the POST requests.
      tokens: the accepted bearer tokens.
      more_routes: further routes, behind the same authentication.
      allowed_origins: web origins whose pages may read the answers.
      root_path: the path under which a proxy shows this server.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        operations: Operations,
        tokens: BearerTokens,
        *,
        limits: Limits | None = None,
        more_routes: Sequence[BaseRoute] = (),
        allowed_origins: Sequence[str] = (),
        root_path: str = "",
    ):
        self._endpoints = endpoints
        self._root_path = root_path.rstrip("/")
        self._crosses_origins = bool(allowed_origins)  # answers get headers from `CORSMiddleware`
        self._posts = {path: JsonRoute(path, endpoints, limits or Limits()) for path in KINDS}
        routes = [*(Post(path, app) for path, app in self._posts.items()), *_routes(endpoints)]
        routes += [*docs_routes(self._root_path), *operation_routes(operations), *more_routes]
        self._router = Router(routes, redirect_slashes=False, default=_unknown)
        checked = Authenticated(self._route, tokens) if tokens.required else self._route
        app = ObservedCalls(self._answering(checked), operations)
        if allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=list(allowed_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self  # makes the router raise its errors
        scope["root_path"] = self._root_path
        await self._app(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Most requests are of few routes. A search through all routes costs each of
        # them more than its authentication.
        app = self._posts.get(get_route_path(scope)) if scope["method"] == "POST" else None
        await (app or self._router)(scope, receive, send)

    def _answering(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose answers have an id, and whose exceptions are answers."""

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            begun = False
            request_id = request_id_of(scope)
            if not self._crosses_origins:
                scope["extensions"][EXTENSION].headers = b"x-request-id: %b\r\n" % request_id

            async def named(message: Message) -> None:
                nonlocal begun
                if not begun:
                    begun = True
                    message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
                await send(message)

            try:
                await app(scope, receive, named)
            except Disconnected as error:
                if (call := CALL.get()) is not None:
                    call.fail(error)
            except Exception as error:
                found = self._endpoints.error(error, get_route_path(scope))
                if begun:
                    raise  # the connection is closed: the caller sees that the answer is not whole
                headers = [(key.encode(), value.encode("latin-1")) for key, value in found.headers.items()]
                await send_json(named, found.status, msgspec.json.encode(found.body), lambda: headers)

        return answered


class Post(Route):
    """The route of an ASGI application that takes POST requests."""

    def __init__(self, path: str, app: ASGIApp):
        super().__init__(path, _no_endpoint, methods=["POST"])
        self.app = app


async def _no_endpoint(request: Request) -> Response:
    raise AssertionError("the application of a Post route is not its endpoint")


def request_id_of(scope: Scope) -> bytes:
    """Return the id of a request: the caller's `x-request-id`, if it is printable ASCII, or a new one."""
    given = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
    if 0 < len(given) <= MAX_ID_CHARS and all(0x20 < byte < 0x7F for byte in given):
        return given
    return new_id().encode()


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    raise HttpError(404, f"no route {get_route_path(scope)[:80]!r}; /docs lists the routes", code="not_found")


def _routes(endpoints: Endpoints) -> list[BaseRoute]:
    """Return the routes of models, versions, and endpoints that are not served."""

    async def models(request: Request) -> Response:
        return json(endpoints.models())

    async def model(request: Request) -> Response:
        return json(endpoints.model(request.path_params["id"]))

    async def tokenizer_info(request: Request) -> Response:
        return json(endpoints.tokenizer_info())

    async def version(request: Request) -> Response:
        return json(Version(jaxflow.__version__))

    async def ping(request: Request) -> Response:
        endpoints.models()  # raises while the model loads
        return Response()

    def refuse(reason: str):
        async def refused(request: Request) -> Response:
            raise HttpError(404, reason, code="not_supported")

        return refused

    return [
        Route("/v1/models", models),
        Route("/v1/models/{id:path}", model),
        Route("/tokenizer_info", tokenizer_info),
        Route("/version", version),
        Route("/ping", ping, methods=["GET", "POST"]),
        *(Route(path, refuse(reason), methods=["POST"]) for path, reason in NOT_SERVED.items()),
    ]


def json(body: object) -> Response:
    """Return an answer with a JSON body."""
    return Response(msgspec.json.encode(body), media_type="application/json")

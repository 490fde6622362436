"""The OpenAPI document of the HTTP server and the page `/docs` that shows the document.

The document is made from the structs that parse bodies and write answers. The page is one file and loads
nothing from other servers.
"""

from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import jaxflow
from serving.batch.store import Batch, StoredFile
from serving.http.errors import ErrorBody
from serving.http.responses import (
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    Model,
    ModelList,
    TokenizeAnswer,
    TokenizerInfo,
    Version,
)
from serving.http.schema import KINDS, NOT_SERVED_FIELDS

PAGE = (Path(__file__).parent / "docs.html").read_bytes()
PAGE_HEADERS = {
    "cache-control": "no-store",
    # The page asks this server only, and no other page may frame it.
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}
_ANSWERS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/tokenize": TokenizeAnswer,
    "/detokenize": DetokenizeAnswer,
}
_SUMMARIES = {
    "/v1/chat/completions": "Answer a conversation",
    "/v1/completions": "Continue texts or token ids",
    "/tokenize": "Return the token ids of a text or a conversation",
    "/detokenize": "Return the text of token ids",
    "/v1/models": "List the names of the served model",
    "/v1/models/{id}": "Return one name of the served model",
    "/tokenizer_info": "Return the special tokens and the chat template",
    "/version": "Return the server's version",
    "/health": "Answer if new requests are served",
    "/health/ready": "Answer if new requests are served",
    "/health/live": "Answer if steps advance while there is work",
    "/health/startup": "Answer if the model is loaded",
    "/metrics": "Return the metrics in Prometheus' text format",
    "/experts": "Return the tokens at each expert of a mixture",
    "/status": "Show the server in a browser",
}
_GETS = (
    ("/v1/models", ModelList),
    ("/v1/models/{id}", Model),
    ("/tokenizer_info", TokenizerInfo),
    ("/version", Version),
)
_BATCHES = (
    ("/v1/files", "post", "Upload a file of requests", "StoredFile"),
    ("/v1/files", "get", "List the files", None),
    ("/v1/files/{id}", "get", "Return a file's record", "StoredFile"),
    ("/v1/files/{id}", "delete", "Delete a file", None),
    ("/v1/files/{id}/content", "get", "Return a file's content", None),
    ("/v1/batches", "post", "Run the requests of a file", "Batch"),
    ("/v1/batches", "get", "List the batches", None),
    ("/v1/batches/{id}", "get", "Return a batch", "Batch"),
    ("/v1/batches/{id}/cancel", "post", "Cancel a batch", "Batch"),
)
_STREAMED = ("/v1/chat/completions", "/v1/completions")
_REQUEST_HEADERS = (
    ("x-request-id", "An id of printable ASCII characters, which the answer repeats.", {"type": "string"}),
    (
        "x-request-timeout-ms",
        "Milliseconds after which the request ends with status 504.",
        {"type": "integer", "minimum": 0, "maximum": 9_999_999_999},
    ),
)


def document(root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `root_path`: the path under which a proxy shows the server."""
    structs = [
        *KINDS.values(),
        *_ANSWERS.values(),
        Model,
        ModelList,
        TokenizerInfo,
        Version,
        ErrorBody,
        StoredFile,
        Batch,
    ]
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for kind in KINDS.values():
        for name in NOT_SERVED_FIELDS:
            schemas[kind.__name__]["properties"].pop(name, None)
    for name, private in ((StoredFile.__name__, ("owner",)), (Batch.__name__, ("owner", "ending"))):
        for field in private:
            schemas[name]["properties"].pop(field)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "JaxFlow",
            "version": jaxflow.__version__,
            "description": "OpenAI's API for one model, with vLLM's extra fields.",
        },
        "servers": [{"url": root_path or "/"}],
        "security": [{"bearer": []}, {}],
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, kind in KINDS.items():
        content = _json(_ref(_ANSWERS[path].__name__))
        if path in _STREAMED:
            content |= {"text/event-stream": {"schema": {"type": "string"}}}
        headers = [
            {"name": name, "in": "header", "description": text, "schema": schema}
            for name, text, schema in _REQUEST_HEADERS
        ]
        body = {"required": True, "content": _json(_ref(kind.__name__))}
        paths[path] = {"post": _operation(path, content) | {"parameters": headers, "requestBody": body}}
    for path, struct in _GETS:
        paths[path] = {"get": _operation(path, _json(_ref(struct.__name__)))}
    for path in ("/health", "/health/ready", "/health/live", "/health/startup"):
        paths[path] = {"get": _operation(path, _json({"type": "object"})) | {"security": []}}
    paths["/metrics"] = {"get": _operation("/metrics", {"text/plain": {"schema": {"type": "string"}}})}
    paths["/experts"] = {"get": _operation("/experts", _json(_EXPERTS))}
    paths["/status"] = {"get": _operation("/status", {"text/html": {"schema": {"type": "string"}}})}
    for path, method, summary, struct in _BATCHES:
        content = _json({"type": "object"} if struct is None else _ref(struct))
        if path.endswith("/content"):
            content = {"application/octet-stream": {"schema": {"type": "string"}}}
        operation = _operation(path, content, f"{summary}. Needs --batch_dir.")
        if (path, method) == ("/v1/files", "post"):
            operation["requestBody"] = {"required": True, "content": {"multipart/form-data": _UPLOAD}}
        elif (path, method) == ("/v1/batches", "post"):
            operation["requestBody"] = {"required": True, "content": _json(_NEW_BATCH)}
        paths.setdefault(path, {})[method] = operation
    return paths


_EXPERTS = {
    "type": ["object", "null"],  # null: no mixture layers, or no step yet
    "properties": {
        "layers": {"type": "array", "items": {"type": "integer"}},
        "tokens": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    },
    "required": ["layers", "tokens"],
}
_UPLOAD = {
    "schema": {
        "type": "object",
        "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
        "required": ["purpose", "file"],
    }
}
_NEW_BATCH = {
    "type": "object",
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"enum": list(_STREAMED)},
        "completion_window": {"const": "24h"},
        "metadata": {"type": ["object", "null"]},
    },
    "required": ["input_file_id", "endpoint", "completion_window"],
    "additionalProperties": False,
}


def _operation(path: str, content: dict[str, Any], summary: str = "") -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary or _SUMMARIES[path],
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "An error.", "content": _json(_ref(ErrorBody.__name__))},
        },
    }
    if "{id}" in path:
        operation["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    if path.startswith("/health"):
        failed = {"description": "The answer is no.", "content": _json({"type": "object"})}
        operation["responses"]["503"] = failed
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def docs_routes(root_path: str = "") -> list[BaseRoute]:
    """Return the routes of the document and the page."""
    text = msgspec.json.encode(document(root_path))

    async def openapi(request: Request) -> Response:
        return Response(text, media_type="application/json")

    async def page(request: Request) -> Response:
        return Response(PAGE, media_type="text/html", headers=PAGE_HEADERS)

    return [Route("/openapi.json", openapi), Route("/docs", page)]

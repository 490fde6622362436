"""The HTTP routes `/v1/files` and `/v1/batches`, as in OpenAI's API."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from serving.batch.batches import Batches
from serving.batch.input_file import URLS, FileLimits
from serving.batch.journal import write_all
from serving.batch.multipart import FormField, MultipartError, MultipartParser, boundary_of
from serving.batch.store import ENDED, Batch, Store, StoredFile, StoreFull, new_batch_id, page

MAX_FIELD_BYTES = 64 * 1024  # of a form field that is no file
MAX_BODY_BYTES = 64 * 1024  # of a JSON body
PIECE_BYTES = 2**20  # an upload is written in pieces of this size, on another thread
WINDOW_S = 24 * 3600

CallerName = Callable[[Request], str]
Handler = Callable[[Request, str], Awaitable[Response]]


class Problem(Exception):
    """A request that is refused, with OpenAI's error fields."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def response(self) -> Response:
        """Return the error as an answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json_response({"error": error}, self.status)


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


def json_response(body: Any, status: int = 200) -> Response:
    """Return an answer with a JSON body."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def routes_without_store() -> list[BaseRoute]:
    """Return the routes of a server without a folder of batches: 404 with the reason."""

    async def absent(request: Request) -> Response:
        message = "this server keeps no files and batches: it was started without --batch_dir"
        return Problem(404, message, code="batches_disabled").response()

    methods = ["GET", "POST", "DELETE"]
    paths = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")
    return [Route(path, absent, methods=methods) for path in paths]


def routes(
    batches: Batches, *, caller_name: CallerName = lambda request: "", limits: FileLimits | None = None
) -> list[BaseRoute]:
    """Return the routes of files and batches. The caller mounts them behind its authentication.

    Args:
      caller_name: returns the owner of what a request makes; other owners see nothing of it.
    """
    own = _Routes(batches, limits or FileLimits())

    def route(path: str, method: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request, caller_name(request))
            except Problem as problem:
                return problem.response()
            except StoreFull as error:
                return Problem(429, str(error), code="storage_full").response()
            except OSError as error:
                message = f"the server cannot use its folder of batches: {error.strerror or error}"
                return Problem(507, message, code="storage_error").response()

        return Route(path, endpoint, methods=[method])

    return [
        route("/v1/files", "POST", own.upload),
        route("/v1/files", "GET", own.list_files),
        route("/v1/files/{id}", "GET", own.file),
        route("/v1/files/{id}", "DELETE", own.delete_file),
        route("/v1/files/{id}/content", "GET", own.content),
        route("/v1/batches", "POST", own.create),
        route("/v1/batches", "GET", own.list_batches),
        route("/v1/batches/{id}", "GET", own.batch),
        route("/v1/batches/{id}/cancel", "POST", own.cancel),
    ]


class _Routes:
    """The handlers. `owner` is the name of the caller."""

    def __init__(self, batches: Batches, limits: FileLimits):
        self._batches, self._limits = batches, limits
        self._store: Store = batches.store
        self._uploads = 0  # under way

    # ---- files

    async def upload(self, request: Request, owner: str) -> Response:
        self._store.check_room(self._uploads * self._limits.file_bytes)
        path = self._store.upload_path()
        self._uploads += 1
        try:
            try:
                with open(path, "xb", buffering=0) as file:
                    form = _Upload(request, file.fileno(), self._limits.file_bytes)
                    await form.read()
            except MultipartError as error:
                raise Problem(400, str(error)) from error
            except ClientDisconnect as error:
                raise Problem(400, "the client closed the connection during the upload") from error
            purpose = form.fields.pop("purpose", None)
            if purpose != "batch":
                raise Problem(400, f"purpose is {purpose!r}; accepted: 'batch'", "purpose")
            if form.filename is None:
                raise Problem(400, "the form has no file in the field 'file'", "file")
            if form.fields:
                raise Problem(400, f"unknown form fields: {', '.join(sorted(form.fields))[:200]}")
            stored = await self._store.add_file(path, form.filename[:256], purpose, owner)
        finally:
            self._uploads -= 1
            path.unlink(missing_ok=True)
        return json_response(stored.public())

    async def list_files(self, request: Request, owner: str) -> Response:
        query = _query(request, {"after", "limit", "order", "purpose"})
        purpose, order = query.get("purpose"), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise Problem(400, f"order is {order[:80]!r}; accepted: asc, desc", "order")
        files = [file for file in self._store.files.values() if purpose in (None, file.purpose)]
        limit = _limit(query, 10_000, 10_000)
        shown, more = page(files, owner, after=query.get("after"), limit=limit, newest_first=order == "desc")
        return json_response(_list([file.public() for file in shown], more))

    async def file(self, request: Request, owner: str) -> Response:
        return json_response(self._file(request.path_params["id"], owner).public())

    async def delete_file(self, request: Request, owner: str) -> Response:
        file = self._file(request.path_params["id"], owner)
        if self._batches.uses(file.id):
            raise Problem(
                409, "a batch that has not ended uses this file: cancel the batch first", code="file_in_use"
            )
        await self._store.delete_file(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request, owner: str) -> Response:
        file = self._file(request.path_params["id"], owner)
        return FileResponse(self._store.path(file), media_type="application/octet-stream")

    def _file(self, file_id: str, owner: str) -> StoredFile:
        file = self._store.files.get(file_id)
        if file is None or file.owner != owner:
            raise Problem(404, f"no such file: {file_id[:80]!r}", "id", "file_not_found")
        return file

    # ---- batches

    async def create(self, request: Request, owner: str) -> Response:
        asked = await _json(request, BatchRequest)
        if asked.endpoint not in URLS:
            raise Problem(
                400, f"endpoint is {asked.endpoint[:80]!r}; accepted: {', '.join(URLS)}", "endpoint"
            )
        if asked.completion_window != "24h":
            given = asked.completion_window[:80]
            raise Problem(400, f"completion_window is {given!r}; accepted: '24h'", "completion_window")
        _check_metadata(asked.metadata)
        file = self._file(asked.input_file_id, owner)
        if file.purpose != "batch":
            raise Problem(
                400, f"the file has the purpose {file.purpose!r}; accepted: 'batch'", "input_file_id"
            )
        now = int(time.time())
        batch = Batch(
            id=new_batch_id(),
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=asked.metadata,
            owner=owner,
        )
        await self._batches.create(batch)
        return json_response(batch.public())

    async def list_batches(self, request: Request, owner: str) -> Response:
        query = _query(request, {"after", "limit"})
        items = self._store.batches.values()
        shown, more = page(items, owner, after=query.get("after"), limit=_limit(query, 20, 100))
        return json_response(_list([self._batches.shown(batch).public() for batch in shown], more))

    async def batch(self, request: Request, owner: str) -> Response:
        return json_response(self._batches.shown(self._batch(request, owner)).public())

    async def cancel(self, request: Request, owner: str) -> Response:
        batch = self._batch(request, owner)
        if batch.status in ENDED or batch.status == "finalizing":
            message = "only a batch that is validating or in_progress can be cancelled"
            raise Problem(409, f"the batch is {batch.status}; {message}", code="batch_ended")
        await self._batches.cancel(batch)
        return json_response(self._batches.shown(batch).public())

    def _batch(self, request: Request, owner: str) -> Batch:
        batch_id = request.path_params["id"]
        batch = self._store.batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise Problem(404, f"no such batch: {batch_id[:80]!r}", "id", "batch_not_found")
        return batch


class _Upload:
    """The form of an upload. The content of the field `file` goes to a file descriptor.

    Attributes:
      filename: the file's name at the client, or None before the field `file`.
      fields: the other fields.
    """

    def __init__(self, request: Request, file: int, max_bytes: int):
        self._request, self._file, self._max_bytes = request, file, max_bytes
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._size = 0
        self._pieces: list[bytes] = []
        self._waiting = 0  # bytes of `_pieces`

    async def read(self) -> None:
        """Read the whole form. Raises: Problem, MultipartError, ClientDisconnect, OSError."""
        self._check_length()
        parser = MultipartParser(boundary_of(self._request.headers.get("content-type", "")))
        part: FormField | None = None
        texts: dict[str, bytearray] = {}
        async for data in self._request.stream():
            for found in parser.feed(data):
                if isinstance(found, FormField):
                    part = found
                    if found.name in texts or (found.name == "file" and self.filename is not None):
                        raise Problem(
                            400, f"the form has the field {found.name[:80]!r} twice", found.name[:80]
                        )
                    if found.name == "file":
                        self.filename = found.filename or "file"
                    else:
                        texts[found.name] = bytearray()
                elif part is not None and part.name == "file":
                    await self._write(found)
                elif part is not None:
                    texts[part.name] += found
                    if sum(map(len, texts.values())) > MAX_FIELD_BYTES or len(texts) > 20:
                        raise Problem(413, f"the form's fields exceed {MAX_FIELD_BYTES} bytes or 20 fields")
        if not parser.ended:
            raise MultipartError("the form ends before its last boundary")
        await self._flush()
        self.fields = {name: bytes(text).decode("utf-8", "replace") for name, text in texts.items()}

    def _check_length(self) -> None:
        length = self._request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_bytes + 2 * MAX_FIELD_BYTES:
            raise self._too_large()

    def _too_large(self) -> Problem:
        return Problem(
            413, f"the file is too large; accepted: at most {self._max_bytes} bytes", "file", "file_too_large"
        )

    async def _write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_bytes:
            raise self._too_large()
        self._pieces.append(data)
        self._waiting += len(data)
        if self._waiting >= PIECE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        data, self._pieces, self._waiting = b"".join(self._pieces), [], 0
        await asyncio.to_thread(write_all, self._file, data)


async def _json[T](request: Request, kind: type[T]) -> T:
    """Return the body of a request. Raises: Problem."""
    body = bytearray()
    try:
        async for data in request.stream():
            body += data
            if len(body) > MAX_BODY_BYTES:
                raise Problem(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return msgspec.json.decode(bytes(body), type=kind)
    except ClientDisconnect as error:
        raise Problem(400, "the client closed the connection") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is not accepted: {error}") from error


def _query(request: Request, known: set[str]) -> dict[str, str]:
    """Return the query of a request. Raises: Problem for an unknown name."""
    query = dict(request.query_params)
    if unknown := sorted(set(query) - known):
        raise Problem(400, f"unknown query parameter {unknown[0][:80]!r}", unknown[0][:80])
    return query


def _limit(query: dict[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
        raise Problem(400, f"limit is {text[:80]!r}; accepted: 1 to {most}", "limit")
    return int(text)


def _list(items: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = (
        {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        if items
        else {"first_id": None, "last_id": None}
    )
    return {"object": "list", "data": items, **ends, "has_more": more}


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is not None and (
        len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items())
    ):
        accepted = "at most 16 pairs of keys of 64 and values of 512 characters"
        raise Problem(400, f"metadata is too large; accepted: {accepted}", "metadata")

"""Parsing of request bodies. One function serves requests of the HTTP server and lines of a batch."""

import msgspec

from jaxflow.request import InvalidRequest, MalformedRequest
from serving.http.schema import (
    MAX_BRACKETS,
    MAX_COMMAS,
    MAX_QUOTES,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    refused_fields,
)

KINDS: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_DECODERS = {path: msgspec.json.Decoder(kind) for path, kind in KINDS.items()}
_UNKNOWN = "Object contains unknown field "
_MISSING = "Object missing required field "


def read_body(path: str, body: bytes) -> Body:
    """Return the request of a body.

    Raises:
      InvalidRequest: not JSON, an unknown field, a value of another type, or a field that is not served.
    """
    _check_parts(body)
    try:
        request = _DECODERS[path].decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed("body", f"not a JSON object in UTF-8: {error}") from None
    except RecursionError:
        raise _malformed("body", "the JSON is nested too deeply") from None
    for name, value, reason in refused_fields(request):
        raise InvalidRequest(name, value, reason)
    return request


def _check_parts(body: bytes) -> None:
    """Check the number of a body's values, so that the event loop reads them in a short time.

    Raises: MalformedRequest.
    """
    quotes = body.count(b'"') - body.count(b'\\"')  # an escaped quote is a part of a string
    brackets = body.count(b"{") + body.count(b"[")
    for found, most in ((body.count(b","), MAX_COMMAS), (quotes, MAX_QUOTES), (brackets, MAX_BRACKETS)):
        if found > most:
            accepted = f"at most {MAX_COMMAS} commas, {MAX_QUOTES} quotes of strings, {MAX_BRACKETS} brackets"
            raise _malformed("body", f"too many values; accepted: {accepted}")


def _malformed(field: str, problem: str) -> MalformedRequest:
    """Return the error of a field, or of `body`."""
    return MalformedRequest(field, f"{field[:80]}: {problem[:300]}")


def _invalid(message: str) -> MalformedRequest:
    """Return the error of a validation message of msgspec, such as "Expected `int` - at `$.n`"."""
    problem, _, where = message.partition(" - at ")
    path = where.rpartition("`$")[2].rstrip("`").lstrip(".")
    for start, reason in ((_UNKNOWN, "unknown field"), (_MISSING, "this field is required")):
        if problem.startswith(start):
            field = problem.removeprefix(start).strip("`")
            return _malformed(f"{path}.{field}" if path else field, reason)
    return _malformed(path or "body", problem)

"""The request log: one JSON line a call, without any text of the caller or the model."""

import asyncio
import datetime
import json
import logging
import logging.handlers
from collections.abc import Mapping
from typing import Any

from serving.frontend.call import Call
from serving.frontend.refusal import refusal_of

MAX_FIELD_CHARS = 80  # a caller may name a field as it likes
OK, REFUSED, CANCELLED, ERROR = "ok", "refused", "cancelled", "error"


class RequestLogError(ValueError):
    """A request log that cannot be written. The message is one line."""


class RequestLog:
    """A log of calls at `target`: `stderr`, or the path of a file.

    A file that another program renamed is opened anew, so any log rotation works. A line that cannot be
    written is reported on standard error and lost; the call is served.

    Raises:
      RequestLogError: the file cannot be opened.
    """

    def __init__(self, target: str):
        try:
            self._handler = (
                logging.StreamHandler()
                if target == "stderr"
                else logging.handlers.WatchedFileHandler(target, encoding="ascii")
            )
        except OSError as error:
            raise RequestLogError(f"--request_log={target}: {error.strerror or error}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one line. Line ends and other controls in an id are escaped, because the line is ASCII."""
        line = json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        self._handler.handle(logging.LogRecord("request", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def outcome(call: Call) -> tuple[str, str]:
    """Return the outcome of a call and its reason.

    A reason is a fixed name or the name of an exception's type.
    """
    error = call.error
    if error is not None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            return CANCELLED, "the client disconnected"
        refusal = refusal_of(error)
        if refusal is not None:
            return REFUSED, str(refusal.code) + (
                f": {refusal.field[:MAX_FIELD_CHARS]}" if refusal.field else ""
            )
        return ERROR, type(error.__cause__ or error).__name__
    if call.status >= 500:
        return ERROR, f"HTTP {call.status}"
    if call.status >= 400:
        return REFUSED, f"HTTP {call.status}"
    reasons = sorted({str(end.reason) for _, end in call.ends})
    return (CANCELLED if reasons == ["abort"] else OK), ",".join(reasons)


def record(call: Call, ended_ns: int, trace_id: str = "") -> dict[str, Any]:
    """Return the log's entry for a call that ended at `ended_ns`.

    The times are those of the slowest sequence.
    """
    result, reason = outcome(call)
    ends = [end for _, end in call.ends]
    # Sequences of one request share the cached tokens.
    cached = {end.request_id: end.usage.cached_prompt_tokens for end in ends}
    entry = {
        "time": datetime.datetime.fromtimestamp(ended_ns / 1e9, datetime.UTC).isoformat(
            timespec="milliseconds"
        ),
        "request_id": call.name,
        "engine_ids": call.engine_ids,
        "protocol": call.protocol,
        "method": call.method,
        "outcome": result,
        "reason": reason,
        "prompt_tokens": call.prompt_tokens,
        "cached_prompt_tokens": sum(cached.values()),
        "completion_tokens": sum(end.usage.completion_tokens for end in ends),
        "queued_s": _longest(end.timings.queued_s for end in ends),
        "ttft_s": _longest(end.timings.time_to_first_token_s for end in ends),
        "engine_s": _longest(end.timings.total_s for end in ends),
        "total_s": round((ended_ns - call.begun_ns) / 1e9, 6),
        "preemptions": sum(end.timings.preemptions for end in ends),
    }
    return entry | ({"trace_id": trace_id} if trace_id else {})


def _longest(seconds: Any) -> float | None:
    found = max(seconds, default=None)
    return None if found is None else round(found, 6)

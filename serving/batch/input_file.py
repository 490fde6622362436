"""The input file of a batch: JSON lines, checked whole before the first request runs."""

import array
import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from jaxflow.request import InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_ID_CHARS = 512
MAX_ERRORS = 100  # errors that a report lists
LINES_A_PAUSE = 32
_BOM = b"\xef\xbb\xbf"

# Checks the body of a request to a url as the HTTP server does. Raises: InvalidRequest.
CheckBody = Callable[[str, bytes], None]


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of the input file. `body` is JSON text."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """A reason to refuse an input file. Fields as in the `errors` of OpenAI's batch object."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclasses.dataclass(frozen=True)
class FileLimits:
    """The limits of an input file, by default those of OpenAI, and of the body of a line, in bytes."""

    file_bytes: int = 200 * 1024 * 1024
    lines: int = 50_000
    line_bytes: int = 8 * 1024 * 1024


class InvalidInput(Exception):
    """An input file that is refused.

    `errors`: the first `MAX_ERRORS` reasons. `count`: their whole number.
    """

    def __init__(self, errors: list[LineError], count: int | None = None):
        self.errors, self.count = errors, len(errors) if count is None else count
        first = errors[0]
        where = f"line {first.line}: " if first.line is not None else ""
        more = f" (and {self.count - 1} more errors)" if self.count > 1 else ""
        super().__init__(f"{where}{first.message}{more}")


_decode_line = msgspec.json.Decoder(Line).decode


class InputFile:
    """A checked input file. Memory: 8 bytes a line.

    Attributes:
      digest: SHA-256 of the bytes, hexadecimal.
      num_lines: the number of the last line. Blank lines count.
      num_requests: lines that are not blank.
    """

    def __init__(self, path: Path, digest: str, ends: array.array, num_requests: int):
        """`ends`: the offset after each line; the entry 0 is the offset of line 1. Negative: a blank line."""
        self.path, self.digest, self.num_requests = path, digest, num_requests
        self.num_lines = len(ends) - 1
        self._ends = ends
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def has_request(self, line: int) -> bool:
        """Return True unless the line is blank."""
        return self._ends[line] > 0

    def size(self, line: int) -> int:
        """Return the bytes of a line."""
        return abs(self._ends[line]) - abs(self._ends[line - 1])

    def read(self, line: int) -> Line:
        """Return the request of a line. The first line is 1.

        Raises:
          OSError: the file changed or cannot be read.
        """
        data = os.pread(self._file, self.size(line), abs(self._ends[line - 1]))
        try:
            return _decode_line(data)
        except msgspec.DecodeError as error:
            raise OSError(f"{self.path} changed while it was in use: line {line}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def open_input(
    path: Path,
    check_body: CheckBody,
    limits: FileLimits | None = None,
    *,
    urls: tuple[str, ...] = URLS,
    pause: Callable[[], None] = lambda: None,
) -> InputFile:
    """Check a whole input file and return it.

    Args:
      urls: accepted values of `url`.
      pause: called after every few lines, so that a server's other threads run.

    Raises:
      InvalidInput: with the number of each line that is refused.
      OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=2**20) as file:
        return _Check(check_body, limits or FileLimits(), urls).run(path, file, pause)


class _Check:
    """The check of one input file."""

    def __init__(self, check_body: CheckBody, limits: FileLimits, urls: tuple[str, ...]):
        self._check_body, self._limits, self._urls = check_body, limits, urls
        self._errors: list[LineError] = []
        self._count = 0
        self._ids: set[bytes] = set()  # digests of the custom ids, of 16 bytes each

    def run(self, path: Path, file: BinaryIO, pause: Callable[[], None]) -> InputFile:
        limits = self._limits
        size = os.fstat(file.fileno()).st_size
        if size > limits.file_bytes:
            message = f"the file has {size} bytes; accepted: at most {limits.file_bytes}"
            raise InvalidInput([LineError("file_too_large", message)])
        digest, requests, offset = hashlib.sha256(), 0, 0
        ends = array.array("q", [0])
        # A longer line is read to its end without being kept.
        while data := file.readline(limits.line_bytes + 1):
            digest.update(data)
            offset += len(data)
            too_long = len(data) > limits.line_bytes
            while not data.endswith(b"\n") and (rest := file.readline(2**16)):
                digest.update(rest)
                offset += len(rest)
                data = rest
            number = len(ends)
            if number == 1 and data.startswith(_BOM):
                data = data[len(_BOM) :]
                ends[0] = len(_BOM)
            blank = not too_long and not data.strip()
            ends.append(-offset if blank else offset)
            if blank:
                continue
            requests += 1
            if requests > limits.lines:
                message = f"the file has more than {limits.lines} requests"
                self._refuse(LineError("too_many_tasks", message, number))
                break
            if too_long:
                message = f"the line has more than {limits.line_bytes} bytes"
                self._refuse(LineError("line_too_large", message, number))
            else:
                self._check_line(data, number)
            if requests % LINES_A_PAUSE == 0:
                pause()
        if not requests:
            self._refuse(LineError("empty_file", "the file has no requests"))
        if self._errors:
            raise InvalidInput(self._errors, self._count)
        return InputFile(path, digest.hexdigest(), ends, requests)

    def _check_line(self, data: bytes, number: int) -> None:
        try:
            line = _decode_line(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(LineError("invalid_json_line", f"not a request: {error}", number))
            return
        if not 1 <= len(line.custom_id) <= MAX_ID_CHARS:
            message = f"custom_id has {len(line.custom_id)} characters; accepted: 1 to {MAX_ID_CHARS}"
            self._refuse(LineError("invalid_custom_id", message, number, "custom_id"))
        name = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if name in self._ids:
            message = f"custom_id {line.custom_id[:80]!r} is that of an earlier line"
            self._refuse(LineError("duplicate_custom_id", message, number, "custom_id"))
        self._ids.add(name)
        if line.method != "POST":
            message = f"method is {line.method[:80]!r}; accepted: POST"
            self._refuse(LineError("invalid_method", message, number, "method"))
        if line.url not in self._urls:
            message = f"url is {line.url[:80]!r}; accepted: {', '.join(self._urls)}"
            self._refuse(LineError("invalid_url", message, number, "url"))
            return
        try:
            self._check_body(line.url, bytes(line.body))
        except InvalidRequest as error:
            self._refuse(LineError("invalid_request", str(error), number, f"body.{error.field}"))

    def _refuse(self, error: LineError) -> None:
        self._count += 1
        if len(self._errors) < MAX_ERRORS:
            self._errors.append(error)

"""A streaming parser of `multipart/form-data` (RFC 7578), for uploads that do not fit in memory."""

import email.message
import re
from collections.abc import Iterator

import msgspec

MAX_HEADER_BYTES = 8 * 1024
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")


class MultipartError(ValueError):
    """A body that is no multipart form."""


class FormField(msgspec.Struct, frozen=True):
    """The beginning of a field. `filename`: None unless the field is a file."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a Content-Type header names. Raises: MultipartError."""
    header = email.message.Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary", None, unquote=True)
    if header.get_content_type() != "multipart/form-data":
        raise MultipartError(f"Content-Type is {content_type[:80]!r}; accepted: multipart/form-data")
    if not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        raise MultipartError("Content-Type names no boundary of 1 to 70 characters")
    return boundary.encode("ascii")


class MultipartParser:
    """The parser of one body. Memory: the largest piece that `feed` gets, and the headers of one part.

    Attributes:
      ended: True after the last boundary. A body that ends before the last boundary is incomplete.
    """

    def __init__(self, boundary: bytes):
        self._border = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # the first boundary may begin the body
        self._inside = False  # a part has begun
        self.ended = False

    def feed(self, data: bytes) -> Iterator[FormField | bytes]:
        """Yield, for the next piece of the body, each part that begins and the contents that follow the part.

        Raises: MultipartError.
        """
        self._buffer += data
        while not self.ended:
            at = self._buffer.find(self._border)
            if at < 0:
                keep = len(self._border) - 1
                if len(self._buffer) > keep:
                    content, self._buffer = self._buffer[:-keep], self._buffer[-keep:]
                    if self._inside:
                        yield content
                return
            if at:
                if self._inside:
                    yield self._buffer[:at]
                self._buffer = self._buffer[at:]
            rest = self._buffer[len(self._border) :]
            if len(rest) < 2:
                return
            if rest[:2] == b"--":
                self.ended, self._buffer = True, b""
                return
            end = rest.find(b"\r\n\r\n")
            if rest[:2] != b"\r\n" or end < 0:
                if rest[:2] != b"\r\n" or len(rest) > MAX_HEADER_BYTES:
                    raise MultipartError("a boundary is not followed by the headers of a part")
                return
            self._inside, self._buffer = True, rest[end + 4 :]
            yield _part(rest[2:end])


def _part(headers: bytes) -> FormField:
    """Return the part of these headers. Raises: MultipartError."""
    for line in headers.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == b"content-disposition":
            header = email.message.Message()
            header["content-disposition"] = value.decode("utf-8", "replace").strip()
            name = header.get_param("name", None, "content-disposition")
            filename = header.get_filename()
            if header.get_content_disposition() == "form-data" and isinstance(name, str):
                return FormField(name, filename)
    raise MultipartError("a part has no Content-Disposition with a name")

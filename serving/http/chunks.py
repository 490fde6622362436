"""The events of a stream: one `data:` line a chunk, all chunks of a step in one text."""

from typing import Protocol

import msgspec

from serving.http.answer_head import Head
from serving.http.errors import HttpError
from serving.http.job import AnswerPiece, Begun, Pieces
from serving.http.responses import Usage

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class ChunkFormat(Protocol):
    """The form of an answer's chunks."""

    @property
    def start(self) -> bytes:
        """Return the start of every chunk, up to its choice."""
        ...

    def first(self, begun: Begun) -> list[bytes]:
        """Return the choices of the first chunks of a prompt, with the end of the list and further fields."""
        ...

    def part(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choices of the chunks with a text, with the end of the list."""
        ...

    def last(self, piece: AnswerPiece) -> list[bytes]:
        """Return the choices of the chunks that end a choice, with the end of the list."""
        ...


class Chunks:
    """The events of one answer."""

    def __init__(self, head: Head, form: ChunkFormat):
        self._head, self._form = head, form
        self._open = b"data: " + form.start

    def events(self, pieces: Pieces, usage: Usage | None) -> bytes:
        """Return the events of the pieces of a step. `usage`: after these pieces, if the chunks carry it."""
        form, head = self._form, self._head
        end = b"}\n\n"
        if usage is not None:
            end = b',"usage":' + msgspec.json.encode(usage) + end
        elif head.usage_at_end:
            end = b',"usage":null}\n\n'
        lines = []
        for piece in pieces:
            if isinstance(piece, Begun):
                lines += form.first(piece)
                continue
            if piece.text or piece.entries or (piece.token_ids and head.with_token_ids):
                lines += form.part(piece)
            if piece.finish_reason is not None:
                lines += form.last(piece)
        return b"".join([self._open + line + end for line in lines])

    def end(self, usage: Usage) -> bytes:
        """Return the last events of a complete answer."""
        if not self._head.usage_at_end:
            return DONE
        return self._open + b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n" + DONE


def error_event(error: HttpError) -> bytes:
    """Return the event that ends a stream with an error. No `[DONE]` follows."""
    return b"data: " + msgspec.json.encode(error.body) + b"\n\n"

"""Values of a step while it is traced: each lies in pieces, an array a token range."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxflow.pipeline.order import Source, Span


@dataclasses.dataclass(eq=False)
class Piece:
    """A value's rows of the tokens of `span`; `array` may be a pytree of arrays with the same rows."""

    source: Source
    span: Span
    array: Any
    stream: int = 0  # where it was made
    merged: bool = False  # holds the outputs of both attentions
    passed: int = 0  # the barriers it went through, a bit each
    behind: int = 0  # the barriers that it, or what it was made from, went through
    followers: list["Piece"] = dataclasses.field(default_factory=list)  # what was made from it


class Pieces:
    """The pieces of every (layer, value). `rows`: decode attention has no outputs for token ranges that begin
    behind the first `rows`.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._pieces: dict[Source, list[Piece]] = {}

    def copy(self) -> "Pieces":
        """The same pieces; more can be put into the copy alone."""
        other = Pieces(self._rows)
        other._pieces = {source: list(pieces) for source, pieces in self._pieces.items()}
        return other

    def put(self, source: Source, span: Span, array: Any) -> Piece:
        piece = Piece(source, self._clip(source, span), array)
        self._pieces.setdefault(source, []).append(piece)
        return piece

    def put_merged(self, layer: int, span: Span, array: Array) -> Piece:
        """What both attentions made of the same tokens, in place of what they made each."""
        for value in ("o_decode", "o_chunk"):
            source = (layer, value)
            gone = self._clip(source, span)
            self._pieces[source] = [piece for piece in self._pieces.get(source, []) if piece.span != gone]
        piece = Piece((layer, "o_chunk"), span, array, merged=True)
        self._pieces[layer, "o_chunk"].append(piece)
        return piece

    def merge(self, piece: Piece, array: Array) -> None:
        """The piece of what `chunk_attention` made now holds both attentions' outputs: nobody may use its
        former array.
        """
        piece.array, piece.merged, piece.passed = array, True, 0

    def merged(self, layer: int, span: Span) -> bool:
        """Whether all of the span's heads are merged."""
        return all(piece.merged for piece in self.find((layer, "o_chunk"), span))

    def find(self, source: Source, span: Span) -> list[Piece]:
        """The pieces that hold some of the span, in order of tokens."""
        return sorted(self.as_made(source, span), key=lambda piece: piece.span.start)

    def as_made(self, source: Source, span: Span) -> list[Piece]:
        """The same, the first made first."""
        span = self._clip(source, span)
        return [piece for piece in self._held(source) if piece.span.meets(span)]

    def read(self, source: Source, span: Span) -> Any:
        """The rows of the span in one array."""
        span = self._clip(source, span)
        found = self.find(source, span)
        if not found:  # no row that decodes can lie here: an array of no rows
            return jax.tree.map(lambda a: a[:0], self._held(source)[0].array)

        def cut(piece: Piece) -> Any:
            first = max(span.start, piece.span.start) - piece.span.start
            last = min(span.stop, piece.span.stop) - piece.span.start
            return (
                piece.array
                if last - first == piece.span.stop - piece.span.start
                else jax.tree.map(lambda a: a[first:last], piece.array)
            )

        parts = [cut(piece) for piece in found]
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *parts)

    def _held(self, source: Source) -> list[Piece]:
        layer, value = source
        merged = (
            [piece for piece in self._pieces.get((layer, "o_chunk"), []) if piece.merged]
            if value == "o_decode"
            else []
        )
        return self._pieces.get(source, []) + merged

    def _clip(self, source: Source, span: Span) -> Span:
        return Span(span.start, span.start) if source[1] == "o_decode" and span.start >= self._rows else span

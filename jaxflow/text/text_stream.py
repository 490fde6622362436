"""Token ids to text as they come: never half a character, and the same text however the ids are cut into
pushes.

A token is a *piece*: a string where it is whole characters, bytes where it is not (a part of a character in
byte-level BPE, a `<0xE2>` of SentencePiece's byte fallback). Strings pass through; bytes wait until they make
characters.
"""

import codecs
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from jaxflow.text.vocabulary import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = re.compile(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("jaxflow.replace_each_byte", _replace_each_byte)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


@dataclasses.dataclass(frozen=True)
class _Decoding:
    """What a `tokenizers` decoder does, of the two kinds that are known: ByteLevel and SentencePiece's chain."""

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strips_space: bool = False  # the first character of a text goes if it is a space


def _decoding(decoder: dict[str, Any]) -> _Decoding:
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Decoding(byte_level=True)
    if not _SENTENCEPIECE_STEPS.fullmatch("".join(f"{kind} " for kind in kinds)):
        raise TokenizerError(
            f"decoder {'+'.join(kinds)} is not supported; ByteLevel and Replace+ByteFallback+Fuse+Strip are"
        )
    replace: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise TokenizerError(
                    f"decoder Replace with pattern {step['pattern']} is not supported; a string is"
                )
            replace.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
            raise TokenizerError(f"decoder {step} is not supported; Strip of one space at the start is")
    return _Decoding(
        byte_fallback="ByteFallback" in kinds, replace=tuple(replace), strips_space="Strip" in kinds
    )


class Pieces(dict[int, "str | bytes | None"]):
    """Token id -> what it adds to a text, made when first asked for. None: nothing at all (hidden, or no such
    token).

    Agrees with the `tokenizers` package but for one case: where a run of byte-fallback tokens is not UTF-8 as
    a whole, the package replaces every byte of it, and only knows at the run's end; here, as in SentencePiece
    itself, the characters in it stay and the stray bytes become U+FFFD each.

    Raises:
      TokenizerError: a decoder that is not supported, or (on lookup) a negative token id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int] = frozenset()):
        super().__init__()
        self._backend, self._hidden = backend, hidden
        if backend.decoder is None:
            raise TokenizerError(
                "there is no decoder; ByteLevel and Replace+ByteFallback+Fuse+Strip are supported"
            )
        self._decoding = _decoding(json.loads(backend.decoder.__getstate__()))
        self.strips_space = self._decoding.strips_space
        # Byte-level BPE puts one U+FFFD for a cut-off character, SentencePiece one for each byte of it.
        self.errors = "replace" if self._decoding.byte_level else "jaxflow.replace_each_byte"

    def __missing__(self, token_id: int) -> str | bytes | None:
        if token_id < 0:
            raise TokenizerError(f"token id {token_id} is negative")
        token = self._backend.id_to_token(token_id) if token_id < 2**32 else None
        if token is None:
            return None  # not kept: callers may ask for any number
        piece = None if token_id in self._hidden else self._piece(token)
        self[int(token_id)] = piece
        return piece

    def _piece(self, token: str) -> str | bytes:
        if self._decoding.byte_level:
            # An added token is not written in the byte alphabet; the package takes it for such if it could
            # be.
            known = all(character in _BYTE_OF_CHARACTER for character in token)
            data = bytes(_BYTE_OF_CHARACTER[character] for character in token) if known else token.encode()
        else:
            for old, new in self._decoding.replace:
                token = token.replace(old, new)
            byte = _BYTE_TOKEN.fullmatch(token) if self._decoding.byte_fallback else None
            if byte is None:
                return token
            data = bytes.fromhex(byte[1])
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class TextStream:
    """The text of a growing list of token ids: `push` returns what has become certain, `finish` the rest."""

    __slots__ = ("_partial", "_pieces", "_strip")

    def __init__(self, pieces: Pieces):
        self._pieces = pieces
        self._partial = b""  # the first bytes of a character, in UTF-8
        self._strip = pieces.strips_space

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and returns the characters they complete. Raises: TokenizerError for a
        negative id.
        """
        pieces, text = self._pieces, ""
        for token_id in token_ids:
            piece = pieces[token_id]
            if isinstance(piece, str):
                if self._partial:
                    text += self._flush()
                text += piece
            elif piece is not None:
                data = self._partial + piece
                characters, used = codecs.utf_8_decode(data, pieces.errors, False)
                self._partial = data[used:]
                text += characters
        return self._stripped(text) if self._strip and text else text

    def skip(self, token_ids: Sequence[int]) -> None:
        """As `push` of a text already told (a prompt): looks only at as much of its end as matters for what
        follows.
        """
        first = len(token_ids)
        while first:
            first -= 1
            piece = self._pieces[token_ids[first]]
            if isinstance(piece, str) and piece:
                break
        self.push(token_ids[first:])

    def finish(self) -> str:
        """Returns U+FFFD for a character that will not be completed, else nothing."""
        text = self._flush()
        return self._stripped(text) if self._strip and text else text

    def _flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._partial, self._pieces.errors, True)
        self._partial = b""
        return text

    def _stripped(self, text: str) -> str:
        self._strip = False
        return text[1:] if text[0] == " " else text

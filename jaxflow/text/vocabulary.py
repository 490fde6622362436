"""The vocabulary of a checkpoint, and the text of its tokens.

`Vocabulary` is the common form of a Hugging Face folder and a GGUF file. `TokenPieces` maps a token id to the
text that the token adds. `TextStream` joins the pieces of a growing list of tokens, without splitting a
character.

A piece is a string if the token is made of full characters. Otherwise it is bytes: a part of a character in
byte-level BPE, or a byte token like `<0xE2>` of SentencePiece. Bytes wait until they complete a character.
"""

import codecs
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = re.compile(r"(Replace )*(ByteFallback )?(Fuse (Strip )?)?")


class TokenizerError(ValueError):
    """A vocabulary that cannot be read, a text that is not Unicode, or an invalid token id."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary and its settings.

    Attributes:
      backend: the tokenizer that encodes. Its added tokens carry the `special` flag.
      vocab_size: the largest token id plus one. A model may round its vocabulary up.
      eos_token_ids: the end-of-sequence tokens. The tokenizer's own token is the first.
      special_tokens: token texts by their names in chat templates (`bos_token`, `eos_token`, ...).
    """

    source: Path
    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("jaxflow.replace_each_byte", _replace_each_byte)


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character in GPT-2's byte alphabet.

    Printable Latin-1 characters are their own bytes. The other 68 bytes are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


@dataclasses.dataclass(frozen=True)
class _Decoding:
    """The settings of a `tokenizers` decoder.

    Two kinds are supported: ByteLevel and SentencePiece's chain.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    strips_space: bool = False  # a space at the start of the text is removed


def _decoding(decoder: dict[str, Any]) -> _Decoding:
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Decoding(byte_level=True)
    if not _SENTENCEPIECE_STEPS.fullmatch("".join(f"{kind} " for kind in kinds)):
        raise TokenizerError(
            f"decoder {'+'.join(kinds)} is not supported; accepted: ByteLevel, "
            "Replace+ByteFallback+Fuse+Strip"
        )
    replace: list[tuple[str, str]] = []
    for step in steps:
        if step["type"] == "Replace":
            if "String" not in step["pattern"]:
                raise TokenizerError(
                    f"decoder Replace with pattern {step['pattern']} is not supported; accepted: a string"
                )
            replace.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
            raise TokenizerError(
                f"decoder {step} is not supported; accepted: Strip of one space at the start"
            )
    return _Decoding(
        byte_fallback="ByteFallback" in kinds, replace=tuple(replace), strips_space="Strip" in kinds
    )


class TokenPieces(dict[int, "str | bytes | None"]):
    """The piece of each token id, computed at the first lookup. None: the token is hidden or does not exist.

    The text agrees with the `tokenizers` package except for a run of byte tokens that is not valid UTF-8. The
    package replaces every byte of the run by U+FFFD. Here, as in SentencePiece, valid characters of the run
    stay, and only stray bytes become U+FFFD.

    Raises:
      TokenizerError: a decoder that is not supported; at a lookup, a negative token id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, hidden: frozenset[int] = frozenset()):
        super().__init__()
        self._backend, self._hidden = backend, hidden
        if backend.decoder is None:
            raise TokenizerError(
                "the tokenizer has no decoder; accepted: ByteLevel, Replace+ByteFallback+Fuse+Strip"
            )
        self._decoding = _decoding(json.loads(backend.decoder.__getstate__()))
        self.strips_space = self._decoding.strips_space
        # An incomplete character becomes one U+FFFD in byte-level BPE, and one
        # U+FFFD a byte in SentencePiece.
        self.errors = "replace" if self._decoding.byte_level else "jaxflow.replace_each_byte"

    def __missing__(self, token_id: int) -> str | bytes | None:
        if token_id < 0:
            raise TokenizerError(f"token id {token_id} is negative")
        token = self._backend.id_to_token(token_id) if token_id < 2**32 else None
        if token is None:
            return None  # not stored, because callers may look up any number
        piece = None if token_id in self._hidden else self._piece(token)
        self[int(token_id)] = piece
        return piece

    def _piece(self, token: str) -> str | bytes:
        if self._decoding.byte_level:
            # An added token is plain text. The package decodes it as byte alphabet if all characters fit.
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
    """The text of a growing list of token ids. `push` returns completed text, `finish` returns the rest."""

    __slots__ = ("_partial", "_pieces", "_strip")

    def __init__(self, pieces: TokenPieces):
        self._pieces = pieces
        self._partial = b""  # the first UTF-8 bytes of an incomplete character
        self._strip = pieces.strips_space

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the characters that they complete.

        Raises: TokenizerError for a negative id.
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

    @property
    def partial(self) -> bytes:
        """Return the bytes of the character within which the last token ends."""
        return self._partial

    def skip(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of a prompt, without returning its text. Only the end of the prompt is decoded."""
        first = len(token_ids)
        while first:
            first -= 1
            piece = self._pieces[token_ids[first]]
            if isinstance(piece, str) and piece:
                break
        self.push(token_ids[first:])

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character at the end, or an empty text."""
        text = self._flush()
        return self._stripped(text) if self._strip and text else text

    def _flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._partial, self._pieces.errors, True)
        self._partial = b""
        return text

    def _stripped(self, text: str) -> str:
        self._strip = False
        return text[1:] if text[0] == " " else text

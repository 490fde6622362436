"""Log-probabilities of a growing text: each token with its bytes, as soon as its bytes are in the text.

The text lags behind the tokens, because a character may have several tokens and because a stop
string is cut off. The bytes of all entries, joined, are the bytes of the text. A token without text,
as the end token, has no bytes.
"""

import collections
from collections.abc import Mapping, Sequence

import msgspec

from jaxflow.request import Logprob
from jaxflow.text.tokenizer import Tokenizer
from jaxflow.text.vocabulary import TextStream

Candidates = Mapping[int, Logprob]  # token id -> log-probability; the sampled token first


class TextToken(msgspec.Struct, frozen=True):
    """A token of the text.

    `data`: its bytes in the text; None if it has none. `offset`: characters of the text before it.
    """

    token_id: int
    candidates: Candidates
    data: bytes | None
    offset: int


class _Waiting(msgspec.Struct, frozen=True):
    token_id: int
    candidates: Candidates
    data: bytes | None
    start: int  # characters before the token
    text: str  # the characters that the token completes
    end: int  # characters of the text that prove the token to be in it


class TokenTexts:
    """The entries of one sequence.

    Args:
      tokenizer: None for entries without bytes.
      prompt_token_ids: the text continues theirs.
      end_token_ids: a token of these has no text if it ended the sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        end_token_ids: frozenset[int],
        skip_special_tokens: bool,
    ):
        self._pieces = None if tokenizer is None else tokenizer.pieces(skip_special_tokens)
        self._stream = None if self._pieces is None else TextStream(self._pieces)
        self._before = b""  # bytes of the prompt's last character, which the text completes
        if self._stream is not None:
            self._stream.skip(prompt_token_ids)
            self._before = self._stream.partial
        self._ends = end_token_ids
        self._held: tuple[int, Candidates] | None = (
            None  # an end token, until it is known if it ended the text
        )
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._chars = 0  # characters of all tokens
        self._returned = 0  # characters of the returned entries

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Candidates], text: str) -> list[TextToken]:
        """Add tokens and the text that is certain after them. Return the entries that are certain."""
        for token_id, candidates in zip(token_ids, logprobs, strict=True):
            self._release_held()
            if token_id in self._ends:
                self._held = (token_id, candidates)
            else:
                self._add(token_id, candidates)
        self._returned += len(text)
        result = []
        while self._waiting and self._waiting[0].end <= self._returned:
            result.append(_entry(self._waiting.popleft()))
        return result

    def finish(self, text: str, stop_token_id: int | None, cut: bool) -> list[TextToken]:
        """Return the last entries. `text`: the rest of the text. `cut`: a stop string ended the text."""
        ended = None
        if self._held is not None and self._held[0] == stop_token_id:
            ended, self._held = self._held, None
        self._release_held()
        self._returned += len(text)
        result = []
        for token in self._waiting:
            if not cut or token.end <= self._returned:
                result.append(_entry(token))
            elif token.start < self._returned and token.data is not None:
                # A part of the token is in the text. The rest begins at a full character.
                rest = token.text[self._returned - token.start :].encode()
                result.append(_entry(token, token.data[: len(token.data) - len(rest)]))
        self._waiting.clear()
        if ended is not None:
            result.append(TextToken(*ended, None, self._returned))
        return result

    def _release_held(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._add(*held)

    def _add(self, token_id: int, candidates: Candidates) -> None:
        if self._stream is None or self._pieces is None:
            self._waiting.append(_Waiting(token_id, candidates, None, 0, "", 0))
            return
        piece = self._pieces[token_id]
        start, text = self._chars, self._stream.push((token_id,))
        self._chars += len(text)
        data = piece.encode() if isinstance(piece, str) else piece
        if isinstance(piece, str) and len(text) == len(piece) - 1:
            data = text.encode()  # the space at the start of a text is left out
        if data and self._before:
            data, self._before = self._before + data, b""
        # A token that ends within a character is certain once the character is in the text.
        end = self._chars + bool(self._stream.partial)
        self._waiting.append(_Waiting(token_id, candidates, data, start, text, end))


def _entry(token: _Waiting, data: bytes | None = None) -> TextToken:
    return TextToken(token.token_id, token.candidates, token.data if data is None else data, token.start)

"""Log-probabilities in the forms of the chat answer, of the completions answer
and of vLLM's prompt logprobs.
"""

from collections.abc import Mapping, Sequence

from jaxflow.request import Logprob
from jaxflow.text.tokenizer import Tokenizer
from jaxflow.text.vocabulary import TextStream
from serving.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from serving.http.token_texts import Candidates, TextToken

LOWEST = -9999.0  # stands for -inf, which JSON cannot write


class TokenNames:
    """The text of tokens in an answer. With `as_ids`, or without a tokenizer, a token is `token_id:17`."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool):
        self._tokenizer = None if as_ids else tokenizer
        self._pieces = None if tokenizer is None else tokenizer.pieces(False)

    def name(self, token_id: int) -> str:
        """Return the text of a token."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def data(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token's text, or None."""
        piece = None if self._pieces is None else self._pieces[token_id]
        return None if piece is None else list(piece.encode() if isinstance(piece, str) else piece)


def number(logprob: float) -> float:
    """Return a log-probability that JSON can write."""
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(entries: Sequence[TextToken], names: TokenNames, top: int) -> ChatLogprobs:
    """Return the log-probabilities of a part of a message, with `top` candidates each."""
    return ChatLogprobs([_content(entry, names, top) for entry in entries])


def _content(entry: TextToken, names: TokenNames, top: int) -> ContentLogprob:
    likeliest = sorted(entry.candidates.items(), key=lambda item: item[1].rank)[:top]
    return ContentLogprob(
        names.name(entry.token_id),
        number(entry.candidates[entry.token_id].logprob),
        None if entry.data is None else list(entry.data),
        [TopLogprob(names.name(t), number(found.logprob), names.data(t)) for t, found in likeliest],
    )


def completion_logprobs(entries: Sequence[TextToken], names: TokenNames, offset: int) -> CompletionLogprobs:
    """Return the log-probabilities of a part of a completion. `offset`: characters of the echoed prompt."""
    return CompletionLogprobs(
        [names.name(entry.token_id) for entry in entries],
        [number(entry.candidates[entry.token_id].logprob) for entry in entries],
        [_by_name(entry.candidates, names) for entry in entries],
        [offset + entry.offset for entry in entries],
    )


def echoed_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Candidates | None],
    names: TokenNames,
    tokenizer: Tokenizer | None,
    skip_special_tokens: bool,
) -> CompletionLogprobs:
    """Return the log-probabilities of an echoed prompt. The first token has none."""
    offsets, chars = [], 0
    stream = None if tokenizer is None else TextStream(tokenizer.pieces(skip_special_tokens))
    for token_id in token_ids:
        offsets.append(chars)
        if stream is not None:
            chars += len(stream.push((token_id,)))
    own = [None if c is None else number(c[t].logprob) for t, c in zip(token_ids, logprobs, strict=True)]
    top = [None if c is None else _by_name(c, names) for c in logprobs]
    return CompletionLogprobs([names.name(t) for t in token_ids], own, top, offsets)


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Return the log-probabilities of consecutive parts of a completion."""
    return CompletionLogprobs(
        [x for part in parts for x in part.tokens],
        [x for part in parts for x in part.token_logprobs],
        [x for part in parts for x in part.top_logprobs],
        [x for part in parts for x in part.text_offset],
    )


def prompt_logprobs(logprobs: Sequence[Candidates | None], names: TokenNames) -> PromptLogprobs:
    """Return the log-probabilities of a prompt as vLLM writes them: by token id, the prompt's token first."""
    return [
        None
        if found is None
        else {str(t): PromptLogprob(number(p.logprob), p.rank, names.name(t)) for t, p in found.items()}
        for found in logprobs
    ]


def _by_name(candidates: Mapping[int, Logprob], names: TokenNames) -> dict[str, float]:
    result: dict[str, float] = {}
    for token_id, found in candidates.items():
        result.setdefault(names.name(token_id), number(found.logprob))
    return result

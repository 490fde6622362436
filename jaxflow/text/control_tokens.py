"""Encoding of a conversation in which control tokens written by a user stay plain text.

A control token is a special token of at least two characters, as `<|im_end|>`. `ControlTokens.mark` puts a
mark into each place of a user's text where a control token could begin or end. The chat template then writes
its own control tokens beside the marked text. A second tokenizer of the same model finds only tokens without
a mark, and its normalizer removes the marks before the text is split into words.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers

# A mark is ESCAPE and NOTHING. A user's own ESCAPE becomes ESCAPE and ITSELF. All are private-use characters.
ESCAPE, NOTHING, ITSELF = "\uf8f0", "\uf8f1", "\uf8f2"
MARK = ESCAPE + NOTHING
_MARKS = re.compile(f"{ESCAPE}([{NOTHING}{ITSELF}])")


class ControlTokens:
    """The control tokens of a tokenizer, and the encoding of marked text. Threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer):
        added = backend.get_added_tokens_decoder()
        texts = [token.content for token in added.values() if token.special and len(token.content) > 1]
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._first = frozenset(text[0] for text in texts)
        self._starts = sorted({text[:2] for text in texts})
        self._ends = frozenset(text[at:] for text in texts for at in range(1, len(text)))
        self._longest = max(map(len, texts), default=0)
        self._texts = tuple(texts)
        self._plain = backend
        self._marked = _without_marks(backend, added) if texts else backend

    def mark(self, text: str) -> str:
        """Return a user's text with marks, so that no control token begins, ends or lies in the text."""
        if ESCAPE in text:
            text = text.replace(ESCAPE, ESCAPE + ITSELF)
        for start in self._starts:
            while start in text:  # a second time for two equal characters, where matches overlap
                text = text.replace(start, start[0] + MARK + start[1])
        if text and text[-1] in self._first:
            text += MARK
        if any(text[:n] in self._ends for n in range(1, min(len(text), self._longest) + 1)):
            text = MARK + text
        return text

    def marked(self, value: Any) -> Any:
        """Return a JSON value with all its texts marked, and those keys that are no identifiers."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, (dict, Mapping)):  # a check of an abstract class alone costs much more
            # Templates look up identifiers, as `role`.
            return {k if k.isidentifier() else self.mark(k): self.marked(v) for k, v in value.items()}
        if isinstance(value, (list, Sequence)):
            return [self.marked(item) for item in value]
        return value

    def holding(self, part: str) -> str | None:
        """Return a control token that contains `part`, or None."""
        return next((text for text in self._texts if part in text), None)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text with marks.

        The ids are those of the text without marks, unless a user's text then becomes a special token.
        """
        plain = encode_text(self._plain, without_marks(text), add_special_tokens)
        if ESCAPE not in text:
            return plain
        safe = encode_text(self._marked, text, add_special_tokens)
        return plain if self._specials(plain) == self._specials(safe) else safe

    def _specials(self, ids: list[int]) -> list[int]:
        return [i for i in ids if i in self._special_ids]


def without_marks(text: str) -> str:
    """Return a marked text as the user wrote it."""
    if ESCAPE not in text:
        return text
    return _MARKS.sub(lambda found: ESCAPE if found[1] == ITSELF else "", text)


def unescape_marks(text: str) -> str:
    """Return a JSON text in ASCII with its marks as characters again, so that they stay marks."""
    mark, escape, itself = (json.dumps(value)[1:-1] for value in (MARK, ESCAPE, ITSELF))
    return text.replace(mark, MARK).replace(escape + itself, escape)


def encode_text(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text. Other threads run meanwhile, because a batch gives up Python's lock."""
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _without_marks(backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
    """Return a tokenizer of the same model and ids that removes marks after it has found the added tokens."""
    remove = [normalizers.Replace(MARK, ""), normalizers.Replace(ESCAPE + ITSELF, ESCAPE)]
    own = [] if backend.normalizer is None else [backend.normalizer]
    copy = tokenizers.Tokenizer(backend.model)  # the two share the model
    if backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    if backend.post_processor is not None:
        copy.post_processor = backend.post_processor
    tokens = [_found_before_normalizing(added[i]) for i in sorted(added)]
    for special, group in itertools.groupby(tokens, key=lambda token: token.special):
        (copy.add_special_tokens if special else copy.add_tokens)(list(group))
    if {i: t.content for i, t in copy.get_added_tokens_decoder().items()} != {
        i: t.content for i, t in added.items()
    }:  # ids with gaps can be kept only by reading the whole tokenizer again
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        copy = tokenizers.Tokenizer.from_str(json.dumps(state))
    copy.normalizer = normalizers.Sequence([*remove, *own])
    return copy


def _found_before_normalizing(token: AddedToken) -> AddedToken:
    """Return an added token, where a special one is found in the text with its marks."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not token.special,
        special=token.special,
    )

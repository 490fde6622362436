"""Incremental detokenization, and the search for stop strings.

`Detokenizer` turns generated tokens into text as they come. `StopMatcher` finds stop strings in text that
arrives in parts.
"""

import functools
from array import array
from collections.abc import Iterable, Sequence

from jaxflow.text.tokenizer import Tokenizer
from jaxflow.text.vocabulary import TextStream


@functools.lru_cache(maxsize=1024)
def _borders(pattern: str) -> array:
    """Return the failure table of Knuth, Morris and Pratt.

    Entry n is the length of the longest proper prefix of pattern[:n] that is also a suffix of pattern[:n].
    """
    borders = array("I", bytes(4 * (len(pattern) + 1)))
    matched = 0
    for n in range(1, len(pattern)):
        while matched and pattern[n] != pattern[matched]:
            matched = borders[matched]
        matched += pattern[n] == pattern[matched]
        borders[n + 1] = matched
    return borders


class StopMatcher:
    """A filter that ends a text at the first stop string.

    The first stop string is the one that is complete first. If several end at the same character, the longest
    counts. So the result does not depend on the parts in which the text arrives. The cost is O(number of stop
    strings) a character, and near zero for text without the first character of any stop string.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False):
        self._stops = [(pattern, _borders(pattern)) for pattern in dict.fromkeys(stop)]
        if not all(pattern for pattern, _ in self._stops):
            raise ValueError("a stop string is empty; accepted: at least one character")
        self._matched = [0] * len(
            self._stops
        )  # for each stop string: the length of its longest prefix at the end of the text
        self._first = frozenset(pattern[0] for pattern, _ in self._stops)
        self._held = ""
        self._include_stop = include_stop
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text and return the text that cannot be part of a stop string."""
        if self.found is not None:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        pending = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            self.found = self._advance(character)
            if self.found is not None:
                self._held = ""
                return pending[: end if self._include_stop else end - len(self.found)]
        safe = len(pending) - max(self._matched)
        self._held = pending[safe:]
        return pending[:safe]

    def finish(self) -> str:
        """Return the rest of the text at its end."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Add one character and return the longest stop string that it completes."""
        found = ""
        for i, (pattern, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and pattern[matched] != character:
                matched = borders[matched]
            matched += pattern[matched] == character
            if matched == len(pattern) > len(found):
                found = pattern
            self._matched[i] = matched
        return found or None


class Detokenizer:
    """The text of one growing sequence, in O(1) a token.

    The results of `push` and `finish`, joined, do not depend on the groups in which the tokens arrive. They
    are the text of all tokens up to the first stop string. No result of `push` ends within a character or
    within a possible stop string. The text continues the prompt: a leading space stays, and bytes of an
    incomplete character at the end of the prompt are completed.

    Args:
      stop: the stop strings.
      include_stop: keep the stop string in the text.
      min_tokens: number of tokens at the start that are not searched for stop strings.

    Raises:
      TokenizerError: a negative token id.
      ValueError: an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._stream = TextStream(tokenizer.pieces(skip_special_tokens))
        self._stream.skip(prompt_token_ids)
        self._matcher = StopMatcher(stop, include_stop=include_stop) if stop else None
        self._before_stops = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that was found, or None."""
        return None if self._matcher is None else self._matcher.found

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the completed text. After a stop string the text is empty."""
        if self._matcher is None:
            return self._stream.push(token_ids)
        text = ""
        if self._before_stops > 0:
            token_ids = list(token_ids)
            text = self._stream.push(token_ids[: self._before_stops])
            token_ids, self._before_stops = (
                token_ids[self._before_stops :],
                self._before_stops - len(token_ids),
            )
        return text + self._matcher.push(self._stream.push(token_ids))

    def finish(self) -> str:
        """Return the rest of the text after the last token. The rest may complete a stop string."""
        rest = self._stream.finish()
        return rest if self._matcher is None else self._matcher.push(rest) + self._matcher.finish()

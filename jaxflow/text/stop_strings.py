"""Finds stop strings in a text that arrives in parts, and holds back exactly what could still become one."""

import functools
from array import array
from collections.abc import Sequence


@functools.lru_cache(maxsize=1024)
def _borders(pattern: str) -> array:
    """Knuth-Morris-Pratt: entry n is the length of the longest proper prefix of pattern[:n] that also ends
    it.
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
    """The text before the first stop string.

    First is the one that is complete first, so that the answer does not depend on how the text is cut; of
    several that end together the longest. Costs O(stop strings) a character, and next to nothing while no
    character begins one.
    """

    def __init__(self, stop: Sequence[str], *, include_stop: bool = False):
        self._stops = [(pattern, _borders(pattern)) for pattern in dict.fromkeys(stop)]
        if not all(pattern for pattern, _ in self._stops):
            raise ValueError("a stop string is empty; it needs at least one character")
        self._matched = [0] * len(self._stops)  # how much of each stop string the text ends with
        self._first = frozenset(pattern[0] for pattern, _ in self._stops)
        self._held = ""
        self._include_stop = include_stop
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Takes the next characters; returns those that are before any stop string, present or still
        possible.
        """
        if self.found is not None:
            return ""
        if not self._held and self._first.isdisjoint(text):
            return text
        whole = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            self.found = self._advance(character)
            if self.found is not None:
                self._held = ""
                return whole[: end if self._include_stop else end - len(self.found)]
        safe = len(whole) - max(self._matched)
        self._held = whole[safe:]
        return whole[:safe]

    def finish(self) -> str:
        """Returns what was held back: the text ends here."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Takes one character; returns the longest stop string that it completes."""
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

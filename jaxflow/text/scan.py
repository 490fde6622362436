"""A text that grows: its readers are generators, which yield where they need more of the text.

The parts in which the text comes do not change what a reader finds.
"""

import functools
import re
from collections.abc import Callable, Generator

MAX_BLANKS = 1000  # white space that is held back until the text after it is known

type Steps[T] = Generator[None, None, T]
BLANKS = re.compile(r"\s*")


class Unexpected(ValueError):
    """The text is another than the reader expects, or it ends too early, or it is too long."""


class Scan:
    """The unread part of a growing text, and a record of what was read since a place.

    Text that may be a part of a mark is held back until this is certain.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._final = False
        self._record: list[str] | None = None
        self._most = self._left = 0

    def push(self, text: str) -> None:
        """Add text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def finish(self) -> None:
        """End the text."""
        self._final = True

    @property
    def ended(self) -> bool:
        """Return True if the whole text was read."""
        return self._final and self._at == len(self._text)

    def record(self, before: str, most: int | None = None) -> None:
        """Record what is read from now on, after a text.

        `most`: more characters are `Unexpected`; None for the limit of the latest record.
        """
        self._most = self._most if most is None else most
        self._record, self._left = [before], self._most

    def recorded(self) -> str:
        """Return the record, and end it."""
        parts, self._record = self._record or [], None
        return "".join(parts)

    def _take(self, count: int) -> str:
        """Return characters as read. Raises: Unexpected."""
        if self._record is None:
            text = self._text[self._at : self._at + count]
            self._at += count
            return text
        text = self._text[self._at : self._at + min(count, self._left)]
        self._at += len(text)
        self._left -= len(text)
        self._record.append(text)
        if len(text) < count:
            raise Unexpected("the text is too long")
        return text

    def until(
        self, *marks: str, take: Callable[[str], None] | None = None, may_end: bool = False
    ) -> Steps[tuple[str, str]]:
        """Read to the first of the marks. Return the text before the mark, and the mark.

        Args:
          take: gets the text before the mark as soon as it is certain. "" is then returned in its place.
          may_end: the mark is "" at the end of the text, where `Unexpected` is raised otherwise.
        """
        parts: list[str] = []
        take = take or parts.append
        pattern = _first_of(marks)
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                if found.start() > self._at:
                    take(self._take(found.start() - self._at))
                return "".join(parts), self._take(len(found[0]))
            end = len(self._text)
            if not self._final and marks:
                start, most = _start_of(marks)
                found = start.search(self._text, max(self._at, end - most))
                end = end if found is None else found.start()
            if end > self._at:
                take(self._take(end - self._at))
            if self._final:
                if not may_end:
                    raise Unexpected("the text ends too early")
                return "".join(parts), ""
            yield

    def run(self, pattern: re.Pattern[str], most: int = 1 << 62) -> Steps[str]:
        """Read the characters that match `pattern`, a class with a star, and return at most so many."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._at, self._at + most)
            length = 0 if found is None else found.end() - self._at
            if length:
                parts.append(self._take(length))
                most -= length
            if self._final or not most or self._at < len(self._text):
                return "".join(parts)
            yield

    def blanks(self) -> Steps[None]:
        """Read white space."""
        if self._at == len(self._text) or self._text[self._at].isspace():
            yield from self.run(BLANKS)

    def maybe(self, *marks: str, after_blanks: bool = False) -> Steps[str]:
        """Read one of the marks if it comes next, and return it; or read nothing, and return "".

        `after_blanks`: white space may come before the mark. It is read with the mark.
        """
        mark, length = yield from self._next(marks, after_blanks)
        if mark:
            self._take(length)
        return mark

    def comes(self, *marks: str) -> Steps[str]:
        """Return the mark that comes next, or "". Read nothing."""
        return (yield from self._next(marks, False))[0]

    def _next(self, marks: tuple[str, ...], after_blanks: bool) -> Steps[tuple[str, int]]:
        """Return the mark that comes next, and the characters up to its end."""
        while True:
            at = self._at
            if after_blanks:
                found = BLANKS.match(self._text, at, at + MAX_BLANKS)
                at = at if found is None else found.end()
            for mark in marks:
                if self._text.startswith(mark, at):
                    return mark, at - self._at + len(mark)
            rest = self._text[at : at + max(map(len, marks))]
            if self._final or not any(mark.startswith(rest) for mark in marks):
                return "", 0
            yield

    def expect(self, *marks: str) -> Steps[str]:
        """Read one of the marks, and return it. Raises: Unexpected if another text comes next."""
        mark = yield from self.maybe(*marks)
        if not mark:
            raise Unexpected("another text than the form has")
        return mark


@functools.lru_cache(maxsize=64)
def _first_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the marks. No mark: a pattern of nothing."""
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


@functools.lru_cache(maxsize=64)
def _start_of(marks: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """Return a pattern of the start of a mark at the end of a text, and the most characters of one."""
    starts = {mark[:length] for mark in marks for length in range(1, len(mark))}
    return re.compile(f"(?:{'|'.join(map(re.escape, starts)) or '(?!)'})\\Z"), max(map(len, marks)) - 1

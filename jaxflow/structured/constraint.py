"""The constraint of one growing sequence: which tokens may follow, by the matcher of its form."""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxflow.request import Reasoning
from jaxflow.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # see `jaxflow.structured.compiler`
    import llguidance


class FormBroken(ValueError):
    """A sequence cannot go on in its form."""


class TokenConstraint:
    """The tokens that may follow in one sequence, see `jaxflow.request.Constraint`.

    Within reasoning every token may follow. Where reasoning may begin, its opening mark may follow, too.

    Args:
      matcher: of the form, at its start. The constraint owns it.
      stops: further tokens that may follow where the form may end.
      reasoning: before the form, or None.
      tokenizer: of the sequence.
    """

    def __init__(
        self,
        matcher: "llguidance.LLMatcher",
        stops: Iterable[int],
        reasoning: Reasoning | None,
        tokenizer: Tokenizer,
    ):
        self._matcher, self._stops, self._text_of = matcher, tuple(stops), tokenizer.token_text
        self._in_reasoning, self._closing, self._end = False, "", ""
        self._opening: int | None = None
        if reasoning is not None:
            self._in_reasoning, self._closing = reasoning.begun, reasoning.closing
            mark = tokenizer.encode(reasoning.opening, add_special_tokens=False)
            if not reasoning.begun and len(mark) == 1:
                (self._opening,) = mark

    @property
    def complete(self) -> bool:
        """True once the form is complete and nothing may follow."""
        return not self._in_reasoning and self._matcher.is_stopped() and not self._matcher.is_error()

    def push(self, token: int) -> None:
        """Add a token. Raises: FormBroken."""
        if self._in_reasoning:
            self._end = self._end[-len(self._closing) :] + self._text_of(token)
            self._in_reasoning = self._closing not in self._end
            return
        opening, self._opening = self._opening, None
        if token == opening:
            self._in_reasoning = True
        elif not self._matcher.consume_token(token):
            problem = self._matcher.get_error().partition("\n")[0]
            raise FormBroken(f"the answer cannot go on in the form that was asked for: {problem}")

    def fill(self, others: Sequence[tuple["TokenConstraint", int]], masks: np.ndarray) -> None:
        """Write the masks of several constraints, see `jaxflow.request.Constraint`."""
        found = [(each, row) for each, row in others if not each._in_reasoning]
        words = masks.shape[1]
        if len(found) == 1:
            (one, row), *_ = found
            one._matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, 4 * words)
        elif found:
            matchers = [(each._matcher, row) for each, row in found]
            _threads().unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * words, masks.shape[0])
        for each, row in found:
            each._add_marks(masks[row])

    def _add_marks(self, mask: np.ndarray) -> None:
        """Add the tokens that may follow beside those of the form."""
        if self._matcher.is_error():
            mask[:] = -1  # the next `push` raises the error
        more = self._stops if self._stops and self._matcher.is_accepting() else ()
        for token in (*more, *(() if self._opening is None else (self._opening,))):
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


@functools.cache
def _threads() -> "llguidance.LLExecutor":
    """Return the threads that compute masks, without Python's lock."""
    import llguidance

    return llguidance.LLExecutor()

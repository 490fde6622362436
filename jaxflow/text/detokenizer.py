"""From generated token ids to text, as they come (`Detokenizer`), and the search for stop strings
(`StopStrings`).
"""

from collections.abc import Iterable, Sequence

from jaxflow.text.stop_strings import StopMatcher
from jaxflow.text.text_stream import TextStream
from jaxflow.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing answer.

    However the ids are cut into pushes, the pieces `push` returned and what `finish` returns make the same
    text: that of all the ids together, up to the stop string (with it, if `include_stop`). No piece ends
    within a character or within what may become a stop string. After a prompt the text is what the answer
    adds to the prompt's: a leading space stays, and bytes that the prompt left open are completed. Costs O(1)
    a token, whatever came before.

    Stop strings are looked for in the text after the first `min_tokens` tokens; `stopped_by` is the one
    found.

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
        return None if self._matcher is None else self._matcher.found

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens; returns the text that is certain. After a stop string: nothing."""
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
        """Returns the text held back: there are no more tokens. A stop string may be found in it."""
        rest = self._stream.finish()
        return rest if self._matcher is None else self._matcher.push(rest) + self._matcher.finish()


class StopStrings:
    """Tells which stop string the tokens of one answer complete, at the very token; text held back is not
    looked at.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        self._text = Detokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            stop=stop,
            min_tokens=min_tokens,
        )

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Takes the next tokens; returns the stop string they complete, if any."""
        self._text.push(token_ids)
        return self._text.stopped_by

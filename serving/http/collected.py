"""The parts of an answer, joined choice by choice."""

from serving.http.job import Begun, Pieces
from serving.http.token_texts import TextToken


class Collected:
    """The pieces of a whole choice."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.entries: list[TextToken] = []
        self.finish_reason = ""
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(self._texts)


class Collection:
    """The choices of an answer, by index, and the first pieces of the prompts.

    `take` is the sink of `job.run`.
    """

    def __init__(self, choices: int):
        self.choices = [Collected() for _ in range(choices)]
        self.begun: dict[int, Begun] = {}

    async def take(self, pieces: Pieces) -> None:
        """Add pieces."""
        for piece in pieces:
            if isinstance(piece, Begun):
                self.begun[piece.prompt] = piece
                continue
            choice = self.choices[piece.index]
            choice._texts.append(piece.text)
            choice.token_ids += piece.token_ids
            choice.entries += piece.entries
            if piece.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason

"""The interface of a server that a load runs on, for every protocol."""

import dataclasses
from typing import Protocol

import numpy as np

from jaxflow.bench.report.requests import Record

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclasses.dataclass(frozen=True)
class ModelDescription:
    """The description that a server gives of its model. None: the server does not say it."""

    name: str
    max_model_len: float = float("inf")
    vocab_size: int | None = None
    dtype: str | None = None
    tensor_parallel_size: int | None = None


class ServerBackend(Protocol):
    """A running server."""

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Return once the server is ready. Raises: RequestFailed, OSError after `timeout_s`."""
        ...

    async def model(self) -> ModelDescription:
        """Return the served model. Raises: RequestFailed, OSError."""
        ...

    async def ask(
        self, record: Record, prompt: np.ndarray, output_tokens: int, timeout_s: float | None
    ) -> list[int]:
        """Send a prompt and read the answer, greedy and without regard to end tokens. Fill `record`.

        Returns the token ids of the answer; empty if the server does not send them. A failure is the record's
        `error`, and raises nothing.
        """
        ...


def text_of(prompt: np.ndarray) -> str:
    """Return a text of one letter a token. It has as many tokens with a byte-level tokenizer."""
    return "".join([LETTERS[token % len(LETTERS)] for token in prompt.tolist()])

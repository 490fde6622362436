"""The engine of a batch: the endpoints that answer lines, and how many lines they take at once."""

import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

from jaxflow.config import ConfigError, EngineConfig
from serving.frontend.config import ServerConfig
from serving.frontend.line_endpoints import LineEndpoints as LineEndpoints
from serving.frontend.served_model import ServedModel
from serving.http.endpoints import Endpoints

if TYPE_CHECKING:
    from jaxflow.llm import LLM

UNREAD_TOKENS = 2**20  # unread tokens of a line; this process reads as fast as it can
BODY_BYTES = 64 * 2**20  # bodies under way at an engine


@dataclasses.dataclass(frozen=True)
class AnsweringModel:
    """A model that answers lines.

    Attributes:
      name: of the model.
      lines, body_bytes: most lines under way, and most bytes of their bodies.
    """

    name: str
    endpoints: LineEndpoints
    lines: int
    body_bytes: int


class BatchEngine(Protocol):
    """One engine or several, for one run of a batch."""

    def answering(self, window: int | None) -> AbstractAsyncContextManager[AnsweringModel]:
        """Answer lines within the context. `window`: most lines under way at an
        engine; None for twice its sequences.

        Raises: StartFailed.
        """
        ...

    def close(self) -> None:
        """End the engine."""
        ...


class LocalEngine:
    """The engine of this process, see `BatchEngine`."""

    def __init__(self, llm: "LLM", served_model_names: tuple[str, ...] = ()):
        self._llm, self._names = llm, served_model_names

    @contextlib.asynccontextmanager
    async def answering(self, window: int | None) -> AsyncIterator[AnsweringModel]:
        """See `BatchEngine.answering`."""
        # The engine's thread gets the interpreter lock within 0.5 ms, even while many answers are written.
        sys.setswitchinterval(0.0005)
        endpoints = await served_endpoints(self._llm, self._names)
        lines = window or default_window(self._llm.engine_config)
        yield AnsweringModel(self._llm.name, endpoints, lines, BODY_BYTES)

    def close(self) -> None:
        """See `BatchEngine.close`."""
        self._llm.close()


def default_window(config: EngineConfig) -> int:
    """Return the lines under way at an engine: as many wait as run."""
    return 2 * (config.max_num_seqs or 256)


async def served_endpoints(llm: "LLM", served_model_names: tuple[str, ...]) -> Endpoints:
    """Return the endpoints of a loaded model. Raises: ConfigError."""
    served = ServedModel(
        ServerConfig(served_model_names=served_model_names, max_pending_tokens=UNREAD_TOKENS)
    )
    await served.serve(llm)
    return Endpoints(served)


def load_model(config: EngineConfig, chat_template: str | None, *, progress: bool = True) -> "LLM":
    """Return the loaded and warm model. Raises: ConfigError."""
    # JAX takes seconds to import. A wrong input file is refused before.
    from jaxflow.engine.heap import freeze_heap
    from jaxflow.llm import LLM

    llm = LLM.from_config(config, progress=progress)
    if chat_template is not None:
        if llm.tokenizer is None:
            raise ConfigError("chat_template", "a file", "no file, because the model has no tokenizer")
        llm.tokenizer = llm.tokenizer.with_chat_template(chat_template)
    freeze_heap()
    return llm

"""The batches of a HTTP server: `/v1/files` and `/v1/batches` over its endpoints."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute

from jaxflow.request import BATCH_PRIORITY
from serving.batch.batches import Batches, BatchModel
from serving.batch.routes import routes, routes_without_store
from serving.batch.store import Store
from serving.batch.window import Window
from serving.frontend.access import CALLER
from serving.http.endpoints import Endpoints
from serving.operations import Operations


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Settings.

    Attributes:
      folder: of the files and batches.
      priority: of the lines, `BATCH_PRIORITY` or later; online requests have 0
        unless they ask for another number.
      window: most lines under way. More lines than the engine runs at once keep each step full.
    """

    folder: Path
    priority: int = BATCH_PRIORITY
    window: int = 2048


class ObservedLines:
    """The endpoints for the lines of batches. Each line is a call of its own in the logs and metrics."""

    def __init__(self, endpoints: Endpoints, operations: Operations):
        self._endpoints, self._operations = endpoints, operations

    async def answer(self, path: str, body: bytes, *, priority: int = 0) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the JSON body of a line, as `Endpoints.answer`."""
        with self._operations.observe("batch", path) as call:
            call.status, answer = await self._endpoints.answer(path, body, priority=priority)
            return call.status, answer

    def alive(self) -> bool:
        """Return False once the engine can answer no more."""
        return self._endpoints.alive()


def open_batches(
    config: BatchConfig | None, endpoints: Endpoints, operations: Operations, model_name: str
) -> Batches | None:
    """Return the batches of a folder, or None without `config`. `Batches.start` continues unfinished ones.

    Raises:
      ConfigError: the folder cannot be used.
    """
    if config is None:
        return None
    model = BatchModel(model_name, ObservedLines(endpoints, operations), endpoints.check)
    return Batches(Store(config.folder), model, Window(config.window), priority=config.priority)


def batch_routes(batches: Batches | None) -> Sequence[BaseRoute]:
    """Return the routes of files and batches. Each bearer token sees its own files and batches."""
    if batches is None:
        return routes_without_store()

    def caller_name(request: Request) -> str:
        return CALLER.get().name

    return routes(batches, caller_name=caller_name)

"""The replica's side of a batch: an engine that answers whole lines.

The replica reads the body, makes the text and encodes the answer. So the process that hands out the lines
only moves bytes, and has work for many engines.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxflow.config import EngineConfig
from serving.batch_engine import load_model, served_endpoints
from serving.cluster.messages import LineAnswer, LineOrder, LineReport, ReplicaModel
from serving.cluster.replica import describe, fault_of
from serving.http.endpoints import Endpoints

if TYPE_CHECKING:
    from jaxflow.llm import LLM

log = logging.getLogger(__name__)

GATHER_S = 0.02  # answers that come within this time after the first one travel in the same message


class BatchReplica:
    """An engine that takes lines and reports their answers. Its methods run on one event loop.

    Args:
      llm: the loaded model.
      endpoints: of the model.
    """

    def __init__(self, llm: "LLM", endpoints: Endpoints):
        self._llm, self._endpoints = llm, endpoints
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answers: list[LineAnswer] = []
        self._wake = asyncio.Event()

    def describe(self) -> ReplicaModel:
        """Describe the model. The tokenizer stays here, because all texts are made here."""
        return msgspec.structs.replace(describe(self._llm), tokenizer=None)

    def take(self, orders: Sequence[LineOrder], aborted: Sequence[str]) -> None:
        """Begin to answer lines, and end others."""
        for order in orders:
            self._tasks[order.name] = asyncio.create_task(self._answer(order))
        for name in aborted:
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()

    async def _answer(self, order: LineOrder) -> None:
        try:
            status, body = await self._endpoints.answer(order.url, order.body, priority=order.priority)
            answer = LineAnswer(order.name, status, msgspec.json.encode(body))
        except Exception as error:  # only this line fails
            log.exception("a line with the url %s failed", order.url)
            message = f"{type(error).__name__}: {error}"
            body = {"error": {"message": message, "code": "internal_error"}}
            answer = LineAnswer(order.name, 500, msgspec.json.encode(body))
        self._tasks.pop(order.name, None)
        self._answers.append(answer)
        self._wake.set()

    async def poll(self, wait_s: float) -> LineReport:
        """Return a report soon after an answer, and after `wait_s` without one."""
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
            await asyncio.sleep(GATHER_S)
        except TimeoutError:
            pass
        self._wake.clear()
        driver = self._llm.driver
        # The fault is read first: an answer that comes with it is then known to be one of a dead engine.
        fault = fault_of(driver)
        answers, self._answers = self._answers, []
        steps, _ = driver.log.take()
        longest_s = max((step.read_s - step.enqueued_s for step in steps), default=0.0)
        return LineReport(answers, longest_s, driver.seconds_without_progress(), fault)

    def close(self) -> None:
        """End the engine in order."""
        self._llm.close()


async def load_batch_replica(
    config: EngineConfig, *, served_model_names: tuple[str, ...], chat_template: str | None
) -> BatchReplica:
    """Return the replica of a loaded and warm engine. Raises: ConfigError, OSError."""
    llm = await asyncio.to_thread(load_model, config, chat_template, progress=False)
    return BatchReplica(llm, await served_endpoints(llm, served_model_names))

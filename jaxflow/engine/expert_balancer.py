"""The rebalancing of experts between steps, layer after layer, from the loads that the steps counted.

A placement is computed on a thread. Then one layer at a time gets new arrays, behind the steps that are
enqueued already, while later steps still read the present ones. Once the copies of a layer are compared with
their sources by digest, the next step reads the new arrays and their map together.
"""

import concurrent.futures
import dataclasses
import logging
from typing import Any

import numpy as np

from jaxflow.engine.expert_load import ExpertCounter
from jaxflow.model.expert_placement import place_experts

log = logging.getLogger(__name__)


class DamagedExpert(RuntimeError):
    """A copy of an expert differs from its source."""

    def __init__(self, layer: int, slots: list[int]):
        super().__init__(f"layer {layer}: the copied experts of slots {slots} differ from their sources")


@dataclasses.dataclass(frozen=True)
class MovedLayer:
    """New arrays of a layer's experts. Reading a digest waits for the copies.

    layer: the index of the layer. placed: the expert of each new slot. source: the old slot of each new slot.
    before, after: the digests of the old slots and of the new ones, uint32 [S].
    """

    layer: int
    placed: np.ndarray
    source: np.ndarray
    arrays: dict[str, Any]
    before: Any
    after: Any

    @property
    def is_ready(self) -> bool:
        """Return True once the copies have ended."""
        return all(array.is_ready() for array in (self.before, self.after))

    def check(self) -> None:
        """Compare the copies with their sources. Raises: DamagedExpert."""
        wrong = np.flatnonzero(np.asarray(self.before)[self.source] != np.asarray(self.after))
        if len(wrong):
            raise DamagedExpert(self.layer, wrong.tolist())


class ExpertBalancer:
    """Moves the experts of an executor every `step_interval` steps. Only the engine's thread uses it.

    Attributes:
      placements: the placements that were begun.
      moved_slots: the slots that got another expert.
    """

    def __init__(self, executor: Any, counter: ExpertCounter, step_interval: int):
        self._executor, self._counter, self._interval = executor, counter, step_interval
        self._steps = self.placements = self.moved_slots = 0
        self._seen: np.ndarray | None = None  # the tokens at the last placement
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "expert-placement")
        self._placing: concurrent.futures.Future[np.ndarray] | None = None
        self._left: list[tuple[int, np.ndarray]] = []  # the layers to move, and their new placement
        self._moving: MovedLayer | None = None

    def after_step(self) -> None:
        """Do what is due after a step was read. Never waits for the device."""
        self._steps += 1
        if self._moving is not None:
            if self._moving.is_ready:
                self._switch(self._moving)
                self._moving = None
        elif self._left:
            self._moving = self._executor.move_experts(*self._left.pop(0))
        elif self._placing is not None:
            if self._placing.done():
                self._take(self._placing.result())
                self._placing = None
        elif self._steps >= self._interval:
            self._begin()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        found = self._counter.read()
        if found is None:
            return
        self._steps = 0
        loads = found.tokens if self._seen is None else found.tokens - self._seen
        self._seen, before = found.tokens, self._executor.placed
        devices = self._executor.programs.mesh.size
        self.placements += 1
        self._placing = self._pool.submit(place_experts, loads, devices, before.shape[1] // devices, before)

    def _take(self, placed: np.ndarray) -> None:
        changed = np.flatnonzero((placed != self._executor.placed).any(axis=1))
        layers = self._executor.expert_layers
        self._left = [(layers[row], placed[row]) for row in changed]

    def _switch(self, moved: MovedLayer) -> None:
        moved.check()
        row = self._executor.expert_layers.index(moved.layer)
        self.moved_slots += int((self._executor.placed[row] != moved.placed).sum())
        self._executor.switch_experts(moved)

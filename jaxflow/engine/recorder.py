"""The interface of a receiver of an executor's calls, for other processes to replay."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxflow.engine.layout import StepLayout
from jaxflow.kv.tiers.page import Page
from jaxflow.model.slot_params import SlotParams


class Recorder(Protocol):
    """The receiver of the calls that change the devices, in their order. Arguments: see `Executor`."""

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        full: bool,
        targets: np.ndarray | None,
        masks: np.ndarray | None = None,
    ) -> None:
        """Take a call of `run`."""
        ...

    def set_slot(self, slot: int, values: SlotParams, token_ids: np.ndarray, num_prompt: int) -> None:
        """Take a call of `set_slot`."""
        ...

    def gathered(self, group: int, pages: Sequence[int], found: Sequence[Page]) -> None:
        """Take a call of `gather_pages` and its results."""
        ...

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[Page]) -> None:
        """Take a call of `scatter_pages`."""
        ...

    def move_experts(self, layer: int, placed: np.ndarray) -> None:
        """Take a call of `move_experts`."""
        ...

    def switch_experts(self, layer: int) -> None:
        """Take a call of `switch_experts`, for the latest move of a layer."""
        ...

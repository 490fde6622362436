"""The calls of an executor as bytes, so that other processes can replay them on their devices.

A call holds numbers and raw arrays only. The layout of a step is its place in `every_layout`, which all processes
have in the same order.
"""

import itertools
from typing import Protocol

import jax
import msgspec
import numpy as np

from jaxflow.engine.executor import Executor, Pending
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.model.slot_params import SlotParams, slot_values


class Run(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A call of `Executor.run`. Arrays are int32."""

    layout: int
    full: bool
    buffer: bytes
    appends: bytes  # [n, 4]
    targets: bytes | None


class SetSlot(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A call of `Executor.set_slot`."""

    slot: int
    values: list[bytes]  # the fields of `SlotParams`, in their order
    token_ids: bytes
    num_prompt: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Run | SetSlot).decode


class Channel(Protocol):
    """The way to the processes that replay the calls."""

    def send(self, call: bytes) -> None:
        """Send a call, after all earlier ones."""
        ...


def every_layout(executor: Executor | StagedExecutor) -> list[StepLayout]:
    """Return all layouts of an executor, in an order that depends on the settings only."""
    return [*itertools.chain(*executor.layouts.values()), *executor.decode_layouts.values()]


class Recorder:
    """The `Executor.recorder` of process 0: sends each call before it is made."""

    def __init__(self, executor: Executor | StagedExecutor, channel: Channel):
        self._places = {layout.key: place for place, layout in enumerate(every_layout(executor))}
        self._channel = channel

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        full: bool,
        targets: np.ndarray | None,
    ) -> None:
        """Send a call of `Executor.run`."""
        place, found = self._places[layout.key], None if targets is None else targets.tobytes()
        self._channel.send(_encode(Run(place, full, buffer.tobytes(), appends.tobytes(), found)))

    def set_slot(self, slot: int, values: SlotParams, token_ids: np.ndarray, num_prompt: int) -> None:
        """Send a call of `Executor.set_slot`."""
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(values)]
        ids = np.asarray(token_ids, np.int32).tobytes()
        self._channel.send(_encode(SetSlot(slot, leaves, ids, num_prompt)))


def replay(executor: Executor | StagedExecutor, layouts: list[StepLayout], call: bytes) -> Pending | None:
    """Make a recorded call. Return the results of a step, None of another call.

    Raises:
      ValueError, IndexError, msgspec.MsgspecError: the call is damaged, or another program's.
    """
    found = _decode(call)
    if isinstance(found, SetSlot):
        leaves, tree = jax.tree.flatten(slot_values())
        pairs = zip(leaves, found.values, strict=True)
        values = [np.frombuffer(raw, np.asarray(leaf).dtype).reshape(np.shape(leaf)) for leaf, raw in pairs]
        ids = np.frombuffer(found.token_ids, np.int32)
        executor.set_slot(found.slot, jax.tree.unflatten(tree, values), ids, found.num_prompt)
        return None
    layout = layouts[found.layout]
    buffer, appends = _ints(found.buffer, layout.size), _ints(found.appends).reshape(-1, 4)
    targets = None if found.targets is None else _ints(found.targets, layout.tokens)
    return executor.run(layout, buffer, appends, full=found.full, targets=targets)


def _ints(raw: bytes, size: int | None = None) -> np.ndarray:
    found = np.frombuffer(raw, np.int32)
    if size is not None and found.size != size:
        raise ValueError(f"a call with {found.size} words, and the layout has {size}")
    return found

"""The calls of an executor as bytes, so that other processes can replay them on their devices.

A call holds numbers and raw arrays only. The layout of a step is its place in `every_layout`, which all
processes have in the same order.
"""

import collections
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import msgspec
import numpy as np

from jaxflow.engine.executor import Executor
from jaxflow.engine.expert_balancer import MovedLayer
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.stage_threads import AnyPending
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.kv.tiers.disk_parts import FollowerDisk
from jaxflow.kv.tiers.page import Page, copy_to
from jaxflow.model.slot_params import SlotParams, slot_values


class Run(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A call of `Executor.run`. Arrays are int32, of all ranks."""

    layout: int
    full: bool
    buffer: bytes
    appends: bytes  # [n, 4], of several ranks [ranks, n, 4]
    targets: bytes | None
    masks: bytes | None = None


class SetSlot(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A call of `Executor.set_slot`."""

    slot: int
    values: list[bytes]  # the fields of `SlotParams`, in their order
    token_ids: bytes
    num_prompt: int


class Gather(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A call of `Executor.gather_pages`. The pages outside the cache have the names from `first` on."""

    group: int
    pages: list[int]
    first: int


class Scatter(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A call of `Executor.scatter_pages`. `names`: of pages outside the cache."""

    group: int
    pages: list[int]
    names: list[int]


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A call of `copy_to`. The copies have the names from `first` on."""

    names: list[int]
    memory_kind: str | None
    first: int


class Free(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Pages outside the cache that process 0 no longer has."""

    names: list[int]


class WritePart(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A call of `FollowerDisk.write`."""

    key: bytes
    name: int


class ReadPart(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A call of `FollowerDisk.read`."""

    key: bytes
    name: int


class LosePart(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A call of `FollowerDisk.lose`."""

    key: bytes
    name: int


class TouchParts(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A call of `FollowerDisk.touch`."""

    keys: list[bytes]


class CloseParts(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A call of `FollowerDisk.close`."""

    keys: list[bytes]
    names: list[int]


class MoveExperts(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """A call of `Executor.move_experts`."""

    layer: int
    placed: list[int]


class SwitchExperts(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """A call of `Executor.switch_experts`, with the latest moved experts of the layer."""

    layer: int


DiskCall = WritePart | ReadPart | LosePart | TouchParts | CloseParts
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(
    Run | SetSlot | Gather | Scatter | Copy | Free | MoveExperts | SwitchExperts | DiskCall
).decode


class CallChannel(Protocol):
    """The way to the processes that replay the calls."""

    def send(self, call: bytes) -> None:
        """Send a call, after all earlier ones."""
        ...


def every_layout(executor: Executor | StagedExecutor) -> list[StepLayout]:
    """Return all layouts of an executor, in an order that depends on the settings only."""
    return [*itertools.chain(*executor.layouts.values()), *executor.decode_layouts.values()]


class CallRecorder:
    """The `Executor.recorder` of process 0: sends each call.

    A page outside the cache has a number as its name. Process 0 decides what becomes of it, and the others
    hold their parts of it by that name.
    """

    def __init__(self, executor: Executor | StagedExecutor, channel: CallChannel):
        self._places = {layout.key: place for place, layout in enumerate(every_layout(executor))}
        self.channel = channel
        self._names: dict[int, int] = {}  # the names of the living pages outside the cache, by `id`
        self._count = 0
        self._freed: collections.deque[tuple[int, int]] = collections.deque()  # any thread may free a page

    def run(
        self,
        layout: StepLayout,
        buffer: np.ndarray,
        appends: np.ndarray,
        full: bool,
        targets: np.ndarray | None,
        masks: np.ndarray | None = None,
    ) -> None:
        """Send a call of `Executor.run`."""
        self._free()
        place = self._places[layout.key]
        found, bits = (None if array is None else array.tobytes() for array in (targets, masks))
        self.channel.send(_encode(Run(place, full, buffer.tobytes(), appends.tobytes(), found, bits)))

    def set_slot(self, slot: int, values: SlotParams, token_ids: np.ndarray, num_prompt: int) -> None:
        """Send a call of `Executor.set_slot`."""
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(values)]
        ids = np.asarray(token_ids, np.int32).tobytes()
        self.channel.send(_encode(SetSlot(slot, leaves, ids, num_prompt)))

    def gathered(self, group: int, pages: Sequence[int], found: Sequence[Page]) -> None:
        """Send a call of `Executor.gather_pages`, and name its results."""
        self.channel.send(_encode(Gather(group, [int(page) for page in pages], self._name(found))))

    def scatter_pages(self, group: int, pages: Sequence[int], data: Sequence[Page]) -> None:
        """Send a call of `Executor.scatter_pages`."""
        names = [self._names[id(page)] for page in data]
        self.channel.send(_encode(Scatter(group, [int(page) for page in pages], names)))

    def copy(self, pages: Sequence[Any], memory_kind: str | None) -> list[Any]:
        """Start copies of pages in every process, see `copy_to`."""
        copies = copy_to(pages, memory_kind)
        names = [self._names[id(page)] for page in pages]
        self.channel.send(_encode(Copy(names, memory_kind, self._name(copies))))
        return copies

    def move_experts(self, layer: int, placed: np.ndarray) -> None:
        """Send a call of `Executor.move_experts`."""
        self.channel.send(_encode(MoveExperts(layer, placed.tolist())))

    def switch_experts(self, layer: int) -> None:
        """Send a call of `Executor.switch_experts`."""
        self.channel.send(_encode(SwitchExperts(layer)))

    # ---- the disks of all processes, see `jaxflow.kv.tiers.disk_parts.ProcessPartCalls`

    def write_part(self, key: bytes, page: Any) -> None:
        """Let every follower write its part of a page."""
        self.channel.send(_encode(WritePart(key, self._names[id(page)])))

    def read_part(self, key: bytes) -> int:
        """Let every follower read its part of a page, and return the page's name."""
        name, self._count = self._count, self._count + 1
        self.channel.send(_encode(ReadPart(key, name)))
        return name

    def found_part(self, name: int, page: Any) -> None:
        """Remember that `page` is the part of process 0 of a page that every process has read."""
        self._free()
        self._remember(name, page)

    def lose_part(self, key: bytes, name: int) -> None:
        """Let every follower forget a page that it read, and remove its part from the disk."""
        self.channel.send(_encode(LosePart(key, name)))

    def touch_parts(self, keys: Sequence[bytes]) -> None:
        """Let every follower mark pages as used now."""
        self.channel.send(_encode(TouchParts(list(keys))))

    def close_parts(self, pages: Sequence[tuple[bytes, Any]]) -> None:
        """Let every follower write its parts of the host's pages, and close its disk."""
        names = [self._names[id(page)] for _, page in pages]
        self.channel.send(_encode(CloseParts([key for key, _ in pages], names)))

    # ----

    def _name(self, pages: Sequence[Any]) -> int:
        """Name new pages by numbers that follow each other, and return the first one."""
        self._free()
        first = self._count
        for page in pages:
            self._remember(self._count, page)
            self._count += 1
        return first

    def _remember(self, name: int, page: Any) -> None:
        self._names[id(page)] = name
        weakref.finalize(page, self._freed.append, (id(page), name)).atexit = False

    def _free(self) -> None:
        """Send the names of the pages that ended. Another page may have the `id` of one that ended."""
        ended = [self._freed.popleft() for _ in range(len(self._freed))]
        for identity, name in ended:
            if self._names.get(identity) == name:
                del self._names[identity]
        if ended:
            self.channel.send(_encode(Free([name for _, name in ended])))


def replay(
    executor: Executor | StagedExecutor,
    layouts: list[StepLayout],
    pages: dict[int, Any],
    call: bytes,
    disk: FollowerDisk | None = None,
    moved: dict[int, MovedLayer] | None = None,
) -> AnyPending | None:
    """Make a recorded call. Return the results of a step, None of another call.

    Args:
      pages: by name, the pages outside the cache; the call may change them.
      disk: of this process's parts of the pages; None without a disk tier.
      moved: by layer, the experts that no step reads yet; the call may change them. None: experts stay.

    Raises:
      ValueError, LookupError, msgspec.MsgspecError: the call is damaged, or another program's.
    """
    found = _decode(call)
    if isinstance(found, Free):
        for name in found.names:
            del pages[name]
        return None
    if isinstance(found, Gather):
        pages |= enumerate(executor.gather_pages(found.group, found.pages), start=found.first)
        return None
    if isinstance(found, Scatter):
        executor.scatter_pages(found.group, found.pages, [pages[name] for name in found.names])
        return None
    if isinstance(found, MoveExperts | SwitchExperts):
        _replay_move(executor, moved, found)
        return None
    if isinstance(found, DiskCall):
        _replay_on_disk(disk, found)
        return None
    if isinstance(found, Copy):
        copies = copy_to([pages[name] for name in found.names], found.memory_kind)
        pages |= enumerate(copies, start=found.first)
        return None
    if isinstance(found, SetSlot):
        leaves, tree = jax.tree.flatten(slot_values())
        pairs = zip(leaves, found.values, strict=True)
        values = [np.frombuffer(raw, np.asarray(leaf).dtype).reshape(np.shape(leaf)) for leaf, raw in pairs]
        ids = np.frombuffer(found.token_ids, np.int32)
        executor.set_slot(found.slot, jax.tree.unflatten(tree, values), ids, found.num_prompt)
        return None
    layout, ranks = layouts[found.layout], executor.ranks
    buffer = _ints(found.buffer, ranks * layout.size)
    appends = _ints(found.appends).reshape(*([ranks] if ranks > 1 else []), -1, 4)
    targets = None if found.targets is None else _ints(found.targets, ranks * layout.tokens)
    more = {}
    if found.masks is not None:
        rows = ranks * layout.rows
        masks = _ints(found.masks, rows * executor.mask_words).reshape(rows, executor.mask_words)
        more["masks"] = lambda: masks
    return executor.run(layout, buffer, appends, full=found.full, targets=targets, **more)


def _replay_move(
    executor: Executor | StagedExecutor,
    moved: dict[int, MovedLayer] | None,
    call: MoveExperts | SwitchExperts,
) -> None:
    if moved is None or not isinstance(executor, Executor):
        raise ValueError("a call that moves experts, and the experts of this process stay")
    if isinstance(call, MoveExperts):
        moved[call.layer] = executor.move_experts(call.layer, np.array(call.placed))
    else:
        executor.switch_experts(moved.pop(call.layer))  # process 0 has compared the digests


def _replay_on_disk(disk: FollowerDisk | None, call: DiskCall) -> None:
    if disk is None:
        raise ValueError("a call of the disk tier, and this process has none")
    match call:
        case WritePart(key, name):
            disk.write(key, name)
        case ReadPart(key, name):
            disk.read(key, name)
        case LosePart(key, name):
            disk.lose(key, name)
        case TouchParts(keys):
            disk.touch(keys)
        case CloseParts(keys, names):
            disk.close(keys, names)


def _ints(raw: bytes, size: int | None = None) -> np.ndarray:
    found = np.frombuffer(raw, np.int32)
    if size is not None and found.size != size:
        raise ValueError(f"a call with {found.size} words, and the layout has {size}")
    return found

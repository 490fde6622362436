"""The division of a side stream's nano-ops into regions that return one array each.

`streams.region` says why a region returns one array. Consecutive nano-ops of a stream are split where only
one array outlives the nano-ops since the last split. Both attentions of the same tokens make one array: the
second attention writes into the first one's output. An op that adds to the residual stream makes two
arrays: the sum, and its norm or gated product. Such an op runs between regions on the main stream, where
it waits no longer than a region would. A region starts when all of its inputs exist, so another side
stream's output is read by the first nano-ops of a group, or by none.
"""

import dataclasses
from typing import Literal

from jaxflow.pipeline.plan import PlanError
from jaxflow.pipeline.program import MAIN, LayerOp, Reads, TokenRange, Value

_PAIRS = ("routing", "expert_rows", "h2_sent", "y2_sent")  # values that may be several arrays
_QUANTIZED_PAIRS = (*_PAIRS, "h1", "h2", "h1_local", "h2_local", "a")


@dataclasses.dataclass(frozen=True)
class RegionOp:
    """An operation of a region: a nano-op, or the merge of both attentions' heads after one.

    form: `op` for a nano-op, `into` for decode attention that writes into the output of chunk attention,
    `merge` for the merge.
    """

    entry: LayerOp
    form: Literal["op", "merge", "into"]
    reads: tuple[Value, ...]
    makes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Region:
    """Operations of one side stream that return one array. merged: the array holds both attentions' heads."""

    ops: tuple[RegionOp, ...]
    output: tuple[Value, TokenRange]
    merged: bool


@dataclasses.dataclass(frozen=True)
class IssueGroup:
    """Entries [first, last) of the program that are issued together.

    A group without regions is one entry on the main stream. A group with regions is some consecutive entries
    of a side stream.
    """

    entries: tuple[LayerOp, ...]
    last: int
    regions: tuple[Region, ...] = ()

    @property
    def first(self) -> int:
        """Return the index of the first entry in the program."""
        return self.last - len(self.entries)


def group_entries(
    entries: tuple[LayerOp, ...], reads: Reads, quantized: bool = False
) -> tuple[IssueGroup, ...]:
    """Divide the program into groups.

    A new group begins at a nano-op that waits, at a change of tokens, and at a value of another side stream.
    quantized: the inputs of GEMMs carry scales.

    Raises:
      PlanError: if a side stream would leave a value that is not one array.
    """
    groups: list[IssueGroup] = []
    pairs = _QUANTIZED_PAIRS if quantized else _PAIRS
    current: list[LayerOp] = []
    makers: dict[Value, set[int]] = {}  # the side streams that made a part of a value
    for index, entry in enumerate(entries):
        current.append(entry)
        on_main = entry.nano.stream == MAIN or _adds_residual(entry)
        if not on_main:
            for name in entry.makes:
                makers.setdefault((entry.layer, name), set()).add(entry.nano.stream)
        if not on_main and index + 1 < len(entries) and _continues(current, entries[index + 1], makers):
            continue
        found = tuple(current)
        regions = () if on_main else _regions(found, index + 1, reads, pairs)
        groups.append(IssueGroup(found, index + 1, regions))
        current = []
    return tuple(groups)


def _adds_residual(entry: LayerOp) -> bool:
    """Return whether an entry has two outputs: the new residual stream, and what it makes of the stream."""
    return len(entry.makes) == 2


def _continues(current: list[LayerOp], following: LayerOp, makers: dict[Value, set[int]]) -> bool:
    """Return whether an entry may share a region with its predecessors.

    XLA would merge GEMMs of different tokens that share a region.
    """
    nano, read = following.nano, {value for entry in current for value in entry.reads}
    if (
        nano.stream != current[-1].nano.stream
        or _adds_residual(following)
        or nano.waits
        or not following.tokens.overlaps(current[-1].tokens)
    ):
        return False
    return all(makers.get(value, set()) <= {nano.stream} for value in following.reads if value not in read)


def _region_ops(entries: tuple[LayerOp, ...]) -> list[RegionOp]:
    found: list[RegionOp] = []
    for at, entry in enumerate(entries):
        layer = entry.layer
        before = [
            other
            for other in entries[:at]
            if other.attends and (other.layer, other.tokens) == (layer, entry.tokens)
        ]
        if entry.nano.op == "decode_attention" and before:
            found.append(RegionOp(entry, "into", (*entry.reads, (layer, "o_chunk")), ("o_chunk",)))
            continue
        found.append(RegionOp(entry, "op", entry.reads, entry.op.outputs))
        if entry.attends and before:
            found.append(RegionOp(entry, "merge", ((layer, "o_decode"), (layer, "o_chunk")), ("o_chunk",)))
    return found


def _regions(
    entries: tuple[LayerOp, ...], last: int, reads: Reads, pairs: tuple[str, ...]
) -> tuple[Region, ...]:
    ops, regions, at = _region_ops(entries), [], 0
    while at < len(ops):
        for stop in range(len(ops), at, -1):
            left = _outliving(ops, at, stop, last, reads)
            if len(left) == 1 and left[0][0][1] not in pairs:
                break
        else:
            entry = ops[at].entry
            raise PlanError(
                entry.nano.id,
                f"from here to {entries[-1].nano.id}, stream {entry.nano.stream} leaves no single array "
                f"to other streams",
            )
        merged = any(
            op.form in ("merge", "into") and (op.entry.layer, "o_chunk") == left[0][0] for op in ops[at:stop]
        )
        regions.append(Region(tuple(ops[at:stop]), left[0], merged))
        at = stop
    return tuple(regions)


def _outliving(
    ops: list[RegionOp], first: int, stop: int, last: int, reads: Reads
) -> list[tuple[Value, TokenRange]]:
    """Return the values that operations [first, stop) make and that later operations read."""
    made: dict[tuple[Value, TokenRange], None] = {}
    for op in ops[first:stop]:
        if op.form == "merge":
            made.pop(((op.entry.layer, "o_decode"), op.entry.tokens), None)
        made.update({((op.entry.layer, name), op.entry.tokens): None for name in op.makes})

    def read_later(value: Value, tokens: TokenRange) -> bool:
        here = any(value in op.reads and op.entry.tokens.overlaps(tokens) for op in ops[stop:])
        return here or reads.later(last, value, tokens)

    return [(value, tokens) for value, tokens in made if read_later(value, tokens)]

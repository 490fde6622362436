"""How nano-ops of a side stream become regions that return one array each (`streams.region` says why one).

A run of nano-ops that follow each other on a stream is cut where just one array outlives what was computed
since the last cut. Both attentions of the same tokens make one array, which decode attention writes into what
chunk attention left where it comes second. A norm that adds to the residual stream makes two arrays in one
pass, the sum and its norm: it runs between regions, on the main stream, where it waits for no more than a
region would. A region begins when all that it reads is there, so that what another side stream makes is read
by the first nano-ops of one, or by none.
"""

import dataclasses
from typing import Literal

from jaxflow.pipeline.order import ATTENTION, MAIN, Reads, Run, Source, Span
from jaxflow.pipeline.plan import PlanError

ADD_NORMS = ("attn_norm", "mlp_norm")  # two outputs each
_PAIRS = ("routing",)  # values that are two arrays
_QUANTIZED_PAIRS = ("routing", "h1", "h2", "h1_own", "h2_own", "a")


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of a nano-op: what it reads and the values of its layer that it makes."""

    run: Run
    part: Literal["all", "merge", "into"]
    reads: tuple[Source, ...]
    makes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps that become one region, and the value that outlives it."""

    steps: tuple[Step, ...]
    output: tuple[Source, Span]
    merged: bool  # the output is that of both attentions


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs [first, last) of the program: one on the main stream (no segments), or some that follow each other
    on a side stream.
    """

    runs: tuple[Run, ...]
    last: int
    segments: tuple[Segment, ...] = ()

    @property
    def first(self) -> int:
        return self.last - len(self.runs)


def grouped(runs: tuple[Run, ...], reads: Reads, quantized: bool = False) -> tuple[Group, ...]:
    """The program in groups; a run that waits begins one, and so do a change of tokens and what another side
    stream made.

    quantized: the inputs of products have scales beside them.

    Raises:
      PlanError: if a side stream would leave a value that is not one array.
    """
    groups: list[Group] = []
    pairs = _QUANTIZED_PAIRS if quantized else _PAIRS
    current: list[Run] = []
    makers: dict[Source, set[int]] = {}  # the side streams that made some of a value
    for index, run in enumerate(runs):
        current.append(run)
        on_main = run.nano.stream == MAIN or run.nano.op in ADD_NORMS
        if not on_main:
            for value in run.makes:
                makers.setdefault((run.layer, value), set()).add(run.nano.stream)
        if not on_main and index + 1 < len(runs) and _continues(current, runs[index + 1], makers):
            continue
        found = tuple(current)
        groups.append(Group(found, index + 1, () if on_main else _segments(found, index + 1, reads, pairs)))
        current = []
    return tuple(groups)


def _continues(current: list[Run], following: Run, makers: dict[Source, set[int]]) -> bool:
    """Whether a run may share a region with those before it: of different tokens, XLA would merge their
    products.
    """
    nano, read = following.nano, {source for run in current for source in run.reads}
    if (
        nano.stream != current[-1].nano.stream
        or nano.op in ADD_NORMS
        or nano.waits
        or not following.span.meets(current[-1].span)
    ):
        return False
    return all(makers.get(source, set()) <= {nano.stream} for source in following.reads if source not in read)


def _steps(runs: tuple[Run, ...]) -> list[Step]:
    steps: list[Step] = []
    for at, run in enumerate(runs):
        name, layer = run.nano.op, run.layer
        earlier = [
            other
            for other in runs[:at]
            if other.nano.op in ATTENTION and (other.layer, other.span) == (layer, run.span)
        ]
        if name == "decode_attention" and earlier:
            steps.append(Step(run, "into", (*run.reads, (layer, "o_chunk")), ("o_chunk",)))
            continue
        steps.append(Step(run, "all", run.reads, run.op.outputs))
        if name in ATTENTION and earlier:
            steps.append(Step(run, "merge", ((layer, "o_decode"), (layer, "o_chunk")), ("o_chunk",)))
    return steps


def _segments(runs: tuple[Run, ...], last: int, reads: Reads, pairs: tuple[str, ...]) -> tuple[Segment, ...]:
    steps, segments, at = _steps(runs), [], 0
    while at < len(steps):
        for stop in range(len(steps), at, -1):
            left = _outliving(steps, at, stop, last, reads)
            if len(left) == 1 and left[0][0][1] not in pairs:
                break
        else:
            run = steps[at].run
            raise PlanError(
                run.nano.id,
                (
                    f"from here to {runs[-1].nano.id}, stream {run.nano.stream} leaves no single array "
                    f"to other streams"
                ),
            )
        merged = any(
            step.part in ("merge", "into") and (step.run.layer, "o_chunk") == left[0][0]
            for step in steps[at:stop]
        )
        segments.append(Segment(tuple(steps[at:stop]), left[0], merged))
        at = stop
    return tuple(segments)


def _outliving(
    steps: list[Step], first: int, stop: int, last: int, reads: Reads
) -> list[tuple[Source, Span]]:
    """What steps [first, stop) make and what comes after them reads."""
    made: dict[tuple[Source, Span], None] = {}
    for step in steps[first:stop]:
        if step.part == "merge":
            made.pop(((step.run.layer, "o_decode"), step.run.span), None)
        made.update({((step.run.layer, value), step.run.span): None for value in step.makes})

    def read_later(source: Source, span: Span) -> bool:
        here = any(source in step.reads and step.run.span.meets(span) for step in steps[stop:])
        return here or reads.later(last, source, span)

    return [(source, span) for source, span in made if read_later(source, span)]

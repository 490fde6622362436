"""How nano-ops of a side stream become regions that return one array each (`streams.region` says why one).

A run of nano-ops that follow each other on a stream is cut where just one array outlives what was computed since the
last cut. Three rewrites make such places. A norm that adds to the residual stream is taken as two steps, so that a
region may end with the sum and the next begin with its norm; both attentions of the same tokens make one array,
which decode attention writes into what chunk attention left where it comes second; the first layer's sum, of one term, is no step.
"""

import dataclasses
from typing import Literal

from jaxflow.pipeline.order import ATTENTION, MAIN, Reads, Run, Source, Span
from jaxflow.pipeline.plan import PlanError

ADD_NORMS = ("attn_norm", "mlp_norm")
_PAIRS = ("routing",)  # values that are two arrays
_QUANTIZED_PAIRS = ("routing", "h1", "h2", "h1_own", "h2_own", "a")


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of a nano-op: what it reads and the values of its layer that it makes."""

    run: Run
    part: Literal["all", "add", "norm", "merge", "into"]
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
    """Runs [first, last) of the program: one on the main stream, or some that follow each other on a side stream."""

    runs: tuple[Run, ...]
    last: int
    segments: tuple[Segment, ...] = ()

    @property
    def first(self) -> int:
        return self.last - len(self.runs)


def grouped(runs: tuple[Run, ...], reads: Reads, quantized: bool = False) -> tuple[Group, ...]:
    """The program in groups; a run that waits begins one, and so does a change of tokens.

    quantized: the inputs of products have scales beside them.

    Raises:
      PlanError: if a side stream would leave a value that is not one array.
    """
    groups: list[Group] = []
    pairs = _QUANTIZED_PAIRS if quantized else _PAIRS
    current: list[Run] = []
    for index, run in enumerate(runs):
        current.append(run)
        stream = run.nano.stream
        if stream != MAIN and index + 1 < len(runs) and _continues(run, runs[index + 1]):
            continue
        found = tuple(current)
        groups.append(Group(found, index + 1, _segments(found, index + 1, reads, pairs) if stream != MAIN else ()))
        current = []
    return tuple(groups)


def _continues(run: Run, following: Run) -> bool:
    """Whether both may share a region: of different tokens, XLA would merge their products."""
    return following.nano.stream == run.nano.stream and not following.nano.waits and following.span.meets(run.span)


def _steps(runs: tuple[Run, ...]) -> list[Step]:
    steps: list[Step] = []
    for at, run in enumerate(runs):
        name, layer = run.nano.op, run.layer
        if name in ADD_NORMS:
            x, h = run.op.outputs
            if len(run.reads) == 2:
                steps.append(Step(run, "add", run.reads, (x,)))
            steps.append(Step(run, "norm", ((layer, x),), (h,)))
            continue
        earlier = [other for other in runs[:at] if other.nano.op in ATTENTION and (other.layer, other.span) == (layer, run.span)]
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
                run.nano.id, f"from here to {runs[-1].nano.id}, stream {run.nano.stream} leaves no single array to other streams"
            )
        merged = any(step.part in ("merge", "into") and (step.run.layer, "o_chunk") == left[0][0] for step in steps[at:stop])
        segments.append(Segment(tuple(steps[at:stop]), left[0], merged))
        at = stop
    return tuple(segments)


def _outliving(steps: list[Step], first: int, stop: int, last: int, reads: Reads) -> list[tuple[Source, Span]]:
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

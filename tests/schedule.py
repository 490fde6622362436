"""Read XLA's schedule of a step from its optimized program, and compare the schedule with the step's plan.

The entry of a program lists instructions in issue order. A region holds the work of a side stream:
`call-start` names its computation, and the main stream waits at `call-done`. A collective may have a start
and a done as well. The compiler of plans puts the nano-op into each instruction's name (`.../qkv/qkv.1/...`).
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from jaxflow.model.graph import Graph
from jaxflow.pipeline.plan import Plan
from jaxflow.pipeline.program import ATTENTION, LayerOp, program

_INSTRUCTION = re.compile(
    r"^ *(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<rest>.*)$", re.M
)
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")
# The identity of a nano-op.
_WORK = ("dot", "custom-call", "scatter", *_COLLECTIVES, *(f"{name}-start" for name in _COLLECTIVES))


@dataclasses.dataclass(frozen=True)
class Window:
    """Work that is under way from one place of the schedule to another: nano-ops by id, each once, as they
    are issued.
    """

    first: int
    last: int
    stream: int
    nano_ops: tuple[str, ...]
    opcodes: tuple[str, ...]

    def meets(self, other: "Window") -> bool:
        return self.first < other.last and other.first < self.last


def read(hlo: str, plan: Plan) -> list[Window]:
    """The windows of a compiled step, by their beginning."""
    ids = {(nano.op, nano.id) for nano in plan.nano_ops}
    bodies, entry = _computations(hlo)
    windows, open_ = [], {}
    for at, found in enumerate(_INSTRUCTION.finditer(bodies[entry])):
        opcode, rest, name = found["opcode"], found["rest"], found["name"]
        if opcode in ("call-done", *(f"{name}-done" for name in _COLLECTIVES)):
            start = open_.pop(re.match(r"%(\S+?)[,)]", rest)[1])
            windows.append(dataclasses.replace(start, last=at))
            continue
        body = re.search(r"(?:calls|to_apply)=%([\w.-]+)", rest)
        work = (
            _work(bodies, body[1], ids)
            if body and opcode in ("fusion", "call", "call-start", "async-start")
            else []
        )
        own = _named(rest, ids) if opcode in _WORK else None
        work += [(own, opcode)] if own else []
        stream = re.search(r'_xla_stream_annotation="(\d+)"', rest)
        window = Window(
            at,
            at + 1,
            int(stream[1]) if stream else 0,
            tuple(dict.fromkeys(i for i, _ in work)),
            tuple(c for _, c in work),
        )
        if opcode.endswith("-start"):
            open_[name] = window
        elif work:
            windows.append(window)
    assert not open_, f"regions without an end: {list(open_)}"
    return sorted((window for window in windows if window.nano_ops), key=lambda window: window.first)


def _computations(hlo: str) -> tuple[dict[str, str], str]:
    """The text of each computation, by name, and the entry's name."""
    heads = list(re.finditer(r"^(ENTRY )?%([\w.-]+) \(.*\{$", hlo, re.M))
    ends = [head.start() for head in heads[1:]] + [len(hlo)]
    return {h[2]: hlo[h.end() : end] for h, end in zip(heads, ends, strict=True)}, next(
        h[2] for h in heads if h[1]
    )


def _named(rest: str, ids: set[tuple[str, str]]) -> str | None:
    """The nano-op that an instruction's metadata names."""
    path = re.search(r'op_name="([^"]*)"', rest)
    parts = path[1].split("/") if path else []
    return next((nano for op, nano in itertools.pairwise(parts) if (op, nano) in ids), None)


def _work(bodies: dict[str, str], name: str, ids: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """(nano-op, opcode) of the work in a computation and in those that it calls, in order."""
    found = []
    for one in _INSTRUCTION.finditer(bodies[name]):
        body = re.search(r"(?:calls|to_apply)=%([\w.-]+)", one["rest"])
        if body and one["opcode"] in ("fusion", "call"):
            found += _work(bodies, body[1], ids)
        elif one["opcode"] in _WORK and (nano := _named(one["rest"], ids)):
            found.append((nano, one["opcode"]))
    return found


def kernels(hlo: str, plan: Plan) -> list[tuple[str | None, str]]:
    """Return (nano-op, kind) of every launch in issue order.

    kind: the opcode of a GEMM or custom call, else the name.
    """
    ids = {(nano.op, nano.id) for nano in plan.nano_ops}
    bodies, entry = _computations(hlo)

    def launched(name: str) -> list[tuple[str | None, str]]:
        found = []
        for one in _INSTRUCTION.finditer(bodies[name]):
            body = re.search(r"(?:calls|to_apply)=%([\w.-]+)", one["rest"])
            if body and one["opcode"] in ("call", "call-start"):
                found += launched(body[1])
            elif one["opcode"] in ("fusion", "custom-call", "copy", "dot", "scatter", "copy-start"):
                inside = _work(bodies, body[1], ids) if body else []
                nano = _named(one["rest"], ids) or next((nano for nano, _ in inside), None)
                plain = one["opcode"] in ("custom-call", "dot") or any(
                    opcode == "dot" for _, opcode in inside
                )
                found.append((nano, "op" if plain else re.sub(r"[._]?\d*$", "", one["name"])))
        return found

    return launched(entry)


def check_schedule(hlo: str, plan: Plan, graph: Graph, rows: int) -> list[Window]:
    """Assert that the schedule is the plan's, and return it.

    rows: rows of the batch. Decode attention of tokens beyond these rows is empty.

    - Every GEMM, attention and collective of every layer occurs once, on its stream.
    - GEMMs and collectives keep the plan's order on their stream.
    - Attention on a side stream is open while all its concurrent nano-ops of the plan are issued.
    - A collective is in flight during at least one GEMM or attention that the plan overlaps with it. XLA
      awaits a collective when it guesses its end, so `spans` counts them.
    """
    windows, runs = read(hlo, plan), program(plan, graph)
    place = _places(windows, runs, rows)
    for stream in {run.nano.stream for run in runs}:
        order = [
            place[run.nano.id, run.layer].first
            for run in runs
            if run.nano.stream == stream and run.op.kind == "dense"
        ]
        assert order == sorted(order), f"products of stream {stream} are in another order"
    placed = {nano for nano, _ in place}
    ops, theirs = (
        {nano.id: nano.op for nano in plan.nano_ops},
        {(run.nano.op, run.nano.stream) for run in runs},
    )
    strays = {
        (nano, w.stream)
        for w in windows
        for nano in w.nano_ops
        if (ops[nano], w.stream) not in theirs and (nano in placed)
    }
    assert not strays, f"work on another stream than the plan's: {strays}"
    behind = _behind(runs)
    for index, run in enumerate(runs):
        window = place.get((run.nano.id, run.layer))
        if run.op.name in ATTENTION and run.nano.stream and window:
            beside = [
                runs[i]
                for i in _beside(runs, behind, index)
                if runs[i].op.kind == "dense" and runs[i].nano.stream
            ]
            beside = [other for other in beside if other.nano.stream != run.nano.stream]
            apart = [other.nano.id for other in beside if not place[other.nano.id, other.layer].meets(window)]
            assert not apart, f"{run.nano.id} of layer {run.layer}: beside it should be {apart}"
    for sent in _spans(place, runs, behind):
        assert sent.spanned or not sent.beside, (
            f"{sent.nano_op} of layer {sent.layer} runs beside none of {sent.beside}"
        )
    return windows


@dataclasses.dataclass(frozen=True)
class Sent:
    """A collective of a layer. beside: ids of GEMMs and attention that the plan overlaps with it; spanned:
    the ids that the schedule overlaps.
    """

    nano_op: str
    layer: int
    beside: tuple[str, ...]
    spanned: tuple[str, ...]


def spans(hlo: str, plan: Plan, graph: Graph, rows: int) -> list[Sent]:
    """Return every collective of every layer in the plan's order, with the ops that overlap it in the
    schedule.
    """
    runs = program(plan, graph)
    return _spans(_places(read(hlo, plan), runs, rows), runs, _behind(runs))


def _spans(
    place: Mapping[tuple[str, int], Window], runs: Sequence[LayerOp], behind: Sequence[int]
) -> list[Sent]:
    found = []
    for index, run in enumerate(runs):
        if run.op.kind == "network" and (window := place.get((run.nano.id, run.layer))):
            near = [
                runs[i] for i in _beside(runs, behind, index) if runs[i].op.kind in ("dense", "attention")
            ]
            near = [other for other in near if (other.nano.id, other.layer) in place]
            spanned = [other for other in near if place[other.nano.id, other.layer].meets(window)]
            found.append(
                Sent(
                    run.nano.id,
                    run.layer,
                    *(tuple(other.nano.id for other in each) for each in (near, spanned)),
                )
            )
    return found


def _places(windows: Sequence[Window], runs: Sequence[LayerOp], rows: int) -> dict[tuple[str, int], Window]:
    """Where each product, attention and collective is, by (nano-op, layer); asserts that each is there once,
    on its stream.
    """
    like = {
        run.nano.id: (run.nano.op, run.nano.stop - run.nano.start) for run in runs
    }  # XLA runs equal regions by one computation
    place: dict[tuple[str, int], Window] = {}
    for stream, op in dict.fromkeys(
        (run.nano.stream, run.nano.op) for run in runs if run.op.kind in ("dense", "attention", "network")
    ):
        wanted = [run for run in runs if (run.nano.stream, run.nano.op) == (stream, op)]
        wanted = [run for run in wanted if op != "decode_attention" or run.nano.start < rows]
        there = [
            (like[nano], window)
            for window in windows
            for nano in window.nano_ops
            if like[nano][0] == op and window.stream == stream
        ]
        kernels = (
            max(1, len(there) // max(1, len(wanted))) if op in ATTENTION and not stream else 1
        )  # each a window of its own
        assert [one for one, _ in there] == [like[run.nano.id] for run in wanted for _ in range(kernels)], (
            f"{op} on stream {stream}"
        )
        for at, run in enumerate(wanted):
            own = [window for _, window in there[at * kernels : (at + 1) * kernels]]
            place[run.nano.id, run.layer] = dataclasses.replace(own[0], last=own[-1].last)
    return place


def _beside(runs: Sequence[LayerOp], behind: Sequence[int], index: int) -> list[int]:
    """Return the runs without an order relative to a run."""
    return [
        i
        for i in range(len(runs))
        if i != index and not behind[i] >> index & 1 and not behind[index] >> i & 1
    ]


def _behind(runs: Sequence[LayerOp]) -> list[int]:
    """For each run all that it follows, a bit each: what made its inputs, its stream, its waits, its layer's
    cache.
    """
    found: list[int] = []
    for index, run in enumerate(runs):
        before = 0
        for i, other in enumerate(runs[:index]):
            data = any((other.layer, value) in run.reads for value in other.makes) and other.tokens.overlaps(
                run.tokens
            )
            cache = other.layer == run.layer and {
                other.nano.op == "rope_append",
                run.nano.op == "rope_append",
            } == {True, False}
            cache = cache and (other.nano.op in ATTENTION or run.nano.op in ATTENTION)
            lane = other.nano.stream == run.nano.stream and other.op.kind != "network"
            if data or cache or lane or other.nano.id in run.nano.waits:
                before |= found[i] | 1 << i
        found.append(before)
    return found

"""From a profiler's trace to what each resource did: which op every kernel is of, and the shares used over
one layer's time.

The profiler says when each kernel ran, on which stream, and of which instruction of the compiled program it
is; the program says in which op's scope that instruction was made (law 4 of the design: one name everywhere).
What an op must compute, move and send is the graph's count, spread evenly over its kernels' time: counted
work over measured time, not a hardware counter.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jaxflow.model.composition import Composition
from jaxflow.model.graph import Graph, Kind, Work
from jaxflow.pipeline.plan import NanoOp, Plan

RESOURCES = ("compute", "memory", "network")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One run of a kernel. `instruction`: its name in the compiled program; `scope`: the scopes it says of
    itself, mostly nothing.
    """

    name: str
    instruction: str
    program: tuple[str, str]  # module, and the profiler's number of it
    scope: str
    stream: str
    start_s: float
    seconds: float
    blocks: int | None = None  # of its grid, on a GPU

    @property
    def stop_s(self) -> float:
        return self.start_s + self.seconds


def read_kernels(path: str | Path) -> list[Kernel]:
    """The kernels of the first GPU in a profiler's `.xplane.pb`, in order of their start; without one, the
    ops of the first CPU device.
    """
    planes = list(ProfileData.from_file(str(path)).planes)
    gpus = sorted(
        (plane for plane in planes if plane.name.startswith("/device:GPU:")), key=lambda plane: plane.name
    )
    found = []
    for plane in gpus[:1] or [plane for plane in planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue  # what a viewer derives from the streams
            for event in line.events:
                if event.name.startswith("end: "):
                    continue
                stats = dict(event.stats)
                if gpus or ("hlo_op" in stats and not stats.get("device_ordinal")):
                    found.append(_kernel(event, line.name, stats))
    return sorted(found, key=lambda kernel: kernel.start_s)


def _kernel(event: Any, stream: str, stats: Mapping[str, Any]) -> Kernel:
    grid = re.search(r"grid:(\d+),(\d+),(\d+)", str(stats.get("kernel_details", "")))
    blocks = None if grid is None else int(grid[1]) * int(grid[2]) * int(grid[3])
    program = str(stats.get("hlo_module", "")), str(stats.get("program_id", ""))
    scope = str(stats.get("name") or stats.get("tf_op") or "")
    instruction = str(stats.get("hlo_op") or event.name)
    return Kernel(
        event.name,
        instruction,
        program,
        scope,
        stream,
        event.start_ns * 1e-9,
        event.duration_ns * 1e-9,
        blocks,
    )


def scopes(compiled_text: str) -> dict[str, str]:
    """The scopes of each instruction of a compiled program's text, by its name."""
    found = re.finditer(
        r"^\s*(?:ROOT )?%?([\w.\-]+) = [^\n]*?metadata=\{[^}\n]*?op_name=\"([^\"]*)\"", compiled_text, re.M
    )
    return {one[1]: one[2] for one in found}


def nano_op_of(scope: str, nano_ops: Mapping[tuple[str, str], NanoOp]) -> NanoOp | None:
    """The nano-op in whose scopes, its op's and then its own, something was made. nano_ops: by (op, id)."""
    return next((nano_ops[pair] for pair in itertools.pairwise(scope.split("/")) if pair in nano_ops), None)


@dataclasses.dataclass(frozen=True)
class Used:
    """A kernel within one layer's time, with what its nano-op asks of the device in its share of the
    nano-op's time.
    """

    kernel: Kernel
    nano: NanoOp | None  # None: of no op of the layers
    kind: Kind | None  # the op's
    start_s: float  # from the beginning of the time
    seconds: float
    work: Work


@dataclasses.dataclass(frozen=True)
class LayerTrace:
    """One layer's time of a step in the steady state: as long as a layer takes, whichever layers' ops run in
    it.

    `idle_s`: of the step's time, in which no kernel ran; `pause_s`: the longest of it in one piece, which is
    the host's, before a step's first kernel, where steps are not ready before the one ahead is done.
    """

    seconds: float
    step_s: float
    idle_s: float
    pause_s: float
    used: tuple[Used, ...]


def one_layer(
    kernels: Sequence[Kernel], names: Mapping[str, str], plan: Plan, graph: Graph, step: Composition
) -> LayerTrace:
    """Of the last step but one, from the middle layer's first product to the next layer's.

    kernels: of several steps, and of whatever ran between them. names: `scopes` of the step's program. step:
    what it is made of.

    Raises: ValueError for a trace in which the plan's ops are not, or too few times.
    """
    by_program: dict[tuple[str, str], float] = collections.defaultdict(float)
    for kernel in kernels:
        by_program[kernel.program] += kernel.seconds
    if not by_program:
        raise ValueError("the trace has no kernels")
    program = max(by_program, key=by_program.__getitem__)
    known = {(nano.op, nano.id): nano for nano in plan.nano_ops}
    own = [(kernel, _assigned(kernel, program, names, known)) for kernel in kernels]
    layers = len(graph.layers)
    anchors = _anchors(own, plan, layers)
    steps = len(anchors) // layers
    if steps < 3:
        raise ValueError(f"the trace has {steps} whole steps: 3 are needed")
    first = (steps - 2) * layers + (layers - 1) // 2
    begin, end = anchors[first], anchors[first + 1]
    step_s = anchors[first] - anchors[first - layers]
    inside = [(kernel, nano) for kernel, nano in own if kernel.start_s < end and kernel.stop_s > begin]
    busy: dict[str, float] = collections.defaultdict(float)
    for kernel, nano in inside:
        if nano is not None:
            busy[nano.id] += _within(kernel, begin, end)
    ops = {op.name: op for op in graph.layers[(layers - 1) // 2]}
    used = []
    for kernel, nano in inside:
        seconds = _within(kernel, begin, end)
        op = None if nano is None else ops.get(nano.op)
        work = (
            Work()
            if nano is None or op is None
            else op.work(part(step, nano.start, nano.stop)) * (seconds / busy[nano.id])
        )
        used.append(
            Used(kernel, nano, op.kind if op else None, max(0.0, kernel.start_s - begin), seconds, work)
        )
    gaps = _gaps(kernels, anchors[first - layers], anchors[first])
    return LayerTrace(end - begin, step_s, sum(gaps), max(gaps, default=0.0), tuple(used))


def _gaps(kernels: Iterable[Kernel], begin: float, end: float) -> list[float]:
    """Seconds of each time between two moments in which no kernel runs. kernels: in order of their start."""
    found, at = [], begin
    for kernel in kernels:
        if kernel.stop_s > begin and kernel.start_s < end:
            if kernel.start_s > at:
                found.append(kernel.start_s - at)
            at = max(at, kernel.stop_s)
    return found


def _assigned(
    kernel: Kernel,
    program: tuple[str, str],
    names: Mapping[str, str],
    known: Mapping[tuple[str, str], NanoOp],
) -> NanoOp | None:
    if kernel.program != program:
        return None
    return nano_op_of(names.get(kernel.instruction, ""), known) or nano_op_of(kernel.scope, known)


def _anchors(own: Iterable[tuple[Kernel, NanoOp | None]], plan: Plan, layers: int) -> list[float]:
    """When each layer's run of one nano-op began: the plan's first product's longest kernels, one a layer and
    step.
    """
    products = [nano.id for nano in plan.nano_ops if nano.op in ("qkv", "up_gate", "router")]
    starts = {name: [] for name in products}
    for kernel, nano in own:
        if nano is not None and nano.id in starts:
            starts[nano.id].append(kernel)
    found = next((kernels for kernels in starts.values() if kernels), [])
    by_instruction: dict[str, list[Kernel]] = collections.defaultdict(list)
    for kernel in found:
        by_instruction[kernel.instruction].append(kernel)
    # Each layer has instructions of its own, each of which runs once a step.
    steps = max((len(kernels) for kernels in by_instruction.values()), default=0)
    longest = sorted(by_instruction.values(), key=lambda kernels: -sum(kernel.seconds for kernel in kernels))[
        :layers
    ]
    if len(longest) < layers:
        raise ValueError(f"the trace has {len(longest)} layers of {products}: the model has {layers}")
    return sorted(kernel.start_s for kernels in longest for kernel in kernels[-steps:])


def _within(kernel: Kernel, begin: float, end: float) -> float:
    return min(kernel.stop_s, end) - max(kernel.start_s, begin)


def part(step: Composition, start: int, stop: int) -> Composition:
    """Tokens [start, stop) of a step, whose decodes come first, as a step of their own."""
    decodes = max(0.0, min(stop, step.decode_tokens) - start)
    chunks, at = [], step.decode_tokens
    for tokens, position in step.chunks:
        low, high = max(start, at), min(stop, at + tokens)
        if high > low:
            chunks.append((high - low, position + low - at))
        at += tokens
    return Composition(decodes, step.decode_keys if decodes else 0.0, tuple(chunks))


def shares(trace: LayerTrace, peaks: Mapping[str, Mapping[str, float]]) -> list[dict[str, float]]:
    """The share of each resource's peak that is used, from each moment on at which that changes, in order of
    `start_us`.

    peaks: FLOP/s by op ("" for all that are not named), and under "memory" and "network" bytes/s under "".
    """
    moments = sorted(
        {
            0.0,
            trace.seconds,
            *(one.start_s for one in trace.used),
            *(one.start_s + one.seconds for one in trace.used),
        }
    )
    found = []
    for low, high in itertools.pairwise(moments):
        row = {"start_us": 1e6 * low, "stop_us": 1e6 * high, **dict.fromkeys(RESOURCES, 0.0)}
        for one in trace.used:
            if one.seconds and one.start_s < high and one.start_s + one.seconds > low:
                for resource, share in _shares(one, peaks).items():
                    row[resource] += share
        found.append(row)
    return found


def _shares(one: Used, peaks: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    compute = peaks["compute"]
    flops = compute.get(one.nano.op if one.nano else "", compute[""])
    amounts = {"compute": one.work.flops / flops, "memory": one.work.memory_bytes / peaks["memory"][""]}
    amounts["network"] = one.work.network_bytes / peaks["network"][""]
    return {resource: amount / one.seconds for resource, amount in amounts.items()}


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean share of each resource over the layer's time."""
    whole = rows[-1]["stop_us"] - rows[0]["start_us"]
    return {
        name: sum(row[name] * (row["stop_us"] - row["start_us"]) for row in rows) / whole
        for name in RESOURCES
    }

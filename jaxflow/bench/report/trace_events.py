"""Resource use from a profiler trace: the op of every kernel, and the utilization over one layer's time.

The profiler gives each kernel's time, stream, and instruction of the compiled program. The program gives the
op scope of each instruction (law 4 of the design: one name everywhere). The graph counts an op's FLOPs and
its bytes of memory and network traffic. These counts are spread evenly over the time of the op's kernels. The
result is counted work over measured time, not a hardware counter.
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


class TraceError(ValueError):
    """A profiler trace does not show what its reader needs."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One run of a kernel.

    `instruction` is its name in the compiled program. `scope` holds the scopes in the kernel's own metadata,
    usually empty.
    """

    name: str
    instruction: str
    program: tuple[str, str]  # module, and the profiler's program number
    scope: str
    stream: str
    start_s: float
    seconds: float
    blocks: int | None = None  # blocks in its grid, on a GPU

    @property
    def stop_s(self) -> float:
        return self.start_s + self.seconds


def read_kernels(path: str | Path) -> list[Kernel]:
    """Return the kernels of the first GPU in a profiler's `.xplane.pb`, ordered by start.

    Without a GPU, return the ops of the first CPU device.
    """
    return read_devices(path)[0]


def read_devices(path: str | Path) -> list[list[Kernel]]:
    """Return the kernels of each GPU in a profiler's `.xplane.pb`, ordered by start.

    Without a GPU, return the ops of the first CPU device.
    """
    planes = list(ProfileData.from_file(str(path)).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU:")]
    if gpus:
        return [_kernels(plane) for plane in sorted(gpus, key=lambda plane: int(plane.name.split(":")[-1]))]
    host = [plane for plane in planes if plane.name == "/host:CPU"]
    return [[kernel for plane in host for kernel in _kernels(plane, is_gpu=False)]]


def _kernels(plane: Any, is_gpu: bool = True) -> list[Kernel]:
    """Return the kernels of a device, ordered by start."""
    found = []
    for line in plane.lines:
        if is_gpu and not line.name.startswith("Stream"):
            continue  # lines that a viewer derives from the streams
        for event in line.events:
            if event.name.startswith("end: "):
                continue
            stats = dict(event.stats)
            if is_gpu or ("hlo_op" in stats and not stats.get("device_ordinal")):
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
    """Return the scopes of each instruction of a compiled program's text, by instruction name."""
    found = re.finditer(
        r"^\s*(?:ROOT )?%?([\w.\-]+) = [^\n]*?metadata=\{[^}\n]*?op_name=\"([^\"]*)\"", compiled_text, re.M
    )
    return {one[1]: one[2] for one in found}


def nano_op_of(scope: str, nano_ops: Mapping[tuple[str, str], NanoOp]) -> NanoOp | None:
    """Return the nano-op of a scope, which contains the op's scope followed by the nano-op's. nano_ops: by
    (op, id)."""
    return next((nano_ops[pair] for pair in itertools.pairwise(scope.split("/")) if pair in nano_ops), None)


@dataclasses.dataclass(frozen=True)
class Used:
    """A kernel within one layer's time, with its share of its nano-op's resource demand."""

    kernel: Kernel
    nano: NanoOp | None  # None: the kernel belongs to no layer op
    kind: Kind | None  # the kind of its op
    start_s: float  # seconds from the start of the layer's time
    seconds: float
    work: Work


@dataclasses.dataclass(frozen=True)
class LayerTrace:
    """The time of one layer in a steady-state step, with kernels of any layer that run in this time.

    `idle_s`: time of the step without a running kernel. `pause_s`: the longest single gap. The host causes
    this gap before a step's first kernel if steps are not enqueued early enough.
    """

    seconds: float
    step_s: float
    idle_s: float
    pause_s: float
    used: tuple[Used, ...]


def one_layer(
    kernels: Sequence[Kernel], names: Mapping[str, str], plan: Plan, graph: Graph, step: Composition
) -> LayerTrace:
    """Return the kernels and the time of one layer of the second-to-last step.

    The layer begins at the first product of the middle layer, and ends at the
    first product of the next layer.

    kernels: the kernels of several steps, and any other kernels between these steps. names: `scopes` of the
    step's program. step: the composition of a step.

    Raises: TraceError for a trace without the plan's ops, or with too few runs of them.
    """
    by_program: dict[tuple[str, str], float] = collections.defaultdict(float)
    for kernel in kernels:
        by_program[kernel.program] += kernel.seconds
    if not by_program:
        raise TraceError("the trace has no kernels; accepted is a trace of at least 3 full steps")
    program = max(by_program, key=by_program.__getitem__)
    known = {(nano.op, nano.id): nano for nano in plan.nano_ops}
    own = [(kernel, _assigned(kernel, program, names, known)) for kernel in kernels]
    layers = len(graph.layers)
    anchors = _anchors(own, plan, layers)
    steps = len(anchors) // layers
    if steps < 3:
        raise TraceError(f"the trace has {steps} full steps; at least 3 are needed")
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
    """Return the seconds of each gap between `begin` and `end` without a running kernel. kernels: ordered by
    start."""
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
    """Return the start times of one nano-op's runs, one per layer and step.

    The nano-op is the plan's first product, and its longest kernel marks each run.
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
    # Each layer has separate instructions, and each instruction runs once per step.
    steps = max((len(kernels) for kernels in by_instruction.values()), default=0)
    longest = sorted(by_instruction.values(), key=lambda kernels: -sum(kernel.seconds for kernel in kernels))[
        :layers
    ]
    if len(longest) < layers:
        raise TraceError(f"the trace has {len(longest)} layers of {products}; the model has {layers} layers")
    return sorted(kernel.start_s for kernels in longest for kernel in kernels[-steps:])


def _within(kernel: Kernel, begin: float, end: float) -> float:
    return min(kernel.stop_s, end) - max(kernel.start_s, begin)


def part(step: Composition, start: int, stop: int) -> Composition:
    """Return tokens [start, stop) of a step as a separate step. Decodes come first."""
    decodes = max(0.0, min(stop, step.decode_tokens) - start)
    chunks, at = [], step.decode_tokens
    for tokens, position in step.chunks:
        low, high = max(start, at), min(stop, at + tokens)
        if high > low:
            chunks.append((high - low, position + low - at))
        at += tokens
    return Composition(decodes, step.decode_keys if decodes else 0.0, tuple(chunks))


def shares(trace: LayerTrace, peaks: Mapping[str, Mapping[str, float]]) -> list[dict[str, float]]:
    """Return each resource's utilization at every time where a utilization changes, ordered by `start_us`.

    peaks: FLOP/s by op ("" for all other ops); bytes/s under "memory" and "network", with the key "".
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
    """Return the mean utilization of each resource over the layer's time."""
    whole = rows[-1]["stop_us"] - rows[0]["start_us"]
    return {
        name: sum(row[name] * (row["stop_us"] - row["start_us"]) for row in rows) / whole
        for name in RESOURCES
    }

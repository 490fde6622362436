"""An event simulation of a plan on a device: every nano-op of every layer, in the executor's order.

A nano-op starts once its inputs exist, the earlier nano-ops of its stream and its waits have ended, and an SM
is free. Waiting nano-ops start first come, first served. A nano-op takes the profile's time for its tokens
and SMs, at the clock that the card settles at under this plan: the step's joules are then at the power cap.
Additions of received parts and copies of rows take time beside the nano-ops (`side_kernels`).
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable

from jaxflow.model.cost import Device
from jaxflow.model.energy import Power, bound
from jaxflow.model.graph import Graph, Op, Work
from jaxflow.pipeline.plan import Plan
from jaxflow.pipeline.program import ATTENTION, LayerOp, TokenRange, program
from search.nanobatch.layer_tasks import APPEND, StepShape
from search.nanobatch.side_kernels import ADDITION, exchange_work, side_kernels, with_additions
from search.profile.clock import Governor, governor_of
from search.profile.op_times import NETWORK_SMS
from search.profile.share_times import ShareTimes

_GUESSES = 3  # iterations of the clock; the error after three is below 0.5 %


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
    """One run of a nano-op, or of an addition before it; seconds from the step's start."""

    run: LayerOp
    start_s: float
    stop_s: float
    sms: int


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated pass over the layers.

    energy_s: the least time for its joules at any clock, 0 where they are not known. clock_hz: the clock
    that the card settles at, where profile and card tell. work: of all layers, as the plan splits them.
    """

    entries: tuple[SimulatedRun, ...]
    layers: int
    energy_s: float
    clock_hz: float | None = None
    work: Work = dataclasses.field(default_factory=Work)

    @property
    def busy_s(self) -> float:
        """Return the end of the last nano-op."""
        return max((entry.stop_s for entry in self.entries), default=0.0)

    @property
    def step_s(self) -> float:
        return max(self.busy_s, self.energy_s)

    @property
    def period_s(self) -> float:
        """Return a layer's time with a full pipeline: the mean over the second half without the last two
        layers.
        """
        ends = [
            0.0,
            *(
                max(entry.stop_s for entry in self.entries if entry.run.layer == layer)
                for layer in range(self.layers)
            ),
        ]
        first = (self.layers + 1) // 2
        last = max(self.layers - 2, first + 1) if self.layers > 1 else 1
        first = min(first, last - 1)
        return max((ends[last] - ends[first]) / (last - first), self.energy_s / self.layers)


def simulate(
    plan: Plan, graph: Graph, shares: ShareTimes, load: StepShape, *, device: Device | None = None,
    power: Power | None = None, governor: Governor | None = None, clock_hz: float | None = None,
) -> Timeline:  # fmt: skip
    """Simulate the plan on a step of this shape, through all layers of the graph.

    The shape may differ from the plan's target. governor: the model of the power governor; None:
    `governor_of` the device. clock_hz: the clock of the step; None: the one that the governor settles at.

    Raises: ProfileError for an op or an SM count without a measured time.
    """
    runs = with_additions(program(plan, graph), plan)
    total = shares.profile.total_sms
    network = 0 if plan.sums == "copies" else min(NETWORK_SMS, total)
    sms = [run.nano.sms or (network if run.op.kind == "network" else total) for run in runs]
    steps = {(run.nano.start, run.nano.stop): load.part(run.nano.start, run.nano.stop) for run in runs}
    before, side_streams = _before(runs), any(nano.stream for nano in plan.nano_ops)
    whole = [run.op.kind == "network" for run in runs]
    disturbing = [run.op.kind != "other" and count > 0 for run, count in zip(runs, sms, strict=True)]
    slowed = [side_streams and run.op.kind in ("dense", "attention") for run in runs]

    def slowdown(run: int, other: int) -> float:
        return shares.slowdown_beside((runs[run].op.name, sms[run]), (runs[other].op.name, sms[other]))

    sides = side_kernels(runs, plan, load)
    bytes_per_s = math.inf if device is None else device.rates.memory_bytes_per_s
    kernel_s = shares.card.kernel_s if shares.card and device is not None else 0.0
    kinds = [
        (run.nano.id, run.op.name, run.op.window, side.seconds(bytes_per_s, kernel_s))
        for run, side in zip(runs, sides, strict=True)
    ]

    def entries(shares: ShareTimes) -> tuple[SimulatedRun, ...]:
        times: dict[tuple, float] = {}
        for run, count, key in zip(runs, sms, kinds, strict=True):
            if key not in times:
                took = key[-1]
                if run.op.name != ADDITION:
                    took += shares.seconds(run.op, steps[run.nano.start, run.nano.stop], count)
                costs = (
                    side_streams and took and (run.op.kind in ("dense", "attention") or run.nano.op == APPEND)
                )
                times[key] = took + shares.nano_s if costs else took
        lasts = [times[key] for key in kinds]
        spans = _spans(before, lasts, sms, total, whole, slowed, disturbing, slowdown)
        return tuple(
            SimulatedRun(run, *span, count) for run, span, count in zip(runs, spans, sms, strict=True)
        )

    amounts = collections.Counter((run.op, (run.nano.start, run.nano.stop)) for run in runs)
    work_of = exchange_work if plan.sums == "copies" else Op.work
    work = sum((work_of(op, steps[part]) * number for (op, part), number in amounts.items()), Work())
    work += Work(activation_bytes=sum(side.moved for side in sides))
    dtype = shares.profile.dtype
    if governor is None and device is not None and shares.clocked:
        governor = governor_of(device.name, dtype)
    if governor is not None and clock_hz is None:
        clock_hz = 0.75 * governor.highest_hz
        for _ in range(_GUESSES):
            took = max(entry.stop_s for entry in entries(shares.at(clock_hz)))
            clock_hz = governor.settle(lambda hz, took=took, now=clock_hz: took * now / hz, work)
    found = entries(shares if clock_hz is None else shares.at(clock_hz))
    energy_s = 0.0
    if device is not None and power is not None and dtype in power.flop:
        energy_s = bound(work, device, power, dtype).energy_s
    return Timeline(found, len(graph.layers), energy_s, clock_hz, work)


@dataclasses.dataclass
class _Blocks:
    """Blocks of a run that began together. left_s: their time at full speed that is left."""

    run: int
    number: int
    left_s: float


def _spans(
    before: list[set[int]],
    lasts: list[float],
    sms: list[int],
    total: int,
    whole: list[bool],
    slowed: list[bool],
    disturbing: list[bool],
    slowdown: Callable[[int, int], float],
) -> list[tuple[float, float]]:
    """Return the start and the end of each run. Runs that are ready start in the order of issue.

    A run has a block for each of its SMs. Its blocks start on the SMs that are free, and the others follow as
    SMs become free, as a GPU places the blocks of a kernel. Each block takes the time of the run, since the
    kernels are persistent: a block has its own part of the work.

    whole: the runs whose blocks wait for each other, so that they begin together. No other run begins with a
      part of its blocks beside such a run: a sum by NCCL and a product together take as long as in sequence.
    slowed: the runs that take `slowdown(run, other)` times as long while another disturbing run is under way.
    """
    after: list[list[int]] = [[] for _ in before]
    for index, others in enumerate(before):
        for other in others:
            after[other].append(index)
    open_, left, pieces = [len(others) for others in before], list(sms), [0] * len(before)
    starts, stops = [-1.0] * len(before), [0.0] * len(before)
    ready = [index for index, count in enumerate(open_) if not count]
    heapq.heapify(ready)
    running: list[_Blocks] = []
    now, free, done = 0.0, total, 0
    while done < len(before):
        waiting = []
        while ready:
            index = heapq.heappop(ready)
            blocks = min(left[index], free) if lasts[index] else 0  # without work it takes no SM
            if blocks < left[index] and (whole[index] or any(whole[piece.run] for piece in running)):
                blocks = 0
            if blocks or not left[index] or not lasts[index]:
                starts[index] = now if starts[index] < 0 else starts[index]
                running.append(_Blocks(index, blocks, lasts[index]))
                left[index], free, pieces[index] = left[index] - blocks, free - blocks, pieces[index] + 1
            if lasts[index] and left[index]:
                waiting.append(index)
        for index in waiting:
            heapq.heappush(ready, index)
        present = {piece.run for piece in running if disturbing[piece.run] and piece.left_s}
        slow = [
            max((slowdown(piece.run, other) for other in present - {piece.run}), default=1.0)
            if slowed[piece.run]
            else 1.0
            for piece in running
        ]
        took = min(piece.left_s * each for piece, each in zip(running, slow, strict=True))
        now += took
        for piece, each in zip(running, slow, strict=True):
            piece.left_s -= took / each
        ended = [piece for piece in running if piece.left_s <= 1e-12 * now]
        running = [piece for piece in running if piece.left_s > 1e-12 * now]
        for piece in ended:
            index, free = piece.run, free + piece.number
            pieces[index] -= 1
            if pieces[index] or (lasts[index] and left[index]):
                continue
            done += 1
            stops[index] = now
            for follower in after[index]:
                open_[follower] -= 1
                if not open_[follower]:
                    heapq.heappush(ready, follower)
    return list(zip(starts, stops, strict=True))


def _before(runs: tuple[LayerOp, ...]) -> list[set[int]]:
    """Return the direct predecessors of each run: the orders of `jaxflow.pipeline.compiler`."""
    found: list[set[int]] = []
    made: dict[tuple[int, str], list[tuple[TokenRange, int]]] = {}
    ids: dict[str, int] = {}
    lanes: dict[object, int] = {}
    appends: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for index, run in enumerate(runs):
        nano, network = run.nano, run.op.kind == "network"
        needs = {
            other for source in run.reads for span, other in made.get(source, []) if span.overlaps(run.tokens)
        }
        needs |= {ids[wait] for wait in nano.waits if wait in ids}
        if nano.op in ATTENTION:
            needs |= set(appends.get(run.layer, []))
            readers.setdefault(run.layer, []).append(index)
        if nano.op == APPEND:
            needs |= set(readers.get(run.layer, []))
            appends.setdefault(run.layer, []).append(index)
        needs |= {
            lanes[lane] for lane in ([nano.stream, "network"] if network else [nano.stream]) if lane in lanes
        }
        found.append(needs)
        for value in run.makes:
            made.setdefault((run.layer, value), []).append((run.tokens, index))
        ids[nano.id] = lanes["network" if network else nano.stream] = index
    return found

"""An event simulation of a plan on a device: every nano-op of every layer, in the executor's order.

A nano-op starts once its inputs exist, the earlier nano-ops of its stream and its waits have ended, and its
SMs are free. Waiting nano-ops start first come, first served. A nano-op takes the profile's time for its
tokens and SMs, at the clock that the card settles at under this plan: the step's joules are then at the
power cap.
"""

import collections
import dataclasses
import heapq

from jaxflow.model.cost import Device
from jaxflow.model.energy import Power, bound
from jaxflow.model.graph import Graph, Work
from jaxflow.pipeline.plan import Plan
from jaxflow.pipeline.program import ATTENTION, LayerOp, TokenRange, program
from search.nanobatch.layer_tasks import APPEND, StepShape
from search.profile.clock import Governor, governor_of
from search.profile.op_times import NETWORK_SMS
from search.profile.share_times import ShareTimes

_GUESSES = 3  # iterations of the clock; the error after three is below 0.5 %


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
    """One run of a nano-op; seconds from the step's start."""

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
    power: Power | None = None, governor: Governor | None = None,
) -> Timeline:  # fmt: skip
    """Simulate the plan on a step of this shape, through all layers of the graph.

    The shape may differ from the plan's target. governor: the model of the power governor; None:
    `governor_of` the device.

    Raises: ProfileError for an op or an SM count without a measured time.
    """
    runs = program(plan, graph)
    total = shares.profile.total_sms
    network = 0 if plan.sums == "copies" else min(NETWORK_SMS, total)
    sms = [run.nano.sms or (network if run.op.kind == "network" else total) for run in runs]
    steps = {(run.nano.start, run.nano.stop): load.part(run.nano.start, run.nano.stop) for run in runs}
    before, side_streams = _before(runs), any(nano.stream for nano in plan.nano_ops)

    def entries(shares: ShareTimes) -> tuple[SimulatedRun, ...]:
        times: dict[tuple, float] = {}
        for run, count in zip(runs, sms, strict=True):
            key = run.nano.id, run.op.window
            if key not in times:
                took = shares.seconds(run.op, steps[run.nano.start, run.nano.stop], count, side_streams)
                costs = (
                    side_streams and took and (run.op.kind in ("dense", "attention") or run.nano.op == APPEND)
                )
                times[key] = took + shares.nano_s if costs else took
        lasts = [times[run.nano.id, run.op.window] for run in runs]
        starts = _starts(before, lasts, sms, total)
        return tuple(
            SimulatedRun(run, at, at + last, count)
            for run, at, last, count in zip(runs, starts, lasts, sms, strict=True)
        )

    amounts = collections.Counter((run.op, (run.nano.start, run.nano.stop)) for run in runs)
    work = sum((op.work(steps[part]) * number for (op, part), number in amounts.items()), Work())
    dtype, clock_hz = shares.profile.dtype, None
    if governor is None and device is not None and shares.clocked:
        governor = governor_of(device.name, dtype)
    if governor is not None:
        clock_hz = 0.75 * governor.highest_hz
        for _ in range(_GUESSES):
            took = max(entry.stop_s for entry in entries(shares.at(clock_hz)))
            clock_hz = governor.settle(lambda hz, took=took, now=clock_hz: took * now / hz, work)
    found = entries(shares if clock_hz is None else shares.at(clock_hz))
    energy_s = 0.0
    if device is not None and power is not None and dtype in power.flop:
        energy_s = bound(work, device, power, dtype).energy_s
    return Timeline(found, len(graph.layers), energy_s, clock_hz, work)


def _starts(before: list[set[int]], lasts: list[float], sms: list[int], total: int) -> list[float]:
    """When each run starts; those that are ready and fit start in order of issue."""
    after: list[list[int]] = [[] for _ in before]
    for index, others in enumerate(before):
        for other in others:
            after[other].append(index)
    open_, starts = [len(others) for others in before], [0.0] * len(before)
    ready = [index for index, count in enumerate(open_) if not count]
    heapq.heapify(ready)
    ending: list[tuple[float, int]] = []
    now, free, done = 0.0, total, 0
    while done < len(before):
        too_large = []
        while ready:
            index = heapq.heappop(ready)
            if not lasts[index]:  # nothing to do: it takes no SM
                starts[index] = now
                heapq.heappush(ending, (now, index))
            elif sms[index] <= free:
                starts[index], free = now, free - sms[index]
                heapq.heappush(ending, (now + lasts[index], index))
            else:
                too_large.append(index)
        for index in too_large:
            heapq.heappush(ready, index)
        now, index = heapq.heappop(ending)
        ended = [index]
        while ending and ending[0][0] <= now * (1 + 1e-12):
            ended.append(heapq.heappop(ending)[1])
        for index in ended:
            done += 1
            free += sms[index] if lasts[index] else 0
            for follower in after[index]:
                open_[follower] -= 1
                if not open_[follower]:
                    heapq.heappush(ready, follower)
    return starts


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

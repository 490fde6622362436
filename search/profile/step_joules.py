"""The joules of a step by op, and the accounts of what a step needs.

An op that runs alone settles at a clock of its own. In a step all ops run at the step's clock. So an op's
joules above idle are scaled from its own clock to that of the step, and its idle joules with its time at that
clock. FLOPs scale with their curve of the energy bound. Bytes scale as in measured sequential steps, where
their joules fall less with the clock than the bound's do (`ClockCard.sequential_byte_fixed`).

Two accounts predict the joules above idle. The fixed one has one constant for a FLOP of each dtype and one
for a byte, both as sustained runs at the power cap needed them. The curves are those of the energy bound
(`jaxflow.model.energy`): they fall with the clock and lie below every sustained run.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from jaxflow.model.composition import Composition
from jaxflow.model.cost import Device
from jaxflow.model.energy import Power, bound
from jaxflow.model.graph import Graph, Op, Work
from search.profile.clock import ClockCard, ClockScaling
from search.profile.energy import flops_dtype
from search.profile.op_bench import OpCase
from search.profile.op_times import OpTime, Profile, ProfileError, seconds
from search.profile.op_watts import joules_of


@dataclasses.dataclass(frozen=True)
class StepOp:
    """An op of a step: its case in isolation, and how many layers have the op.

    work: of all its layers in the step.
    """

    op: Op
    case: OpCase
    layers: int
    work: Work


@dataclasses.dataclass(frozen=True)
class OpJoules:
    """Joules of an op in all layers of a step. clock_mhz, watts: of the op alone.

    alone: at its own clock. The others are at the step's clock, or at the op's own if that is unknown. now:
    of this measurement. least: the least of all measurements of this op at this size. source: the measurement
    of the least. bound: by the curves of the energy bound, or None if they are unknown.
    """

    op: str
    clock_mhz: float
    watts: float
    alone: float
    now: float
    least: float
    source: str
    bound: float | None

    @property
    def difference(self) -> float:
        """Return now minus the lesser of `least` and `bound`."""
        return self.now - (self.least if self.bound is None else min(self.least, self.bound))


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """A step that ran back to back. seconds, joules: of one step, with idle power."""

    tokens: float
    seconds: float
    joules: float
    watts: float | None
    clock_mhz: float | None


@dataclasses.dataclass(frozen=True)
class Account:
    """Joules above idle of one step's work, by one account. clock_mhz: None for joules without a clock."""

    name: str
    dynamic_j: float
    clock_mhz: float | None
    tokens_per_s: float


def step_ops(graph: Graph, step: Composition, names: Sequence[str]) -> list[StepOp]:
    """Return the ops of these names that a step runs, in the order of the step."""
    found: dict[str, StepOp] = {}
    for op in graph.ops():
        case = _case(op, step)
        if op.name not in names or not case.tokens:
            continue
        before = found.get(op.name)
        work = op.work(step) + (before.work if before else Work())
        found[op.name] = StepOp(op, case, 1 + (before.layers if before else 0), work)
    return list(found.values())


def _case(op: Op, step: Composition) -> OpCase:
    if op.name == "decode_attention":
        return OpCase(op.name, round(step.decode_tokens), round(step.decode_keys))
    if op.name == "chunk_attention":
        tokens = round(step.chunk_tokens)
        return OpCase(op.name, tokens, round(step.count("chunk_pairs") / tokens) if tokens else 0)
    return OpCase(op.name, round(step.count("samples") if op.name == "logits" else step.tokens))


def at_case(profile: Profile, case: OpCase, sms: int | None = None) -> OpTime | None:
    """Return an op's time, joules and clock at a case, between the measured points of a profile.

    Joules are those of the energy counter, or else the sensor's watts times the seconds. None for an op
    without joules on this number of SMs.
    """
    sms = profile.total_sms if sms is None else sms
    known = [
        one
        for one in profile.op_times
        if (one.op, one.sms) == (case.op, sms) and one.clock_mhz is not None and joules_of(one) is not None
    ]
    if not known:
        return None

    def between(values: Mapping[OpTime, float], tokens: float, keys: float) -> float:
        points = tuple(msgspec.structs.replace(one, seconds=value) for one, value in values.items())
        return seconds(msgspec.structs.replace(profile, op_times=points), case.op, tokens, keys, sms)

    def inside(values: Sequence[int], value: int) -> int:
        return min(max(value, min(values)), max(values))

    joules = {one: joules_of(one) or 0.0 for one in known}
    took = between({one: one.seconds for one in known}, case.tokens, case.keys)
    spent = between(joules, case.tokens, case.keys)
    # Beyond the last point time and joules grow, and the clock does not.
    tokens, keys = (
        inside([one.tokens for one in known], case.tokens),
        inside([o.keys for o in known], case.keys),
    )
    clock = between({one: one.clock_mhz or 0.0 for one in known}, tokens, keys)
    return OpTime(case.op, case.tokens, case.keys, sms, took, spent / took, clock, spent)


def measurements(profiles: Mapping[str, Profile], case: OpCase) -> list[tuple[OpTime, str]]:
    """Return the measurements of a case, on all SMs and on a part, each with the name of its source."""
    return [
        (one, name if sms == profile.total_sms else f"{name}, {sms} SMs")
        for name, profile in profiles.items()
        for sms in sorted({one.sms for one in profile.op_times if one.op == case.op}, reverse=True)
        if (one := at_case(profile, case, sms)) is not None
    ]


def sequential(power: Power, card: ClockCard | None) -> Power:
    """Return the curves by which joules of sequential steps change with the clock."""
    if card is None or card.sequential_byte_fixed is None:
        return power
    byte = msgspec.structs.replace(power.byte, fixed=card.sequential_byte_fixed)
    return msgspec.structs.replace(power, byte=byte)


class Accounting:
    """The joules of a step's ops, and the accounts of its work, on one device.

    profile: of the device, model and dtypes. power, card, fixed: the device's, or None if unknown.
    """

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        step: Composition,
        ops: Sequence[StepOp],
        device: Device | None,
        power: Power | None,
        card: ClockCard | None = None,
        fixed: Mapping[str, Any] | None = None,
    ):
        self.profile, self.step, self.ops, self.device, self.power = profile, step, ops, device, power
        self.fixed, self.graph, self.card = fixed, graph, card
        self.scale = power if power is None else sequential(power, card)
        self.alone = {one.op.name: found for one in ops if (found := at_case(profile, one.case)) is not None}
        if not self.alone:
            raise ProfileError(
                f"profile of {profile.model} on {profile.device}: entries with watts and clock are accepted, "
                f"and no op of the step has one"
            )

    def rows(self, seen: Mapping[str, Profile], clock_mhz: float | None) -> list[OpJoules]:
        """Return a row for each op, the largest difference first.

        seen: other profiles, by name. clock_mhz: of the step; None: each op's own.
        """
        profiles, found = {"this": self.profile, **seen}, []
        for one in self.ops:
            alone = self.alone.get(one.op.name)
            if alone is None:
                continue
            known = [
                (self._at_clock(one, each, clock_mhz)[1], source)
                for each, source in measurements(profiles, one.case)
            ]
            least, source = min(known, key=lambda each: each[0])
            found.append(
                OpJoules(
                    one.op.name,
                    alone.clock_mhz or 0.0,
                    alone.watts or 0.0,
                    one.layers * (alone.joules or 0.0),
                    one.layers * self._at_clock(one, alone, clock_mhz)[1],
                    one.layers * least,
                    source,
                    self.curves_j(one, clock_mhz or alone.clock_mhz),
                )
            )
        return sorted(found, key=lambda row: -row.difference)

    def of_ops(self, names: Collection[str], clock_mhz: float | None) -> tuple[float, float]:
        """Return the seconds and the joules of the ops with these names, in all layers, as measured alone.

        clock_mhz: of the sum; None: each op's own. An op without a measurement counts as 0.
        """
        found = [
            (one.layers, self._at_clock(one, alone, clock_mhz))
            for one in self.ops
            if one.op.name in names and (alone := self.alone.get(one.op.name)) is not None
        ]
        return sum(n * took for n, (took, _) in found), sum(n * joules for n, (_, joules) in found)

    def _at_clock(self, one: StepOp, alone: OpTime, clock_mhz: float | None) -> tuple[float, float]:
        """Return the seconds and joules of a measurement of an op, in one layer, at another clock."""
        joules = alone.joules or 0.0
        if clock_mhz is None or self.power is None or self.scale is None or alone.clock_mhz is None:
            return alone.seconds, joules
        layers = (*self.graph.layers, self.graph.after)  # the output head scales as the products of layers
        here = msgspec.structs.replace(self.profile, op_times=(alone,))
        scaling = ClockScaling(dataclasses.replace(self.graph, layers=layers), here, self.card)
        took = scaling.at(here, 1e6 * clock_mhz).op_times[0].seconds
        dtype = flops_dtype(one.op, self.profile)
        before, then = (
            float(self.scale.dynamic_j(one.work, dtype, 1e6 * mhz / self.power.highest_clock_hz))
            for mhz in (alone.clock_mhz, clock_mhz)
        )
        return took, self.power.idle_w * took + (joules - self.power.idle_w * alone.seconds) * then / before

    def curves_j(self, one: StepOp, clock_mhz: float | None) -> float | None:
        """Return the least joules of an op by the bound's curves at a clock, with idle power for the least
        time; None for a device with unknown joules.

        clock_mhz: None for the clock that is best for the op.
        """
        if self.power is None or self.device is None:
            return None
        power, dtype = self.power, flops_dtype(one.op, self.profile)
        least = bound(one.work, self.device, power, dtype)
        clock_hz = least.clock_hz if clock_mhz is None else 1e6 * clock_mhz
        cycles_s = one.work.flops / (power.flops_per_cycle[dtype] * clock_hz)
        dynamic_j = float(power.dynamic_j(one.work, dtype, clock_hz / power.highest_clock_hz))
        return power.idle_w * max(cycles_s, least.memory_s) + dynamic_j

    def accounts(self, clock_mhz: float | None) -> list[Account]:
        """Return the fixed account, the curves at the step's clock, and the curves at the bound's clock.

        Tokens/s are those at the power cap, except for the last account, which is the bound by four
        resources. Empty for a device with unknown joules.
        """
        if self.power is None or self.device is None:
            return []
        power, found = self.power, []
        work: dict[str, Work] = {}
        for op in self.graph.ops():
            dtype = flops_dtype(op, self.profile)
            work[dtype] = work.get(dtype, Work()) + op.work(self.step)

        def curves(share: float) -> float:
            return sum(float(power.dynamic_j(each, dtype, share)) for dtype, each in work.items())

        def at_cap(name: str, dynamic_j: float, mhz: float | None, idle_w: float) -> Account:
            return Account(name, dynamic_j, mhz, self.step.tokens * (power.cap_w - idle_w) / dynamic_j)

        if self.fixed is not None:
            flop, byte = self.fixed["flop"], self.fixed["byte"]
            dynamic_j = sum(
                each.flops * flop[dtype] + each.memory_bytes * byte for dtype, each in work.items()
            )
            found.append(at_cap("fixed constants", dynamic_j, None, self.fixed["idle_w"]))
        if clock_mhz is not None:
            share = 1e6 * clock_mhz / power.highest_clock_hz
            found.append(at_cap("the bound's curves, step's clock", curves(share), clock_mhz, power.idle_w))
        # As `search cost` has it: one dtype for all products.
        least = bound(sum(work.values(), Work()), self.device, power, self.profile.dtype)
        tokens_per_s = self.step.tokens / least.longest_s
        dynamic_j = curves(least.clock_hz / power.highest_clock_hz)
        return [*found, Account("the bound, best clock", dynamic_j, least.clock_hz / 1e6, tokens_per_s)]

    def dynamic_j(self, joules: float, took_s: float) -> float | None:
        """Return the joules above idle of measured joules; None for a device with unknown idle watts."""
        return None if self.power is None else joules - self.power.idle_w * took_s


def nearest(accounts: Sequence[Account], dynamic_j: float) -> Account:
    """Return the account whose joules above idle are nearest to the measured ones, by their ratio.

    dynamic_j: positive.
    """
    return min(accounts, key=lambda account: abs(math.log(dynamic_j / account.dynamic_j)))

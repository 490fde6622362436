"""The clock of a card at its power cap, the op times at that clock, and the slowdown of concurrent ops.

Under load the governor lowers the clock until the mean power is the cap. A step that keeps all resources
busy does its work in less time and therefore runs at a lower clock than the same ops in sequence. Work that
counts cycles takes longer there: products, and streams limited by the intake of the SMs. On an H200 this
effect and the split of the SMs explain all interference between products and attention.

A profile can be scaled to another clock (`ClockScaling`). What concurrent ops lose beyond SMs and clock is
the slowdown of their pair, or the median over the profile's pairs (NanoFlow §4.1.1). The slowdown of a pair
is its time until both ops have ended, over the time of the slower op in isolation on its SMs at the pair's
clock. In old profiles, whose pairs did not end together (`Pair.seconds`), this time follows from the
performances, and attention's context from its share.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping

import msgspec

from jaxflow.model.cost import find_device
from jaxflow.model.energy import Power, shipped_power
from jaxflow.model.graph import Graph, Work
from pallas_kernels.cards import card_of
from search.profile.op_times import (
    ATTENTION,
    PAIR_DECODES,
    PAIR_TOKENS,
    OpTime,
    Pair,
    Profile,
    ProfileError,
    alone,
    fastest,
    keys_lasting,
    seconds,
)

SCHEMA_VERSION = 3


class ClockCard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rates of a device's kernels, in cycles, and their joules. method: the source of the numbers."""

    schema_version: int
    device: str  # as in `jaxflow.model.cost.DEVICES`
    tensor_share: Mapping[
        str, float
    ]  # by the products' dtype: of the tensor cores' FLOP a cycle, in waves that are full
    attention_share: float  # share of the tensor cores' FLOP a cycle, for attention
    attention_bytes_per_s: Mapping[str, float]  # by the cache's dtype: decode attention on the full device
    sm_bytes_per_cycle: Mapping[str, float]  # by the cache's dtype: the intake of an SM
    kernel_s: float  # start and end of a kernel
    collective_s: float  # start and end of a collective
    joules_factor: Mapping[
        str, float
    ]  # by dtype of FLOPs, and "byte": joules of ordinary kernels over the least
    overlap_slowdown: float  # slowdown of concurrent ops on the same SMs at the same clock
    # joules of an engine's sustained steps over those of kernels in windows of half a second
    hot_factor: float
    nano_s: float  # seconds of a chain beyond its op times, in a layer with side streams
    step_s: float  # seconds of a step beyond its op times
    method: str
    exchange_s: float | None = None  # seconds of a peer copy between two devices, without its bytes
    exchange_bytes_per_s: float | None = None  # rate of each of the two devices
    memory_bytes: float | None = None  # bytes that the driver can allocate; datasheets round down
    # share of a byte's joules that does not fall with the clock, in sequential steps; None: the power's
    sequential_byte_fixed: float | None = None


@functools.cache
def shipped_card(device: str) -> ClockCard | None:
    """Return the constants shipped for a device of `jaxflow.model.cost.DEVICES`, or None.

    Raises: ProfileError for another schema.
    """
    found = card_of(device).clock
    if found is None:
        return None
    if found["schema_version"] != SCHEMA_VERSION:
        version = found["schema_version"]
        raise ProfileError(f"card of {device}: clock.schema_version={version}: accepted is {SCHEMA_VERSION}")
    return msgspec.convert(found, ClockCard)


def of_kernels(power: Power, card: ClockCard) -> Power:
    """Return the joules of ordinary kernels, where `power` has the least joules."""
    flop = {dtype: curve.times(card.joules_factor[dtype]) for dtype, curve in power.flop.items()}
    return msgspec.structs.replace(power, flop=flop, byte=power.byte.times(card.joules_factor["byte"]))


@dataclasses.dataclass(frozen=True)
class Governor:
    """The power governor: it keeps a card's mean power at the cap.

    power: the joules of the kernels (`of_kernels`). dtype: of the products.
    """

    power: Power
    dtype: str
    hot_factor: float = 1.0

    @property
    def lowest_hz(self) -> float:
        return self.power.lowest_clock_hz

    @property
    def highest_hz(self) -> float:
        return self.power.highest_clock_hz

    def joules(self, work: Work, clock_hz: float) -> float:
        """Return the joules above idle."""
        return self.hot_factor * float(self.power.dynamic_j(work, self.dtype, clock_hz / self.highest_hz))

    def watts(self, work: Work, clock_hz: float, seconds: float) -> float:
        return self.power.idle_w + self.joules(work, clock_hz) / seconds

    def least_s(self, work: Work, clock_hz: float) -> float:
        """Return the least seconds of the work at this clock: its joules at the cap."""
        return self.joules(work, clock_hz) / (self.power.cap_w - self.power.idle_w)

    def clock_for(self, work: Work, seconds: float) -> float:
        """Return the highest clock at which the work's joules fit in these seconds."""
        at_rest, rising = self.least_s(work, 0.0), self.least_s(work, self.highest_hz)
        if rising <= seconds:
            return self.highest_hz
        share = math.sqrt(max(0.0, (seconds - at_rest) / (rising - at_rest)))
        return max(self.lowest_hz, self.highest_hz * share)

    def settle(self, seconds_at: Callable[[float], float], work: Work) -> float:
        """Return the clock (Hz) of repeated work that takes `seconds_at(clock)`, which does not rise with
        the clock.
        """
        low, high = self.lowest_hz, self.highest_hz
        if self.least_s(work, high) <= seconds_at(high):
            return high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.least_s(work, middle) <= seconds_at(middle) else (low, middle)
        return low

    def settled_s(self, seconds: float, clock_hz: float, work: Work) -> float:
        """Return the time at the settled clock of work that takes `seconds` at `clock_hz`, if all of it
        counts cycles.
        """
        clock = self.settle(lambda hz: seconds * clock_hz / hz, work)
        return seconds * clock_hz / clock


@functools.cache
def governor_of(device: str, dtype: str) -> Governor | None:
    """Return the governor of a device with known joules and kernels, as hot as in an engine; or None."""
    power, card = shipped_power(device), shipped_card(device)
    if power is None or card is None or dtype not in power.flop:
        return None
    return Governor(of_kernels(power, card), dtype, card.hot_factor)


_BY_BYTES = 0.75  # if an op's bytes take this share of its time, the clock does not change it
_BY_INTAKE = 0.6  # if the SMs' intake takes this share of attention's time, the intake limits it


class ClockScaling:
    """Scales a profile's times to other clocks: products and attention count cycles, bytes do not.

    The intake of an SM per cycle is the largest that any entry of the profile shows on a part of the SMs, or
    the card's.
    """

    def __init__(self, graph: Graph, profile: Profile, card: ClockCard | None = None):
        self.ops = {
            op.name: op for layer in graph.layers for op in layer if op.kind in ("dense", "attention")
        }
        device = find_device(profile.device)
        self.bytes_per_s = device.rates.memory_bytes_per_s if device else None
        cases = {(one.op, one.tokens, one.keys) for one in profile.op_times if one.op in self.ops}
        self.moved = {
            case: self.ops[case[0]].work(alone(self.ops[case[0]], *case[1:])).memory_bytes for case in cases
        }
        seen = [
            self.moved[one.op, one.tokens, one.keys] / (one.sms * one.seconds * one.clock_mhz * 1e6)
            for one in profile.op_times
            if one.op in ATTENTION
            and one.op in self.ops
            and one.clock_mhz is not None
            and one.sms < profile.total_sms
        ]
        self.sm_bytes_per_cycle = max(
            seen, default=card.sm_bytes_per_cycle.get(profile.kv_cache_dtype) if card else None
        )

    def at(self, profile: Profile, clock_hz: float) -> Profile:
        """Return the profile at another clock. Entries without a clock and pairs stay as they are."""
        return msgspec.structs.replace(
            profile, op_times=tuple(self._time(one, clock_hz) for one in profile.op_times)
        )

    def _time(self, one: OpTime, clock_hz: float) -> OpTime:
        if one.op not in self.ops or one.clock_mhz is None:
            return one
        moved, own_hz = self.moved[one.op, one.tokens, one.keys], one.clock_mhz * 1e6
        bytes_s = moved / self.bytes_per_s if self.bytes_per_s else 0.0
        intake_s = moved / (one.sms * self.sm_bytes_per_cycle * own_hz) if self.sm_bytes_per_cycle else 0.0
        then_s = intake_s * own_hz / clock_hz
        if bytes_s >= _BY_BYTES * one.seconds or (
            one.op in ATTENTION and intake_s >= _BY_INTAKE * one.seconds
        ):
            took = one.seconds * max(bytes_s, then_s) / max(bytes_s, intake_s)
        else:
            took = max(bytes_s, then_s, one.seconds * own_hz / clock_hz)
        return msgspec.structs.replace(one, seconds=took, clock_mhz=clock_hz / 1e6)


_LONGEST = 1 << 20  # the longest context searched


def slowdown(profile: Profile, clocks: ClockScaling) -> float:
    """Return how many times as long concurrent ops take as isolated ones on the same SMs and clock; 1
    without pairs.
    """
    pairs = [of_pair(profile, clocks, pair) for pair in profile.pairs if pair.second in ATTENTION]
    found = [one for one in pairs if one is not None]
    return max(1.0, statistics.median(found)) if found else 1.0


def of_pair(profile: Profile, clocks: ClockScaling, pair: Pair) -> float | None:
    """Return the slowdown of one pair, or None for a context shorter than every isolated measurement."""
    if not pair.first_performance or not pair.second_performance:
        return None
    first_tokens = pair.first_tokens or PAIR_TOKENS
    tokens = pair.second_tokens or (PAIR_DECODES if pair.second == "decode_attention" else PAIR_TOKENS)
    if pair.seconds is not None and pair.keys is not None:
        together_s, keys = pair.seconds, float(pair.keys)
    else:
        together_s = fastest(profile, pair.first, first_tokens, 0) / pair.first_performance
        keys = keys_lasting(
            lambda keys: fastest(profile, pair.second, tokens, keys),
            pair.second_performance * together_s,
            _LONGEST,
        )
    if keys < min(one.keys for one in profile.op_times if one.op == pair.second):
        return None
    here = profile if pair.clock_mhz is None else clocks.at(profile, pair.clock_mhz * 1e6)
    alone_s = (
        seconds(here, pair.first, first_tokens, 0, pair.first_sms),
        seconds(here, pair.second, tokens, keys, pair.second_sms),
    )
    return together_s / max(alone_s)

"""A profile at another clock than it was taken at."""

import msgspec

from jaxflow.model.cost import find_device
from jaxflow.model.graph import Graph
from search.profile.clock import Card
from search.profile.op_times import ATTENTION, OpTime, Profile, alone

_BY_BYTES = 0.75  # of an op's time: where its bytes alone take so much, no clock changes it
_BY_INTAKE = (
    0.6  # of attention's on few SMs: where what these take in would need so much, that is what takes the time
)


class Clocks:
    """Takes the times of a profile of this device and graph to other clocks: products and attention count
    cycles, but bytes do not.

    What an SM takes in a cycle is the most that any entry of the profile shows on a part of the SMs; without
    one, the card's.
    """

    def __init__(self, graph: Graph, profile: Profile, card: Card | None = None):
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
        """Entries that do not say at which clock they were taken stay as they are; pairs are as they were
        measured.
        """
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

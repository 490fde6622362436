"""A profile at another clock than it was taken at."""

import msgspec

from jaxflow.model.cost import find_device
from jaxflow.model.graph import Graph
from search.clock import shipped_card
from search.op_times import OpTime, Pair, Profile, alone

_BY_BYTES = 0.75  # of an op's time: where its bytes alone take so much, no clock changes it


class Clocks:
    """Takes the times of a profile of this device and graph to other clocks: products and attention count cycles, but bytes do not."""

    def __init__(self, graph: Graph, profile: Profile):
        self.ops = {op.name: op for layer in graph.layers for op in layer if op.kind in ("dense", "attention")}
        device = find_device(profile.device)
        card = None if device is None else shipped_card(device.name)
        self.bytes_per_s = device.rates.memory_bytes_per_s if device else None
        self.sm_bytes_per_cycle = card.sm_bytes_per_cycle if card else None
        cases = {(one.op, one.tokens, one.keys) for one in profile.op_times if one.op in self.ops}
        self.moved = {case: self.ops[case[0]].work(alone(self.ops[case[0]], *case[1:])).memory_bytes for case in cases}

    def at(self, profile: Profile, clock_hz: float) -> Profile:
        """Entries that do not say at which clock they were taken stay as they are."""
        found = msgspec.structs.replace(profile, op_times=tuple(self._time(one, clock_hz) for one in profile.op_times))
        return msgspec.structs.replace(found, pairs=tuple(_pair(pair, profile, found, clock_hz / 1e6) for pair in profile.pairs))

    def _time(self, one: OpTime, clock_hz: float) -> OpTime:
        if one.op not in self.ops or one.clock_mhz is None:
            return one
        moved = self.moved[one.op, one.tokens, one.keys]
        least = moved / self.bytes_per_s if self.bytes_per_s else 0.0
        took = one.seconds if least >= _BY_BYTES * one.seconds else max(least, one.seconds * one.clock_mhz * 1e6 / clock_hz)
        if self.sm_bytes_per_cycle:
            took = max(took, moved / (one.sms * self.sm_bytes_per_cycle * clock_hz))
        return msgspec.structs.replace(one, seconds=took, clock_mhz=clock_hz / 1e6)


def _pair(pair: Pair, before: Profile, after: Profile, mhz: float) -> Pair:
    """What a pair took counts cycles; what its ops take alone, to which performances are relative, may not."""
    if pair.clock_mhz is None:
        return pair
    kept = []
    for name, performance in ((pair.first, pair.first_performance), (pair.second, pair.second_performance)):
        at = max((i for i, one in enumerate(before.op_times) if (one.op, one.sms) == (name, before.total_sms)), default=None,
                 key=lambda i: (before.op_times[i].tokens, before.op_times[i].keys))  # fmt: skip
        slower = 1.0 if at is None else after.op_times[at].seconds / before.op_times[at].seconds
        kept.append(min(1.0, performance * slower * mhz / pair.clock_mhz))
    return msgspec.structs.replace(pair, first_performance=kept[0], second_performance=kept[1], clock_mhz=mhz)

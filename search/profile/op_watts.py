"""The watts of a profile's ops: what the card drew while an op ran in isolation."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from search.profile.op_times import OpTime, Profile

Points = Sequence[tuple[int, float]]


def joules_of(one: OpTime) -> float | None:
    """Return the joules of an entry by the energy counter, or else by the sensor's watts."""
    return one.seconds * one.watts if one.joules is None and one.watts is not None else one.joules


@dataclasses.dataclass(frozen=True)
class OpWatts:
    """The watts of a profile's entries, idle watts included.

    by_op: op -> SMs -> keys -> [(tokens, watts)], all rising. Entries without joules are absent.
    """

    by_op: Mapping[str, Mapping[int, Mapping[int, Points]]]

    @classmethod
    def of(cls, profile: Profile) -> "OpWatts":
        found: dict = collections.defaultdict(lambda: collections.defaultdict(dict))
        for one in sorted(profile.op_times, key=lambda one: (one.sms, one.keys, one.tokens)):
            joules = joules_of(one)
            if joules is not None:
                found[one.op][one.sms].setdefault(one.keys, []).append((one.tokens, joules / one.seconds))
        return cls(found)

    def at(self, op: str, tokens: float, keys: float, sms: int) -> float | None:
        """Return the watts of an op: linear between the points, constant beyond the points.

        None for an op without joules.
        """
        if op not in self.by_op:
            return None
        by_sms = []
        for count, by_keys in self.by_op[op].items():
            by_context = [(context, _between(points, tokens)) for context, points in by_keys.items()]
            by_sms.append((count, _between(by_context, keys)))
        return _between(by_sms, sms)


def _between(points: Points, x: float) -> float:
    """Return the value at x: linear between the points, constant beyond the points."""
    at, values = zip(*points, strict=True)
    return float(np.interp(x, at, values))

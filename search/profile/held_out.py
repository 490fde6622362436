"""What interpolation in a profile is off by: each point that lies between two others, as if it had not been
measured.
"""

import collections
from collections.abc import Callable

from search.profile.op_times import Profile

AXES = {"tokens": "tokens", "keys": "keys", "sms": "SMs"}  # as they are called


def held_out_errors(
    profile: Profile, fill: Callable[[str, float, int], float] = lambda op, tokens, sms: 1.0
) -> dict[str, float | None]:
    """By axis, the mean relative error of the times of an op between their neighbours on it, all else equal;
    None where there is none.

    Between tokens and between keys seconds are linear (`search.profile.op_times`), between SMs rates of full waves
    (`search.profile.share_times`). fill: the part of an op's waves that is full, on so many tokens and SMs
    (`ShareTimes.fill`).
    """
    return {axis: _mean(_errors(profile, axis, fill)) for axis in AXES}


def in_words(errors: dict[str, float | None]) -> str:
    """For people."""
    known = [f"{error:.1%} along {AXES[axis]}" for axis, error in errors.items() if error is not None]
    if unknown := [AXES[axis] for axis, error in errors.items() if error is None]:
        known.append(f"not known along {', '.join(unknown)}, where no point lies between others")
    return f"Mean error of interpolation at points left out: {'; '.join(known)}"


def _errors(profile: Profile, axis: str, fill: Callable[[str, float, int], float]) -> list[float]:
    lines: dict[tuple, list[tuple[int, float]]] = collections.defaultdict(list)
    for one in profile.op_times:
        place = {"op": one.op, "tokens": one.tokens, "keys": one.keys, "sms": one.sms}
        at = place.pop(axis)
        lines[tuple(place.values())].append(
            (at, 1 / (one.seconds * fill(one.op, one.tokens, one.sms)) if axis == "sms" else one.seconds)
        )
    errors = []
    for line in map(sorted, lines.values()):
        for (x0, y0), (x, y), (x1, y1) in zip(line, line[1:], line[2:], strict=False):
            between = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
            errors.append(abs((y / between if axis == "sms" else between / y) - 1))
    return errors


def _mean(errors: list[float]) -> float | None:
    return sum(errors) / len(errors) if errors else None

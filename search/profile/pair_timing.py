"""What two ops keep of their speed when they run together, each timed to its own end.

Only until both have ended can be timed: then whichever ended first waited in it for the other. So the second
op, attention, whose keys are data, is given as many as make it end with the first. Until there the time does
not depend on the keys, beyond it grows with them, as attention does alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from search.profile.entries import PAIR_KEYS, Together
from search.profile.op_bench import PHASES, Layer
from search.profile.op_times import (
    ATTENTION,
    EXCHANGE,
    NETWORK_SMS,
    Pair,
    Profile,
    fastest,
    keys_lasting,
    seconds,
)
from search.profile.sustain import Sustained

_REACHES = (1.6, 1.2)  # around the guess: how few and how many keys are tried, in ever smaller steps


def timed_pair(
    profile: Profile,
    layer: Layer,
    entry: Together,
    given: Any,
    run: Callable[[Any, float], Sustained],
    seconds_each: float,
) -> Pair:
    """What both of a pair keep; beside attention at the keys at which it ends with the product.

    profile: has both alone. given: what the pair's program is given, for `run`, which sustains it for so many
    seconds.
    """
    a, b, keys = entry.product, entry.other, 0
    first_sms, second_sms = held_sms(entry, profile.total_sms)

    def loaded(keys: int) -> Any:
        return given | {"batch": layer.batch(dataclasses.replace(b, keys=keys), PAIR_KEYS)}

    if b.op in ATTENTION:
        fewest = min(one.keys for one in profile.op_times if one.op == b.op)
        least = max(fewest, b.tokens // 2 if b.op == "chunk_attention" else 1)  # a chunk sees itself
        wanted_s = seconds(profile, a.op, a.tokens, 0, first_sms)

        def alone_s(keys: float) -> float:
            return seconds(profile, b.op, b.tokens, keys, second_sms)

        def together_s(keys: int) -> float:
            return run(loaded(keys), seconds_each / 2).seconds / PHASES

        keys = equal_ends(together_s, alone_s, keys_lasting(alone_s, wanted_s, PAIR_KEYS), least, PAIR_KEYS)
        given = loaded(keys)
    found = run(given, seconds_each)
    took = found.seconds / PHASES
    kept = (min(1.0, fastest(profile, one.op, one.tokens, keys) / took) for one, keys in ((a, 0), (b, keys)))
    joules = None if found.joules is None else found.joules / PHASES
    about = {"watts": found.watts, "clock_mhz": found.clock_mhz, "joules": joules, "seconds": took}
    return Pair(
        a.op,
        b.op,
        first_sms,
        second_sms,
        *kept,
        first_tokens=a.tokens,
        second_tokens=b.tokens,
        keys=keys,
        **about,
    )


def equal_ends(
    together_s: Callable[[int], float], alone_s: Callable[[float], float], guess: float, least: int, most: int
) -> int:
    """The keys, from `least` to `most`, at which attention ends with what is beside it.

    together_s: seconds until both have ended, by keys. alone_s: of the attention alone on its SMs, rising.
    The first's own time is that beside little attention; attention's, in proportion to its time alone, that
    of much. A guess that is far off is followed.
    """

    def within(keys: float) -> int:
        return round(min(most, max(least, keys)))

    keys = guess
    for reach in _REACHES:
        few, many = within(keys / reach), within(keys * reach)
        first_s, longer = together_s(few), together_s(many) / alone_s(many)
        keys = keys_lasting(lambda keys, longer=longer: longer * alone_s(keys), first_s, most)
    return within(keys)


def held_sms(pair: Together, total: int) -> tuple[int, int]:
    """SMs that each of a pair holds, as far as is known: an exchange none."""
    sent = {EXCHANGE: 0, "attn_reduce": min(NETWORK_SMS, total)}.get(pair.other.op, total)
    return pair.product.sms or total, pair.other.sms or sent

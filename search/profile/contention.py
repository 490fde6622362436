"""What ops lose beside others, beyond the SMs and the clock: one number of a profile, from its pairs
(NanoFlow §4.1.1).

What sharing costs is how much longer the two took, until both had ended, than the slower of them takes alone,
on its SMs and at the pair's clock. In profiles from before both ended together (`Pair.seconds`) this time is
in the performances, and attention's keys are found from what it kept. Single pairs scatter: a phase ends in a
join, and the time alone is between measured points. So the median is taken.
"""

import statistics

from search.profile.clock_scaling import Clocks
from search.profile.op_times import (
    ATTENTION,
    PAIR_DECODES,
    PAIR_TOKENS,
    Pair,
    Profile,
    fastest,
    keys_lasting,
    seconds,
)

_LONGEST = 1 << 20  # keys


def slowdown(profile: Profile, clocks: Clocks) -> float:
    """How many times as long ops take beside others as alone on the same SMs at the same clock; 1 of a
    profile without pairs.
    """
    beside = [of_pair(profile, clocks, pair) for pair in profile.pairs if pair.second in ATTENTION]
    found = [one for one in beside if one is not None]
    return max(1.0, statistics.median(found)) if found else 1.0


def of_pair(profile: Profile, clocks: Clocks, pair: Pair) -> float | None:
    """Of one pair; None where attention had fewer keys than the profile knows its time at: what it kept is
    then not known.
    """
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

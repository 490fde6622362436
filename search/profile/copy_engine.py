"""Sums over devices by the copy engines (`jaxflow.parallel.collectives`), as the search sees them: other times, and
no SMs.
"""

import msgspec

from jaxflow.model.graph import Graph
from search.profile.clock import Card
from search.profile.op_times import EXCHANGE, OpTime, Profile, alone, seconds

SMS = 0  # of the sums of such a profile: what runs beside them has all


def copied(profile: Profile, graph: Graph, card: Card) -> Profile:
    """The profile with the graph's sums sent by the copy engines, at each number of tokens at which it has
    times of them.

    What an exchange takes is the profile's, where it was measured, else the card's.

    Raises: ValueError for a card whose copies were not measured, nor in the profile.
    """
    measured = any(one.op == EXCHANGE for one in profile.op_times)
    if not measured and (card.exchange_s is None or card.exchange_bytes_per_s is None):
        raise ValueError(f"sums='copies': how long they take on a {card.device} is not known")
    sums = {op.name: op for layer in graph.layers for op in layer if op.kind == "network"}

    def sent_s(name: str, one: OpTime) -> float:
        """Each device sends all of its part, as many bytes as two devices send in an all-reduce."""
        if measured:
            return seconds(profile, EXCHANGE, one.tokens)
        assert card.exchange_s is not None and card.exchange_bytes_per_s is not None
        return (
            card.exchange_s
            + sums[name].work(alone(sums[name], one.tokens, one.keys)).network_bytes
            / card.exchange_bytes_per_s
        )

    times = []
    for one in profile.op_times:
        if one.op not in sums:
            times.append(one)
            continue
        for name in (one.op, one.op.replace("_reduce", "_swap")):  # of four devices a sum is two exchanges
            if name in sums:
                times.append(OpTime(name, one.tokens, one.keys, SMS, sent_s(name, one)))
    return msgspec.structs.replace(
        profile, op_times=tuple(times), method=f"{profile.method}; sums by the copy engines"
    )

"""Sums over devices by the copy engines (`jaxflow.model.exchange`), as the search sees them: other times, and no SMs."""

import msgspec

from jaxflow.model.graph import Graph
from search.clock import Card
from search.op_times import OpTime, Profile, alone

SMS = 0  # of the sums of such a profile: what runs beside them has all


def copied(profile: Profile, graph: Graph, card: Card) -> Profile:
    """The profile with the graph's sums over devices sent by the copy engines, at each number of tokens at which it has them.

    Raises: ValueError for a card whose copies were not measured.
    """
    if card.exchange_s is None or card.exchange_bytes_per_s is None:
        raise ValueError(f"sums='copies': how long they take on a {card.device} is not known")
    sent = {op.name: op for layer in graph.layers for op in layer if op.kind == "network"}
    times = []
    for one in profile.op_times:
        if one.op in sent:  # as many bytes as in a ring: of two devices in an all-reduce, of more in its two halves
            moved = sent[one.op].work(alone(sent[one.op], one.tokens, one.keys)).network_bytes
            times.append(OpTime(one.op, one.tokens, one.keys, SMS, card.exchange_s + moved / card.exchange_bytes_per_s))
        else:
            times.append(one)
    return msgspec.structs.replace(profile, op_times=tuple(times), method=f"{profile.method}; sums by the copy engines")

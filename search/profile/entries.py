"""What a profile is made of, and in which order: what matters most is measured first, so that a profile that
was cut short is of use.

First each op on the whole device at its largest and smallest size, and at the size that pairs have. Then the
shares that pairs use, at two sizes, and the pairs (the largest products and the middle share first): these
give a share's time where it matters, beside another op. Over several devices the large products beside a sum:
by NCCL's kernels, also where they leave it its SMs, and by the copy engines. Then the sizes between, which
interpolation would else have to stand for; the largest gaps first.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from jaxflow.model.graph import Op
from search.profile.op_bench import OpCase
from search.profile.op_times import ATTENTION, EXCHANGE, NETWORK_SMS, PAIR_DECODES, PAIR_TOKENS

MOST_DECODES = 1024  # tokens of a step that decode: one a sequence
PAIR_KEYS = 4096  # that attention beside a product can be given, to last as long as the product
LARGE = ("up_gate", "down")  # products that are paired first, and beside chunks and sums
_ENDS, _SHARES, _PAIRS, _BETWEEN = range(4)


@dataclasses.dataclass(frozen=True)
class OpPair:
    """A product and attention at the same time, on all SMs between them, or a product and a sum over devices.

    Attention's keys are the most that it may be given: what fits the product's duration is found by
    measuring.
    """

    product: OpCase
    other: OpCase


Measurement = OpCase | OpPair


def entries(
    ops: Mapping[str, Op], tokens: Sequence[int], keys: Sequence[int], shares: Sequence[int], total: int
) -> list[Measurement]:
    """All that is to be measured, the most important first. shares: SMs that attention gets beside products,
    of `total`.
    """
    found: dict[Measurement, tuple] = {}
    middle = (coarse_first(shares)[2:3] or coarse_first(shares)[:1]) if shares else []
    by_share = [*middle, *(share for share in shares if share not in middle)]
    for op in ops.values():
        attends = op.name in ATTENTION
        sizes = [count for count in tokens if count <= MOST_DECODES or op.name != "decode_attention"] or [
            min(tokens)
        ]
        contexts = coarse_first(keys) if attends else [0]
        paired = PAIR_DECODES if op.name == "decode_attention" else PAIR_TOKENS
        for (i, count), (j, context) in itertools.product(
            enumerate(coarse_first(sizes)), enumerate(contexts)
        ):
            first = (i < 2 or count == paired) and j < 2
            found[OpCase(op.name, count, context)] = (
                (_ENDS, max(min(i, 2), j)) if first else (_BETWEEN, max(i, j + 1 if attends else 0))
            )
        bounded = by_share if attends else [total - share for share in by_share] if op.kind == "dense" else []
        beside = {*coarse_first(sizes)[:2], *({pair_tokens(op.name)} if op.kind == "dense" else ())}
        for sms, count, context in itertools.product(bounded, sorted(beside), contexts[:2]):
            found[OpCase(op.name, count, context, sms)] = (_SHARES, bounded.index(sms))
    products = [
        op.name for op in ops.values() if op.kind == "dense" and not op.experts and op.name != "router"
    ]
    for at, share in enumerate(by_share):
        for name in products:
            product, large = OpCase(name, pair_tokens(name), sms=total - share), name in LARGE
            if "decode_attention" in ops:
                decodes = OpCase("decode_attention", PAIR_DECODES, PAIR_KEYS, share)
                found[OpPair(product, decodes)] = (_PAIRS, at + (0 if large else len(shares)))
            if large and "chunk_attention" in ops:
                found[OpPair(product, OpCase("chunk_attention", PAIR_TOKENS, PAIR_KEYS, share))] = (
                    _PAIRS,
                    at + 2 * len(shares),
                )
    for name, sent in itertools.product(LARGE, ("attn_reduce", EXCHANGE)):
        if name in ops and sent in ops:
            found[OpPair(OpCase(name, PAIR_TOKENS), OpCase(sent, PAIR_TOKENS))] = (_PAIRS, 0)
            if shares and sent != EXCHANGE:
                found[
                    OpPair(OpCase(name, PAIR_TOKENS, sms=total - NETWORK_SMS), OpCase(sent, PAIR_TOKENS))
                ] = (
                    _PAIRS,
                    1,
                )
    return sorted(found, key=found.__getitem__)


def pair_tokens(product: str) -> int:
    """Of a product beside attention: short ones have more, or attention beside them would see fewer keys than
    any that it was timed at.
    """
    return PAIR_TOKENS if product in LARGE else 2 * PAIR_TOKENS


def coarse_first(values: Iterable[int]) -> list[int]:
    """The last, the first, the middle, the middles of the halves, and so on."""
    rest = sorted(set(values))
    order = [rest[-1], rest[0]] if len(rest) > 1 else rest[:]
    spans = [(0, len(rest) - 1)]
    while spans:
        first, last = spans.pop(0)
        if last - first > 1:
            middle = (first + last) // 2
            order.append(rest[middle])
            spans += [(first, middle), (middle, last)]
    return order


def described(left: Sequence[Measurement]) -> str:
    """Entries in a few words: how many of which op, and whether whole, on a share or in pairs."""
    counts = collections.Counter(
        f"{entry.product.op} beside {entry.other.op}" if isinstance(entry, OpPair)
        else f"{entry.op}{'' if entry.sms is None else ' on a share'}"
        for entry in left
    )  # fmt: skip
    return ", ".join(f"{number} of {name}" for name, number in counts.items())

"""The measurements of a profile and their order: the most important first, so that a partial profile is
useful.

First comes each op on the full device at its largest and smallest size, and at the size of the pairs. Then
come the SM counts of the pairs, at two sizes, and the pairs: the largest products and the middle count
first. Over several devices the large products are also paired with a collective: by NCCL's kernels, with and
without free SMs for them, and by the copy engines. The sizes between come last, with the largest gaps first.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from jaxflow.model.graph import Op
from search.profile.op_bench import OpCase
from search.profile.op_times import ATTENTION, EXCHANGE, NETWORK_SMS, PAIR_DECODES, PAIR_TOKENS

MOST_DECODES = 1024  # the most decodes of a step
PAIR_KEYS = 4096  # the longest context of attention next to a product
LARGE = ("up_gate", "down")  # products paired first, also with chunks and collectives
_ENDS, _SHARES, _PAIRS, _BETWEEN = range(4)


@dataclasses.dataclass(frozen=True)
class OpPair:
    """A product concurrent with attention, on all SMs together, or with a collective.

    Attention's context is the longest allowed; measuring finds the context that lasts as long as the
    product.
    """

    product: OpCase
    other: OpCase


Measurement = OpCase | OpPair


def entries(
    ops: Mapping[str, Op], tokens: Sequence[int], keys: Sequence[int], shares: Sequence[int], total: int
) -> list[Measurement]:
    """Return all measurements, the most important first.

    shares: SMs of attention next to products, of `total`.
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
        counts = {*coarse_first(sizes)[:2], *({pair_tokens(op.name)} if op.kind == "dense" else ())}
        for sms, count, context in itertools.product(bounded, sorted(counts), contexts[:2]):
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
    """Return a paired product's tokens.

    A short product has more, so that attention's context stays measurable.
    """
    return PAIR_TOKENS if product in LARGE else 2 * PAIR_TOKENS


def coarse_first(values: Iterable[int]) -> list[int]:
    """Return the last value, the first, the middle, the middles of the halves, and so on."""
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
    """Return a summary of measurements: the number of each op, in isolation,
    on part of the SMs or in pairs.
    """
    counts = collections.Counter(
        f"{entry.product.op} with {entry.other.op}" if isinstance(entry, OpPair)
        else f"{entry.op}{'' if entry.sms is None else ' on a share'}"
        for entry in left
    )  # fmt: skip
    return ", ".join(f"{number} of {name}" for name, number in counts.items())

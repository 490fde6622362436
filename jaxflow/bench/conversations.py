"""Conversations: each round's prompt is all that was said so far and some new text, sent when the answer
before it was read.

The multi-round workload of NanoFlow's KV hierarchy (§4.2.2). New texts are random token ids and lengths come
from a seed; the answers are the engine's, so the prompts of later rounds are known only as it runs.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxflow.bench.workload import Item, WorkloadError


@dataclasses.dataclass(frozen=True)
class Round:
    """New text, int32 [n], and how long its answer gets. `think_s`: from the end of the answer before it to
    its sending.
    """

    text: np.ndarray
    output_tokens: int
    think_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Conversation:
    """`arrival_s`: when its first round is sent. `opening`: which round the first one counts as, see
    `of_items`.
    """

    arrival_s: float
    rounds: tuple[Round, ...]
    opening: int = 1
    known_tokens: int = 0  # of the first prompt's beginning, that an earlier conversation had too


def synthetic(
    openings: Sequence[Item],
    later: Sequence[Item],
    vocab_size: int,
    *,
    think_s: float = 0.0,
    max_tokens: float = float("inf"),
    seed: int = 0,
) -> list[Conversation]:
    """Conversations that begin with `openings` and go on with the lengths of `later`, the next ones for each
    in turn.

    think_s: the mean of exponential pauses. A conversation ends before a round that would make it longer than
    `max_tokens`.

    Raises:
      WorkloadError: if `later` is no multiple of the openings.
    """
    if not openings or len(later) % len(openings):
        raise WorkloadError(
            f"{len(later)} later rounds for {len(openings)} conversations: a multiple is possible"
        )
    made = []
    for index, opening in enumerate(openings):
        rng = np.random.default_rng([seed, 6, index])
        rounds, total = [], 0
        for item in (opening, *later[index :: len(openings)]):
            total += item.prompt_tokens + item.output_tokens
            if rounds and total > max_tokens:
                break
            pause = float(rng.exponential(think_s)) if rounds else 0.0
            text = rng.integers(0, vocab_size, item.prompt_tokens, dtype=np.int32)
            rounds.append(Round(text, item.output_tokens, pause))
        made.append(Conversation(opening.arrival_s, tuple(rounds)))
    return made


def of_items(items: Sequence[Item], prompts: Sequence[np.ndarray]) -> list[Conversation]:
    """Each item as a conversation of one round, which counts as a second one if an earlier item shares more
    of its blocks than all of them have in common (a system's prompt): a trace has the rounds of one
    conversation as separate requests.
    """
    shared = shared_blocks(items)
    common = min((len(_common(items[0].blocks, item.blocks)) for item in items), default=0)
    return [
        Conversation(
            item.arrival_s,
            (Round(ids, item.output_tokens),),
            opening=2 if blocks > common else 1,
            known_tokens=min(item.prompt_tokens, blocks * item.block_tokens),
        )
        for item, ids, blocks in zip(items, prompts, shared, strict=True)
    ]


def shared_blocks(items: Sequence[Item]) -> list[int]:
    """For each item, how many of its leading blocks an earlier item begins with too."""
    seen: dict[tuple[int, int], int] = {}  # (the node before, a block's id) -> node of a tree of beginnings
    counts = []
    for item in items:
        node, shared = 0, 0
        for block in item.blocks:
            known = seen.get((node, block))
            if known is None:
                known = seen[node, block] = len(seen) + 1
            else:
                shared += 1
            node = known
        counts.append(shared)
    return counts


def _common(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    return one[
        : next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
    ]

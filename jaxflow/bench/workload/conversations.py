"""Multi-round conversations, the workload of NanoFlow's KV hierarchy (§4.2.2).

The prompt of each round is the whole conversation before the round, followed by new text. A round is sent
after the previous answer has ended. New texts are random token ids, and lengths come from a seed. The engine
generates the answers, so the prompts of later rounds are known only during the run.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxflow.bench.workload.lengths import Item, WorkloadError


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a conversation: new text, int32 [n], and the number of answer tokens.

    `think_s` is the time in seconds from the end of the previous answer to the round's submission.
    """

    text: np.ndarray
    output_tokens: int
    think_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation: its rounds and the time `arrival_s` of its first submission.

    `opening` is the round number that the first round counts as (`of_items`).
    """

    arrival_s: float
    rounds: tuple[Round, ...]
    opening: int = 1
    known_tokens: int = 0  # leading tokens of the first prompt that an earlier conversation also had


def synthetic(
    openings: Sequence[Item],
    later: Sequence[Item],
    vocab_size: int,
    *,
    think_s: float = 0.0,
    max_tokens: float = float("inf"),
    seed: int = 0,
) -> list[Conversation]:
    """Return conversations that begin with `openings` and continue with the lengths of `later`.

    Each conversation takes the next item of `later` in turn.

    think_s: the mean of the exponential pauses, in seconds. max_tokens: a conversation ends before a round
    that would exceed this length.

    Raises:
      WorkloadError: if the number of later rounds is not a multiple of the number of openings.
    """
    if not openings or len(later) % len(openings):
        raise WorkloadError(
            f"{len(later)} later rounds for {len(openings)} conversations: accepted is a multiple of the "
            "conversations"
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
    """Return each item as a conversation of one round.

    A trace holds the rounds of one conversation as separate requests. An item counts as a second round if it
    shares more blocks with an earlier item than all items have in common. The blocks common to all items are
    a system prompt.
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
    """Return, for each item, the number of its leading blocks that an earlier item also begins with."""
    seen: dict[tuple[int, int], int] = {}  # (parent node, block id) -> node of a prefix tree
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

"""How a step is filled: JaxFlow's policy, and those it is compared with in the papers (SARATHI §4.1, §5.2)."""

import bisect
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a scheduler may do.

    Attributes:
      mixes: prefills and decodes share a step. Otherwise prefills go first and decodes wait for them.
      lockstep: requests start together: none is admitted once the running ones decode, until all of them have
      ended. pads: with `lockstep`, sequences that ended keep their row in every step until the last one ends.
      whole: a prompt that fits in a step is not begun before it fits beside the decodes. max_chunks:
      sequences that prefill in a step. chunked: at most `SchedulerConfig.chunk_size` prefill tokens a step.
      shares: while a prompt longer than a step is prefilled, half of the room is for shorter ones, see
      `Scheduler`.
    """

    mixes: bool = True
    lockstep: bool = False
    pads: bool = False
    whole: bool = False
    max_chunks: int | None = None
    chunked: bool = False
    shares: bool = False


POLICIES = {
    # SARATHI §4.3 and NanoFlow §4.2.1: all decodes, then prefill tokens up to the budget, exactly.
    "decode-maximal": Policy(shares=True),
    # FasterTransformer: a batch is prefilled, then decoded until its longest request ends; shorter ones are
    # padding.
    "request-level": Policy(mixes=False, lockstep=True, pads=True, whole=True),
    # Orca, when each step holds the whole prefill of one new request beside the running decodes.
    "orca-best": Policy(whole=True, max_chunks=1),
    # Orca, when all requests start and end together: nothing overlaps, but ended requests leave.
    "orca-worst": Policy(mixes=False, lockstep=True, whole=True),
    # vLLM at first: waiting prompts are prefilled at once, in steps of their own, while decodes stall.
    "prefill-first": Policy(mixes=False, whole=True),
    # SARATHI with a fixed chunk: one chunk of at most C tokens a step, and all decodes.
    "hybrid": Policy(max_chunks=1, chunked=True),
}


def bucket_of(tokens: int, buckets: Sequence[int]) -> int:
    """The smallest bucket (sorted) that holds so many tokens."""
    return buckets[bisect.bisect_left(buckets, tokens)]


def surplus(tokens: int, buckets: Sequence[int]) -> int:
    """Tokens to put off, if a chunk can be cut, so as not to run a bucket whose last part is mostly padding.

    Tile quantisation (SARATHI §4.4): a step costs what its bucket costs. Going down to the bucket below is
    worth it when it puts off no more tokens than there is padding; the work put off then fills a later step.
    """
    i = bisect.bisect_left(buckets, tokens)
    if i == 0:
        return 0
    over = tokens - buckets[i - 1]
    return over if over <= buckets[i] - tokens else 0

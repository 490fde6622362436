"""The counters of several replicas as one."""

import collections
from collections.abc import Iterable, Sequence

from jaxflow.engine.loop import Stats

PRESENT = ("running_requests", "waiting_requests", "kv_pages", "kv_pages_free")  # values that are no counters
COUNTERS = (
    "steps",
    "prompt_tokens",
    "completion_tokens",
    "cached_prompt_tokens",
    "preemptions",
    "compilations_after_warmup",
)


def total(running: Sequence[Stats], ended: Sequence[Stats]) -> Stats:
    """Return the sum over replicas. Of those that ended only the counters count, so that no counter falls.

    The counters of the KV tiers are also contents, so only the running replicas give them.
    """
    every = (*running, *ended)
    return Stats(
        **{name: sum(getattr(stats, name) for stats in running) for name in PRESENT},
        **{name: sum(getattr(stats, name) for stats in every) for name in COUNTERS},
        steps_by_plan=_sum(stats.steps_by_plan for stats in every),
        kv_tiers=_sum(stats.kv_tiers for stats in running),
    )


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for each in counts:
        found.update(each)
    return dict(found)

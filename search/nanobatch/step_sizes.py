"""How many tokens a step has: the sequential step of every size costs nothing to simulate, plans are searched
for the best sizes alone.

A larger step reads weights for more tokens, until memory holds no more requests to decode and the rest of its
rows is padding.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxflow.config import ModelConfig
from search.nanobatch.known_orders import sequential
from search.nanobatch.predict import outside_s
from search.nanobatch.problem import Setting

SIZES = (512, 1024, 1536, 2048)  # that every engine of 2048 tokens compiles (`jaxflow.engine.step_plans`)
SEARCHED = 2  # sizes that a plan is searched for: on each workload half of the time


@dataclasses.dataclass(frozen=True)
class Size:
    """A size of step, with what the sequential one makes."""

    tokens: int
    padding: int
    tokens_per_s: float

    @classmethod
    def of(cls, model: ModelConfig, setting: Setting) -> "Size":
        load = setting.load
        return cls(load.tokens, load.padding, tokens_per_s(setting, sequential(model, setting).step_s))


def tokens_per_s(setting: Setting, layers_s: float) -> float:
    """Of whole steps whose layers take so long, padding not counted."""
    load = setting.load
    return load.real_tokens / (
        layers_s
        + outside_s(setting.graph, load.part(0, load.tokens), setting.device, setting.shares.profile.dtype)
    )


def most_promising(sizes: Iterable[Size]) -> list[Size]:
    """Those to search, the best sequential step first."""
    return sorted(sizes, key=lambda size: (-size.tokens_per_s, size.tokens))[:SEARCHED]


def line(sizes: Sequence[Size], searched: Sequence[Size], best: int) -> str:
    """What is said of them. best: tokens of the plan that is kept."""
    told = ", ".join(f"{size.tokens} {size.tokens_per_s:,.0f} ({size.padding} padding)" for size in sizes)
    return (
        f"  sequential tokens/s by tokens of a step: {told}; plans for "
        f"{' and '.join(str(size.tokens) for size in searched)}; best {best}"
    )

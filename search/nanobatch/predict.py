"""Predicted step times of a plan: the table by which the engine chooses a step's plan.

A plan is made for one step shape but runs others. Each shape is simulated under the plan and under the
sequential plan. The ops outside the layers (embedding, head, sampling) come from the cost model, for known
devices. The sequential step of each size is cheap to simulate, so plans are searched for the best sizes
only: a larger step reads the weights for more tokens, until memory holds no more requests and the rest of
its rows is padding.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import msgspec

from jaxflow.config import ModelConfig
from jaxflow.model.cost import Device
from jaxflow.model.energy import Power
from jaxflow.model.graph import Graph
from jaxflow.pipeline.plan import NanoOp, Plan, Predictions
from pallas_kernels.cards import Card, card_of, default_card
from search.nanobatch.known_orders import sequential
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.outside import outside_s
from search.nanobatch.problem import SearchProblem
from search.nanobatch.simulate import simulate
from search.profile.clock import shipped_card
from search.profile.share_times import ShareTimes

# Shares of the target's decodes. At lengths as ShareGPT's, a step decodes 1.7 times those of 1024 / 512.
DECODES = (0.0, 0.5, 1.0, 1.5, 2.0)
CONTEXTS = (0.125, 0.25, 0.5, 1.0, 2.0)


def predict(
    plan: Plan, graph: Graph, shares: ShareTimes, load: StepShape, *, device: Device | None = None,
    power: Power | None = None, rival: ShareTimes | None = None,
) -> Predictions:  # fmt: skip
    """Return the seconds of steps around the plan's target: other numbers of decodes, shorter and longer
    contexts.

    rival: the op times of the sequential step, where its collectives have another form; None: `shares`.

    Raises: ProfileError for an op or an SM count without a measured time.
    """
    rival = rival or shares
    alone = Plan(
        "sequential",
        plan.tokens,
        tuple(NanoOp(op.name, op.name, 0, plan.tokens) for op in rival.graph.layers[-1]),
    )
    decodes = sorted({min(load.tokens, round(share * load.decode_tokens)) for share in DECODES})
    contexts = sorted({max(1, round(share * load.decode_keys)) for share in CONTEXTS})

    def seconds(which: Plan, count: int, context: int) -> float:
        here = dataclasses.replace(
            load,
            decode_tokens=count,
            decode_keys=context,
            chunk_keys=load.chunk_keys * context / max(1.0, load.decode_keys),
        )
        own = shares if which is plan else rival
        timeline = simulate(which, own.graph, own, here, device=device, power=power)
        return timeline.step_s + outside_s(graph, here.part(0, load.tokens), device, shares.profile.dtype)

    def table(which: Plan) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(seconds(which, count, context) for context in contexts) for count in decodes)

    known = device is not None and shipped_card(device.name) is not None
    found = Predictions(tuple(decodes), tuple(contexts), table(plan), table(alone))
    profile = shares.profile
    return (
        msgspec.structs.replace(
            found,
            margin=margin(
                plan,
                graph,
                profile.tensor_parallel_size,
                profile.dtype,
                card_of(device.name if device else ""),
            ),
        )
        if known
        else found
    )


def margin(plan: Plan, graph: Graph, gpus: int, dtype: str, card: Card | None = None) -> float:
    """Return the largest relative error of a predicted gain, measured for the plan's kind.

    dtype: of the products.
    """
    card = card or default_card()
    if (
        plan.sums == "kernels"
        or any(nano.stream for nano in plan.nano_ops)
        or any(op.name == "router" for op in graph.layers[0])
    ):
        return card.plan_margin
    if gpus == 2:
        return card.plan_margin_copies
    return card.plan_margin_swaps_fp8 if dtype == "float8_e4m3fn" else card.plan_margin_swaps


SIZES = (
    512,
    1024,
    1536,
    2048,
)  # sizes that every engine of 2048 tokens compiles (`jaxflow.engine.step_plans`)
SEARCHED = 2  # sizes with a plan search: each one gets half of a workload's time


@dataclasses.dataclass(frozen=True)
class StepSize:
    """A number of tokens a step, with the throughput and the cost of a token of its sequential step."""

    tokens: int
    padding: int
    tokens_per_s: float
    cost: float

    @classmethod
    def of(cls, model: ModelConfig, setting: SearchProblem) -> "StepSize":
        load, found = setting.load, sequential(model, setting)
        return cls(load.tokens, load.padding, tokens_per_s(setting, found.step_s), found.cost)


def tokens_per_s(setting: SearchProblem, layers_s: float) -> float:
    """Return the tokens per second of full steps without padding, from the seconds of their layers."""
    load = setting.load
    return load.real_tokens / (
        layers_s
        + outside_s(setting.graph, load.part(0, load.tokens), setting.device, setting.shares.profile.dtype)
    )


def most_promising(sizes: Iterable[StepSize]) -> list[StepSize]:
    """Return the sizes to search: those of the fastest sequential steps, and that of the least cost."""
    fastest = sorted(sizes, key=lambda size: (-size.tokens_per_s, size.tokens))
    return list(dict.fromkeys((*fastest[:SEARCHED], min(fastest, key=lambda size: size.cost))))


def line(sizes: Sequence[StepSize], searched: Sequence[StepSize], best: int) -> str:
    """Return the report line of the sizes. best: the tokens of the plan that is kept."""
    listed = ", ".join(f"{size.tokens} {size.tokens_per_s:,.0f} ({size.padding} padding)" for size in sizes)
    return (
        f"  sequential tokens/s by tokens of a step: {listed}; plans for "
        f"{' and '.join(str(size.tokens) for size in searched)}; best {best}"
    )

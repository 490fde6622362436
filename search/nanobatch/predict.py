"""How long a plan's steps take, by what they are made of: the table that the engine chooses a step's plan by.

A plan is made for one composition but runs others. Each is simulated under the plan and under the sequential
one, with what lies outside the layers (embedding, head, sampling) added from the cost model where the device
is in its table.
"""

import dataclasses

import msgspec

from jaxflow.model.composition import Composition
from jaxflow.model.cost import Device, op_times
from jaxflow.model.energy import Power
from jaxflow.model.graph import Graph
from jaxflow.pipeline.plan import NanoOp, Plan, Predictions
from search.nanobatch.layer_tasks import Load
from search.nanobatch.simulate import simulate
from search.profile.clock import shipped_card
from search.profile.share_times import ShareTimes

DECODES = (0.0, 0.5, 1.0, 1.5)  # of those that the plan was made for
CONTEXTS = (0.25, 0.5, 1.0, 2.0)
# By how much a gain may be predicted too large on a card whose kernels and steps were measured: the most that
# any was (docs/overlap.md).
MARGIN = 0.19  # with side streams 1.174 times in fp8, of a mixture 1.13
COPIES = 0.035  # sums of two devices by their copy engines: 1.032 times, cut in unequal halves
SWAPS, SWAPS_FP8 = 0.05, 0.11  # of four: 1.040 times in 16 bits, in fp8 1.100


def predict(
    plan: Plan, graph: Graph, shares: ShareTimes, load: Load, *, device: Device | None = None, power: Power | None = None,
    rival: ShareTimes | None = None,
) -> Predictions:  # fmt: skip
    """Seconds of steps around the load that the plan was made for: other numbers of decodes, shorter and
    longer contexts.

    rival: of the sequential step, where its sums over devices have another form than the plan's; None:
    `shares`.

    Raises: ProfileError for an op or a number of SMs that was not measured.
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
            found, margin=margin(plan, graph, profile.tensor_parallel_size, profile.dtype)
        )
        if known
        else found
    )


def margin(plan: Plan, graph: Graph, gpus: int, dtype: str) -> float:
    """By how much of itself a plan's predicted gain may be too large, by what was measured of its kind.
    dtype: of the products.
    """
    if (
        plan.sums == "kernels"
        or any(nano.stream for nano in plan.nano_ops)
        or any(op.name == "router" for op in graph.layers[0])
    ):
        return MARGIN
    if gpus == 2:
        return COPIES
    return SWAPS_FP8 if dtype == "float8_e4m3fn" else SWAPS


def outside_s(graph: Graph, step: Composition, device: Device | None, dtype: str) -> float:
    """What the ops before and after the layers take, one after the other, and the step itself; 0 where the
    device's rates are not known.

    Of several devices two of these ops sum or gather over them what they have made: after it, not beside it.
    """
    if device is None or dtype not in device.rates.flops_per_s or "bfloat16" not in device.rates.flops_per_s:
        return 0.0
    card = shipped_card(device.name)
    ops_s = 0.0
    for op in (*graph.before, *graph.after):
        times = op_times(op, step, device.rates, dtype)
        ops_s += max(times.compute_s, times.memory_s) + times.network_s
        ops_s += card.collective_s if card and times.network_s else 0.0
    return ops_s + (card.step_s if card else 0.0)

"""Orders of nano-ops known before a search: the hand-written ones, at every cut.

A solver out of time may have less than a hand-written order. A search therefore simulates these orders and
keeps the best.
"""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Iterator

from jaxflow.config import ModelConfig
from jaxflow.pipeline.handwritten import (
    copied,
    gemms_in_two_plan,
    phased_plan,
    sequential_plan,
    swapped,
    two_nano_batch_plan,
    waited,
)
from jaxflow.pipeline.plan import Plan
from search.nanobatch.cuts import cut_sets
from search.nanobatch.layer_tasks import repeated_layer
from search.nanobatch.objective import token_cost
from search.nanobatch.problem import SearchProblem
from search.nanobatch.simulate import Timeline, simulate
from search.profile.op_times import ProfileError

ORDERS = (
    "sequential",
    "two",
    "products",
    "phases",
)  # the unsplit step, and the orders of two nano-batches in `jaxflow.pipeline.handwritten`


@dataclasses.dataclass(frozen=True)
class SimulatedPlan:
    """A plan with its simulation, and the cost of a token by the problem's objective."""

    plan: Plan
    timeline: Timeline
    cost: float

    @property
    def step_s(self) -> float:
        return self.timeline.step_s


def simulated(plan: Plan, setting: SearchProblem) -> SimulatedPlan:
    """Return a plan with its simulation. Raises: ProfileError for an SM count without a measured time."""
    shares = setting.shares
    timeline = simulate(plan, setting.graph, shares, setting.load, device=setting.device, power=setting.power)
    return SimulatedPlan(plan, timeline, token_cost(plan, timeline, setting))


def sequential(model: ModelConfig, setting: SearchProblem) -> SimulatedPlan:
    """Return the sequential step. Raises: ProfileError for an op that the profile lacks."""
    (plan,) = known_plans(model, dataclasses.replace(setting, split=False), ("sequential",))
    return simulated(plan, setting)


def cuts_of(plan: Plan) -> tuple[int, ...]:
    """Return the cuts of a plan's tokens, rising."""
    return tuple(sorted({nano.start for nano in plan.nano_ops} - {0}))


def best_known(
    model: ModelConfig, setting: SearchProblem, orders: Collection[str], stop_s: float = float("inf")
) -> SimulatedPlan | None:
    """Return the order of the least cost, or None where none is allowed.

    stop_s: the time of the monotonic clock after which no further order begins.
    """
    best = None
    for plan in known_plans(model, setting, orders):
        if best is not None and time.monotonic() > stop_s:
            break
        with contextlib.suppress(ProfileError):  # an order on unmeasured SM counts is no candidate
            found = simulated(plan, setting)
            best = found if best is None or found.cost < best.cost else best
    return best


def known_plans(model: ModelConfig, setting: SearchProblem, orders: Collection[str]) -> Iterator[Plan]:
    """Yield the plans of these orders at every cut, with only the overlap that the problem allows.

    The order with phases is absent where all-reduces are swapped, which have no place in it, and for a
    mixture of experts, whose products stay on the main stream.
    """
    profile, graph, tokens = setting.shares.profile, setting.graph, setting.load.tokens
    tp, names = profile.tensor_parallel_size, [op.name for op in repeated_layer(graph)]
    swaps, experts = "attn_swap" in names, "expert_down" in names
    network, memory = (
        tp > 1 and "network" in setting.overlap,
        "memory" in setting.overlap and (tp == 1 or "network" in setting.overlap),
    )
    send = swapped if swaps else copied if setting.shares.copies else lambda plan: plan
    if "sequential" in orders and not setting.split:
        yield send(sequential_plan(model, tokens, tp, graph.scattered))
    for cut in (cuts[0] for cuts in cut_sets(setting) if len(cuts) == 1):
        two = send(two_nano_batch_plan(model, tokens, cut, tp, graph.scattered))
        if "two" in orders and (tp == 1 or network):
            yield two
        elif "two" in orders and not (swaps or graph.scattered):
            yield waited(two)
        if "products" in orders and network and not graph.scattered:
            yield send(gemms_in_two_plan(model, tokens, cut, tp))
        if "phases" in orders and memory and not (swaps or experts):
            for part in (sms for sms in setting.shares.offered_sms() if 2 * sms <= profile.total_sms):
                sms = part, profile.total_sms - part
                yield send(phased_plan(model, tokens, cut, tp, sms, graph.scattered))

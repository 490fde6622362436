"""Orders of nano-ops that are known before a search begins: those written by hand, wherever the step may be
cut.

A solver whose time is over may have less than what somebody wrote. So a search simulates these orders, too,
and keeps the best.
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
from search.nanobatch.problem import Setting
from search.nanobatch.simulate import Timeline, simulate
from search.profile.op_times import ProfileError

ORDERS = (
    "sequential",
    "two",
    "products",
    "phases",
)  # nothing cut, and what `jaxflow.pipeline.handwritten` has of two nano-batches


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A plan with what is simulated of it."""

    plan: Plan
    timeline: Timeline

    @property
    def step_s(self) -> float:
        return self.timeline.step_s


def simulated(plan: Plan, setting: Setting) -> Simulated:
    """Raises: ProfileError for SMs that an op was not timed on."""
    shares = setting.shares
    return Simulated(
        plan, simulate(plan, setting.graph, shares, setting.load, device=setting.device, power=setting.power)
    )


def sequential(model: ModelConfig, setting: Setting) -> Simulated:
    """The step that is not cut. Raises: ProfileError for an op that the profile lacks: without it nothing can
    be searched.
    """
    (plan,) = known_plans(model, dataclasses.replace(setting, split=False), ("sequential",))
    return simulated(plan, setting)


def cuts_of(plan: Plan) -> tuple[int, ...]:
    """Where its tokens are cut, rising."""
    return tuple(sorted({nano.start for nano in plan.nano_ops} - {0}))


def best_known(
    model: ModelConfig, setting: Setting, orders: Collection[str], stop_s: float = float("inf")
) -> Simulated | None:
    """The fastest of these orders; None where none is allowed. stop_s: when, by the monotonic clock, no
    further one is begun.
    """
    best = None
    for plan in known_plans(model, setting, orders):
        if best is not None and time.monotonic() > stop_s:
            break
        with contextlib.suppress(ProfileError):  # on shares that were not timed it is no candidate
            found = simulated(plan, setting)
            best = found if best is None or found.step_s < best.step_s else best
    return best


def known_plans(model: ModelConfig, setting: Setting, orders: Collection[str]) -> Iterator[Plan]:
    """Plans of these orders at every cut, in which only what the setting allows to overlap does.

    No phases where sums are swapped, for which they have no place, or of a mixture, whose experts' products
    stay on the main stream.
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
            for few in (sms for sms in setting.shares.offered_sms() if 2 * sms <= profile.total_sms):
                sms = few, profile.total_sms - few
                yield send(phased_plan(model, tokens, cut, tp, sms, graph.scattered))

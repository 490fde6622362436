"""The ops of a step outside its layers: embedding, head and sampling. No plan splits them."""

from jaxflow.model.composition import Composition
from jaxflow.model.cost import Device, op_times
from jaxflow.model.graph import Graph, Work
from search.profile.clock import shipped_card


def outside_s(graph: Graph, step: Composition, device: Device | None, dtype: str) -> float:
    """Return the seconds of the ops outside the layers, in sequence, and of the step itself.

    The result is 0 where the device's rates are unknown. On several devices two of these ops end with a
    collective, which does not overlap them.
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


def outside_work(graph: Graph, step: Composition) -> Work:
    return sum((op.work(step) for op in (*graph.before, *graph.after)), Work())

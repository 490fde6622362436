"""Watts over a layer's time from the energy model, because a GPU's sensor averages over tens of milliseconds.

The counted work of every kernel has joules at the measured clock. Concurrent kernels add up, on top of the
idle power. The model's constants are the minimum energy of sustained runs. Therefore the dynamic watts are
scaled until their mean over the layer equals the sensor's mean over many steps. For a sum over devices the
model counts only the memory traffic.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxflow.model.cost import FP8_PRODUCTS, find_device
from jaxflow.model.energy import Power, shipped_power
from jaxflow.model.graph import Work


@dataclasses.dataclass(frozen=True)
class Watts:
    """Watts over a layer.

    `values`: one per row of a plan's `shares`. `scale`: factor of the dynamic watts to match the sensor's
    mean; 1 without a sensor.
    """

    values: tuple[float, ...]
    scale: float
    cap: float


def modelled(result: Mapping[str, Any], plan: Mapping[str, Any]) -> Watts | None:
    """Return the watts of one plan of a `bench trace` report, or None for a device or dtype with unknown
    joules."""
    device = find_device(result["device"])
    power = shipped_power(device.name) if device else None
    engine = result["engine_config"]
    products = "float8_e4m3fn" if engine["quantization"] == "fp8" else engine["dtype"]
    if power is None or not {products, engine["dtype"]} <= set(power.flop):
        return None
    clock = 1e6 * plan["sm_clock_mhz"] / power.highest_clock_hz if plan["sm_clock_mhz"] else 1.0
    joules = [
        _joules(kernel, power, products if kernel["op"] in FP8_PRODUCTS else engine["dtype"], clock)
        for kernel in plan["kernels"]
    ]
    rows = plan["shares"]
    dynamic = [_at(row["start_us"], row["stop_us"], plan["kernels"], joules) for row in rows]
    whole = (
        sum(watts * (row["stop_us"] - row["start_us"]) for watts, row in zip(dynamic, rows, strict=True))
        / plan["layer_us"]
    )
    scale = (plan["watts"] - power.idle_w) / whole if plan["watts"] and whole else 1.0
    return Watts(tuple(power.idle_w + scale * watts for watts in dynamic), scale, power.cap_w)


def _joules(kernel: Mapping[str, Any], power: Power, dtype: str, clock: float) -> float:
    work = Work(flops=kernel["flops"], activation_bytes=kernel["memory_bytes"])
    return float(power.dynamic_j(work, dtype, clock))


def _at(low: float, high: float, kernels: Sequence[Mapping[str, Any]], joules: Sequence[float]) -> float:
    """Return the sum over the kernels that run from `low` to `high`, in microseconds."""
    running = zip(kernels, joules, strict=True)
    return sum(
        1e6 * j / k["us"]
        for k, j in running
        if k["us"] and k["start_us"] < high and k["start_us"] + k["us"] > low
    )

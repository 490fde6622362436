"""The fraction that a run reaches of the bound by compute, memory, network and energy, in addition to Eq.
5's.

The work of a step is linear in the counts of its composition. Therefore the total work of a run is its mean
step times its number of steps. The bound keeps the number of steps, because fewer steps would read the
weights less often.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.cost import find_device
from jaxflow.model.energy import bound, shipped_power
from jaxflow.model.graph import Widths, model_graph

_BYTES = {
    "float8_e4m3fn": 1.0,
    "int8": 1.0,
    "fp8": 1.0,
    "int4": 0.5625,
    "float32": 4.0,
}  # int4: including the scale and minimum of each group


def mean_step(run: Mapping[str, Any], steps: int) -> Composition:
    """Return the mean composition of a run's steps. run: `report.figures`.

    A report without decode key counts is treated as a run of equal mean-length requests. A request's first
    output token comes from the last row of its prompt, and its last output token is never computed.
    """
    requests, output = run["completed"], run["total_output_tokens"]
    computed = run["total_input_tokens"] - run["cached_input_tokens"]
    prompt = run["total_input_tokens"] / requests
    prefill, each = computed / steps, computed / requests
    pieces = max(1, math.ceil(prefill / each)) if computed else 0
    keys = run.get("mean_prompt_keys", prompt - (each - 1) / 2)  # mean keys of a prompt token
    chunks = ((prefill / pieces, keys - (prefill / pieces + 1) / 2),) * pieces if pieces else ()
    return Composition(
        (output - requests) / steps,
        run.get("mean_decode_keys", prompt + output / requests / 2),
        chunks,
        output / steps,
    )


def of_step(
    model: ModelConfig, engine: Mapping[str, Any], device_kind: str, step: Composition, tokens_per_s: float
) -> dict[str, Any]:
    """Return the fraction of the bound's rate that steps of this composition reach, and the limiting
    resource.

    engine: fields of a resolved `EngineConfig`. device_kind: the driver's device name. tokens_per_s: computed
    tokens per second. Both results are None for a device or a dtype with unknown joules.
    """
    narrow, tp = engine.get("quantization"), engine["tensor_parallel_size"]
    dtype = "float8_e4m3fn" if narrow == "fp8" else engine["dtype"]
    device = find_device(device_kind)
    power = shipped_power(device.name) if device else None
    if device is None or power is None or dtype not in power.flop:
        return {"fraction_of_bound": None, "binding": None}
    graph = model_graph(
        model,
        tp,
        Widths(weights=_BYTES.get(narrow or dtype, 2.0), kv=_BYTES.get(engine["kv_cache_dtype"], 2.0)),
    )
    limit = bound(graph.work(step), device, power, dtype)
    return {"fraction_of_bound": limit.longest_s * tokens_per_s / step.tokens, "binding": limit.binding}


def of_run(
    model: ModelConfig, engine: Mapping[str, Any], device_kind: str, run: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """Return `of_step` of a run, by its mean step. run: `report.figures` with at least one token."""
    step = mean_step(run, steps)
    return of_step(model, engine, device_kind, step, step.tokens * steps / run["duration"])


def of_report(model: ModelConfig, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return `of_step` of a written report, from its engine fields and its number of steps."""
    return of_run(model, report["engine_config"], report["device"], report, report["engine_stats"]["steps"])

"""How near a run came to what no engine can beat: the bound by compute, memory, network and energy, beside
Eq. 5's.

The work of a step is linear in the counts of its composition, so a run's mean step, as often as the run had
steps, is all of its work. The bound is of so many steps: fewer would read the weights less often.
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
}  # int4: with scale and minimum of its groups


def mean_step(run: Mapping[str, Any], steps: int) -> Composition:
    """The mean of a run's steps. run: `report.figures`; of reports without keys of decodes, those of requests
    that are all the mean one.

    A request's first output token comes from its prompt's last row, and its last is never computed.
    """
    requests, output = run["completed"], run["total_output_tokens"]
    computed = run["total_input_tokens"] - run["cached_input_tokens"]
    prompt = run["total_input_tokens"] / requests
    prefill, each = computed / steps, computed / requests
    pieces = max(1, math.ceil(prefill / each)) if computed else 0
    keys = run.get("mean_prompt_keys", prompt - (each - 1) / 2)  # of a prompt's token in the mean
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
    """The fraction of the bound's rate that steps like this one reached, and which resource binds.

    engine: fields of a resolved `EngineConfig`. device_kind: as a driver calls it. tokens_per_s: of those
    that are computed. Both are None of a device or a dtype whose joules are not known.
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
    """`of_step` of a whole run, by its mean step. run: `report.figures`, with a token."""
    step = mean_step(run, steps)
    return of_step(model, engine, device_kind, step, step.tokens * steps / run["duration"])


def of_report(model: ModelConfig, report: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a report that was written. Its engine's fields are there, and its steps."""
    return of_run(model, report["engine_config"], report["device"], report, report["engine_stats"]["steps"])

"""The fractions that a run reaches of NanoFlow's Eq. 5, and of the bound by
compute, memory, network and energy.

The work of a step is linear in the counts of its composition. Therefore the total work of a run is its mean
step times its number of steps. The bound keeps the number of steps, because fewer steps would read the
weights less often.
"""

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxflow.config import ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, dense_parameters, find_device, optimal_throughput
from jaxflow.model.energy import PeakRate, bound, known_rate, shipped_power
from jaxflow.model.graph import BFLOAT16, EXPERT_WIDTHS, Widths, Work, model_graph

_BYTES = {
    "float8_e4m3fn": 1.0,
    "int8": 1.0,
    "fp8": 1.0,
    "int4": 0.5625,
    "float32": 4.0,
}  # int4: including the scale and minimum of each group


@functools.cache
def peak_rate(dtype: str, device: str | None = None) -> PeakRate:
    """Return the peak rate of a device in the cost model's table, or of this machine's device for None.

    The rate is that of the energy bound, so that no bound exceeds the optimum. A device with unknown joules
    has its measured rate or the datasheet's. A rate of this machine that the table lacks is measured here.

    Raises: KeyError for a named device without a rate in the table.
    """
    known = DEVICES[device] if device else find_device(jax.devices()[0].device_kind)
    found = known_rate(known, dtype) if known else None
    if found is not None:
        return found
    if device:
        raise KeyError(f"no rate for {dtype} on {device}")
    return PeakRate(_measured_flops_per_s(dtype), f"{dtype} products of 1024, measured here")


def _measured_flops_per_s(dtype: str, size: int = 1024, seconds: float = 0.3) -> float:
    """Return the best rate of square products over several rounds."""
    x = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    product = jax.jit(lambda a: a @ a.T)
    product(x).block_until_ready()
    best, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        product(x).block_until_ready()
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def optimal(
    config: ModelConfig,
    prompt_tokens: float,
    output_tokens: float,
    *,
    dtype: str,
    tp: int = 1,
    device: str | None = None,
) -> dict[str, Any]:
    """Return the optimal throughput of a model on a device by NanoFlow's Eq. 5.

    prompt_tokens, output_tokens: mean or total counts; only their ratio matters.
    """
    best = peak_rate(jnp.dtype(dtype).name, device)
    parameters = dense_parameters(config, output_tokens / (prompt_tokens + output_tokens))
    return {
        "optimal_token_throughput": optimal_throughput(tp * best.flops_per_s, parameters),
        "optimal_flops_per_s": tp * best.flops_per_s,
        "optimal_flops_source": best.source,
        "optimal_parameters": parameters,
    }


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
    own = EXPERT_WIDTHS.get(narrow or "")
    widths = Widths(
        weights=own.weights if own else _BYTES.get(narrow or dtype, 2.0),
        kv=_BYTES.get(engine["kv_cache_dtype"], 2.0),
        expert_weights=(own or BFLOAT16).expert_weights,
    )
    work = device_work(model, tp, engine.get("data_parallel_size", 1), widths, step)
    limit = bound(work, device, power, dtype)
    # Every pipeline stage runs a step of its own at the same time.
    in_flight = engine.get("pipeline_parallel_size", 1)
    fraction = limit.longest_s * tokens_per_s / step.tokens / in_flight
    return {"fraction_of_bound": fraction, "binding": limit.binding}


def device_work(model: ModelConfig, tp: int, ranks: int, widths: Widths, step: Composition) -> Work:
    """Return the mean work of a device in a step of all data-parallel ranks.

    A rank computes its own tokens, and reads all weights but the experts. The experts of a layer serve the
    tokens of all ranks, and each device computes an equal part of them. The rows that ranks send for experts
    are not counted.
    """
    graph = model_graph(model, tp, widths)
    if ranks == 1:
        return graph.work(step)
    one = Composition(
        step.decode_tokens / ranks,
        step.decode_keys,
        tuple((n / ranks, start + (n - n / ranks) / 2) for n, start in step.chunks),  # of the same mean keys
        step.count("samples") / ranks,
    )
    own = sum((op.work(one) for op in graph.ops() if not op.experts), Work())
    shared = sum((op.work(step) for op in model_graph(model, 1, widths).ops() if op.experts), Work())
    return own + shared * (1 / (tp * ranks))


def of_run(
    model: ModelConfig, engine: Mapping[str, Any], device_kind: str, run: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """Return `of_step` of a run, by its mean step. run: `report.figures` with at least one token."""
    step = mean_step(run, steps)
    return of_step(model, engine, device_kind, step, step.tokens * steps / run["duration"])

"""The prediction of step times from the cost model, or from empty steps on a device that the model lacks."""

import itertools

import jax

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.rehearsal import rehearse
from jaxflow.kv.tiers.start import best_seconds
from jaxflow.model.composition import Composition
from jaxflow.model.cost import Rates, find_device, step_timer
from jaxflow.model.graph import BFLOAT16, EXPERT_WIDTHS, Widths, model_graph
from jaxflow.scheduler.step_time import StepTime

FEW_KEYS = 64  # layers with a window see all of so few keys, so the time of a key is an upper bound


def predict_step_time(config: EngineConfig, model: ModelConfig, executor: Executor) -> StepTime:
    """Return the step times of a warm executor. config: resolved."""
    device = find_device(jax.devices()[0].device_kind)
    buckets = sorted(executor.layouts)
    if device is None:
        measured = [best_seconds(lambda b=b: rehearse(executor, executor.layouts[b][0])) / 2 for b in buckets]
        return StepTime(buckets, rising(measured), 0.0, 0.0)
    dtype = "float8_e4m3fn" if config.quantization == "fp8" else "bfloat16"
    widths = EXPERT_WIDTHS.get(config.quantization or "", BFLOAT16)
    by_head = executor.programs.context.kernels.latent_up_chunk_attention is not None
    tp = config.tensor_parallel_size
    return roofline_step_time(model, tp, device.rates, buckets, dtype, widths, by_head)


def roofline_step_time(
    model: ModelConfig,
    tp: int,
    rates: Rates,
    buckets: list[int],
    dtype: str = "bfloat16",
    widths: Widths = BFLOAT16,
    by_head: bool = False,
) -> StepTime:
    """Return the step times of the cost model. `dtype`: of the GEMMs, see `jaxflow.model.cost.op_times`.

    by_head: whether long chunks of latent attention run with keys and values by head.
    """
    timer = step_timer(model_graph(model, tp, widths, by_head=by_head), rates, dtype)

    def seconds(step: Composition) -> float:
        return timer(step).sequential_s

    empty = [seconds(Composition(decode_tokens=tokens)) for tokens in buckets]
    rows = FEW_KEYS
    idle = seconds(Composition(decode_tokens=rows))
    key_s = (seconds(Composition(decode_tokens=rows, decode_keys=FEW_KEYS)) - idle) / (rows * FEW_KEYS)
    # A short chunk of latent attention is bound by the bytes of its queries, and by making its keys.
    long = rows if model.latent is None else max(buckets)
    chunk = Composition(chunks=((long, 0),), samples=long)
    pair_s = (seconds(chunk) - seconds(Composition(decode_tokens=long))) / chunk.count("chunk_pairs")
    return StepTime(buckets, rising(empty), max(0.0, key_s), max(0.0, pair_s))


def rising(seconds: list[float]) -> list[float]:
    """Return the running maximum: a larger step is never predicted to be faster."""
    return list(itertools.accumulate(seconds, max))

"""Compute, memory, network and energy of a model's average step, what binds it, and the optimal throughput.

  python -m search cost --model llama-3.1-8b --device H200 --prompt_tokens 1024 --output_tokens 512

Times are lower bounds: ops at the datasheet's rates, joules at the lowest that any implementation was measured at (where the
device's were measured). The optimal throughput of Eq. 5 counts dense products alone, at the best measured rate.
"""

import dataclasses
from typing import Any

from absl import flags

from jaxflow.config import ConfigError
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, dense_parameters, optimal_throughput
from jaxflow.model.energy import Bound, bound, shipped_power
from jaxflow.model.graph import Widths, Work, model_graph

BYTES = {"bfloat16": 2.0, "float8_e4m3fn": 1.0}
WIDTH = 96


def define_flags() -> None:
    flags.DEFINE_string("model", "llama-3.1-8b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_enum("device", "H200", sorted(DEVICES), "Which GPU.")
    flags.DEFINE_integer("gpus", 1, "GPUs that share the model (tensor parallel).", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", sorted(BYTES), "Of weights and products.")
    flags.DEFINE_enum("kv_cache_dtype", "bfloat16", sorted(BYTES), "Of the cache.")
    flags.DEFINE_integer("tokens", 2048, "Tokens of a step, prefill and decode together.", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 1024, "Mean prompt.", lower_bound=1)
    flags.DEFINE_integer("output_tokens", 512, "Mean output.", lower_bound=0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One op's share of a step, on one GPU, over all layers. `bound` is None where the device's joules are not known."""

    name: str
    work: Work
    bound: Bound | None


def rows(model: Any, gpus: int, device_name: str, dtype: str, kv_dtype: str, step: Composition) -> list[Row]:
    """A row for each op of the model, in order of the step, and one for their sum."""
    device, power = DEVICES[device_name], shipped_power(device_name)
    works: dict[str, Work] = {}
    for op in model_graph(model, gpus, Widths(weights=BYTES[dtype], kv=BYTES[kv_dtype])).ops():
        works[op.name] = works.get(op.name, Work()) + op.work(step)
    works["total"] = sum(works.values(), Work())
    return [Row(name, work, None if power is None else bound(work, device, power, dtype)) for name, work in works.items()]


def run() -> None:
    """The command."""
    f = flags.FLAGS
    model, device = open_checkpoint(f.model, load_format="dummy").model_config, DEVICES[f.device]
    if f.dtype not in device.datasheet.flops_per_s:
        raise ConfigError("dtype", f.dtype, f"what a {f.device} multiplies: {', '.join(device.datasheet.flops_per_s)}")
    step = Composition.steady_state(f.tokens, f.prompt_tokens, f.output_tokens)
    title = f" {f.model} on {f.gpus} x {f.device}, {f.tokens} tokens a step, {f.prompt_tokens} in / {f.output_tokens} out "
    print(title.center(WIDTH, "="))
    print(f"{'op':18}{'GFLOP':>11}{'GB moved':>11}{'GB sent':>10}{'compute':>11}{'memory':>10}{'network':>10}{'energy':>10}  ms")
    found = rows(model, f.gpus, f.device, f.dtype, f.kv_cache_dtype, step)
    for row in found:
        print(_line(row, device.datasheet, f.dtype))
    parameters = dense_parameters(model, sampled=f.output_tokens / (f.prompt_tokens + f.output_tokens))
    best = optimal_throughput(device.rates.flops_per_s[f.dtype], parameters)
    print(f"Optimal throughput, Eq. 5 (tokens/s/GPU): {best:.0f}")
    total = found[-1].bound
    if total is None:
        print(f"Energy: nobody has measured the joules of a {f.device} here.")
    else:
        print(f"Bound by all four resources (tokens/s/GPU): {f.tokens / f.gpus / total.longest_s:.0f}")
        print(f"Binding: {total.binding}; the best clock for the step's joules is {total.clock_hz / 1e6:.0f} MHz")


def _line(row: Row, rates: Any, dtype: str) -> str:
    work, times = row.work, row.bound
    compute = work.flops / rates.flops_per_s[dtype] if times is None else times.compute_s
    seconds = [compute, work.memory_bytes / rates.memory_bytes_per_s, work.network_bytes / rates.network_bytes_per_s]
    cells = "".join(f"{1e3 * value:>{width}.3f}" for value, width in zip(seconds, (11, 10, 10), strict=True))
    energy = "-" if times is None else f"{1e3 * times.energy_s:.3f}"
    return f"{row.name:18}{work.flops / 1e9:>11.1f}{work.memory_bytes / 1e9:>11.2f}{work.network_bytes / 1e9:>10.2f}{cells}{energy:>10}"

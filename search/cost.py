"""Print a step's compute, memory, network and energy, what binds it, and the optimal throughput.

  python -m search cost --model llama-3.1-8b --device H200 --prompt_tokens 1024 --output_tokens 512

All times are lower bounds. Ops run at the datasheet's rates. Joules are the least that sustained runs took,
on devices with measured joules. The optimal throughput of Eq. 5 counts dense products only, at the rate that
the power cap allows; without measured joules, at the measured or the datasheet's rate. The largest
batch follows NanoFlow's classification (Eq. 1, 2 and 4; docs/cost-model.md): requests fill the
memory that the weights leave.
"""

import dataclasses

from absl import flags

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, Device, dense_parameters, optimal_throughput, work_times
from jaxflow.model.energy import Bound, Power, bound, known_rate, shipped_power
from jaxflow.model.graph import Widths, Work, model_graph
from search.regimes import largest_batch, weight_bytes

BYTES = {"bfloat16": 2.0, "float8_e4m3fn": 1.0}
WIDTH = 107


def define_flags() -> None:
    flags.DEFINE_string("model", "llama-3.1-8b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_enum("device", "H200", sorted(DEVICES), "The GPU whose rates count.")
    flags.DEFINE_integer("gpus", 1, "GPUs that share the model (tensor parallel).", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", sorted(BYTES), "The dtype of weights and products.")
    flags.DEFINE_enum("kv_cache_dtype", "bfloat16", sorted(BYTES), "The dtype of the KV cache.")
    flags.DEFINE_integer("tokens", 2048, "Tokens of a step: prefill plus decode.", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 1024, "Mean prompt length.", lower_bound=1)
    flags.DEFINE_integer("output_tokens", 512, "Mean output length.", lower_bound=0)


def check_gpus(name: str, model: ModelConfig, gpus: int) -> None:
    """Raises: ConfigError for a number of GPUs that does not divide the model's heads."""
    heads = model.num_heads
    if heads % gpus:
        raise ConfigError("gpus", gpus, f"a divisor of {name}'s {heads} heads")
    for kv_heads, _ in model.head_shapes:
        if kv_heads % gpus and gpus % kv_heads:
            raise ConfigError("gpus", gpus, f"a divisor or a multiple of {name}'s {kv_heads} key/value heads")


def check_lengths(name: str, model: ModelConfig, prompt: int, output: int) -> None:
    """Raises: ConfigError for a prompt and output, in tokens, that together exceed the model's context."""
    if prompt + output > model.max_position:
        accepted = f"with the output's {output} at most {model.max_position}, which {name} was made for"
        raise ConfigError("prompt_tokens", prompt, accepted)


@dataclasses.dataclass(frozen=True)
class OpBound:
    """The share of one op in a step: on one GPU, over all layers.

    The energy bound is 0 without measured joules.
    """

    name: str
    work: Work
    bound: Bound


def rows(
    model: ModelConfig, gpus: int, device_name: str, dtype: str, kv_dtype: str, step: Composition
) -> list[OpBound]:
    """Return one row for each op, in the order of the step, and a last row for their sum."""
    device, power = DEVICES[device_name], shipped_power(device_name)
    works: dict[str, Work] = {}
    for op in model_graph(model, gpus, Widths(weights=BYTES[dtype], kv=BYTES[kv_dtype])).ops():
        works[op.name] = works.get(op.name, Work()) + op.work(step)
    works["total"] = sum(works.values(), Work())
    return [OpBound(name, work, _bound(work, device, power, dtype)) for name, work in works.items()]


def _bound(work: Work, device: Device, power: Power | None, dtype: str) -> Bound:
    if power is not None:
        return bound(work, device, power, dtype)
    times = work_times(work, device.datasheet, dtype)
    return Bound(times.compute_s, times.memory_s, times.network_s, 0.0, 0.0)


def run() -> None:
    """Run the command."""
    f = flags.FLAGS
    model, device = open_checkpoint(f.model, load_format="dummy").model_config, DEVICES[f.device]
    if f.dtype not in device.datasheet.flops_per_s:
        raise ConfigError(
            "dtype", f.dtype, f"what a {f.device} multiplies: {', '.join(device.datasheet.flops_per_s)}"
        )
    check_gpus(f.model, model, f.gpus)
    check_lengths(f.model, model, f.prompt_tokens, f.output_tokens)
    step = Composition.steady_state(f.tokens, f.prompt_tokens, f.output_tokens)
    title = (
        f" {f.model} on {f.gpus} x {f.device}, {f.tokens} tokens a step, {f.prompt_tokens} in / "
        f"{f.output_tokens} out "
    )
    print(title.center(WIDTH, "="))
    head = f"{'a GPU, all layers':18}{'GFLOP':>11}{'GB moved':>11}{'GB sent':>10}"
    print(f"{head}{'compute':>11}{'memory':>10}{'network':>10}{'energy':>10}  ms  bound by")
    found = rows(model, f.gpus, f.device, f.dtype, f.kv_cache_dtype, step)
    for row in found:
        if row.name == "total":
            print("-" * WIDTH)
        print(_line(row))
    total, ops = found[-1].bound, found[:-1]
    known = shipped_power(f.device) is not None
    print(
        (
            f"One op after the other takes {1e3 * sum(row.bound.longest_s for row in ops):.1f} ms at "
            f"least, all resources at once"
        ),
        end=" ",
    )
    print(f"{1e3 * total.longest_s:.1f} ms: {total.binding} binds.")
    if known:
        print(
            f"Binding: {total.binding}; the best clock for the step's joules is "
            f"{total.clock_hz / 1e6:.0f} MHz"
        )
    else:
        print(f"Energy: nobody has measured the joules of a {f.device} here.")
    _print_throughput(model, device, total)


def _print_throughput(model: ModelConfig, device: Device, total: Bound) -> None:
    f = flags.FLAGS
    parameters = dense_parameters(model, sampled=f.output_tokens / (f.prompt_tokens + f.output_tokens))
    rate = known_rate(device, f.dtype)
    if rate is not None:
        best = optimal_throughput(rate.flops_per_s, parameters)
        print(
            f"Optimal throughput, Eq. 5 (tokens/s/GPU): {best:.0f}, of dense products alone ({rate.source})"
        )
    resources, joules = (
        ("four resources", " and the least joules") if total.energy_s else ("compute, memory and network", "")
    )
    print(
        f"Bound by {resources} (tokens/s/GPU): {f.tokens / f.gpus / total.longest_s:.0f}, at the "
        f"datasheet's rates{joules}"
    )
    widths = Widths(weights=BYTES[f.dtype], kv=BYTES[f.kv_cache_dtype])
    lengths = f.gpus, f.prompt_tokens, f.output_tokens
    batch = largest_batch(
        model, device.datasheet, device.memory_bytes, *lengths, widths=widths, dtype=f.dtype
    )
    if batch is not None:
        print(
            f"Largest batch: {batch.tokens:.0f} tokens, of which {batch.requests:.0f} decode; T_mem / "
            "T_compute (Eq. 4): "
            f"{1e3 * batch.memory_s:.1f} / {1e3 * batch.compute_s:.1f} ms = {batch.ratio:.2f}"
        )
    elif weight_bytes(model, widths) > f.gpus * device.memory_bytes:
        need = weight_bytes(model, widths) / device.memory_bytes
        print(f"Largest batch: none, the weights alone fill {need:.1f} x {f.device}")


def _line(row: OpBound) -> str:
    work, times = row.work, row.bound
    seconds = (times.compute_s, times.memory_s, times.network_s)
    cells = "".join(f"{1e3 * value:>{width}.3f}" for value, width in zip(seconds, (11, 10, 10), strict=True))
    energy = f"{1e3 * times.energy_s:.3f}" if times.clock_hz else "-"
    amounts = f"{work.flops / 1e9:>11.1f}{work.memory_bytes / 1e9:>11.2f}{work.network_bytes / 1e9:>10.2f}"
    return f"{row.name:18}{amounts}{cells}{energy:>10}      {times.binding}"

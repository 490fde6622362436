"""Find where to keep a model that exceeds the device: FlexGen's policy search over device, host and disk
(§4.3).

  python -m search placement --model opt-30b --gpu_mem 16 --cpu_mem 100 --disk 500 --output policy.json

Prints the policy, its predicted throughput and what binds it, the bound by the link between host and device,
and rivals: the paper's ablations, hand-written policies, and each tier by itself. `--output` receives the
policy as JSON. `--front` receives latency against throughput over all blocks, as JSON with a PNG.
"""

import dataclasses
import math

from absl import flags, logging

from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.flexgen.policy import SCHEDULES, Policy, Shares, save_policy
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import Prediction, predict
from search.placement.front import front, pareto, save_front
from search.placement.machine_curves import Machine, load_machine
from search.placement.rivals import Rival, rivals
from search.placement.solver import (
    GIGA,
    GPU_BATCH_SIZES,
    NUM_GPU_BATCHES,
    TIERS,
    PlacementError,
    PlacementOptions,
    TierMemory,
    candidates,
    link_bound,
    search,
)
from search.placement.workload import PlacementWorkload, workload

WIDTH = 96
SEARCHED_SCHEDULES = {"auto": SCHEDULES, **{name: (name,) for name in SCHEDULES}}
HOST_ATTENTION = {"auto": None, "on": True, "off": False}


def define_flags() -> None:
    define_workload_flags()
    flags.DEFINE_string("output", None, "File for the policy that was found (JSON).")
    flags.DEFINE_string(
        "front",
        None,
        "JSON file for latency against throughput; a PNG chart of the same name is written next to it.",
    )


def define_workload_flags() -> None:
    """Define the flags of the model, the machine, its memories, the requests and the allowed policies."""
    flags.DEFINE_string("model", "opt-30b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_string(
        "machine",
        "h200",
        "Machine whose rates and links count: a file of `python -m search machine`, or a shipped name.",
    )
    flags.DEFINE_float("gpu_mem", 16.0, "GB of the device that the run may use.", lower_bound=0.0)
    flags.DEFINE_float("cpu_mem", 100.0, "GB of host memory that the run may use.", lower_bound=0.0)
    flags.DEFINE_float("disk", 0.0, "GB of disk space that the run may use.", lower_bound=0.0)
    flags.DEFINE_integer("prompt_tokens", 512, "Prompt tokens of each sequence, padded.", lower_bound=1)
    flags.DEFINE_integer("output_tokens", 32, "Output tokens of each sequence.", lower_bound=1)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "bfloat16", "float32"],
        "What weights and activations of 16 bits are; auto: bfloat16.",
    )
    flags.DEFINE_integer("block_size", 64, "Tokens in a page of KV.", lower_bound=1)
    flags.DEFINE_enum(
        "weight_bits",
        "16",
        ["16", "4"],
        "Bits of a weight. 4: groups of 64 weights have a scale and a minimum.",
    )
    flags.DEFINE_enum(
        "kv_bits", "16", ["16", "4"], "Bits of a number of the KV cache. 4 excludes attention on the host."
    )
    flags.DEFINE_enum(
        "host_attention",
        "auto",
        sorted(HOST_ATTENTION),
        "Whether a decode attends on the host to what is not on the device.",
    )
    flags.DEFINE_float(
        "value_top_k_percent",
        100.0,
        "Percentage of the cached value vectors that a decode reads: those with the largest softmax weights "
        "(FlexGen §5).",
    )
    flags.DEFINE_enum(
        "schedule",
        "auto",
        sorted(SEARCHED_SCHEDULES),
        "Order of a block's steps; auto: the one with the higher predicted throughput.",
    )
    flags.DEFINE_integer(
        "pipeline_parallel_size",
        1,
        "Devices, each with its part of the layers and with the given memories (§4.4).",
        lower_bound=1,
    )
    flags.DEFINE_float("max_latency_s", math.inf, "The longest allowed time of a block, in seconds.")
    flags.DEFINE_integer("percent_step", None, "Shares are multiples of so many percent; unset: any share.")
    flags.DEFINE_list(
        "gpu_batch_sizes",
        [str(size) for size in GPU_BATCH_SIZES],
        "Numbers of sequences of a batch that the search tries.",
    )
    flags.DEFINE_list(
        "num_gpu_batches",
        [str(number) for number in NUM_GPU_BATCHES],
        "Numbers of batches of a block that the search tries.",
    )


def run() -> None:
    """Run the command."""
    f = flags.FLAGS
    config = open_checkpoint(f.model, load_format="dummy").model_config
    if f.prompt_tokens + f.output_tokens > config.max_position:
        accepted = (
            f"prompt_tokens + output_tokens of at most {config.max_position}, what {f.model} was made for"
        )
        raise ConfigError("prompt_tokens", f.prompt_tokens, accepted)
    if f.pipeline_parallel_size > config.num_layers:
        accepted = f"at most the {config.num_layers} layers of {f.model}"
        raise ConfigError("pipeline_parallel_size", f.pipeline_parallel_size, accepted)
    if f.pipeline_parallel_size > 1 and f.schedule == "diagonal":
        raise ConfigError("schedule", f.schedule, "zigzag or auto, for several stages")
    machine, work = load_machine(f.machine), workload_from_flags(f.model, config, f.dtype)
    memory, options = memory_from_flags(machine), options_from_flags()
    check_outputs("output", "front")
    if f.front and f.front.lower().endswith(".png"):
        raise ConfigError(
            "front", f.front, "a file for JSON: a PNG chart of the same name is written next to it"
        )
    policy = search(work, machine, memory, options)
    print(f" {f.model} on {machine.name}, {f.prompt_tokens} in / {f.output_tokens} out ".center(WIDTH, "="))
    print(*describe(work, machine, memory, options, policy), sep="\n")
    print(
        "-" * WIDTH,
        f"{'policy':20}{'batch':>9}{'weights':>13}{'KV':>13}{'activations':>14}{'s/block':>11}{'tok/s':>10}",
        sep="\n",
    )
    print(*map(_line, rivals(work, machine, memory, options, policy)), sep="\n")
    if policy.pipeline_parallel_size > 1:
        print("-" * WIDTH, *scaling(work, machine, memory, options, policy), sep="\n")
    if f.output:
        save_policy(policy, f.output)
    if f.front:
        found = candidates(work, machine, memory, options)
        save_front(front(f.model, machine.name, found), f.front)
        logging.info("%d blocks fit, %d are on the front", len(found), len(pareto(found)))


def workload_from_flags(name: str, config: ModelConfig, dtype: str) -> PlacementWorkload:
    """Return the workload of a model that runs in `dtype`."""
    f = flags.FLAGS
    wide_bytes = 4.0 if dtype == "float32" else 2.0
    return workload(
        name, config, f.prompt_tokens, f.output_tokens, wide_bytes=wide_bytes, page_size=f.block_size
    )


def memory_from_flags(machine: Machine) -> TierMemory:
    """Return the memory that a run on a machine may use."""
    return TierMemory(*(getattr(flags.FLAGS, tier) * GIGA for tier in TIERS), pools=machine.has_pools)


def options_from_flags() -> PlacementOptions:
    """Return the allowed policies. Raises: PlacementError."""
    f = flags.FLAGS
    return PlacementOptions(
        weight_bits=int(f.weight_bits),
        kv_bits=int(f.kv_bits),
        host_attention=HOST_ATTENTION[f.host_attention],
        value_top_k_percent=f.value_top_k_percent,
        schedules=("zigzag",) if f.pipeline_parallel_size > 1 else SEARCHED_SCHEDULES[f.schedule],
        pipeline_parallel_size=f.pipeline_parallel_size,
        max_latency_s=f.max_latency_s,
        percent_step=f.percent_step,
        gpu_batch_sizes=_numbers("gpu_batch_sizes"),
        num_gpu_batches=_numbers("num_gpu_batches"),
    )


def describe(
    work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions, policy: Policy
) -> list[str]:
    """Return the lines that describe a policy."""
    made = predict(work, machine, policy)
    bound = link_bound(work, machine, memory, options)
    lines = [
        f"Block: {policy.num_gpu_batches} batches of {policy.gpu_batch_size} sequences; {_widths(policy)}"
    ]
    for name in ("weights", "kv", "activations"):
        shares = getattr(policy, name)
        lines.append(
            f"{name:12} device {shares.device:6.2f} %   host {shares.host:6.2f} %   disk {shares.disk:6.2f} %"
        )
    lines.append(f"Predicted: {made.tokens_per_s:.2f} generated tokens/s, a block in {made.latency_s:.1f} s")
    if policy.schedule == "diagonal" and "zigzag" in options.schedules:
        zigzag = dataclasses.replace(options, schedules=("zigzag",))
        best = max((one.tokens_per_s for one in candidates(work, machine, memory, zigzag)), default=0.0)
        lines.append(f"Schedule: diagonal, in a long run; the best zig-zag block: {best:.2f} tokens/s")
    lines.append(f"Binding: {_binding(made)}; full: {_full(memory, made)}")
    lines.append(
        f"Bound by the link's bandwidth: {made.link_tokens_per_s:.2f} tokens/s for this policy, {bound:.2f} "
        "for any; "
        f"busy {made.link_s / made.latency_s:.0%} of the time"
    )
    return lines


# FlexGen's Table 3: tokens/s with and without prompts, on 1 and 4 machines with a T4, 512 in and 32 out
TABLE_3 = {
    "opt-6.7b": {1: (25.26, 38.28), 4: (201.12, 764.65)},
    "opt-30b": {1: (7.32, 11.52), 4: (23.61, 48.94)},
    "opt-175b": {1: (0.69, 0.83), 4: (2.33, 3.86)},
}


def scaling(
    work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions, policy: Policy
) -> list[str]:
    """Return the lines of the found policy beside the best policy of one device, as in FlexGen's Table 3."""
    stages = policy.pipeline_parallel_size
    alone = search(work, machine, memory, dataclasses.replace(options, pipeline_parallel_size=1))
    rows = []
    for one in (alone, policy):
        made = predict(work, machine, one)
        rows.append((made.tokens_per_s, made.decode_tokens_per_s(work.output_tokens)))
    paper = TABLE_3.get(policy.model, {})
    known = stages in paper and (work.prompt_tokens, work.output_tokens) == (512, 32)
    lines = [f"{'devices':12}{'block':>9}{'tokens/s':>12}{'decoding':>12}{'paper, on T4s (Table 3)':>28}"]
    for devices, one, row in zip((1, stages), (alone, policy), rows, strict=True):
        theirs = "{:.2f}, {:.2f}".format(*paper[devices]) if known else ""
        lines.append(f"{devices:<12}{one.block_size:>9}{row[0]:>12.2f}{row[1]:>12.2f}{theirs:>28}")
    ratios = [many / few for few, many in zip(*rows, strict=True)]
    theirs = (
        "{:.1f}x, {:.1f}x".format(*(b / a for a, b in zip(paper[1], paper[stages], strict=True)))
        if known
        else ""
    )
    lines.append(f"{'times':12}{'':9}{ratios[0]:>11.1f}x{ratios[1]:>11.1f}x{theirs:>28}")
    return lines


def _binding(made: Prediction) -> str:
    terms = zip(("prefill", "decode"), made.binding, (made.prefill, made.decode), strict=True)
    return ", ".join(
        f"{phase} by {term} ({1e3 * found[term]:.2f} ms a layer)" for phase, term, found in terms
    )


def _full(memory: TierMemory, made: Prediction) -> str:
    used = zip(TIERS, made.memory_bytes, memory.usable, strict=True)
    return (
        ", ".join(tier for tier, bytes_used, capacity in used if capacity and bytes_used > 0.999 * capacity)
        or "no memory"
    )


def _widths(policy: Policy) -> str:
    where = "host, to what is there" if policy.host_attention else "device"
    rows = f", to {policy.value_top_k_percent:g} % of the V rows" if policy.sparse_values else ""
    return (
        f"weights of {policy.weight_bits} bits, KV of {policy.kv_bits}; a decode attends on the {where}{rows}"
    )


def _line(row: Rival) -> str:
    if row.policy is None or row.prediction is None:
        return f"{row.name:20}{'does not fit':>9}"
    batch = f"{row.policy.gpu_batch_size}x{row.policy.num_gpu_batches}"
    cells = [_short(shares) for shares in (row.policy.weights, row.policy.kv, row.policy.activations)]
    figures = f"{row.prediction.latency_s:>11.1f}{row.prediction.tokens_per_s:>10.2f}"
    return f"{row.name:20}{batch:>9}{cells[0]:>13}{cells[1]:>13}{cells[2]:>14}{figures}"


def _short(shares: Shares) -> str:
    return "/".join(f"{share:.0f}" for share in shares)


def _numbers(flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in getattr(flags.FLAGS, flag))
    except ValueError as error:
        raise PlacementError(
            f"{flag}={','.join(getattr(flags.FLAGS, flag))}: numbers between commas"
        ) from error

"""Latency and throughput of an offloaded model for growing block sizes, as in FlexGen's Figure 1.

  python -m jaxflow.bench offload --model opt-30b --load_format dummy --policy policy.json
      --gpu_memory_limit 16 --blocks 8x1,16x1,32x2,48x3

The policy sets the placement percentages. Each block size is started, warmed up and run once. The Pareto
front holds the sizes that no other size beats in both latency and throughput.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from absl import flags

from jaxflow.bench.report import machine, plot
from jaxflow.cli.engine_flags import define_engine_flags, engine_config_from_flags
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.flexgen import config as options
from jaxflow.flexgen.config import OffloadConfig, offload_from_flags, random_prompts
from jaxflow.flexgen.report import measure_links, report
from jaxflow.llm import LLM
from jaxflow.request import SamplingParams

Size = tuple[int, int]  # (sequences per batch, batches)


def define_flags() -> None:
    define_engine_flags()
    options.define_flags()
    flags.DEFINE_list(
        "blocks", ["1x1", "4x1", "4x2", "8x4"], "Block sizes to run, each gpu_batch_size x num_gpu_batches."
    )
    flags.DEFINE_string("output_json", None, "Report file (JSON).")
    flags.DEFINE_string("output_png", None, "Chart file (.png, .svg, .pdf).")


def sweep(
    config: EngineConfig, offload: OffloadConfig, blocks: Iterable[Size], *, progress: bool = False
) -> dict[str, Any]:
    """Run a block of each size, leaving out sizes that do not fit. Raises: ConfigError if no size fits."""
    points, refused = [], None
    for size, batches in blocks:
        policy = msgspec.structs.replace(offload.policy, gpu_batch_size=size, num_gpu_batches=batches)
        try:
            point = _run(config, dataclasses.replace(offload, policy=policy), progress)
        except ConfigError as error:
            refused = error
            continue
        points.append(point)
    if not points:
        raise refused or ConfigError("blocks", "", "at least one")
    _mark_front(points)
    policy = offload.policy
    about = {
        "model": policy.model,
        "prompt_tokens": policy.prompt_tokens,
        "output_tokens": policy.output_tokens,
    }
    return {
        "command_name": "offload",
        "kind": "blocks",
        **about,
        "policy": msgspec.to_builtins(policy),
        "points": points,
        **machine.describe(),
    }


def _run(config: EngineConfig, offload: OffloadConfig, progress: bool) -> dict[str, Any]:
    policy = offload.policy
    with LLM(offload=offload, progress=progress, **dataclasses.asdict(config)) as llm:
        assert llm.runtime is not None
        prompts = random_prompts(
            policy.block_size, policy.prompt_tokens, llm.model_config.vocab_size, config.seed
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=policy.output_tokens, ignore_eos=True, seed=0)
        llm.generate(prompts, sampling, use_tqdm=progress)
        found = report(llm.runtime, measure_links(llm.runtime.devices, 16))
    keys = (
        "effective_block_size",
        "latency_s",
        "tokens_per_s",
        "decode_tokens_per_s",
        "prefill_s",
        "decode_s",
        "link",
    )
    return {"gpu_batch_size": policy.gpu_batch_size, "num_gpu_batches": policy.num_gpu_batches} | {
        key: found[key] for key in keys
    }


def _mark_front(points: Sequence[dict[str, Any]]) -> None:
    """Set `best` of each point: True if no other point has at least its throughput in less time."""
    for point in points:
        rivals = [other for other in points if other["latency_s"] < point["latency_s"]]
        point["best"] = all(other["tokens_per_s"] < point["tokens_per_s"] for other in rivals)


def parse_blocks(words: Iterable[str]) -> list[Size]:
    """Return the block sizes of `words`. Raises: ConfigError."""
    try:
        found = [tuple(int(part) for part in word.split("x")) for word in words]
        if not found or any(len(size) != 2 or min(size) < 1 for size in found):
            raise ValueError
    except ValueError:
        raise ConfigError(
            "blocks",
            ",".join(words),
            "comma-separated sizes gpu_batch_size x num_gpu_batches, for example 48x3",
        ) from None
    return [(size[0], size[1]) for size in found]


def table(result: dict[str, Any]) -> list[str]:
    """Return the report as lines of text."""
    lines = [f"{'block':>10}{'latency (s)':>14}{'tokens/s':>12}{'link busy':>12}  front"]
    for point in result["points"]:
        block = f"{point['gpu_batch_size']}x{point['num_gpu_batches']}"
        busy = f"{point['link']['busy_share']:.0%}"
        lines.append(
            f"{block:>10}{point['latency_s']:>14.3f}{point['tokens_per_s']:>12.2f}{busy:>12}  "
            f"{'*' if point['best'] else ''}"
        )
    return lines


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, PolicyError, CheckpointError, DiskError."""
    f = flags.FLAGS
    config = engine_config_from_flags()
    result = sweep(config, offload_from_flags(config.model), parse_blocks(f.blocks), progress=True)
    print(*table(result), sep="\n")
    if f.output_png:
        plot.save(result, f.output_png)
    return result

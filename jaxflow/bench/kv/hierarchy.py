"""Savings of each KV tier for conversations, and its cost for requests without shared prefixes (NanoFlow
§4.2.2, §6.4).

  python -m jaxflow.bench hierarchy --model llama-3.1-8b --load_format dummy --rounds 5 --num_requests 256
      --request_rate 4 --kv_offloading_size 64 --kv_disk_path /mnt/nvme --kv_disk_size 500

The same conversations run on a sequence of engines. The first engine has all tiers. The second is a new
engine that starts with the first engine's disk contents. Each later engine has one tier fewer, and the last
has no prefix reuse. All engines share the same weights, cache and compiled programs.

Afterwards each engine runs requests without common prefixes, all at once, several times. The paper reports a
throughput loss of 3 % from offloading for such requests. A tier without its flag is left out. From a Mooncake
trace the command takes the first requests in order, at random arrival times.
"""

import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from jaxflow.bench.engine import throughput
from jaxflow.bench.report import machine, reuse
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.conversations import Conversation
from jaxflow.bench.workload.lengths import Item
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.executor import Executor
from jaxflow.engine.heap import freeze_heap
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.llm import LLM

COLUMNS = (
    f"{'lowest tier':<16}{'1st ms':>11}{'later ms':>11}{'saved':>9}{'device':>9}{'host':>9}{'disk':>9}"
    f"{'tok/s':>11}{'no reuse':>11}"
)


_NO_DISK = {"kv_disk_path": None, "kv_disk_size": None}
_DEVICE = {"enable_prefix_caching": True, "kv_offloading_size": 0.0, **_NO_DISK}
LOWEST_TIERS: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "recompute": lambda config: dataclasses.replace(config, **{**_DEVICE, "enable_prefix_caching": False}),
    "device": lambda config: dataclasses.replace(config, **_DEVICE),
    "host": lambda config: dataclasses.replace(config, enable_prefix_caching=True, **_NO_DISK),
    "disk": lambda config: dataclasses.replace(config, enable_prefix_caching=True),
    "disk, restarted": lambda config: dataclasses.replace(config, enable_prefix_caching=True),
}
ORDER = (
    "disk",
    "disk, restarted",
    "host",
    "device",
    "recompute",
)  # first, because the other engines use its executor


def define_flags() -> None:
    options.define_engine()
    options.define_workload()
    options.define_conversations(rounds=4)
    options.define_report()
    flags.DEFINE_float(
        "request_rate", math.inf, "Mean conversations started per second; inf starts all at once."
    )
    flags.DEFINE_multi_enum(
        "only",
        [],
        list(LOWEST_TIERS),
        "Engine to run, named by its lowest tier; may be repeated. Default: all engines with configured "
        "tiers.",
    )
    flags.DEFINE_integer("repeats", 3, "Number of runs of the requests without reuse.", lower_bound=1)


def lowest_tiers(config: EngineConfig) -> dict[str, EngineConfig]:
    """Return the engine configurations to compare, by lowest tier, limited to the tiers that `config` has."""
    host, disk = config.kv_offloading_size > 0, config.kv_disk_path is not None
    available = {"recompute": True, "device": True, "host": host, "disk": disk, "disk, restarted": disk}
    return {name: tier(config) for name, tier in LOWEST_TIERS.items() if available[name]}


def measure(
    llm: LLM, talks: Sequence[Conversation], unshared: Sequence[Item], repeats: int, seed: int
) -> dict[str, Any]:
    """Return the report of the conversations, and each repeat's throughput for the requests without reuse."""
    found = throughput.measure_conversations(llm, talks, progress=True)
    rates = [
        throughput.measure(llm, unshared, seed=seed + 1 + i, progress=True)["total_token_throughput"]
        for i in range(repeats)
    ]
    return {
        "conversations": found,
        "no_reuse": {"total_token_throughput": rates, "median": statistics.median(rates)},
    }


def _measure_engine(
    config: EngineConfig, executor: Executor | StagedExecutor | None
) -> tuple[dict[str, Any], dict[str, Any], Executor | StagedExecutor]:
    """Return the report's head, one engine's figures, and the engine's executor for the next engine."""
    f = flags.FLAGS
    seed = f.workload_seed
    config = dataclasses.replace(
        config, max_waiting=max(config.max_waiting, f.num_requests or max(options.PROTOCOL.values()))
    )
    with LLM.from_config(config, executor=executor) as llm:
        wait_until_compiled()
        freeze_heap()
        items, described = options.items_from_flags(
            llm.max_model_len, ordered=True
        )  # keeps requests with shared blocks close together
        openings = workload.poisson_arrivals(items, f.request_rate, seed)
        talks, more = options.conversations_from_flags(
            openings, llm.max_model_len, llm.model_config.vocab_size
        )
        unshared = [Item(item.prompt_tokens, item.output_tokens) for item in items]
        return (
            {**throughput.head(llm), "workload": described | more},
            measure(llm, talks, unshared, f.repeats, seed),
            llm.executor,
        )


def run() -> dict[str, Any]:
    """Run the command and write the report after each engine.

    Raises: ConfigError, WorkloadError for invalid flags.
    """
    f = flags.FLAGS
    chosen = {
        name: config
        for name, config in lowest_tiers(engine_config_from_flags()).items()
        if name in (f.only or LOWEST_TIERS)
    }
    if not chosen:
        raise ConfigError(
            "only", ",".join(f.only), "an engine with configured tiers: --kv_offloading_size, --kv_disk_path"
        )
    options.check_workload(min(map(options.longest, chosen.values())))
    if not f.request_rate > 0:
        raise ConfigError(
            "request_rate", f.request_rate, "a positive number of conversations per second, or inf"
        )
    rate = "inf" if math.isinf(f.request_rate) else f.request_rate
    result: dict[str, Any] = {}
    executor: Executor | StagedExecutor | None = None
    for name in (name for name in ORDER if name in chosen):
        print(f"{name}:", file=sys.stderr)
        head, found, executor = _measure_engine(chosen[name], executor)
        result = result or {"command_name": "hierarchy", **head, "request_rate": rate, "lowest_tiers": {}}
        result["lowest_tiers"] = {
            tier: found if tier == name else result["lowest_tiers"][tier]
            for tier in LOWEST_TIERS
            if tier == name or tier in result["lowest_tiers"]
        }
        machine.keep(f.output_json, result)
    print(text(result))
    print(machine.where(result))
    return result


def text(result: Mapping[str, Any]) -> str:
    """Return one line per engine: median times to the first token, shares of
    input tokens, tokens per second.
    """
    lines = [f" KV hierarchy, {result['model']} on {result['device']} ".center(100, "="), COLUMNS]
    for name, found in result["lowest_tiers"].items():
        talks = found["conversations"]
        sides = [talks[side]["median_ttft_ms"] if side in talks else math.nan for side in reuse.ROUNDS]
        shares = [talks["compute_saved"], *talks["compute_saved_by_tier"].values()]
        rates = [talks["total_token_throughput"], found["no_reuse"]["median"]]
        lines.append(
            f"{name:<16}"
            + "".join(f"{ms:11.1f}" for ms in sides)
            + "".join(f"{s:9.1%}" for s in shares)
            + "".join(f"{r:11.1f}" for r in rates)
        )
    return "\n".join(lines)

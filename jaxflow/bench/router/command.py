"""The router of several replicas, simulated: throughput, balance and prefix hits, beside other rules.

  python -m jaxflow.bench router --replicas 8 --output_json router.json
  python -m jaxflow.bench router --trace mooncake_conversation.jsonl --num_requests 4000

The engine's scheduler decides the steps of each replica, and the cost model gives their times. The router is
the one of `serving.cluster`, with reports that are --report_s old. Without a trace the requests are
conversations with shared system prompts.

Two experiments: `scaling` hands over all requests at once, and divides the throughput of all replicas by the
throughput of one replica with its share of the requests. `balance` sends the requests at
--load of the replicas' capacity. It compares the router with other rules, and with one engine
that has all memory and all speed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench.pipeline.stage_time import StageTimer
from jaxflow.bench.report import machine
from jaxflow.bench.router.simulate import (
    BLOCK_SIZE,
    BUSY_SHARE,
    Cluster,
    ClusterRun,
    FewestRequests,
    RouterChoice,
    SpreadRule,
    simulate,
)
from jaxflow.bench.workload.lengths import (
    BLOCK_TOKENS,
    UNLIMITED,
    Item,
    poisson_arrivals,
    prompts,
    read_trace,
    trace_arrivals,
)
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, Device
from jaxflow.model.graph import model_graph

MEMORY_SHARE = 0.9  # memory for weights and KV, the default of --gpu_memory_utilization

RULES: dict[str, Callable[[Cluster], SpreadRule]] = {
    "router": RouterChoice,
    "fewest requests": FewestRequests,
    "in turns": lambda cluster: FewestRequests(cluster, turns=True),
}


def define_flags() -> None:
    """Define the flags of `bench router`."""
    flags.DEFINE_string("model", "llama-3.1-8b", "Model: a shipped config's name, or a folder.")
    flags.DEFINE_enum("device", "H200", sorted(DEVICES), "Device of the cost model, one for each replica.")
    flags.DEFINE_integer("replicas", 8, "Number of replicas behind the router.", lower_bound=2)
    flags.DEFINE_integer("max_num_seqs", 256, "Running sequences of a replica.", lower_bound=1)
    flags.DEFINE_integer("max_num_batched_tokens", 2048, "Most tokens of a step.", lower_bound=1)
    flags.DEFINE_integer("num_requests", 8000, "Requests of all replicas.", lower_bound=8)
    flags.DEFINE_integer("balance_requests", 4000, "Requests of `balance`, the first ones.", lower_bound=8)
    flags.DEFINE_string("trace", None, "Trace of requests, .csv or Mooncake's .jsonl.")
    flags.DEFINE_integer(
        "max_model_len", 32768, "Longer requests of a trace are left out.", lower_bound=BLOCK_SIZE
    )
    flags.DEFINE_float("load", 0.8, "Arrival rate of `balance`, over the replicas' capacity.", 0.01, 1.0)
    flags.DEFINE_float("report_s", 0.25, "Seconds between two reports of a replica.", 0.001)
    flags.DEFINE_float("layer_us", 15.0, "Microseconds of a layer beyond the roofline of its ops.", 0.0)
    flags.DEFINE_integer("seed", 0, "Seed of requests, arrivals and the router.", lower_bound=0)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def chats(
    number: int, seed: int, *, rounds: int = 4, systems: int = 16, mean_output: float = 250.0
) -> list[Item]:
    """Return the requests of conversations, which begin with one of a few system prompts.

    A request repeats its conversation's earlier blocks. The system prompts have 1 to 4 blocks, and one is as
    popular as the inverse of its rank. Conversations begin at exponential intervals, and their
    rounds follow at such intervals too.
    """
    rng = np.random.default_rng([seed, 7])
    weights = 1 / np.arange(1, systems + 1)
    items: list[Item] = []
    next_block = 4 * systems
    for start in np.cumsum(rng.exponential(1.0, -(-number // rounds))).tolist():
        system = int(rng.choice(systems, p=weights / weights.sum()))
        blocks = [4 * system + i for i in range(1 + system % 4)]
        for _ in range(rounds):
            new = 1 + int(rng.poisson(1.0))
            blocks += range(next_block, next_block + new)
            next_block += new
            short = int(rng.integers(0, BLOCK_TOKENS))  # tokens that the last block lacks
            output = 1 + int(rng.exponential(mean_output))
            items.append(Item(len(blocks) * BLOCK_TOKENS - short, output, start, tuple(blocks)))
            start += float(rng.exponential(30.0))
    return sorted(items, key=lambda item: item.arrival_s)[:number]


def cluster_of(
    model: ModelConfig, device: Device, *, replicas: int, slots: int, token_budget: int, report_s: float
) -> Cluster:
    """Return replicas of one device each, with the KV pages that the weights leave. Raises: ConfigError."""
    page = sum(page_bytes(page_groups(model, np.dtype("bfloat16"), 1), BLOCK_SIZE, 1))
    weights = model_graph(model).work(Composition(decode_tokens=1)).weight_bytes
    free = MEMORY_SHARE * device.memory_bytes - weights
    pages = int(free // page)
    if pages < slots:
        raise ConfigError(
            "model", model.architecture, f"a model that leaves {slots} pages of a device's memory"
        )
    return Cluster(replicas, slots, pages, token_budget, report_s)


def figures(run: ClusterRun) -> dict[str, Any]:
    """Return the figures of a run."""
    return {
        "tokens_per_s": run.tokens_per_s,
        "cached_share": run.cached_tokens / run.total_tokens,
        "computed_max_over_mean": float(run.computed.max() / run.computed.mean()),
        "outstanding_max_over_mean": float(run.outstanding.max() / run.outstanding.mean()),
        "median_ttft_ms": 1e3 * float(np.median(run.ttft_s)),
        "p99_ttft_ms": 1e3 * float(np.percentile(run.ttft_s, 99)),
    }


def measure(
    items: Sequence[Item],
    cluster: Cluster,
    step_s: Callable[[np.ndarray], np.ndarray],
    *,
    load: float,
    balance_requests: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the report of both experiments.

    items: in the order of their arrivals. balance_requests: requests of the second experiment,
    whose steps are smaller and more.
    """
    ids = prompts(items, 32_000, seed)
    at_once = [dataclasses.replace(item, arrival_s=0.0) for item in items]
    share = len(items) // cluster.replicas
    single = dataclasses.replace(cluster, replicas=1)
    one = simulate(at_once[:share], ids[:share], single, RouterChoice(single, seed), step_s)
    routed = simulate(at_once, ids, cluster, RouterChoice(cluster, seed), step_s)
    scaling = {"one replica": one.tokens_per_s, f"{cluster.replicas} replicas": routed.tokens_per_s}
    capacity = cluster.replicas * BUSY_SHARE * share / one.seconds  # requests/s
    some = items[:balance_requests]
    spread = len({item.arrival_s for item in some}) > 1
    arriving = (
        trace_arrivals(some, load * capacity) if spread else poisson_arrivals(some, load * capacity, seed)
    )
    ids = ids[:balance_requests]
    joined = cluster.joined()
    runs = {name: simulate(arriving, ids, cluster, make(cluster), step_s) for name, make in RULES.items()}
    whole = simulate(arriving, ids, joined, RouterChoice(joined, seed), step_s)
    return {
        "cluster": dataclasses.asdict(cluster),
        "capacity_requests_per_s": capacity,
        "scaling": {
            name: {"tokens_per_s": rate, "over_one_replica": rate / one.tokens_per_s}
            for name, rate in scaling.items()
        },
        "balance": {
            name: figures(run) | {"hits_over_one_engine": run.cached_tokens / max(1, whole.cached_tokens)}
            for name, run in (runs | {"one engine with all memory": whole}).items()
        },
    }


def text(report: dict[str, Any]) -> str:
    """Return the report as two tables."""
    lines = [f"until {BUSY_SHARE:.0%} have ended".ljust(28) + "tokens/s".rjust(12) + "over one".rjust(12)]
    lines += [
        f"{name:28}{row['tokens_per_s']:12,.0f}{row['over_one_replica']:12.2f}"
        for name, row in report["scaling"].items()
    ]
    columns = ("cached", "of one engine", "computed", "outstanding", "TTFT ms", "p99 TTFT ms")
    title = f"{report['load']:.0%} of capacity"
    lines += ["", title.ljust(28) + "".join(column.rjust(15) for column in columns)]
    for name, row in report["balance"].items():
        cells = (
            f"{row['cached_share']:.1%}",
            f"{row['hits_over_one_engine']:.3f}",
            f"{row['computed_max_over_mean']:.3f}",
            f"{row['outstanding_max_over_mean']:.3f}",
            f"{row['median_ttft_ms']:.0f}",
            f"{row['p99_ttft_ms']:.0f}",
        )
        lines.append(name.ljust(28) + "".join(cell.rjust(15) for cell in cells))
    return "\n".join([*lines, "", "computed, outstanding: the largest replica's tokens over the mean"])


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, CheckpointError, WorkloadError, OSError."""
    f = flags.FLAGS
    model = open_checkpoint(f.model, load_format="dummy").model_config
    device = DEVICES[f.device]
    if f.trace:
        items = sorted(read_trace(f.trace, UNLIMITED), key=lambda item: item.arrival_s)
        items = [item for item in items if item.prompt_tokens + item.output_tokens <= f.max_model_len]
        items = items[: f.num_requests]
    else:
        items = chats(f.num_requests, f.seed)
    if len(items) < f.replicas:
        raise ConfigError(
            "num_requests", len(items), f"at least {f.replicas}, one for each replica; see --max_model_len"
        )
    cluster = cluster_of(
        model,
        device,
        replicas=f.replicas,
        slots=f.max_num_seqs,
        token_budget=f.max_num_batched_tokens,
        report_s=f.report_s,
    )
    timer = StageTimer(model, (model.num_layers,), 1, device.rates, layer_s=1e-6 * f.layer_us)
    report = {
        "command_name": "router",
        "model": f.model,
        **machine.describe(),
        "cost_model_of": device.name,
        "workload": {
            "requests": len(items),
            "trace": f.trace,
            "mean_prompt_tokens": float(np.mean([item.prompt_tokens for item in items])),
            "mean_output_tokens": float(np.mean([item.output_tokens for item in items])),
        },
        "load": f.load,
        "seed": f.seed,
    }
    report |= measure(items, cluster, timer, load=f.load, balance_requests=f.balance_requests, seed=f.seed)
    print(text(report))
    return report

"""Tokens per second and balance of a mixture whose router prefers some experts, which stay or move.

  python -m jaxflow.bench skewed_experts --model qwen3-30b-a3b --tensor_parallel_size 2
      --enable_expert_parallel --enable_eplb --num_redundant_experts 32

The weights are dummies. The router of each layer has a bias for each expert: Zipf's law over a random order
of the experts, whatever the token. Without `--enable_eplb` the experts stay. The same requests run several
times, after runs in which experts find their places. The balance of a run is the mean number of (token,
expert) pairs of a device over the largest, as counted on the devices, and the mean over the layers. Copies of
an expert count as if they shared its pairs evenly, also in small steps, which use one slot of each expert.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxflow.bench.engine import steps
from jaxflow.bench.report import machine
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.drive import drive, greedy_requests
from jaxflow.bench.workload.lengths import Item
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.executor import Executor
from jaxflow.engine.heap import freeze_heap
from jaxflow.engine.start import Engine, open_model, prepare_process, start_engine
from jaxflow.model.expert_placement import device_loads
from jaxflow.model.weights import Weights

_GUMBEL_STD = np.pi / np.sqrt(6)  # of the noise with which the largest sums draw experts by their weights


def start_skewed(config: EngineConfig, zipf: float, progress: bool = True) -> Engine:
    """Start an engine whose routers have a bias for each expert.

    Raises:
      ConfigError: for weights that are no dummies, a model without experts, several stages, and as
        `start_engine`.
    """
    if config.load_format != "dummy":
        raise ConfigError("load_format", config.load_format, "dummy")
    if config.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size", config.pipeline_parallel_size, "1")
    prepare_process(config)
    checkpoint = open_model(config)
    if not checkpoint.model_config.num_experts or checkpoint.model_config.router is not None:
        raise ConfigError("model", config.model, "a mixture with softmax routers")
    model = dataclasses.replace(checkpoint.model_config, router_bias=True)
    engine = start_engine(config, dataclasses.replace(checkpoint, model_config=model), progress=progress)
    executor = engine.executor
    assert isinstance(executor, Executor)

    def bias(_: Any) -> None:
        executor.weights = with_bias(executor.weights, zipf, config.seed)

    engine.driver.call(bias).result()
    return engine


def with_bias(weights: Weights, zipf: float, seed: int) -> Weights:
    """Return the weights with routers that prefer experts by Zipf's law, each layer in an order of its own.

    The scores of normalized tokens deviate by the length of the router's rows. A draw of experts with the
    weights rank ** -zipf is the largest sums of their logarithms and Gumbel noise. The bias is the logarithm,
    scaled by the ratio of both deviations.
    """
    rng, layers = np.random.default_rng(seed), []
    for layer in weights["layers"]:
        if "router" in layer:
            rows = np.asarray(layer["router"], np.float32)
            rank = 1 + rng.permutation(len(rows))
            deviation = np.sqrt((rows**2).sum(axis=1).mean())
            bias = jnp.asarray(-zipf * np.log(rank) * deviation / _GUMBEL_STD, layer["router_bias"].dtype)
            layer = layer | {"router_bias": jax.device_put(bias, layer["router_bias"].sharding)}
        layers.append(layer)
    return weights | {"layers": layers}


def balances(tokens: np.ndarray, placed: np.ndarray, devices: int) -> np.ndarray:
    """Return the balance of each layer, [L].

    tokens: of each expert, [L, E]. placed: the expert of each slot, [L, S].
    """
    loads = np.array([device_loads(*each, devices) for each in zip(tokens, placed, strict=True)])
    return loads.mean(axis=1) / np.maximum(loads.max(axis=1), 1)


def measure(
    engine: Engine,
    items: Sequence[Item],
    *,
    iterations: int,
    warm_up: int,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run the items `warm_up` times, then `iterations` times, and return the report.

    keep: receives the report so far after each run.
    """
    executor, driver = engine.executor, engine.driver
    assert isinstance(executor, Executor)
    model = executor.programs.context.config
    devices = engine.config.tensor_parallel_size * engine.config.data_parallel_size
    requests = greedy_requests(items, workload.prompts(items, model.vocab_size, engine.config.seed))
    total = sum(item.prompt_tokens + item.output_tokens for item in items)
    runs: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    shares = np.zeros(model.num_experts)
    seen: Any = 0
    for _ in range(warm_up + iterations):
        with machine.watch(devices) as readings, steps.step_log(executor) as log:
            records, duration_s = drive(driver, requests)
        counted = driver.expert_tokens()
        assert counted is not None
        tokens, seen = counted.tokens - seen, counted.tokens
        in_order = np.tile(np.arange(model.num_experts), (len(tokens), 1))
        placed = in_order if executor.placed is None else executor.placed
        balancer = driver.call(lambda loop: loop.balancer).result()
        run = {
            "duration_s": duration_s,
            "tokens_per_s": total / duration_s,
            "failed": sum(record.error is not None for record in records),
            "balance": float(balances(tokens, placed, devices).mean()),
            "least_balance": float(balances(tokens, placed, devices).min()),
            "balance_in_order": float(balances(tokens, in_order, devices).mean()),
            "placements": 0 if balancer is None else balancer.placements,
            "moved_slots": 0 if balancer is None else balancer.moved_slots,
            "power": machine.power_summary(readings),
            "steps": steps.summary(log),
        }
        print(
            f"{run['tokens_per_s']:,.0f} tokens/s, balance {run['balance']:.3f}", file=sys.stderr, flush=True
        )
        runs.append(run)
        ordered = -np.sort(-tokens, axis=1)
        shares = (ordered / ordered.sum(axis=1, keepdims=True)).mean(axis=0)
        measured = runs[warm_up:]
        result = {
            "requests": len(items),
            "warm_up_runs": warm_up,
            "runs": runs,
            "share_of_pairs_by_expert": shares.tolist(),
            **{
                name: float(np.median([each[name] for each in measured])) if measured else None
                for name in ("tokens_per_s", "balance", "balance_in_order")
            },
        }
        keep(result)
    return result


def define_flags() -> None:
    """Define the flags of `bench skewed_experts`."""
    options.define_engine(enable_prefix_caching=False)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_float("zipf", 1.0, "Exponent of the router's preference; 0 prefers none.", lower_bound=0.0)
    flags.DEFINE_integer("num_requests", 400, "Requests of a run, all at once.", lower_bound=1)
    flags.DEFINE_integer("input_len", 512, "Prompt tokens of each request.", lower_bound=1)
    flags.DEFINE_integer("output_len", 128, "Output tokens of each request.", lower_bound=1)
    flags.DEFINE_integer("num_iters_warmup", 2, "Runs before the measurement.", lower_bound=0)
    flags.DEFINE_integer("num_iters", 3, "Measured runs.", lower_bound=1)


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError."""
    f = flags.FLAGS
    config = engine_config_from_flags()
    config = dataclasses.replace(config, max_waiting=max(config.max_waiting, f.num_requests))
    engine = start_skewed(config, f.zipf)
    try:
        wait_until_compiled()
        freeze_heap()
        head = {
            "command_name": "skewed_experts",
            "model": f.model,
            "zipf": f.zipf,
            "engine_config": dataclasses.asdict(engine.config),
            "start": dict(engine.start),
            **machine.describe(),
        }
        items = workload.constant(f.num_requests, f.input_len, f.output_len)
        found = measure(
            engine,
            items,
            iterations=f.num_iters,
            warm_up=f.num_iters_warmup,
            keep=lambda result: machine.keep(f.output_json, head | result),
        )
    finally:
        engine.driver.close()
    print(
        f"{found['tokens_per_s']:,.0f} tokens/s, balance {found['balance']:.3f}, with experts in order "
        f"{found['balance_in_order']:.3f}; the busiest expert of a layer has "
        f"{found['share_of_pairs_by_expert'][0]:.1%} of its pairs"
    )
    return head | found

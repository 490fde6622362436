"""Loops over an executor, from settings."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from jaxflow.config import ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.loop import Loop
from jaxflow.engine.rank_pages import rank_pages
from jaxflow.engine.ranked_loop import RankedLoop
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.step_plans import cost_device
from jaxflow.engine.step_time_prediction import predict_step_time
from jaxflow.kv.tiers.offload import KvOffload
from jaxflow.kv.tiers.start import HostTier
from jaxflow.model.composition import Composition
from jaxflow.model.cost import op_times
from jaxflow.model.graph import model_graph
from jaxflow.scheduler.batch_budget import BatchBudget
from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.running import make_page_tables
from jaxflow.scheduler.scheduler import Scheduler, StepPolicy


def make_loop(
    config: EngineConfig,
    model: ModelConfig,
    executor: Executor | StagedExecutor,
    tier: HostTier | None = None,
    *,
    policy: StepPolicy | None = None,
    **changes: Any,
) -> Loop:
    """Return a loop over an executor.

    Args:
      config: resolved.
      tier: the host tier, which the loop closes; None without one.
      policy: see `Scheduler`; None for `BatchBudget` with the limit of the settings.
      changes: fields of the `SchedulerConfig` to replace.

    Raises:
      ConfigError: for a config with several data-parallel ranks.
    """
    check_one_rank(config)
    scheduling = _scheduling(config, model, executor)
    if executor.num_stages > 1:  # only micro-batches need the cost of a decode
        cost = decode_cost(model, config.tensor_parallel_size)
        scheduling = dataclasses.replace(scheduling, stages=executor.num_stages, decode_cost=cost)
    scheduling = dataclasses.replace(scheduling, **changes)
    offload = None
    if tier is not None:
        offload = tier.offload(make_page_tables(scheduling, record_named=True), executor)
    step_time = None
    if policy is None:
        if config.batch_tpot_ms is None:
            policy = BatchBudget()
        else:
            assert isinstance(executor, Executor)
            step_time = predict_step_time(config, model, executor)
            policy = BatchBudget(config.batch_tpot_ms / 1000, step_time)
    scheduler = Scheduler(scheduling, None if offload is None else offload.policy, policy)
    return Loop(
        scheduler,
        executor,
        eos_token_ids=model.eos_token_ids,
        offload=offload,
        step_time=step_time,
        eplb_step_interval=config.eplb_step_interval if config.enable_eplb else None,
    )


def make_ranked_loop(
    config: EngineConfig,
    model: ModelConfig,
    executor: Executor,
    tiers: Sequence[HostTier] = (),
    **changes: Any,
) -> RankedLoop:
    """Return the loop of data-parallel ranks over an executor. Arguments: see `make_loop`.

    tiers: the host tier of each rank, which the loop closes; () without one.
    """
    scheduling = dataclasses.replace(_scheduling(config, model, executor), **changes)
    seeds = random.Random(scheduling.seed)  # requests without a seed get those of one rank
    offloads: list[KvOffload | None] = [
        tier.offload(make_page_tables(scheduling, record_named=True), pages)
        for tier, pages in zip(tiers, rank_pages(executor), strict=bool(tiers))
    ] or [None] * executor.ranks
    ranks = [
        Loop(
            Scheduler(
                scheduling, None if offload is None else offload.policy, policy=BatchBudget(), seeds=seeds
            ),
            executor,
            eos_token_ids=model.eos_token_ids,
            offload=offload,
            first_slot=rank * executor.slots,
        )
        for rank, offload in enumerate(offloads)
    ]
    return RankedLoop(
        ranks, executor, eplb_step_interval=config.eplb_step_interval if config.enable_eplb else None
    )


def check_one_rank(config: EngineConfig) -> None:
    """Refuse data-parallel ranks in a command that runs the steps of one. Raises: ConfigError."""
    if config.data_parallel_size != 1:
        raise ConfigError("data_parallel_size", config.data_parallel_size, "1 for this command")


def _scheduling(
    config: EngineConfig, model: ModelConfig, executor: Executor | StagedExecutor
) -> SchedulerConfig:
    """Return the settings of a scheduler, of one rank. config: resolved."""
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len
    return SchedulerConfig(
        token_budget=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        windows=model.windows,
        num_pages=executor.num_pages,
        max_model_len=config.max_model_len,
        buckets=tuple(sorted(executor.layouts)),
        enable_prefix_caching=config.enable_prefix_caching,
        max_waiting=config.max_waiting,
        seed=config.seed,
    )


def decode_cost(model: ModelConfig, tp: int) -> tuple[float, float]:
    """Return the predicted seconds of a decode: without its KV, and of each KV token that it reads."""
    graph, rates = model_graph(model, tp), cost_device().rates
    several, keys = 64.0, 1024.0  # a step with so many decodes, where an op's fixed weights count little

    def seconds(step: Composition) -> float:
        return sum(op_times(op, step, rates).longest_s for op in graph.ops())

    short = seconds(Composition(decode_tokens=several, decode_keys=several))
    long = seconds(Composition(decode_tokens=several, decode_keys=several * keys))
    return short / several, (long - short) / (several * (keys - 1))

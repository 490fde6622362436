"""Rivals of a found policy: FlexGen's ablations (Tables 4, 23), hand-written policies, and each tier by
itself.
"""

import dataclasses
from collections.abc import Iterable

from jaxflow.config import ConfigError
from jaxflow.flexgen.accounting import DoesNotFit
from jaxflow.flexgen.policy import TIERS, Policy, Shares
from search.placement.cost_model import Prediction, memory_bytes, predict, split
from search.placement.machine_curves import Machine
from search.placement.solver import (
    PlacementError,
    PlacementOptions,
    TierMemory,
    candidates,
    policy_of,
    search,
)
from search.placement.workload import PlacementWorkload

DEVICE, HOST, DISK = Shares(device=100.0), Shares(host=100.0), Shares(disk=100.0)


@dataclasses.dataclass(frozen=True)
class Rival:
    """A rival policy; without a policy, no policy of its kind fits."""

    name: str
    policy: Policy | None
    prediction: Prediction | None


def rivals(
    work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions, found: Policy
) -> list[Rival]:
    """Return the found policy first, then each ablation and hand-written policy.

    "no search" keeps weights and all other tensors on the next tiers with room, in the largest batches that
    fit, one to a block. "row by row" is the policy of other systems (DeepSpeed): KV and activations on the
    device, one batch a block.
    """
    rows = [Rival("all optimisations", found, predict(work, machine, found))]
    rows.append(Rival("no overlap", found, predict(work, machine, found, overlap=False)))
    by_hand = [
        placed
        for beyond in (HOST, DISK)
        for placed in ((beyond, HOST, HOST), (beyond, DISK, HOST), (beyond, DISK, DISK))
    ]
    rows.append(_largest("no search", work, machine, memory, options, found, by_hand, batches=(1,)))
    rows.append(
        _searched(
            "no host attention", work, machine, memory, dataclasses.replace(options, host_attention=False)
        )
    )
    rows.append(_searched("no disk", work, machine, dataclasses.replace(memory, disk=0.0), options))
    row_by_row = [(weights, DEVICE, DEVICE) for weights in (DEVICE, HOST, DISK)]
    rows.append(_largest("row by row", work, machine, memory, options, found, row_by_row, batches=(1,)))
    for name, tier in (("all on the device", DEVICE), ("all on the host", HOST), ("all on disk", DISK)):
        rows.append(
            _largest(
                name,
                work,
                machine,
                memory,
                options,
                found,
                [(tier, tier, tier)],
                batches=options.num_gpu_batches,
            )
        )
    return rows


def fits(work: PlacementWorkload, memory: TierMemory, policy: Policy) -> bool:
    """Return whether each tier has room."""
    return all(
        used <= capacity for used, capacity in zip(memory_bytes(work, *split(policy)), memory, strict=True)
    )


def _searched(
    name: str, work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions
) -> Rival:
    best = max(candidates(work, machine, memory, options), key=lambda one: one.tokens_per_s, default=None)
    if best is None:
        return Rival(name, None, None)
    policy = policy_of(work, machine, memory, best.choice, options)
    return Rival(name, policy, predict(work, machine, policy))


def _largest(
    name: str,
    work: PlacementWorkload,
    machine: Machine,
    memory: TierMemory,
    options: PlacementOptions,
    found: Policy,
    placements: Iterable[tuple[Shares, Shares, Shares]],
    batches: Iterable[int],
) -> Rival:
    """Return the first placement that fits at all, with its fastest batches."""
    for weights, kv, activations in placements:
        made = [
            Policy(
                model=found.model,
                prompt_tokens=found.prompt_tokens,
                output_tokens=found.output_tokens,
                gpu_batch_size=size,
                num_gpu_batches=number,
                weights=weights,
                kv=kv,
                activations=activations,
                weight_bits=found.weight_bits,
                kv_bits=found.kv_bits,
                host_attention=found.host_attention,
                value_top_k_percent=found.value_top_k_percent,
                pipeline_parallel_size=found.pipeline_parallel_size,
            )
            for size in options.gpu_batch_sizes
            for number in batches
        ]
        fitting = [(policy, predict(work, machine, policy)) for policy in made if fits(work, memory, policy)]
        fitting = [
            (policy, prediction)
            for policy, prediction in fitting
            if prediction.latency_s <= options.max_latency_s
        ]
        if fitting:
            return Rival(name, *max(fitting, key=lambda one: one[1].tokens_per_s))
    return Rival(name, None, None)


NAMES = (
    *("all optimisations", "no overlap", "no search", "no host attention", "no disk", "row by row"),
    *("all on the device", "all on the host", "all on disk"),
)
SEARCHED = (
    "all optimisations",
    "no overlap",
    "no host attention",
    "no disk",
)  # the others are made by hand, as large as fits


def chosen(only: list[str] | None) -> list[str]:
    """Return the requested names in order; None: all. Raises: ConfigError."""
    unknown = set(only or ()) - set(NAMES)
    if unknown:
        raise ConfigError("only", ",".join(sorted(unknown)), ", ".join(NAMES))
    return [name for name in NAMES if only is None or name in only]


@dataclasses.dataclass
class TierRoom:
    """The room of each tier for a policy, as far as known. Runs need more than the cost model says."""

    memory: TierMemory
    beyond: dict[str, float]  # bytes that a sequence of a batch takes of a tier beyond the cost model

    def of(self, gpu_batch_size: int) -> TierMemory:
        """Return the memory that the cost model may fill with batches of this size."""
        return TierMemory(
            *(
                max(0.0, capacity - self.beyond[tier] * gpu_batch_size)
                for tier, capacity in zip(TIERS, self.memory, strict=True)
            )
        )

    def learn(self, error: DoesNotFit, policy: Policy, modelled: float) -> None:
        """Reduce the room after a refused policy. modelled: the cost model's bytes of the tier."""
        self.memory = dataclasses.replace(
            self.memory, **{error.tier: min(getattr(self.memory, error.tier), error.limit_bytes)}
        )
        # Tensors are not divisible at every share, so one percent of the tier stays free.
        beyond = (error.needed_bytes - modelled + 0.01 * error.limit_bytes) / policy.gpu_batch_size
        self.beyond[error.tier] = max(self.beyond[error.tier], beyond)


def policy_named(
    name: str, work: PlacementWorkload, machine: Machine, room: TierRoom, options: PlacementOptions
) -> Policy | None:
    """Return the fastest policy of a name that is expected to fit."""
    if name == "no host attention":
        options = dataclasses.replace(options, host_attention=False)
    if name == "no disk":
        room = TierRoom(dataclasses.replace(room.memory, disk=0.0), room.beyond)
    found: list[tuple[float, float, Policy]] = []
    for size in options.gpu_batch_sizes:
        own, memory = dataclasses.replace(options, gpu_batch_sizes=(size,)), room.of(size)
        try:
            policy = search(work, machine, memory, own)
        except PlacementError:
            continue
        if name not in SEARCHED:
            row = next(row for row in rivals(work, machine, memory, own, policy) if row.name == name)
            if row.policy is None:
                continue
            policy = row.policy
        made = predict(work, machine, policy)
        found.append((made.tokens_per_s, -made.latency_s, policy))
    return max(found, key=lambda one: one[:2])[2] if found else None

"""Rivals of a found policy: FlexGen's ablations (Tables 4, 23), hand-written policies, and each tier by
itself.
"""

import dataclasses

from jaxflow.config import ConfigError
from jaxflow.flexgen.accounting import DoesNotFit
from jaxflow.flexgen.policy import TIERS, Policy, Shares
from search.placement.cost_model import Prediction, memory_bytes, predict, split
from search.placement.machine_curves import Machine
from search.placement.solver import (
    GIGA,
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
    hand = {name: by_hand(name, work, machine, memory, options, found.host_attention) for name in BY_HAND}
    return [
        Rival("all optimisations", found, predict(work, machine, found)),
        Rival("no overlap", found, predict(work, machine, found, overlap=False)),
        hand["no search"],
        _searched(
            "no host attention", work, machine, memory, dataclasses.replace(options, host_attention=False)
        ),
        _searched("no disk", work, machine, dataclasses.replace(memory, disk=0.0), options),
        *(hand[name] for name in BY_HAND if name != "no search"),
    ]


def fits(work: PlacementWorkload, memory: TierMemory, policy: Policy) -> bool:
    """Return whether each tier has room."""
    return all(
        used <= capacity
        for used, capacity in zip(memory_bytes(work, *split(policy)), memory.usable, strict=True)
    )


def _searched(
    name: str, work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions
) -> Rival:
    best = max(candidates(work, machine, memory, options), key=lambda one: one.tokens_per_s, default=None)
    if best is None:
        return Rival(name, None, None)
    policy = policy_of(work, machine, memory, best.choice, options)
    return Rival(name, policy, predict(work, machine, policy))


Placement = tuple[Shares, Shares, Shares]  # of weights, KV and activations
_NEXT_TIERS = tuple(
    placed
    for beyond in (HOST, DISK)
    for placed in ((beyond, HOST, HOST), (beyond, DISK, HOST), (beyond, DISK, DISK))
)
# Placements by hand, in the order in which they are tried, and whether a block has one batch only.
BY_HAND: dict[str, tuple[tuple[Placement, ...], bool]] = {
    "no search": (_NEXT_TIERS, True),
    "row by row": (tuple((weights, DEVICE, DEVICE) for weights in (DEVICE, HOST, DISK)), True),
    "all on the device": (((DEVICE, DEVICE, DEVICE),), False),
    "all on the host": (((HOST, HOST, HOST),), False),
    "all on disk": (((DISK, DISK, DISK),), False),
}


def by_hand(
    name: str,
    work: PlacementWorkload,
    machine: Machine,
    memory: TierMemory,
    options: PlacementOptions,
    host_attention: bool,
) -> Rival:
    """Return the first placement of a name in `BY_HAND` that fits at all, with its fastest batches."""
    for policies in _hand_made(name, work, options, host_attention):
        made = [(policy, predict(work, machine, policy)) for policy in policies if fits(work, memory, policy)]
        fitting = [one for one in made if one[1].latency_s <= options.max_latency_s]
        if fitting:
            return Rival(name, *max(fitting, key=lambda one: one[1].tokens_per_s))
    return Rival(name, None, None)


def _hand_made(
    name: str, work: PlacementWorkload, options: PlacementOptions, host_attention: bool
) -> list[list[Policy]]:
    """Return the policies of each placement of a name, with every batch size and number of batches."""
    placements, one_batch = BY_HAND[name]
    return [
        [
            Policy(
                model=work.model,
                prompt_tokens=work.prompt_tokens,
                output_tokens=work.output_tokens,
                gpu_batch_size=size,
                num_gpu_batches=number,
                weights=weights,
                kv=kv,
                activations=activations,
                weight_bits=options.weight_bits,
                kv_bits=options.kv_bits,
                host_attention=host_attention,
                value_top_k_percent=options.value_top_k_percent,
                pipeline_parallel_size=options.pipeline_parallel_size,
            )
            for size in options.gpu_batch_sizes
            for number in ((1,) if one_batch else options.num_gpu_batches)
        ]
        for weights, kv, activations in placements
    ]


def shortage(
    name: str, work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions
) -> str:
    """Return why no policy of a name in `BY_HAND` fits: the tiers that are short, or the time of a block.

    The reasons are those of the policy that lacks the fewest bytes.
    """
    policies = [
        policy
        for host_attention in options.host_attentions()
        for placed in _hand_made(name, work, options, host_attention)
        for policy in placed
    ]

    def lacking(policy: Policy) -> list[float]:
        used = memory_bytes(work, *split(policy))
        return [
            max(0.0, bytes_used - capacity) for bytes_used, capacity in zip(used, memory.usable, strict=True)
        ]

    nearest = min(policies, key=lambda policy: sum(lacking(policy)))
    block = f"a block of {nearest.num_gpu_batches} x {nearest.gpu_batch_size}"
    short = [
        f"{_gb(used)} GB of the {tier}, {_gb(more)} GB more than {_gb(capacity)}"
        for tier, used, more, capacity in zip(
            TIERS, memory_bytes(work, *split(nearest)), lacking(nearest), memory.usable, strict=True
        )
        if more
    ]
    if short:
        return f"{block} needs {', and '.join(short)}"
    latency_s = predict(work, machine, nearest).latency_s
    return f"{block} takes {latency_s:.4g} s, and max_latency_s is {options.max_latency_s:g}"


def _gb(size: float) -> str:
    return f"{size / GIGA:.4g}"


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
        left = {
            tier: max(0.0, capacity - self.beyond[tier] * gpu_batch_size)
            for tier, capacity in zip(TIERS, self.memory, strict=True)
        }
        return dataclasses.replace(self.memory, **left)

    def learn(self, error: DoesNotFit, policy: Policy, modelled: float) -> None:
        """Reduce the room of a stage after a refused policy. modelled: the cost model's bytes of the tier.

        The error's bytes of host and disk are those of all stages.
        """
        parts = 1 if error.tier == "device" else policy.pipeline_parallel_size
        needed, limit = error.needed_bytes / parts, error.limit_bytes / parts
        free = self.memory.least(error.tier, limit)
        self.memory = dataclasses.replace(
            self.memory, **{error.tier: min(getattr(self.memory, error.tier), free)}
        )
        # Tensors are not divisible at every share, so one percent of the tier stays free.
        beyond = (needed - modelled + 0.01 * limit) / policy.gpu_batch_size
        self.beyond[error.tier] = max(self.beyond[error.tier], beyond)


def policy_named(
    name: str, work: PlacementWorkload, machine: Machine, room: TierRoom, options: PlacementOptions
) -> Policy:
    """Return the fastest policy of a name that is expected to fit. A name in `BY_HAND` needs no solver.

    Raises:
      PlacementError: no policy fits; the message names the memory that is short.
      MissingSolver
    """
    if name == "no host attention":
        options = dataclasses.replace(options, host_attention=False)
    if name == "no disk":
        room = TierRoom(dataclasses.replace(room.memory, disk=0.0), room.beyond)
    found: list[tuple[float, float, Policy]] = []
    refused: PlacementError | None = None
    for size in sorted(options.gpu_batch_sizes):
        own, memory = dataclasses.replace(options, gpu_batch_sizes=(size,)), room.of(size)
        try:
            policies = (
                [search(work, machine, memory, own)]
                if name in SEARCHED
                else _fastest_by_hand(name, work, machine, memory, own)
            )
        except PlacementError as error:
            refused = refused or error  # of the smallest batch
            continue
        for policy in policies:
            made = predict(work, machine, policy)
            found.append((made.tokens_per_s, -made.latency_s, policy))
    if not found:
        assert refused is not None, options.gpu_batch_sizes
        raise refused
    return max(found, key=lambda one: one[:2])[2]


def _fastest_by_hand(
    name: str, work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions
) -> list[Policy]:
    """Return the policy of a name in `BY_HAND` with each place of attention. Raises: PlacementError."""
    rows = (by_hand(name, work, machine, memory, options, on_host) for on_host in options.host_attentions())
    found = [row.policy for row in rows if row.policy is not None]
    if not found:
        raise PlacementError(shortage(name, work, machine, memory, options))
    return found

"""Which policies a run compares, by name: the one found, and its rivals, each searched for what tiers really
have room for.
"""

import dataclasses

from jaxflow.config import ConfigError
from jaxflow.flexgen.accounting import DoesNotFit
from jaxflow.flexgen.policy import TIERS, Policy
from search.placement.cost import predict
from search.placement.machine_curves import Machine
from search.placement.rivals import rivals
from search.placement.solver import Memory, Options, PlacementError, search
from search.placement.workload import Workload

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
    """The names that are asked for, in order; None: all. Raises: ConfigError."""
    unknown = set(only or ()) - set(NAMES)
    if unknown:
        raise ConfigError("only", ",".join(sorted(unknown)), ", ".join(NAMES))
    return [name for name in NAMES if only is None or name in only]


@dataclasses.dataclass
class Room:
    """What each tier has for a policy, as far as it is known: runs take more than the cost model says, the
    more the larger a batch.
    """

    memory: Memory
    beyond: dict[str, float]  # bytes that a sequence of a batch takes of a tier beyond the cost model

    def of(self, gpu_batch_size: int) -> Memory:
        """What the cost model may fill with batches of this size."""
        return Memory(
            *(
                max(0.0, capacity - self.beyond[tier] * gpu_batch_size)
                for tier, capacity in zip(TIERS, self.memory, strict=True)
            )
        )

    def learn(self, error: DoesNotFit, policy: Policy, modelled: float) -> None:
        """From a policy that the account refused; modelled: what the cost model thought it takes of the tier."""
        self.memory = dataclasses.replace(
            self.memory, **{error.tier: min(getattr(self.memory, error.tier), error.limit_bytes)}
        )
        # Whole tensors do not follow shares smoothly: a percent of the tier is left besides.
        beyond = (error.needed_bytes - modelled + 0.01 * error.limit_bytes) / policy.gpu_batch_size
        self.beyond[error.tier] = max(self.beyond[error.tier], beyond)


def policy_named(name: str, work: Workload, machine: Machine, room: Room, options: Options) -> Policy | None:
    """The fastest policy of a name that is thought to fit."""
    if name == "no host attention":
        options = dataclasses.replace(options, host_attention=False)
    if name == "no disk":
        room = Room(dataclasses.replace(room.memory, disk=0.0), room.beyond)
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

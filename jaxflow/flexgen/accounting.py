"""What a policy needs of each tier, in bytes, counted before anything is loaded; and the refusal of one that
does not fit.

The parts are those of the cost model (FlexGen A.3), counted of the very shapes that are allocated: of several
devices what each one holds, of host and disk what all of them need. Not counted: counters, positions and the
like, a few kilobytes a batch; programs; and the space that the host's attention works in.
"""

import dataclasses
from collections.abc import Mapping

from jaxflow.config import ConfigError
from jaxflow.flexgen.compiled import attends_on_host
from jaxflow.flexgen.geometry import Geometry, PlacedWeights
from jaxflow.flexgen.kv_store import file_bytes
from jaxflow.flexgen.policy import TIERS
from jaxflow.flexgen.scratch_files import HEADER_BYTES
from jaxflow.flexgen.shards import array_bytes, device_bytes, tree_bytes
from jaxflow.flexgen.weight_store import disk_pairs, staging_bytes

_GIGA = 1e9
LIMITS = {"device": "gpu_memory_limit", "host": "host_memory_limit", "disk": "disk_limit"}


class DoesNotFit(ConfigError):
    """A tier has too little room. tier; needed_bytes: what the policy needs of it; limit_bytes."""

    def __init__(self, tier: str, needed_bytes: int, limit_bytes: int, accepted: str):
        self.tier, self.needed_bytes, self.limit_bytes = tier, needed_bytes, limit_bytes
        super().__init__(LIMITS[tier], f"{_gb(limit_bytes)} GB", accepted)


@dataclasses.dataclass(frozen=True)
class Account:
    """Bytes by tier, and by what takes them. `lives`: from the start to the end; `passes`: at most at once of
    what comes and goes.
    """

    lives: Mapping[str, Mapping[str, int]]
    passes: Mapping[str, Mapping[str, int]]

    def total(self, tier: str) -> int:
        return sum(self.lives[tier].values()) + sum(self.passes[tier].values())

    def describe(self) -> str:
        """A line for each tier."""
        lines = []
        for tier in TIERS:
            parts = {
                **self.lives[tier],
                **{f"{name} in passing": size for name, size in self.passes[tier].items()},
            }
            told = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items() if size)
            lines.append(f"{tier:7}{_gb(self.total(tier))} GB{f' ({told})' if told else ''}")
        return "\n".join(lines)


def account(g: Geometry, placed: PlacedWeights, working_bytes: int) -> Account:
    """What a run of a policy holds. working_bytes: what the largest program takes beside its inputs (0: not
    known yet).
    """
    layers, batches = range(g.config.num_layers), g.policy.num_gpu_batches
    squares = len(layers) * batches
    kv = {part.tier: part for part in g.kv_parts}
    activations = {part.tier: part for part in g.activation_parts}
    weights = {tier: sum(placed.bytes_of(layer, tier) for layer in layers) for tier in ("host", "disk")}  # type: ignore[arg-type]
    pages = {tier: tree_bytes(g.kv_pages(part.rows)) for tier, part in kv.items()}
    passed = {tier: array_bytes(g.activation(part.rows, g.prompt)) for tier, part in activations.items()}
    own_pages = {tier: device_bytes(g.kv_pages(part.rows)) for tier, part in kv.items()}
    own_passed = {tier: device_bytes(g.activation(part.rows, g.prompt)) for tier, part in activations.items()}

    def away(sizes: Mapping[str, int]) -> int:
        return sum(size for tier, size in sizes.items() if tier != "device")

    fetched = [
        sum(device_bytes(placed.of_tier(layer, tier)) for tier in ("host", "disk")) for layer in layers
    ]
    device = {
        "embedding and head": device_bytes(placed.ends),
        "weights": sum(device_bytes(placed.of_tier(layer, "device")) for layer in layers),
        "KV": squares * own_pages.get("device", 0),
    }
    device_passes = {
        "weights": max(one + two for one, two in zip(fetched, fetched[1:] + fetched[:1], strict=True))
        if len(fetched) > 1
        else fetched[0],
        # what decodes with and what comes for the next; attended to on the host, only a prompt's on its way
        # home
        "KV": (1 if attends_on_host(g) else 2) * away(own_pages),
        # of the square before on its way home, of this one and of the next
        "activations": batches * own_passed.get("device", 0) + 3 * away(own_passed),
        "programs": working_bytes,
    }
    steps = {tier: tree_bytes(g.kv_rows(part.rows)) for tier, part in kv.items()}
    host_passes = {
        "weights": staging_bytes(disk_pairs(placed)),
        # read ahead and on its way down, and a prompt's on its way up
        "KV": 4 * pages.get("disk", 0) + 2 * away(steps),
        "activations": 4 * passed.get("disk", 0),
    }
    if attends_on_host(g):
        host_passes["queries and outputs"] = 5 * array_bytes(g.heads(g.batch))
    disk = {
        "weights": weights["disk"]
        + HEADER_BYTES * sum(placed.bytes_of(layer, "disk") > 0 for layer in layers),
        "KV": squares * (file_bytes(g, kv["disk"]) + HEADER_BYTES) if "disk" in kv else 0,
        "activations": batches * (passed["disk"] + HEADER_BYTES) if "disk" in activations else 0,
    }
    host = {
        "weights": weights["host"],
        "KV": squares * pages.get("host", 0),
        "activations": batches * passed.get("host", 0),
    }
    nothing: dict[str, int] = {}
    return Account(
        {"device": device, "host": host, "disk": disk},
        {"device": device_passes, "host": host_passes, "disk": nothing},
    )


def check_fits(found: Account, limits: Mapping[str, int | None]) -> None:
    """Raises DoesNotFit, naming the limit and what would fit, where a tier has too little room. limits: bytes
    by tier; None: not known.
    """
    for tier in TIERS:
        limit, needed = limits.get(tier), found.total(tier)
        if limit is not None and needed > limit:
            accepted = (
                f"at least {_gb(needed)} GB for this policy, or lower shares of the {tier}, or smaller "
                f"batches\n{found.describe()}"
            )
            raise DoesNotFit(tier, needed, limit, accepted)


def _gb(size: int) -> str:
    """Rounded up, so that what is advised fits."""
    return f"{-(-size // 1000) / 1e6:.6g}"

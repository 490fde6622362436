"""Memory account of a policy: the bytes of each tier before the load, and the check of the limits.

The items are those of the cost model (FlexGen A.3), counted from the shapes that are allocated. The device's
bytes are those of each device; the bytes of host and disk are those of all devices together. Not counted are
counters and positions (a few kilobytes a batch), programs, and the scratch memory of the host's attention.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxflow.config import ConfigError
from jaxflow.flexgen.geometry import Geometry, PlacedWeights, array_bytes, device_bytes, tree_bytes
from jaxflow.flexgen.kv_store import file_bytes, row_checksum_bytes
from jaxflow.flexgen.policy import TIERS
from jaxflow.flexgen.pool_limits import least_limit
from jaxflow.flexgen.programs import attends_on_host, fetches_rows
from jaxflow.flexgen.scratch_files import HEADER_BYTES
from jaxflow.flexgen.weight_store import disk_pairs, staging_bytes

_GIGA = 1e9
LIMITS = {"device": "gpu_memory_limit", "host": "host_memory_limit", "disk": "disk_limit"}


class DoesNotFit(ConfigError):
    """A tier is too small.

    Attributes:
      tier: name of the tier.
      needed_bytes: bytes that the policy needs.
      limit_bytes: bytes of the tier.
    """

    def __init__(self, tier: str, needed_bytes: int, limit_bytes: int, accepted: str):
        self.tier, self.needed_bytes, self.limit_bytes = tier, needed_bytes, limit_bytes
        super().__init__(LIMITS[tier], f"{_gb(limit_bytes)} GB", accepted)


@dataclasses.dataclass(frozen=True)
class Account:
    """Bytes by tier and item.

    Attributes:
      lives: items from the start to the end of a run.
      passes: the largest size at once of items that come and go.
      stages: bytes of the host for each stage of a pipeline.
    """

    lives: Mapping[str, Mapping[str, int]]
    passes: Mapping[str, Mapping[str, int]]
    stages: Sequence[int] = ()

    def total(self, tier: str) -> int:
        """Return the bytes of a tier."""
        return sum(self.lives[tier].values()) + sum(self.passes[tier].values())

    def pooled(self, tier: str) -> int:
        """Return the bytes of a tier that has a pool for each stage, all as large as the fullest one."""
        return len(self.stages) * max(self.stages) if tier == "host" and self.stages else self.total(tier)

    def pinned(self) -> list[int]:
        """Return the bytes of each stage in pinned memory of the host."""
        checksums = self.lives["host"]["checksums of V"] // len(self.stages)
        return [size - checksums for size in self.stages]

    def describe(self) -> str:
        """Return a line of text for each tier."""
        lines = []
        for tier in TIERS:
            splits = {
                **self.lives[tier],
                **{f"{name} in transit": size for name, size in self.passes[tier].items()},
            }
            items = ", ".join(f"{name} {_gb(size)}" for name, size in splits.items() if size)
            lines.append(f"{tier:7}{_gb(self.total(tier))} GB{f' ({items})' if items else ''}")
        return "\n".join(lines)


def account(g: Geometry, placed: PlacedWeights, working_bytes: int) -> Account:
    """Return the account of a policy.

    `working_bytes`: memory of the largest program beyond its inputs; 0 before the programs are compiled.
    """
    layers, batches = range(g.config.num_layers), g.places
    pairs = len(layers) * batches
    kv = {split.tier: split for split in g.kv_splits}
    activations = {split.tier: split for split in g.activation_splits}
    weights = {tier: sum(placed.bytes_of(layer, tier) for layer in layers) for tier in ("host", "disk")}  # type: ignore[arg-type]
    pages = {tier: tree_bytes(g.kv_pages(split.rows)) for tier, split in kv.items()}
    passed = {tier: array_bytes(g.activation(split.rows, g.prompt)) for tier, split in activations.items()}
    own_pages = {tier: device_bytes(g.kv_pages(split.rows)) for tier, split in kv.items()}
    own_passed = {
        tier: device_bytes(g.activation(split.rows, g.prompt)) for tier, split in activations.items()
    }

    def away(sizes: Mapping[str, int]) -> int:
        return sum(size for tier, size in sizes.items() if tier != "device")

    fetched = [
        sum(device_bytes(placed.of_tier(layer, tier)) for tier in ("host", "disk")) for layer in layers
    ]
    rows = [
        (g.top_values(layer, split.rows), g.chosen(layer, split.rows), g.kept(layer, split.rows))
        for split in g.kv_splits
        if fetches_rows(g) and split.tier != "device"
        for layer in set(g.config.layers)
    ]
    device = {
        "embedding and head": device_bytes(placed.ends),
        "weights": sum(device_bytes(placed.of_tier(layer, "device")) for layer in layers),
        "KV": pairs * own_pages.get("device", 0),
    }
    device_passes = {
        "weights": max(one + two for one, two in zip(fetched, fetched[1:] + fetched[:1], strict=True))
        if len(fetched) > 1
        else fetched[0],
        # KV of this step and of the next; with attention on the host, only a prompt's KV on its way up;
        # with sparse values, keys of two steps, and positions, weights and rows of V of two steps
        "KV": (1 if attends_on_host(g) or fetches_rows(g) else 2) * away(own_pages) + 2 * device_bytes(rows),
        # activations of the last step on their way up, of this step and of the next
        "activations": batches * own_passed.get("device", 0) + 3 * away(own_passed),
        "programs": working_bytes,
    }
    steps = {tier: tree_bytes(g.kv_rows(split.rows)) for tier, split in kv.items()}
    host_passes = {
        "weights": staging_bytes(disk_pairs(placed)),
        # KV that is read ahead or on its way down, and a prompt's KV on its way up
        "KV": (2 if g.policy.sparse_values else 4) * pages.get("disk", 0) + 2 * away(steps),
        "activations": 4 * passed.get("disk", 0),
    }
    if attends_on_host(g):
        host_passes["queries and outputs"] = 5 * array_bytes(g.heads(g.batch))
    if fetches_rows(g):
        host_passes["rows of V"] = 3 * tree_bytes(rows)
    disk = {
        "weights": weights["disk"]
        + HEADER_BYTES * sum(placed.bytes_of(layer, "disk") > 0 for layer in layers),
        "KV": pairs * (file_bytes(g, kv["disk"]) + HEADER_BYTES) if "disk" in kv else 0,
        "activations": batches * (passed["disk"] + HEADER_BYTES) if "disk" in activations else 0,
    }
    host = {
        "checksums of V": pairs * row_checksum_bytes(g, kv["disk"]) if "disk" in kv else 0,
        "weights": weights["host"],
        "KV": pairs * pages.get("host", 0),
        "activations": batches * passed.get("host", 0),
    }
    nothing: dict[str, int] = {}
    return Account(
        {"device": device, "host": host, "disk": disk},
        {"device": device_passes, "host": host_passes, "disk": nothing},
    )


def together(found: Sequence[Account]) -> Account:
    """Return the account of a pipeline's stages: the fullest device, and all bytes of host and disk."""
    device = max(found, key=lambda one: one.total("device"))

    def added(kind: str, tier: str) -> dict[str, int]:
        names = getattr(found[0], kind)[tier]
        return {name: sum(getattr(one, kind)[tier].get(name, 0) for one in found) for name in names}

    lives, passes = (
        {tier: added(kind, tier) if tier != "device" else getattr(device, kind)[tier] for tier in TIERS}
        for kind in ("lives", "passes")
    )
    return Account(lives, passes, tuple(one.total("host") for one in found))


def check_fits(found: Account, limits: Mapping[str, int | None], pools: int = 0) -> None:
    """Raise DoesNotFit for a tier that is too small, with the accepted limit.

    `limits`: usable bytes by tier; None is unknown. `pools`: XLA's pinned pools; 0 without a GPU.
    """
    for tier in TIERS:
        limit, needed = limits.get(tier), found.pooled(tier) if pools else found.total(tier)
        if limit is not None and needed > limit:
            least = least_limit(tier, needed, pools) if pools else needed
            accepted = (
                f"at least {_gb(least)} GB for this policy, or lower shares of the {tier}, or smaller "
                f"batches\n{found.describe()}"
            )
            raise DoesNotFit(tier, needed, limit, accepted)


def _gb(size: int) -> str:
    """Return gigabytes as text, rounded up, so that the advised limit fits."""
    return f"{-(-size // 1000) / 1e6:.6g}"

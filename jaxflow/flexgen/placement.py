"""What a policy's percentages come to, in whole tensors and whole sequences.

Weights are placed by tensors of a layer, KV and activations by sequences of a batch (FlexGen §4.2). Whole
things only approximate a percentage: the faster tiers never get more than their share, what is left over goes
to the slowest tier that has one. A model of many layers comes within one tensor of the percentages, since
what one layer falls short of counts for the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxflow.flexgen.policy import TIERS, Shares

Tier = Literal["device", "host", "disk"]
_EPSILON = 1e-9  # of a percentage that was computed: 3 x 33.333... % of 3 rows are 3 rows


def place_rows(rows: int, shares: Shares) -> tuple[int, int, int]:
    """How many of a batch's sequences lie on device, host and disk; those of the device come first, those of
    the disk last.
    """
    slowest = _slowest(shares)
    counts = [
        int(rows * share / 100 + _EPSILON) if tier != slowest else 0
        for tier, share in zip(TIERS, shares, strict=True)
    ]
    counts[TIERS.index(slowest)] = rows - sum(counts)
    return counts[0], counts[1], counts[2]


def place_weights(layers: Sequence[Mapping[str, int]], shares: Shares) -> list[dict[str, Tier]]:
    """The tier of each tensor of each layer.

    Args:
      layers: bytes of each layer's tensors by name.
    """
    slowest, total = _slowest(shares), 0
    used: dict[str, int] = dict.fromkeys(TIERS, 0)
    placed = []
    for layer in layers:
        total += sum(layer.values())
        tiers: dict[str, Any] = {}
        for name, size in sorted(layer.items(), key=lambda item: (-item[1], item[0])):
            room = (
                tier
                for tier, share in zip(TIERS, shares, strict=True)
                if used[tier] + size <= total * (share / 100 + _EPSILON)
            )
            tiers[name] = tier = next((tier for tier in room if tier != slowest), slowest)  # type: ignore[assignment]
            used[tier] += size
        placed.append(tiers)
    return placed


def _slowest(shares: Shares) -> Tier:
    """The last tier that has a share."""
    return [tier for tier, share in zip(TIERS, shares, strict=True) if share > 0][-1]  # type: ignore[return-value]

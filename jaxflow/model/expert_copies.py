"""Experts with copies: a device's slots hold experts, and a token goes to one of the slots with its expert.

The copy is chosen by a hash of the token and of its position, so a request's tokens go to the same slots in
any batch. The map is part of a layer's weights, so that a step sees the map of the experts that it reads.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

EXPERT_OF_SLOT = "expert_of_slot"  # [S]
EXPERT_SLOTS = "expert_slots"  # [E, most copies]: the slots of each expert, the first one repeated at the end
EXPERT_COPIES = "expert_copies"  # [E]: how many of them are real
COPY_MAP = (EXPERT_OF_SLOT, EXPERT_SLOTS, EXPERT_COPIES)


def has_copies(w: dict[str, Any]) -> bool:
    """Return whether the experts of a layer lie in slots by a map."""
    return EXPERT_OF_SLOT in w


def copy_map(placed: Int[np.ndarray, " S"], experts: int) -> dict[str, np.ndarray]:
    """Return the map's arrays, int32, whose shapes depend on S and E only.

    placed: the expert of each slot.
    """
    most = len(placed) - experts + 1
    slots, copies = np.zeros((experts, most), np.int32), np.bincount(placed, minlength=experts)
    for expert in range(experts):
        found = np.flatnonzero(placed == expert)
        slots[expert] = found[0]
        slots[expert, : len(found)] = found
    return {
        EXPERT_OF_SLOT: placed.astype(np.int32),
        EXPERT_SLOTS: slots,
        EXPERT_COPIES: copies.astype(np.int32),
    }


def choose_copies(
    w: dict[str, Any], experts: Int[Array, "t e"], token_ids: Int[Array, " t"], positions: Int[Array, " t"]
) -> Int[Array, "t e"]:
    """Return the slot that computes each token's expert."""
    mixed = _mixed(token_ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + positions.astype(jnp.uint32))
    mixed = _mixed(mixed[:, None] + experts.astype(jnp.uint32))
    copy = mixed % w[EXPERT_COPIES][experts].astype(jnp.uint32)
    return w[EXPERT_SLOTS][experts, copy.astype(jnp.int32)]


def _mixed(x: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Return the numbers with every bit spread over all bits: the end of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

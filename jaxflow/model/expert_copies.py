"""Experts with copies: a device's slots hold experts, and a token goes to one of the slots with its expert.

In a large step a hash of the token and of its position chooses the copy. In a small step the products take as
long as the reads of the experts, so each expert has one slot, and the devices read equally many experts.
The map is part of a layer's weights, so that a step sees the map of the experts that it reads.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

EXPERT_OF_SLOT = "expert_of_slot"  # [S]
EXPERT_SLOTS = "expert_slots"  # [E, most copies]: the slots of each expert, `first_slots` repeated at the end
EXPERT_COPIES = "expert_copies"  # [E]: how many of them are real
# Rows of an expert, in the mean, from which copies pay. On an H200 a product of 175 rows takes as long as the
# read of its weights. With fewer rows a step takes the time of the reads, and a copy is one more to read.
COPY_ROWS = 128
COPY_MAP = (EXPERT_OF_SLOT, EXPERT_SLOTS, EXPERT_COPIES)


def has_copies(w: dict[str, Any]) -> bool:
    """Return whether the experts of a layer lie in slots by a map."""
    return EXPERT_OF_SLOT in w


def copy_map(placed: Int[np.ndarray, " S"], experts: int, devices: int) -> dict[str, np.ndarray]:
    """Return the map's int32 arrays. Their shapes depend on S and E only.

    placed: the expert of each slot; device i has the i-th S / devices slots.
    """
    most = len(placed) - experts + 1
    slots, copies = np.zeros((experts, most), np.int32), np.bincount(placed, minlength=experts)
    for expert, first in enumerate(first_slots(placed, experts, devices)):
        found = np.flatnonzero(placed == expert)
        slots[expert] = first
        slots[expert, : len(found)] = [first, *found[found != first]]
    return {
        EXPERT_OF_SLOT: placed.astype(np.int32),
        EXPERT_SLOTS: slots,
        EXPERT_COPIES: copies.astype(np.int32),
    }


def first_slots(placed: Int[np.ndarray, " S"], experts: int, devices: int) -> Int[np.ndarray, " E"]:
    """Return a slot of each expert. The devices have as even numbers of these slots as a greedy choice finds.

    Arguments: see `copy_map`.
    """
    device_of, used = np.arange(len(placed)) // (len(placed) // devices), np.zeros(devices, int)
    slots_of = [np.flatnonzero(placed == expert) for expert in range(experts)]
    found = np.zeros(experts, int)
    # Experts without a choice come first.
    for expert in sorted(range(experts), key=lambda each: len(slots_of[each])):
        slots = slots_of[expert]
        found[expert] = slots[np.argmin(used[device_of[slots]])]
        used[device_of[found[expert]]] += 1
    return found


def choose_copies(
    w: dict[str, Any],
    experts: Int[Array, "t e"],
    token_ids: Int[Array, " t"],
    positions: Int[Array, " t"],
    rows: float,
) -> Int[Array, "t e"]:
    """Return the slot that computes each token's expert. rows: of an expert in the step, in the mean."""
    if rows < COPY_ROWS:
        return w[EXPERT_SLOTS][experts, 0]
    mixed = _mixed(token_ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + positions.astype(jnp.uint32))
    mixed = _mixed(mixed[:, None] + experts.astype(jnp.uint32))
    copy = mixed % w[EXPERT_COPIES][experts].astype(jnp.uint32)
    return w[EXPERT_SLOTS][experts, copy.astype(jnp.int32)]


def _mixed(x: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Return the numbers with every bit spread over all bits: the end of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

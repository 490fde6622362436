"""The devices on which copies of experts lie, chosen from measured loads, after DeepSeek's EPLB.

A device has the same number of slots as each other device, and a slot holds one expert. With more slots than
experts, the busiest experts get several copies, which share the tokens of their expert evenly.
"""

import numpy as np
from jaxtyping import Float, Int

_MOST_SWAPS = 256  # of two slots, for each layer
_EVEN = 0.005  # a device with so much more than the mean, as a part of the mean, gives nothing away


def place_experts(
    loads: Float[np.ndarray, "L E"], devices: int, slots: int, before: Int[np.ndarray, "L S"] | None = None
) -> Int[np.ndarray, "L S"]:
    """Return the expert of each slot, int32; device i has the i-th `slots` slots of the S = devices · slots.

    Every expert has at least one slot. Equal arguments give equal results.

    Args:
      loads: the tokens of each expert in each layer.
      before: the present experts of the slots, which stay where they are good enough; None: no slot has one.

    Raises:
      ValueError: there are fewer slots than experts, or a load is negative or not finite.
    """
    if devices * slots < loads.shape[1]:
        raise ValueError(f"{devices} x {slots} slots for {loads.shape[1]} experts")
    if not (np.isfinite(loads) & (loads >= 0)).all():
        raise ValueError("a load that is negative or not finite")
    present = [None] * len(loads) if before is None else before
    placed = [_place(load, devices, slots, old) for load, old in zip(loads, present, strict=True)]
    return np.array(placed, np.int32)


def count_copies(load: Float[np.ndarray, " E"], total: int, devices: int) -> Int[np.ndarray, " E"]:
    """Return the number of copies of each expert, `total` in all.

    Each further copy goes to the expert with the largest load a copy. An expert has more copies than devices
    only where all experts have a copy on every device.
    """
    copies = np.ones(len(load), int)
    for _ in range(total - len(load)):
        useful = copies < devices if (copies < devices).any() else np.ones(len(load), bool)
        copies[np.argmax(np.where(useful, load / copies, -1.0))] += 1
    return copies


def _place(
    load: Float[np.ndarray, " E"], devices: int, slots: int, before: Int[np.ndarray, " S"] | None
) -> Int[np.ndarray, " S"]:
    copies = count_copies(load, devices * slots, devices)
    share = load / copies
    held: list[list[int]] = [[] for _ in range(devices)]
    total, left = np.zeros(devices), copies.copy()

    def put(expert: int, device: int) -> None:
        held[device].append(expert)
        total[device] += share[expert]
        left[expert] -= 1

    if before is not None:
        for device, experts in enumerate(before.reshape(devices, slots)):
            for expert in experts[left[experts] > 0]:
                if left[expert]:  # a device may hold two copies
                    put(int(expert), device)
    rest = np.repeat(np.arange(len(load)), left)
    for expert in rest[np.argsort(-share[rest], kind="stable")]:  # the largest share first
        free = [device for device in range(devices) if len(held[device]) < slots]
        apart = [device for device in free if expert not in held[device]]
        put(int(expert), min(apart or free, key=lambda device: (total[device], device)))
    places = np.array(held)
    _swap(places, share)
    if before is None:
        return np.sort(places, axis=1).reshape(-1)
    present = before.reshape(devices, slots)
    return np.concatenate([_keep_slots(*each) for each in zip(present, places, strict=True)])


def _swap(places: Int[np.ndarray, "n s"], share: Float[np.ndarray, " E"]) -> None:
    """Exchange slots of the busiest device with another device's while the larger of both loads falls.

    In place.
    """
    for _ in range(_MOST_SWAPS):
        shares = share[places]
        total = shares.sum(axis=1)
        busiest = int(np.argmax(total))
        if total[busiest] <= total.mean() * (1 + _EVEN):
            return
        # [n, s, s]: what the busiest device gives to device n for each pair of slots.
        given = shares[busiest][None, :, None] - shares[:, None, :]
        after = np.maximum(total[busiest] - given, total[:, None, None] + given)
        same = places[busiest][None, :, None] == places[:, None, :]
        doubled = same.any(axis=2)[:, :, None] | same.any(axis=1)[:, None, :]  # two copies on one device
        after = np.where(doubled, np.inf, after)
        device, own, other = np.unravel_index(np.argmin(after), after.shape)
        if not after[device, own, other] < total[busiest] * (1 - 1e-9):
            return
        places[busiest, own], places[device, other] = places[device, other], places[busiest, own]


def _keep_slots(old: Int[np.ndarray, " s"], new: Int[np.ndarray, " s"]) -> Int[np.ndarray, " s"]:
    """Return the experts of `new`, those that are also in `old` at their present slots."""
    left, found, empty = list(new), old.copy(), []
    for slot, expert in enumerate(old):
        if expert in left:
            left.remove(expert)
        else:
            empty.append(slot)
    found[empty] = left
    return found


def device_loads(
    tokens: Float[np.ndarray, " E"], placed: Int[np.ndarray, " S"], devices: int
) -> Float[np.ndarray, " n"]:
    """Return the tokens of each device, if the copies of an expert share its tokens evenly."""
    copies = np.bincount(placed, minlength=len(tokens))
    return (tokens / np.maximum(copies, 1))[placed].reshape(devices, -1).sum(axis=1)

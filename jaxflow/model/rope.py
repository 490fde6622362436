"""Rotary frequencies: radians per position for each plane of a head."""

import math

import numpy as np

from jaxflow.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return frequencies [H/2] float32 of `rope`, its context extension applied.

    The frequency is 0 in the planes of the columns that do not rotate (`rotary_order`).
    `linear` divides all frequencies by the factor. `llama3` divides the frequencies with a wavelength above
    the original context over `low_freq_factor`. It keeps those below the original context over
    `high_freq_factor`, and blends between the two. `yarn` blends by the number of the plane, between the
    planes of `beta_fast` and of `beta_slow` turns in the original context (Peng et al. 2023, §3.2).
    `proportional` (Gemma 4) gives the planes that rotate the frequencies that they have in a head that
    rotates in full, and divides by the factor.
    """
    width = rope.width(head_dim)
    over = head_dim if rope.scaling == "proportional" else width
    exponent = np.arange(0, width, 2, dtype=np.float32) / over
    freq = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    return np.pad(_extended(rope, freq, width), (0, (head_dim - width) // 2))


def rotary_order(rope: Rope | None, head_dim: int) -> np.ndarray | None:
    """Return the column of a checkpoint's head [H] that each column of ours is; None for the same columns.

    Kernels rotate plane i of a head, the columns i and H/2 + i. A checkpoint whose heads rotate in part has
    the first halves of its planes, the second halves, and then the other columns. Any order of the columns
    gives the same attention if queries and keys have the same one.
    """
    if rope is None or rope.scaling == "proportional" or (width := rope.width(head_dim)) == head_dim:
        return None
    first, second, rest = np.split(np.arange(head_dim), [width // 2, width])
    return np.concatenate([first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]])


def _extended(rope: Rope, freq: np.ndarray, width: int) -> np.ndarray:
    if rope.scaling == "default":
        return freq
    if rope.scaling in ("linear", "proportional"):
        return (freq / rope.factor).astype(np.float32)
    if rope.scaling == "yarn":
        keep = _kept_by_yarn(rope, width)
        return ((1 - keep) * freq / rope.factor + keep * freq).astype(np.float32)
    wavelength = 2 * math.pi / freq
    turns = rope.original_max_position / wavelength
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return ((1 - keep) * freq / rope.factor + keep * freq).astype(np.float32)


def _kept_by_yarn(rope: Rope, head_dim: int) -> np.ndarray:
    """Return float32 [H/2]: 1 for a plane that keeps its frequency, 0 for an interpolated plane."""

    def plane(turns: float) -> float:
        """Return the plane that makes so many turns in the original context."""
        return (
            head_dim
            * math.log(rope.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    first, last = plane(rope.beta_fast), plane(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # a step where both borders are one plane
    return 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - first) / width, 0.0, 1.0)

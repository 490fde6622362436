"""Rotary frequencies: radians per position for each plane of a head."""

import math

import numpy as np

from jaxflow.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return frequencies [H/2] float32 of `rope`, its context extension applied.

    `linear` divides all frequencies by the factor. `llama3` divides the frequencies with a wavelength above
    the original context over `low_freq_factor`. It keeps those below the original context over
    `high_freq_factor`, and blends between the two. `yarn` blends by the number of the plane, between the planes
    of `beta_fast` and of `beta_slow` turns in the original context (Peng et al. 2023, §3.2).
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    freq = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.scaling == "default":
        return freq
    if rope.scaling == "linear":
        return (freq / rope.factor).astype(np.float32)
    if rope.scaling == "yarn":
        keep = _kept_by_yarn(rope, head_dim)
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

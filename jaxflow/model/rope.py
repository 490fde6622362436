"""Rotary frequencies: radians per position for each plane of a head."""

import math

import numpy as np

from jaxflow.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return frequencies [H/2] float32 of `rope`, its context extension applied.

    `linear` divides all frequencies by the factor. `llama3` divides the frequencies with a wavelength above
    the original context over `low_freq_factor`. It keeps those below the original context over
    `high_freq_factor`, and blends between the two.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    freq = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.scaling == "default":
        return freq
    if rope.scaling == "linear":
        return (freq / rope.factor).astype(np.float32)
    wavelength = 2 * math.pi / freq
    turns = rope.original_max_position / wavelength
    keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return ((1 - keep) * freq / rope.factor + keep * freq).astype(np.float32)

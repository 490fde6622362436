"""The unified max value φ of a model's softmax, from the measured range of its scores (FlashDecoding++Next
§3).

`python -m jaxflow.model.checkpoints.calibrate` writes the file that an engine reads. With a unified max value
the weight of every key is exp(score - φ), independent of the row, so that partial sums need no rescaling. The
weights must fit in float32. Attention kernels recompute a row that leaves φ ± bound with its true maximum.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxflow.config import ConfigError
from jaxflow.parallel.mesh import place, sharded

VERSION = 1
BOUND = 60.0  # natural logarithm: exp(±60) times any sum over keys fits in float32


class LayerRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's range of scores: q·k times the attention scale, with the soft cap applied."""

    phi: float
    bound: float
    score_low: float  # score_low and score_high enclose 99.99 % of all scores
    score_high: float
    row_low: float  # row_low and row_high enclose the largest score of every row
    row_high: float

    @property
    def qualifies(self) -> bool:
        """Return whether the scores fit in float32, with room for texts of twice the range."""
        rows = max(self.row_high - self.phi, self.phi - self.row_low) <= self.bound / 2
        return rows and self.phi - self.bound <= self.score_low and self.score_high <= self.phi + self.bound


class SoftmaxRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the file. qualifies: whether all layers qualify; otherwise an engine uses row
    maxima."""

    version: int
    model: str
    windows: tuple[int, int]  # number of texts, and tokens per text
    qualifies: bool
    layers: tuple[LayerRange, ...]


def layer_range(score_low: float, score_high: float, row_low: float, row_high: float) -> LayerRange:
    """Return a range with φ in the middle of the rows' maxima, which decide whether a row's sum fits."""
    return LayerRange((row_low + row_high) / 2, BOUND, score_low, score_high, row_low, row_high)


def default_path(model: Path) -> Path:
    """Return the default path: softmax.json in a model's folder, NAME.softmax.json next to a file."""
    return model / "softmax.json" if model.is_dir() else model.with_suffix(".softmax.json")


def read(path: Path, num_layers: int) -> SoftmaxRange:
    """Return the file's range. Raises: ConfigError (field `calibration`) if it does not fit a model of so
    many layers."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SoftmaxRange)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            "calibration", str(path), f"a file that jaxflow.model.checkpoints.calibrate wrote ({error})"
        ) from error
    if found.version != VERSION:
        raise ConfigError(
            "calibration", str(path), f"version {VERSION}, and this is {found.version}: calibrate again"
        )
    if len(found.layers) != num_layers:
        raise ConfigError(
            "calibration",
            str(path),
            f"one of a model with {num_layers} layers, and this has {len(found.layers)}",
        )
    return found


def with_unified_max(weights: dict[str, Any], ranges: Sequence[LayerRange], mesh: Mesh) -> dict[str, Any]:
    """Return the weights with "unified_max" = (φ, bound), float32 [2], in each layer, on every device.

    ranges: of the layers in `weights`.
    """
    everywhere = sharded(mesh, PartitionSpec())

    def pair(layer: LayerRange) -> jax.Array:
        return place(np.array([layer.phi, layer.bound], np.float32), everywhere)

    return weights | {
        "layers": [
            w | {"unified_max": pair(layer)} for w, layer in zip(weights["layers"], ranges, strict=True)
        ]
    }

"""How softmax inputs of a model are distributed, and the unified maximum that follows from it
(FlashDecoding++Next §3).

`python -m jaxflow.model.checkpoints.calibrate` writes the file, an engine reads it. With a unified maximum φ
the weights of all keys are exp(score - φ), whatever else the row holds, so that partial sums need no
rescaling. That works while float32 holds both the largest and the smallest weight that matters; a row that
leaves φ ± bound is done with its own maximum by the attention kernels.
"""

from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxflow.config import ConfigError
from jaxflow.parallel.mesh import sharded

VERSION = 1
BOUND = 60.0  # in natural logarithms: exp(±60) times any sum of keys is far from float32's ends


class LayerRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's scores: q·k times the attention scale, soft cap applied."""

    phi: float
    bound: float
    score_low: float  # 99.99 % of all scores are between these two
    score_high: float
    row_low: float  # the largest score of every row is between these two
    row_high: float

    @property
    def qualifies(self) -> bool:
        """Weights that matter stay within float32, and other texts have as much room again as this one
        took."""
        rows = max(self.row_high - self.phi, self.phi - self.row_low) <= self.bound / 2
        return rows and self.phi - self.bound <= self.score_low and self.score_high <= self.phi + self.bound


class SoftmaxRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. `qualifies`: all layers do; otherwise an engine leaves the unified maximum alone."""

    version: int
    model: str
    windows: tuple[int, int]  # texts, tokens of each
    qualifies: bool
    layers: tuple[LayerRange, ...]


def layer_range(score_low: float, score_high: float, row_low: float, row_high: float) -> LayerRange:
    """φ in the middle of the rows' maxima, which are what decides whether a row's sum can be held."""
    return LayerRange((row_low + row_high) / 2, BOUND, score_low, score_high, row_low, row_high)


def path_beside(model: Path) -> Path:
    """Where an engine looks: softmax.json in a model's folder, NAME.softmax.json beside a file."""
    return model / "softmax.json" if model.is_dir() else model.with_suffix(".softmax.json")


def read(path: Path, num_layers: int) -> SoftmaxRange:
    """Raises: ConfigError (field `calibration`) for a file that is not one of a model with so many layers."""
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


def with_unified_maximum(weights: dict[str, Any], found: SoftmaxRange, mesh: Mesh) -> dict[str, Any]:
    """The weights with "unified" = (φ, bound), float32 [2], in each layer, on every device."""
    place = sharded(mesh, PartitionSpec())

    def pair(layer: LayerRange) -> jax.Array:
        return jax.device_put(np.array([layer.phi, layer.bound], np.float32), place)

    return weights | {
        "layers": [
            w | {"unified": pair(layer)} for w, layer in zip(weights["layers"], found.layers, strict=True)
        ]
    }

"""The tensors of a published e4m3 checkpoint: matrices of a byte an element, their scales beside them under
their names + `_scale`.
"""

import jax.numpy as jnp
import numpy as np

from jaxflow.model.checkpoints.safetensors_file import SafetensorsFolder
from jaxflow.model.checkpoints.source import CheckpointError

_SCALES = (
    ".weight_scale",
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".output_scale",
    ".kv_scale",
    ".prob_scale",
)


class Fp8Tensors:
    """A `TensorSource` of the wide values, that also gives out what is stored.

    Raises:
      CheckpointError: an e4m3 matrix without a scale.
    """

    def __init__(self, source: SafetensorsFolder):
        self._source, self.path = source, source.path
        self._scales = {name for name in source.shapes if name.endswith(_SCALES)}
        self.shapes = {name: shape for name, shape in source.shapes.items() if name not in self._scales}
        for name in self.shapes:
            if self.is_e4m3(name) and f"{name}_scale" not in self._scales:
                raise CheckpointError(f"{self.path}: tensor {name!r} is e4m3 and there is no {name}_scale")

    def is_e4m3(self, name: str) -> bool:
        """Whether a tensor is there in e4m3."""
        return name in self.shapes and self.stored(name).dtype == jnp.float8_e4m3fn

    def stored(self, name: str) -> np.ndarray:
        """The tensor as it is."""
        return self._source.read(name)

    def row_scale(self, name: str) -> np.ndarray:
        """float32 [rows]: the scale of each row of a matrix, by the scale's own name."""
        rows = self.shapes[name.removesuffix("_scale")][0]
        return self._scale(name, rows)

    def kv_scale(self, name: str, heads: int) -> np.ndarray:
        """float32 [heads]: what the numbers of an e4m3 cache are multiplied with; 1 where the checkpoint does
        not say.

        Older checkpoints have one `kv_scale` for keys and values.
        """
        block, _, which = name.rpartition(".")  # ...self_attn, k_scale or v_scale
        projection = f"{block}.{which[0]}_proj"
        names = (name, f"{projection}.{which}", f"{projection}.output_scale", f"{block}.kv_scale")
        known = [found for found in names if found in self._scales]
        return self._scale(known[0], heads) if known else np.ones(heads, np.float32)

    def read(self, name: str) -> np.ndarray:
        """float32 where the tensor is e4m3, otherwise its own dtype."""
        values = self.stored(name)
        return (
            values.astype(np.float32) * self.row_scale(f"{name}_scale")[:, None]
            if self.is_e4m3(name)
            else values
        )

    def _scale(self, name: str, rows: int) -> np.ndarray:
        scale = self._source.read(name).astype(np.float32).reshape(-1)
        if scale.size not in (1, rows):
            raise CheckpointError(f"{self.path}: {name} has {scale.size} numbers and should have 1 or {rows}")
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise CheckpointError(f"{self.path}: {name} is not positive and finite")
        return np.broadcast_to(scale, rows)

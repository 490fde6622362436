"""Expert weights in MXFP4, as gpt-oss publishes them: numbers of 4 bits with a
power of two for every 32 of a row.

A matrix `name` of [in, out] columns is stored by its rows of outputs (OCP Microscaling Formats, §5):
`name_blocks` [E, out, in / 32, 16] has two numbers in a byte, the first one in the low bits, and
`name_scales` [E, out, in / 32] has exponents with a bias of 127. Numbers are e2m1: a sign, and a magnitude of
0, 0.5, 1, 1.5, 2, 3, 4 or 6.
"""

import functools

import jax.numpy as jnp
import numpy as np

from jaxflow.model.checkpoints.safetensors_file import SafetensorsFolder
from jaxflow.model.checkpoints.source import CheckpointError
from pallas_kernels.quantized import MXFP4_GROUP as GROUP

LARGEST_SCALE = 160  # the limit for experts that stay in 4 bits: kernels hold scales times 2 ** -32
_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS, _NAN = 127, 255  # the bias and the NaN of e8m0


class Mxfp4Tensors:
    """A `TensorSource` of a checkpoint with matrices in MXFP4, which appear as [E, in, out] in bfloat16.

    `stored` returns their bytes and scales.

    Raises:
      CheckpointError: blocks without scales or scales without blocks, wrong
        shapes, and bytes that are neither.
    """

    def __init__(self, source: SafetensorsFolder):
        self._source, self.path = source, source.path
        bytes_of = {
            name: shape for name, shape in source.shapes.items() if source.read(name).dtype == np.uint8
        }
        self._packed = {name.removesuffix(_BLOCKS) for name in bytes_of if name.endswith(_BLOCKS)}
        known = {f"{name}{part}" for name in self._packed for part in (_BLOCKS, _SCALES)}
        for name in bytes_of:
            if name not in known:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} has bytes, and is no part of MXFP4 blocks"
                )
        self.shapes = {name: shape for name, shape in source.shapes.items() if name not in known}
        for name in self._packed:
            shape, scales = source.shapes[name + _BLOCKS], bytes_of.get(name + _SCALES)
            if len(shape) != 4 or shape[3] != GROUP // 2 or scales != shape[:3]:
                raise CheckpointError(
                    f"{self.path}: {name}{_BLOCKS} is {list(shape)} and {name}{_SCALES} is "
                    f"{None if scales is None else list(scales)}; MXFP4 has [E, out, in / {GROUP}, "
                    f"{GROUP // 2}] and [E, out, in / {GROUP}], in bytes"
                )
            if name in self.shapes:
                raise CheckpointError(f"{self.path}: tensor {name!r} is there in MXFP4 and in 16 bits")
            self.shapes[name] = (shape[0], shape[2] * GROUP, shape[1])

    @property
    def has_all_experts(self) -> bool:
        """Return whether the matrices of all experts are in MXFP4."""
        return all(
            name in self._packed for name in self.shapes if ".experts." in name and not name.endswith("_bias")
        )

    def read(self, name: str) -> np.ndarray:
        """Return one tensor. A matrix of MXFP4 is exact in bfloat16, as a view of its rows of outputs."""
        experts = self.shapes[name][0] if name in self._packed else 0
        return self.read_experts(name, range(experts))

    def is_packed(self, name: str) -> bool:
        """Return whether a tensor is stored in MXFP4. name: of the tensor, or of its blocks or scales."""
        return name.removesuffix(_BLOCKS).removesuffix(_SCALES) in self._packed

    def stored(self, name: str, experts: range | None = None) -> np.ndarray:
        """Return the blocks or the scales of a matrix, as a view of the file.

        name: with `_blocks` or `_scales`. experts: those whose scales are checked; None: all.

        Raises: CheckpointError for a scale that is no number, or that is above 2 ** 33.
        """
        found = self._source.read(name)
        if name.endswith(_SCALES):
            checked = found if experts is None else found[experts.start : experts.stop]
            largest = int(checked.max(initial=0))
            if largest > LARGEST_SCALE:
                said = "not numbers" if largest == _NAN else f"above 2 ** {LARGEST_SCALE - _BIAS}"
                raise CheckpointError(f"{self.path}: {name} has scales that are {said}")
        return found

    def read_experts(self, name: str, experts: range) -> np.ndarray:
        """Return one tensor.

        Of a matrix of MXFP4 only these experts are read, and the others are undefined.
        """
        if name not in self._packed:
            return self._source.read(name)
        blocks, scales = self._source.read(name + _BLOCKS), self._source.read(name + _SCALES)
        made = np.empty((*blocks.shape[:2], blocks.shape[2] * GROUP), jnp.bfloat16)
        for expert in experts:
            if (scales[expert] == _NAN).any():
                raise CheckpointError(f"{self.path}: {name}{_SCALES} has scales that are not numbers")
            made[expert] = dequantize(blocks[expert], scales[expert])
        return made.swapaxes(1, 2)


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers of MXFP4 rows, bfloat16 [N, K].

    blocks: uint8 [N, K / 32, 16]. scales: uint8 [N, K / 32].
    """
    which = scales.astype(np.uint16)[..., None] << 8 | blocks
    return np.take(_table(), which).view(jnp.bfloat16).reshape(scales.shape[0], -1)


@functools.cache
def _table() -> np.ndarray:
    """Return uint32 [65536]: the two bfloat16 numbers of each byte under each scale.

    Reading it is the only arithmetic.
    """
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    e2m1 = np.concatenate([magnitudes, -magnitudes])
    pairs = np.stack([np.tile(e2m1, 16), np.repeat(e2m1, 16)], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # the largest scales overflow
        numbers = np.ldexp(np.float32(1), np.arange(256) - _BIAS)[:, None, None] * pairs
    return np.ascontiguousarray(numbers.astype(jnp.bfloat16)).view(np.uint32).reshape(-1)

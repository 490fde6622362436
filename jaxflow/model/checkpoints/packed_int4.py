"""Matrices in 4 bits with zero points, as AWQ, GPTQ and compressed-tensors checkpoints store them.

A matrix [out, in] has groups of 64 or 128 columns. Its numbers are (code - zero point) · scale of the group.
Eight codes of 4 bits are an int32, the first one in the low bits. The tensors of a module are:

    AWQ      qweight [in, out / 8], qzeros [in / group, out / 8], scales [in / group, out]. The eight codes of
             an int32 are of the outputs 0, 2, 4, 6, 1, 3, 5, 7.
    GPTQ     qweight [in / 8, out], qzeros [in / group, out / 8], scales [in / group, out]. Version 1 of the
             format stores zero points less 1.
    packed   weight_packed [out, in / 8], weight_scale [out, in / group], weight_shape, and for asymmetric
             numbers weight_zero_point [out / 8, in / group]. Symmetric numbers have a zero point of 8. This
             is `pack-quantized` of compressed-tensors.

`g_idx` of GPTQ and `weight_g_idx` name the group of each column. The columns of a group must follow each
other.
"""

from collections.abc import Sequence

import numpy as np

from jaxflow.model.architectures.hf_packed_int4 import PackedInt4
from jaxflow.model.checkpoints.safetensors_file import SafetensorsFolder
from jaxflow.model.checkpoints.source import CheckpointError
from pallas_kernels.quantized import GROUP

_WEIGHT = ".weight"
_CODES = {"awq": ".qweight", "gptq": ".qweight", "pack-quantized": ".weight_packed"}
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each code of an int32
_SYMMETRIC = 8  # the zero point of symmetric numbers


class PackedInt4Tensors:
    """A `TensorSource` of a checkpoint with matrices in 4 bits, which appear as [out, in] in float32.

    `codes`, `scales` and `zero_points` return the parts of a matrix in the groups of `Int4`.

    Raises:
      CheckpointError: a missing part, a part of another shape or dtype, or columns that do not follow the
        order of the groups. The error names the tensor.
    """

    def __init__(self, source: SafetensorsFolder, form: PackedInt4):
        self._source, self._form, self.path = source, form, source.path
        self._ending = _CODES[form.layout]
        self._groups: dict[str, int] = {}
        self.shapes = dict(source.shapes)
        for name in [name for name in source.shapes if name.endswith(self._ending)]:
            module = name.removesuffix(self._ending)
            weight = module + _WEIGHT
            if weight in source.shapes:
                raise CheckpointError(f"{self.path}: tensor {weight!r} is there in 4 bits and in 16 bits")
            self.shapes[weight] = self._check(module, weight)

    def is_packed(self, name: str) -> bool:
        """Return whether a matrix is stored in 4 bits. name: with `.weight`."""
        return name in self._groups

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros of a packed matrix, as AutoGPTQ adds to each matrix."""
        weight = name.removesuffix(".bias") + _WEIGHT
        return name.endswith(".bias") and self.is_packed(weight) and not self._source.read(name).any()

    def read(self, name: str) -> np.ndarray:
        """Return one tensor. A matrix in 4 bits is exact in float32."""
        if not self.is_packed(name):
            return self._source.read(name)
        rows, columns = self.shapes[name]
        grouped = self.codes(name).reshape(rows, columns // GROUP, GROUP)
        numbers = grouped.astype(np.float32) - self.zero_points(name)[..., None]
        numbers *= self.scales(name).astype(np.float32)[..., None]
        return numbers.reshape(rows, columns)

    def codes(self, name: str) -> np.ndarray:
        """Return the codes of a matrix, uint8 [out, in]."""
        words = self._source.read(name.removesuffix(_WEIGHT) + self._ending)
        if self._form.layout == "awq":
            return _eight_rows(words.T, _AWQ_OUTPUTS)
        return _eight_columns(words if self._by_output else words.T)

    def scales(self, name: str) -> np.ndarray:
        """Return the scale of each 64 columns of a matrix, [out, in / 64], in the dtype of the checkpoint.

        Raises:
          CheckpointError: a scale is infinite or no number.
        """
        part = name.removesuffix(_WEIGHT) + (".weight_scale" if self._by_output else ".scales")
        scales = self._source.read(part)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise CheckpointError(f"{self.path}: {part} is not finite")
        return self._in_groups(name, scales if self._by_output else scales.T)

    def zero_points(self, name: str) -> np.ndarray:
        """Return the zero point of each 64 columns of a matrix, int16 [out, in / 64], from 0 to 16."""
        module, (rows, columns) = name.removesuffix(_WEIGHT), self.shapes[name]
        if not self._form.zero_points:
            return np.full((rows, columns // GROUP), _SYMMETRIC, np.int16)
        if self._by_output:
            words = self._source.read(f"{module}.weight_zero_point")
        else:
            words = self._source.read(f"{module}.qzeros").T
        zeros = _eight_rows(words, _AWQ_OUTPUTS if self._form.layout == "awq" else range(8))
        return self._in_groups(name, zeros.astype(np.int16) + self._form.less_one)

    @property
    def _by_output(self) -> bool:
        """Return whether the rows of the tensors are outputs."""
        return self._form.layout == "pack-quantized"

    def _in_groups(self, name: str, of_groups: np.ndarray) -> np.ndarray:
        """Return factors of the checkpoint's groups as factors of groups of 64 columns."""
        return np.repeat(of_groups, self._groups[name] // GROUP, axis=1)

    def _check(self, module: str, weight: str) -> tuple[int, int]:
        """Check the parts of a matrix, and take them from `shapes`. Return the shape of the matrix."""
        codes = self._part(module + self._ending, (None, None), np.int32)
        layout, group = self._form.layout, self._form.group
        across, along = codes if self._by_output else codes[::-1]
        rows, columns = (8 * across, along) if layout == "awq" else (across, 8 * along)
        if columns % group or (self._form.zero_points and rows % 8):
            raise CheckpointError(
                f"{self.path}: {module} is [{rows}, {columns}]; accepted are columns in whole groups of "
                f"{group} and a multiple of 8 rows"
            )
        groups, zeros = columns // group, self._form.zero_points
        if self._by_output:
            self._part(f"{module}.weight_scale", (rows, groups), None)
            self._check_shape(f"{module}.weight_shape", (rows, columns))
            if zeros:
                self._part(f"{module}.weight_zero_point", (rows // 8, groups), np.int32)
        else:
            self._part(f"{module}.scales", (groups, rows), None)
            self._part(f"{module}.qzeros", (groups, rows // 8), np.int32)
        order = f"{module}.weight_g_idx" if self._by_output else f"{module}.g_idx"
        if layout != "awq" and order in self._source.shapes:
            self._part(order, (columns,), np.int32)
            if not np.array_equal(self._source.read(order), np.arange(columns) // group):
                raise CheckpointError(
                    f"{self.path}: {order} spreads the columns of a group; accepted are groups of {group} "
                    "columns that follow each other, as without desc_act"
                )
        self._groups[weight] = group
        return rows, columns

    def _part(self, name: str, shape: tuple[int | None, ...], dtype: type | None) -> tuple[int, ...]:
        """Check one tensor, and take it from `shapes`. Return its shape.

        shape: None for any size. dtype: None for any floating dtype.
        """
        wanted = f"{np.dtype(dtype or np.float16).name} {['any' if n is None else n for n in shape]}"
        if name not in self._source.shapes:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing; accepted is {wanted}")
        found = self._source.read(name)
        kind = found.dtype == dtype if dtype else found.dtype.name in ("float16", "bfloat16", "float32")
        sizes = len(found.shape) == len(shape) and all(
            one in (None, size) for one, size in zip(shape, found.shape, strict=True)
        )
        if not (kind and sizes):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is {found.dtype.name} {list(found.shape)}; "
                f"accepted is {wanted}"
            )
        del self.shapes[name]
        return found.shape

    def _check_shape(self, name: str, shape: tuple[int, int]) -> None:
        """Check the tensor that names the shape of a matrix, and take it from `shapes`."""
        if name not in self._source.shapes:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing; accepted is {list(shape)}")
        found = self._source.read(name).reshape(-1).tolist()
        if found != list(shape):
            raise CheckpointError(f"{self.path}: {name} is {found}; accepted is {list(shape)}")
        del self.shapes[name]


def _eight_columns(words: np.ndarray) -> np.ndarray:
    """Return the codes of int32 words [rows, n] as uint8 [rows, 8 n]."""
    rows, n = words.shape
    codes, pairs = np.empty((rows, n, 4, 2), np.uint8), _bytes(words)
    codes[..., 0], codes[..., 1] = pairs & 15, pairs >> 4
    return codes.reshape(rows, 8 * n)


def _eight_rows(words: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Return the codes of int32 words [n, columns] as uint8 [8 n, columns].

    order: the row of each code of a word among its eight rows.
    """
    n, columns = words.shape
    codes, pairs = np.empty((n, 8, columns), np.uint8), _bytes(words)
    for i, row in enumerate(order):
        codes[:, row] = pairs[..., i // 2] >> 4 if i % 2 else pairs[..., i // 2] & 15
    return codes.reshape(8 * n, columns)


def _bytes(words: np.ndarray) -> np.ndarray:
    """Return the bytes of int32 words [rows, n] as uint8 [rows, n, 4], the low bits first."""
    return np.ascontiguousarray(words, "<i4").view(np.uint8).reshape(*words.shape, 4)

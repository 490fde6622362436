"""Tensors of a Hugging Face folder: one safetensors file, or several files with an index."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxflow.model.checkpoints.source import CheckpointError, read_json
from pallas_kernels.quantized import BLOCK

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16, "F64": np.float64}
_E4M3 = {"F8_E4M3": jnp.float8_e4m3fn}  # needs a scale tensor
_BYTES = {"U8": np.uint8}  # of MXFP4
_WHOLE = {"I32": np.int32, "I64": np.int64}  # of matrices in 4 bits
_BLOCK_SCALES = "_scale_inv"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
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


class SafetensorsFolder:
    """Tensors by name, read one at a time from memory-mapped files.

    Args:
      e4m3: accept tensors of dtype e4m3. unsigned: accept tensors of bytes. whole: accept tensors of int32
        and int64.

    Raises:
      CheckpointError: no weights or only pickled weights, a damaged or missing file, an index that points
        outside the folder, or a dtype that is not supported.
    """

    def __init__(self, folder: Path, *, e4m3: bool = False, unsigned: bool = False, whole: bool = False):
        self.path = folder
        dtypes = _DTYPES | (_E4M3 if e4m3 else {}) | (_BYTES if unsigned else {}) | (_WHOLE if whole else {})
        names, index = weight_files(folder)
        views: dict[str, np.ndarray] = {}
        for file_name in names:
            for name, view in _views(folder / file_name, dtypes).items():
                if index.get(name, file_name) != file_name:
                    continue
                if name in views:
                    raise CheckpointError(
                        f"{folder / file_name}: tensor {name!r} is also in another file of the folder"
                    )
                views[name] = view
        for name, file_name in index.items():
            if name not in views:
                raise CheckpointError(f"{folder / file_name}: has no tensor {name!r}, which {INDEX} lists")
        if not any(name.startswith("model.") for name in views):
            # A model that was saved without its head has names without the prefix `model.`.
            views = {
                name if name.startswith("lm_head.") else f"model.{name}": view for name, view in views.items()
            }
        self._views = views
        self.shapes = {name: view.shape for name, view in views.items()}

    def read(self, name: str) -> np.ndarray:
        """Return a view of the memory-mapped file."""
        return self._views[name]


class Fp8Tensors:
    """A `TensorSource` of an e4m3 checkpoint, which also returns the stored values and scales.

    The scale of matrix `name` is the tensor `name` + "_scale".

    Raises:
      CheckpointError: an e4m3 matrix without a scale.
    """

    def __init__(self, source: SafetensorsFolder):
        self._source, self.path = source, source.path
        self._scales = {name for name in source.shapes if name.endswith(_SCALES)}
        self.shapes = {name: shape for name, shape in source.shapes.items() if name not in self._scales}
        for name in self.shapes:
            if self.is_e4m3(name) and f"{name}_scale" not in self._scales:
                raise CheckpointError(f"{self.path}: tensor {name!r} is e4m3, but {name}_scale is missing")

    def is_e4m3(self, name: str) -> bool:
        """Return True if the tensor is stored in e4m3."""
        return name in self.shapes and self.stored(name).dtype == jnp.float8_e4m3fn

    def stored(self, name: str) -> np.ndarray:
        """Return the tensor as stored."""
        return self._source.read(name)

    def row_scale(self, name: str) -> np.ndarray:
        """Return the scale of each row of a matrix, float32 [rows]. `name` is the name of the scale."""
        rows = self.shapes[name.removesuffix("_scale")][0]
        return self._scale(name, rows)

    def kv_scale(self, name: str, heads: int) -> np.ndarray:
        """Return the factors of the values in an e4m3 KV cache, float32 [heads]; 1 without a scale tensor.

        Older checkpoints have one `kv_scale` for keys and values.
        """
        block, _, which = name.rpartition(".")  # ...self_attn, k_scale or v_scale
        projection = f"{block}.{which[0]}_proj"
        names = (name, f"{projection}.{which}", f"{projection}.output_scale", f"{block}.kv_scale")
        known = [found for found in names if found in self._scales]
        return self._scale(known[0], heads) if known else np.ones(heads, np.float32)

    def read(self, name: str) -> np.ndarray:
        """Return the tensor, as float32 if it is stored in e4m3, otherwise in its dtype."""
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


class BlockFp8Tensors:
    """A `TensorSource` of a checkpoint with e4m3 matrices in blocks (DeepSeek-V3,
    §3.3), which appear in float32.

    The factors of the blocks of matrix `name` are the tensor `name` + "_scale_inv", [rows /
    128, columns / 128], rounded up.

    Raises:
      CheckpointError: an e4m3 matrix without scales, or scales of another shape.
    """

    def __init__(self, source: SafetensorsFolder):
        self._source, self.path = source, source.path
        scales = {name for name in source.shapes if name.endswith(_BLOCK_SCALES)}
        self.shapes = {name: shape for name, shape in source.shapes.items() if name not in scales}
        for name, shape in self.shapes.items():
            if not self.is_e4m3(name):
                continue
            wanted, found = (
                tuple(-(-size // BLOCK) for size in shape),
                source.shapes.get(name + _BLOCK_SCALES),
            )
            if found != wanted:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is e4m3, so {name}{_BLOCK_SCALES} should be "
                    f"{list(wanted)}; it is {'missing' if found is None else list(found)}"
                )

    def read(self, name: str) -> np.ndarray:
        """Return the tensor, as float32 if it is stored in e4m3, otherwise in its dtype."""
        values = self.stored(name)
        if not self.is_e4m3(name):
            return values
        scales = self.block_scales(name + _BLOCK_SCALES)
        out = values.astype(np.float32)
        for row, by_column in enumerate(scales):
            factors = np.repeat(by_column, BLOCK)[: out.shape[1]]
            out[row * BLOCK : (row + 1) * BLOCK] *= factors
        return out

    def is_e4m3(self, name: str) -> bool:
        """Return True if the tensor is stored in e4m3."""
        return self.stored(name).dtype == jnp.float8_e4m3fn

    def stored(self, name: str) -> np.ndarray:
        """Return the tensor as stored."""
        return self._source.read(name)

    def block_scales(self, name: str) -> np.ndarray:
        """Return the factors of a matrix's blocks, float32 [rows / 128, columns / 128].

        `name`: of the factors.
        """
        scales = self._source.read(name).astype(np.float32)
        if not (np.isfinite(scales) & (scales > 0)).all():
            raise CheckpointError(f"{self.path}: {name} is not positive and finite")
        return scales


def _views(path: Path, dtypes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return views of all tensors of a file, after the library has checked the file."""
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path}: cut short or damaged, or no safetensors file ({size} bytes): {error}"
        ) from error
    # The library copies each tensor, which takes five times as long as arranging it. Views avoid the copy.
    data = np.memmap(path, np.uint8, mode="r")
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    views: dict[str, np.ndarray] = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        if tensor["dtype"] not in dtypes:
            raise CheckpointError(
                f"{path}: tensor {name!r} is of dtype {tensor['dtype']}; supported are {', '.join(dtypes)}"
            )
        start, stop = (8 + header_bytes + offset for offset in tensor["data_offsets"])
        views[name] = data[start:stop].view(dtypes[tensor["dtype"]]).reshape(tensor["shape"])
    return views


def weight_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the safetensors files of a folder, and the index (tensor ->
    file), empty without an index file.
    """
    if (folder / INDEX).exists():
        return _indexed(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"], {}
    if len(found) == 1:
        return found, {}
    if found:
        raise CheckpointError(f"{folder}: {len(found)} safetensors files, but {INDEX} is missing")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder}: only pickled weights ({pickles[0]}), which could run any code when they are read; "
            f"convert them to safetensors"
        )
    raise CheckpointError(f"{folder}: contains no *.safetensors file")


def _indexed(folder: Path) -> tuple[list[str], dict[str, str]]:
    path = folder / INDEX
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(
            f"{path}: weight_map={json.dumps(index)[:80]} is not an object of tensor names and file names"
        )
    for tensor, name in index.items():
        # An index may name only files of its folder, because a checkpoint is not trusted.
        if (
            not isinstance(name, str)
            or "\\" in name
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise CheckpointError(
                f"{path}: weight_map[{tensor!r}]={name!r} is not the name of a .safetensors file in "
                f"the same folder"
            )
    names = sorted({*index.values()})
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing, but {INDEX} names it")
    return names, index

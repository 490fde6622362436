"""The tensors of a Hugging Face folder: one safetensors file, or several with an index."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxflow.model.checkpoints.source import CheckpointError, read_json

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16, "F64": np.float64}
_E4M3 = {"F8_E4M3": jnp.float8_e4m3fn}  # a number only with the scale beside it
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class SafetensorsFolder:
    """Tensors by name, read one at a time from memory-mapped files.

    Raises:
      CheckpointError: no weights or only pickled ones, a damaged or missing file, an index that leads out of
      the folder,
        a dtype of quantised weights other than e4m3, and that too unless `e4m3`.
    """

    def __init__(self, folder: Path, *, e4m3: bool = False):
        self.path = folder
        names, index = _files(folder)
        views: dict[str, np.ndarray] = {}
        for file_name in names:
            for name, view in _views(folder / file_name, _DTYPES | _E4M3 if e4m3 else _DTYPES).items():
                if index.get(name, file_name) != file_name:
                    continue
                if name in views:
                    raise CheckpointError(
                        f"{folder / file_name}: tensor {name!r} is in another file of the folder too"
                    )
                views[name] = view
        for name, file_name in index.items():
            if name not in views:
                raise CheckpointError(
                    f"{folder / file_name}: has no tensor {name!r}, which {INDEX} says it has"
                )
        if not any(name.startswith("model.") for name in views):
            # A model saved without its head lacks the outer prefix of all names.
            views = {
                name if name.startswith("lm_head.") else f"model.{name}": view for name, view in views.items()
            }
        self._views = views
        self.shapes = {name: view.shape for name, view in views.items()}

    def read(self, name: str) -> np.ndarray:
        """A view of the file: nothing is read before its numbers are used."""
        return self._views[name]


def _views(path: Path, dtypes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of a file that the library finds whole."""
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise CheckpointError(
            f"{path}: cut short or damaged, or no safetensors file ({size} bytes): {error}"
        ) from error
    # The library would copy each tensor, five times slower than arranging it: views of the mapped file are
    # made here.
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


def _files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a folder, and the index (tensor -> file), empty where there is none."""
    if (folder / INDEX).exists():
        return _indexed(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in found:
        return ["model.safetensors"], {}
    if len(found) == 1:
        return found, {}
    if found:
        raise CheckpointError(
            f"{folder}: {len(found)} safetensors files and no {INDEX} that says which tensor is where"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder}: only pickled weights ({pickles[0]}); reading those can run any code, so they "
            f"never are: convert to safetensors"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file in it")


def _indexed(folder: Path) -> tuple[list[str], dict[str, str]]:
    path = folder / INDEX
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(
            f"{path}: weight_map={json.dumps(index)[:80]} is not an object of tensor names and file names"
        )
    for tensor, name in index.items():
        # Only files of this very folder: an index from elsewhere must not make us read any other.
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
            raise CheckpointError(f"{folder / name}: missing, though {INDEX} names it")
    return names, index

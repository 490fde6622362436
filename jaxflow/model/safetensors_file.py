"""The tensors of a Hugging Face folder: one safetensors file, or several with an index."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxflow.model.source import CheckpointError, read_json

INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16", "F64")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class SafetensorsFolder:
    """Tensors by name, read one at a time from memory-mapped files.

    Raises:
      CheckpointError: no weights or only pickled ones, a damaged or missing file, an index that leads out of the folder,
        a dtype of quantised weights.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[str, Any] = {}
        names, index = _files(folder)
        for name in names:
            self._add(name, index)
        for tensor, name in index.items():
            if tensor not in self.shapes:
                raise CheckpointError(f"{folder / name}: has no tensor {tensor!r}, which {INDEX} says it has")
        # A model saved without its head lacks the outer prefix of all names.
        bare = not any(name.startswith("model.") for name in self.shapes)
        self._own_names = {f"model.{name}" if bare and not name.startswith("lm_head.") else name: name for name in self.shapes}
        self.shapes = {name: self.shapes[own] for name, own in self._own_names.items()}

    def _add(self, file_name: str, index: dict[str, str]) -> None:
        path = self.path / file_name
        try:
            file = safe_open(path, framework="np")
            for name in file.keys():  # noqa: SIM118  (not a dict)
                if index.get(name, file_name) != file_name:
                    continue
                part = file.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise CheckpointError(f"{path}: tensor {name!r} is of dtype {part.get_dtype()}; supported are {', '.join(_DTYPES)}")
                if name in self.shapes:
                    raise CheckpointError(f"{path}: tensor {name!r} is in another file of the folder too")
                self.shapes[name] = tuple(part.get_shape())
                self._open[name] = file
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size if path.is_file() else 0
            raise CheckpointError(f"{path}: cut short or damaged, or no safetensors file ({size} bytes): {error}") from error

    def read(self, name: str) -> np.ndarray:
        try:
            return self._open[self._own_names[name]].get_tensor(self._own_names[name])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {name!r} cannot be read: {error}") from error


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
        raise CheckpointError(f"{folder}: {len(found)} safetensors files and no {INDEX} that says which tensor is where")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder}: only pickled weights ({pickles[0]}); reading those can run any code, so they never are: convert to safetensors"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file in it")


def _indexed(folder: Path) -> tuple[list[str], dict[str, str]]:
    path = folder / INDEX
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path}: weight_map={json.dumps(index)[:80]} is not an object of tensor names and file names")
    for tensor, name in index.items():
        # Only files of this very folder: an index from elsewhere must not make us read any other.
        if not isinstance(name, str) or "\\" in name or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: weight_map[{tensor!r}]={name!r} is not the name of a .safetensors file in the same folder")
    names = sorted({*index.values()})
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing, though {INDEX} names it")
    return names, index

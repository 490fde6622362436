"""Models that a test may damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paths
import pytest
from safetensors.numpy import load_file, save_file


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a model that a test may damage, with tensors and config changed as asked."""

    def make(
        name: str = "tiny-llama", change: Callable[[dict[str, np.ndarray]], Any] | None = None, **config: Any
    ) -> Path:
        copy = tmp_path / name
        shutil.copytree(paths.MODELS / name, copy)
        if change is not None:
            tensors: dict[str, np.ndarray] = {}
            for file in copy.glob("*.safetensors"):
                tensors |= load_file(file)
            change(tensors)
            save_file(tensors, copy / "model.safetensors")
        if config:
            path = copy / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return copy

    return make

"""What every kind of checkpoint has in common: tensors by name, and the checks before the first is read."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_SHOWN = 8  # names in one error message


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file and what is wrong with it."""


class TensorSource(Protocol):
    """Tensors under their Hugging Face names (`jaxflow.model.architectures.tensor_names`)."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray:
        """One tensor in host memory, of a floating dtype. Raises: CheckpointError."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """Raises: CheckpointError, naming the file, where it cannot be read or is no JSON object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def check_tensors(
    source: TensorSource, expected: Mapping[str, tuple[int, ...]], harmless: Callable[[str], bool]
) -> None:
    """Raises CheckpointError unless the source has just the expected tensors, of the expected shapes."""
    missing = [name for name in expected if name not in source.shapes]
    extra = [name for name in source.shapes if name not in expected and not harmless(name)]
    misshapen = [
        f"{name} is {list(source.shapes[name])} and should be {list(shape)}"
        for name, shape in expected.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    wrong = [
        (
            f"{label}: "
            f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        )
        for label, names in (
            ("missing tensors", missing),
            ("unexpected tensors", extra),
            ("wrong shapes", misshapen),
        )
        if names
    ]
    if wrong:
        raise CheckpointError(f"{source.path}: does not fit its config; " + "; ".join(wrong))

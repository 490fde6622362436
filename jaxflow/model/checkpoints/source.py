"""Parts that all checkpoint formats share: tensors by name, their checks, and the generation config."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxflow.config import ConfigError
from jaxflow.model.architectures.hf_config import token_ids

_SHOWN = 8  # names in one error message
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "max_new_tokens": (1.0, 2.0**31),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file and the problem."""


class TensorSource(Protocol):
    """Tensors under their Hugging Face names (`jaxflow.model.architectures.tensor_names`)."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str) -> np.ndarray:
        """Return one tensor in host memory, with a floating dtype. Raises: CheckpointError."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises: CheckpointError if the file is unreadable or no JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: contains a JSON {type(value).__name__}, not an object")
    return value


def check_tensors(
    source: TensorSource, expected: Mapping[str, tuple[int, ...]], harmless: Callable[[str], bool]
) -> None:
    """Check the names and shapes of the tensors in `source`.

    Args:
      harmless: returns True for the name of an unexpected tensor that is ignored.

    Raises:
      CheckpointError: missing, unexpected or misshapen tensors.
    """
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


def generation_settings(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a `generation_config.json`.

    The result has those of temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens and do_sample
    that the file names, and always `eos_token_ids`.

    Raises:
      CheckpointError: a value is not a number or is out of range. The error names the file and the key.
    """
    settings: dict[str, Any] = {}
    for key, (low, high) in _RANGES.items():
        value = values.get(key)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (math.isfinite(value) and low <= value <= high):
            raise CheckpointError(f"{path}: {key}={value!r} is not a number from {low:g} to {high:g}")
        settings[key] = value
    if isinstance(values.get("do_sample"), bool):
        settings["do_sample"] = values["do_sample"]
    try:
        settings["eos_token_ids"] = token_ids("eos_token_id", values.get("eos_token_id"))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return settings

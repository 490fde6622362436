"""Reads a checkpoint's `generation_config.json`: how its makers would have tokens drawn."""

import math
from pathlib import Path
from typing import Any

from jaxflow.config import ConfigError
from jaxflow.model.architectures.hf_config import token_ids
from jaxflow.model.checkpoints.source import CheckpointError

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, 2.0**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "max_new_tokens": (1.0, 2.0**31),
}


def generation_settings(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Those of temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens and do_sample that are
    named, and `eos_token_ids`.

    Raises:
      CheckpointError: a value that is no number or out of range, naming file and key.
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

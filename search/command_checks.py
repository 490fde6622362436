"""What commands of the search refuse before they begin."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from jaxflow.config import ConfigError, ModelConfig


def check_gpus(name: str, model: ModelConfig, gpus: int) -> None:
    """Raises: ConfigError for a number of GPUs over which a model's heads cannot be cut."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % gpus:
        raise ConfigError("gpus", gpus, f"a divisor of {name}'s {heads} heads")
    if kv_heads % gpus and gpus % kv_heads:
        raise ConfigError("gpus", gpus, f"a divisor or a multiple of {name}'s {kv_heads} key/value heads")


def check_lengths(name: str, model: ModelConfig, prompt: int, output: int) -> None:
    """Raises: ConfigError for a prompt and output, in tokens, longer together than a model was made for."""
    if prompt + output > model.max_position:
        accepted = f"with the output's {output} at most {model.max_position}, which {name} was made for"
        raise ConfigError("prompt_tokens", prompt, accepted)


def check_scattered(tp: int, **numbers: Sequence[int]) -> None:
    """numbers: by flag. Raises: ConfigError for rows that do not divide among so many devices."""
    for flag, given in numbers.items():
        if odd := [number for number in given if number % tp]:
            raise ConfigError(flag, odd[0], f"multiples of the {tp} devices that rows are scattered over")


def check_files(out: Path, files: Sequence[Path]) -> None:
    """Before the search, whose plans would be lost: makes the folder. Raises: ConfigError where a plan's file
    could not be written.
    """
    with contextlib.suppress(OSError):
        files[0].parent.mkdir(parents=True, exist_ok=True)
    for file in files:
        there = file if file.exists() else file.parent
        if file.is_dir() or not file.parent.is_dir() or not os.access(there, os.W_OK):
            accepted = (
                "a folder that is there or can be made, of files that can be written: one for each "
                "workload's plan"
            )
            raise ConfigError(
                "out",
                str(out),
                accepted if len(files) > 1 else "a file that can be written, for the plan of one workload",
            )

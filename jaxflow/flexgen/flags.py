"""An offloaded run's settings as command-line flags: a policy's file, and what overrides it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from absl import flags

from jaxflow.config import ConfigError
from jaxflow.flexgen.config import OffloadConfig
from jaxflow.flexgen.policy import KINDS, PERCENTAGES, Policy, Shares, load_policy
from jaxflow.flexgen.schedule import SCHEDULES
from jaxflow.model.checkpoints.checkpoint import open_checkpoint


def define_flags() -> None:
    """Flags of the settings that `OffloadConfig` has, and of what overrides a policy."""
    flags.DEFINE_string("policy", None, "The policy: a file that `python -m search placement` wrote.")
    for kind in KINDS:
        flags.DEFINE_list(
            f"{kind}_percent",
            None,
            f"Overrides the policy: percentages of {kind} on device, host and disk, as 20,80,0.",
        )
    for name in ("prompt_tokens", "output_tokens", "gpu_batch_size", "num_gpu_batches"):
        flags.DEFINE_integer(name, None, "Overrides the policy.", lower_bound=1)
    for name in ("weight_bits", "kv_bits"):
        flags.DEFINE_enum(name, None, ["16", "4"], "Overrides the policy.")
    flags.DEFINE_bool(
        "host_attention",
        None,
        "Overrides the policy: whether decodes attend on the host to what KV is not on the device.",
    )
    flags.DEFINE_float("gpu_memory_limit", None, "GB of the device that may be used.")
    flags.DEFINE_float("host_memory_limit", None, "GB of the host that may be used.")
    flags.DEFINE_float("disk_limit", None, "GB of disk that may be used.")
    flags.DEFINE_string("disk_path", None, "A folder for what the policy keeps on disk.")
    flags.DEFINE_enum(
        "schedule", "zigzag", list(SCHEDULES), "row: batch by batch, which fetches the weights for each."
    )
    flags.DEFINE_bool("overlap", True, "False: each transfer ends before the next step begins.")


def policy_from_flags(model: str) -> Policy:
    """The policy file with what overrides it. Raises: ConfigError, PolicyError."""
    f = flags.FLAGS
    if f.policy is None:
        name = open_checkpoint(model, load_format="dummy").name
        raise ConfigError(
            "policy",
            None,
            f"a policy's file: `python -m search placement --model {name} --output policy.json` writes one",
        )
    changes: dict[str, Any] = {}
    for kind in KINDS:
        given = f[f"{kind}_percent"].value
        if given is not None:
            changes[kind] = _shares(f"{kind}_percent", given)
    for name in (
        "prompt_tokens",
        "output_tokens",
        "gpu_batch_size",
        "num_gpu_batches",
        "weight_bits",
        "kv_bits",
        "host_attention",
    ):
        if f[name].value is not None:
            changes[name] = int(str(f[name].value)) if name.endswith("bits") else f[name].value
    return msgspec.structs.replace(load_policy(f.policy), **changes)


def _shares(flag: str, given: Sequence[str]) -> Shares:
    try:
        device, host, disk = map(float, given)
        shares = Shares(device, host, disk)
        if not shares.are_whole:
            raise ValueError
    except ValueError:
        raise ConfigError(
            flag, ",".join(given), f"{PERCENTAGES}: of device, host and disk, as 20,80,0"
        ) from None
    return shares


def offload_from_flags(model: str) -> OffloadConfig:
    """Raises: ConfigError, PolicyError."""
    names = [field.name for field in dataclasses.fields(OffloadConfig) if field.name != "policy"]
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
    return OffloadConfig(policy_from_flags(model), **given)


def random_prompts(number: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed % 2**64)  # of numpy's generators alone a seed may not be negative
    return [rng.integers(0, vocabulary, tokens).tolist() for _ in range(number)]

"""Settings of an offloaded run: memory limits, disk folder, schedule; and their command-line flags."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from absl import flags

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.flexgen.policy import KINDS, PERCENTAGES, Policy, PolicyError, Shares, load_policy
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

GIGA = 1e9
Schedule = Literal["zigzag", "diagonal", "row"]
SCHEDULES = ("zigzag", "diagonal", "row")
# The fields of `EngineConfig` that apply to an offloaded run, which has no scheduler, page cache or plans.
ENGINE_FIELDS = (
    *("model", "tokenizer", "dtype", "load_format", "quantization", "block_size", "tensor_parallel_size"),
    *("gpu_memory_utilization", "seed", "kernels", "compilation_cache_dir"),
)


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """How a policy is run. Limits are in GB (1e9 bytes); None means all of the machine's memory.

    Attributes:
      disk_path: an existing folder, needed by a policy with a share on disk. Scratch files go to a new folder
        inside.
      schedule: the order of the steps (`jaxflow.flexgen.block`); None: the policy's. "row" runs batch after
        batch.
      overlap: False ends each transfer before the next step begins.

    Raises:
      ConfigError: naming the field of an invalid value.
    """

    policy: Policy
    gpu_memory_limit: float | None = None
    host_memory_limit: float | None = None
    disk_limit: float | None = None
    disk_path: str | None = None
    schedule: Schedule | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        for field in ("gpu_memory_limit", "host_memory_limit", "disk_limit"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(field, value, "a positive number of GB")
        if self.schedule not in (None, *SCHEDULES):
            raise ConfigError("schedule", self.schedule, " or ".join(SCHEDULES))
        if self.policy.pipeline_parallel_size > 1 and self.order != "zigzag":
            stages = self.policy.pipeline_parallel_size
            raise ConfigError("schedule", self.schedule, f"zigzag, the order of the policy's {stages} stages")
        if self.on_disk and not self.disk_path:  # an empty path would mean the working directory
            raise ConfigError(
                "disk_path",
                self.disk_path,
                f"a folder, because the policy places {' and '.join(self.on_disk)} on disk",
            )

    @property
    def order(self) -> Schedule:
        """The order of the steps."""
        return self.schedule or self.policy.schedule  # type: ignore[return-value]

    @property
    def on_disk(self) -> list[str]:
        """The kinds of tensors with a share on disk."""
        return [kind for kind in ("weights", "kv", "activations") if getattr(self.policy, kind).disk > 0]


def offload_config(given: "OffloadConfig | Policy | str | os.PathLike", model: str) -> OffloadConfig:
    """Return the settings for an `offload` argument: settings, a policy, or a policy's file.

    Raises: ConfigError, PolicyError.
    """
    if isinstance(given, OffloadConfig):
        return given
    if isinstance(given, Policy):
        return OffloadConfig(given)
    if isinstance(given, str | os.PathLike):
        return OffloadConfig(load_policy(given))
    raise PolicyError(
        f"offload={given!r}; accepted are a Policy, the file of a policy, or an OffloadConfig; `python -m "
        f"search placement --model {model}` writes a policy"
    )


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError for an engine setting without effect on an offloaded run."""
    for field in dataclasses.fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name not in ENGINE_FIELDS and value != field.default:
            raise ConfigError(
                field.name,
                value,
                ("unset: the policy (kv_bits for the KV) and the limits of an offloaded run apply"),
            )


def define_flags() -> None:
    """Define the flags of `OffloadConfig` and of overrides of a policy."""
    flags.DEFINE_string("policy", None, "File of the policy, written by `python -m search placement`.")
    for kind in KINDS:
        flags.DEFINE_list(
            f"{kind}_percent",
            None,
            f"Percentages of {kind} on device, host and disk, for example 20,80,0; overrides the policy.",
        )
    for name in ("prompt_tokens", "output_tokens", "gpu_batch_size", "num_gpu_batches"):
        flags.DEFINE_integer(name, None, f"{name} of the run; overrides the policy.", lower_bound=1)
    for name in ("weight_bits", "kv_bits"):
        flags.DEFINE_enum(name, None, ["16", "4"], f"{name} of the run; overrides the policy.")
    flags.DEFINE_bool(
        "host_attention",
        None,
        "Compute attention over KV that is not on the device on the host; overrides the policy.",
    )
    flags.DEFINE_float(
        "value_top_k_percent",
        None,
        "Percentage of the cached value vectors that a decode reads: those with the largest softmax weights. "
        "Overrides the policy.",
    )
    flags.DEFINE_float("gpu_memory_limit", None, "Limit of the device memory in GB.")
    flags.DEFINE_float("host_memory_limit", None, "Limit of the host memory in GB.")
    flags.DEFINE_float("disk_limit", None, "Limit of the disk space in GB.")
    flags.DEFINE_string("disk_path", None, "Folder for the scratch files.")
    flags.DEFINE_enum(
        "schedule",
        None,
        list(SCHEDULES),
        "zigzag: all batches of a block pass a layer together; diagonal: so do batches at different tokens; "
        "row: one batch after another. Overrides the policy.",
    )
    flags.DEFINE_bool(
        "overlap",
        True,
        "Run transfers concurrently with the computation; otherwise each transfer ends before the next step.",
    )


def policy_from_flags(model: str) -> Policy:
    """Return the policy of the file with the overrides of the flags. Raises: ConfigError, PolicyError."""
    f = flags.FLAGS
    if f.policy is None:
        name = open_checkpoint(model, load_format="dummy").name
        raise ConfigError(
            "policy",
            None,
            f"a policy file, as of `python -m search placement --model {name} --output policy.json`",
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
        "value_top_k_percent",
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
    """Return the settings of the flags. Raises: ConfigError, PolicyError."""
    names = [field.name for field in dataclasses.fields(OffloadConfig) if field.name != "policy"]
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
    return OffloadConfig(policy_from_flags(model), **given)


def random_prompts(number: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids."""
    rng = np.random.default_rng(seed % 2**64)  # numpy's generators take no negative seed
    return [rng.integers(0, vocabulary, tokens).tolist() for _ in range(number)]

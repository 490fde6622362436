"""How a policy is run: the limits of each tier and the paper's ablations. Frozen data, checked when it is
made.
"""

import dataclasses
import math
import os

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.flexgen.policy import Policy, PolicyError, load_policy
from jaxflow.flexgen.schedule import SCHEDULES, Schedule

GIGA = 1e9
# Of `EngineConfig`, what an offloaded run goes by; the rest is of a scheduler, a cache of pages and plans,
# which it does not have.
ENGINE_FIELDS = (
    *("model", "tokenizer", "dtype", "load_format", "quantization", "block_size", "tensor_parallel_size"),
    *("gpu_memory_utilization", "seed", "kernels", "compilation_cache_dir"),
)


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """Limits are in GB (1e9 bytes), None: what the machine has. Weights on the disk and such lie in a folder
    made under `disk_path`.

    Raises:
      ConfigError: for a value that cannot work, naming the field. PolicyError: for a policy that cannot be
      read.
    """

    policy: Policy
    gpu_memory_limit: float | None = None
    host_memory_limit: float | None = None
    disk_limit: float | None = None
    disk_path: str | None = None  # needed where the policy has a share on disk
    schedule: Schedule = "zigzag"  # row: batch by batch, as systems without a block do
    overlap: bool = True  # False: each verb ends before the next begins

    def __post_init__(self) -> None:
        for field in ("gpu_memory_limit", "host_memory_limit", "disk_limit"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(field, value, "a positive number of GB")
        if self.schedule not in SCHEDULES:
            raise ConfigError("schedule", self.schedule, " or ".join(SCHEDULES))
        if self.on_disk and not self.disk_path:  # an empty path would be the working directory
            raise ConfigError(
                "disk_path",
                self.disk_path,
                f"a folder: the policy keeps {' and '.join(self.on_disk)} on disk",
            )

    @property
    def on_disk(self) -> list[str]:
        """What has a share on disk."""
        return [kind for kind in ("weights", "kv", "activations") if getattr(self.policy, kind).disk > 0]


def offload_config(given: "OffloadConfig | Policy | str | os.PathLike", model: str) -> OffloadConfig:
    """What a caller means by `offload`: settings, a policy, or a policy's file. Raises: ConfigError,
    PolicyError.
    """
    if isinstance(given, OffloadConfig):
        return given
    if isinstance(given, Policy):
        return OffloadConfig(given)
    if isinstance(given, str | os.PathLike):
        return OffloadConfig(load_policy(given))
    raise PolicyError(
        f"offload={given!r}: a Policy, a policy's file, or an OffloadConfig; `python -m search "
        f"placement --model {model}` writes one"
    )


def check_engine(config: EngineConfig) -> None:
    """Refuses a setting that would be of no effect. Raises: ConfigError."""
    for field in dataclasses.fields(EngineConfig):
        value = getattr(config, field.name)
        if field.name not in ENGINE_FIELDS and value != field.default:
            raise ConfigError(
                field.name,
                value,
                (
                    "unset: an offloaded run goes by its policy (of KV its kv_bits) and limits, block "
                    "after block"
                ),
            )

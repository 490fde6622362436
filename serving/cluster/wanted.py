"""The wanted replicas: their number and the settings of their engines, from flags or from a file."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from jaxflow.config import ConfigError, EngineConfig


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of the file."""

    replicas: int
    prefill_replicas: int = 0
    version: str = ""
    engine: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class WantedReplicas:
    """The wanted replicas. A change of `version` or `config` replaces every replica.

    Attributes:
      replicas: that answer requests; `prefill_replicas`: that compute prompts for the others.

    Raises:
      ConfigError: fewer than one replica, or prefill replicas without a host tier for their pages.
    """

    replicas: int
    config: EngineConfig
    version: str = ""
    prefill_replicas: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError("replicas", self.replicas, "1 or more")
        if self.prefill_replicas < 0:
            raise ConfigError("prefill_replicas", self.prefill_replicas, "0 or more")
        if self.prefill_replicas and not self.config.kv_offloading_size:
            accepted = "0 without --kv_offloading_size: KV pages pass through host memory"
            raise ConfigError("prefill_replicas", self.prefill_replicas, accepted)


def read_wanted(path: str | Path, base: EngineConfig) -> WantedReplicas:
    """Return the wanted replicas of a JSON file.

    `{"replicas": 2, "version": "b", "engine": {"plan": "sequential"}}`: `engine` holds settings that differ
    from the command line, and may be left out like `version`.

    Raises:
      ConfigError: the file cannot be read, or a field is unknown or has a value that is not accepted.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError("cluster_file", str(path), f"a file that can be read ({error.strerror})") from error
    try:
        file = msgspec.json.decode(content, type=_File)
    except msgspec.MsgspecError as error:
        accepted = f"JSON with replicas, and perhaps version and engine ({error})"
        raise ConfigError("cluster_file", str(path), accepted) from error
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    for name in file.engine:
        if name not in fields:
            raise ConfigError("engine", name, f"one of {', '.join(fields)}")
    try:
        settings = {
            name: msgspec.convert(value, type=fields[name].type) for name, value in file.engine.items()
        }
    except msgspec.ValidationError as error:
        raise ConfigError("engine", file.engine, str(error)) from error
    config = dataclasses.replace(base, **settings)
    return WantedReplicas(file.replicas, config, file.version, file.prefill_replicas)

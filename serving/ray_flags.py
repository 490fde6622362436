"""The flags of replicas on Ray, and the connection that they describe."""

import importlib.util
from typing import TYPE_CHECKING

from absl import flags

from jaxflow.config import ConfigError, EngineConfig
from serving.cluster.link import Load

if TYPE_CHECKING:
    from serving.cluster.ray_link import RayCluster

REPLICAS = flags.DEFINE_integer("replicas", 1, "Engines, each in its own process.")
RAY_ADDRESS = flags.DEFINE_string(
    "ray_address",
    None,
    "Address of a running Ray cluster, or auto for the one of this machine. Default: start Ray on this "
    "machine.",
)
CPUS_PER_REPLICA = flags.DEFINE_float(
    "cpus_per_replica", 1.0, "CPU cores that a replica reserves in Ray.", lower_bound=0.0
)
GPUS_PER_REPLICA = flags.DEFINE_float(
    "gpus_per_replica",
    None,
    "GPUs that a replica reserves in Ray. Default: the devices of its engine, or 0 where Ray has no GPU.",
    lower_bound=0.0,
)
PROCESSES_PER_REPLICA = flags.DEFINE_integer(
    "processes_per_replica",
    1,
    "Processes that run the engine of a replica, one a machine. Each has the same number of devices.",
    lower_bound=1,
)
NAMES = ("replicas", "ray_address", "cpus_per_replica", "gpus_per_replica", "processes_per_replica")


def check_ray(field: str, value: str) -> None:
    """Check that Ray is installed. Raises: ConfigError for a field whose value needs Ray."""
    if importlib.util.find_spec("ray") is None:
        accepted = 'a Python environment with ray: pip install "jaxflow[cluster]"'
        raise ConfigError(field, f"{value} without ray", accepted)


def connect(replicas: int, engine: EngineConfig, load: Load) -> "RayCluster":
    """Start or join Ray, before a server's threads run: Ray starts processes. Raises: ConfigError."""
    from serving.cluster.ray_link import RayCluster, RayConfig

    config = RayConfig(
        RAY_ADDRESS.value, CPUS_PER_REPLICA.value, GPUS_PER_REPLICA.value, PROCESSES_PER_REPLICA.value
    )
    return RayCluster(config, replicas, engine.parallel.devices, load)

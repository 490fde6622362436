"""The engine of a batch whose replicas Ray starts."""

import functools

from jaxflow.config import EngineConfig
from serving import ray_flags
from serving.cluster.batch_replica import load_batch_replica
from serving.cluster.batch_replicas import ReplicaEngine
from serving.cluster.wanted import WantedReplicas


def ray_engine(
    config: EngineConfig, chat_template: str | None, served_model_names: tuple[str, ...]
) -> ReplicaEngine:
    """Start or join Ray as its flags say, and return the engine with its replicas. Raises: ConfigError."""
    wanted = WantedReplicas(ray_flags.REPLICAS.value, config)
    load = functools.partial(
        load_batch_replica, served_model_names=served_model_names, chat_template=chat_template
    )
    cluster = ray_flags.connect(wanted.replicas, config, load)
    return ReplicaEngine(wanted, cluster.launch, close=cluster.close)

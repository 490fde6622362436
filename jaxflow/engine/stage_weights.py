"""The weights of a pipeline stage, loaded or as shapes."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxflow.config import EngineConfig, ModelConfig
from jaxflow.engine.expert_slots import with_slots
from jaxflow.model import softmax_range
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.model.stage import Stage
from jaxflow.model.weights import Weights, shapes, shardings
from jaxflow.parallel.mesh import TP, sharded

log = logging.getLogger(__name__)


def weight_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of `jaxflow.model.weights.leaves`. config: resolved."""
    return {
        "quantization": config.quantization,
        "kv_scales": config.kv_cache_dtype == "float8_e4m3fn",
        "expert_parallel": config.enable_expert_parallel,
        "ranks": config.data_parallel_size,
    }


def load_stage(
    config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, stage: Stage, progress: bool
) -> Weights:
    """Return the weights of a stage on its devices."""
    weights = checkpoint.load(
        config.dtype,
        mesh,
        progress=progress,
        seed=config.seed,
        stage=None if stage.is_model else stage,
        **weight_options(config),
    )
    weights = _calibrated(config, checkpoint, weights, mesh, stage)
    if config.enable_eplb:
        experts = checkpoint.model_config.num_experts
        weights = with_slots(weights, mesh, experts, config.num_redundant_experts)
    return weights


def absent_stage(config: EngineConfig, model: ModelConfig, mesh: Mesh, stage: Stage) -> Weights:
    """Return the shapes of the weights of a stage that another process has."""
    options = weight_options(config)
    arrays = stage.weights(shapes(model, mesh.shape[TP], jnp.dtype(config.dtype), **options))
    specs = stage.weights(shardings(model, mesh, **options))
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharded(mesh, spec)), arrays, specs
    )


def _calibrated(
    config: EngineConfig, checkpoint: Checkpoint, weights: Weights, mesh: Mesh, stage: Stage
) -> Weights:
    """Return the weights with the unified max value of each layer of a stage, if the model qualifies.

    With an e4m3 cache the running maximum stays: e4m3 attention weights lack the range for a maximum that
    differs from the row's, and decodes gain nothing.
    """
    path = Path(config.calibration) if config.calibration else None
    if config.calibration is None and checkpoint.source is not None:
        path = softmax_range.default_path(checkpoint.source.path)
        path = path if path.exists() else None
    if path is None:
        return weights
    found = softmax_range.read(path, checkpoint.model_config.num_layers)
    if not found.qualifies:
        log.info("softmax: running maximum: the model does not qualify for a unified max value (%s)", path)
        return weights
    if jnp.dtype(config.kv_cache_dtype) == jnp.float8_e4m3fn:
        say = log.warning if config.calibration else log.info
        say("softmax: running maximum: an e4m3 cache does not use a unified max value (%s)", path)
        return weights
    log.info("softmax: unified max value (%s)", path)
    return softmax_range.with_unified_max(weights, found.layers[stage.first : stage.stop], mesh)

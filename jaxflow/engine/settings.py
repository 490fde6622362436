"""Settings with their defaults for a device and a model."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxflow.config import KV_DTYPES, ConfigError, EngineConfig, ModelConfig
from jaxflow.engine.default_seqs import TOKENS_OF_SEQ, default_max_num_seqs, default_step_tokens
from jaxflow.engine.latent_limits import check_latent
from jaxflow.engine.program_memory import SPARE
from jaxflow.engine.stage_weights import weight_options
from jaxflow.engine.step_plans import cost_device, default_plan, largest_step
from jaxflow.kv.device_cache import page_bytes, page_groups
from jaxflow.kv.tiers.host_machine import free_host_bytes
from jaxflow.model.weight_spec import Leaf
from jaxflow.model.weights import leaves
from jaxflow.parallel.mesh import DP, TP, on_gpu


def resolve(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return the settings with their defaults for this device and model. Raises: ConfigError."""
    if config.attention_spans is not None and not model.span_classes:
        raise ConfigError("attention_spans", config.attention_spans, "unset for this command")
    gpu = on_gpu()
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if gpu else "float32")
    longest = config.max_model_len or model.max_position
    if longest > model.max_position:
        raise ConfigError(
            "max_model_len", longest, f"at most {model.max_position}, which the checkpoint was made for"
        )
    config = dataclasses.replace(
        config, dtype=dtype, kv_cache_dtype=KV_DTYPES[config.kv_cache_dtype] or dtype
    )
    if model.attention_sinks and jnp.dtype(config.kv_cache_dtype).itemsize == 1:
        raise ConfigError(
            "kv_cache_dtype",
            config.kv_cache_dtype,
            "auto, bfloat16 or float32 for a model with attention sinks, whose layers with a window lose "
            "accuracy in 8 bits",
        )
    check_latent(config, model)
    mixture = (model.num_experts, model.experts_per_token, config.data_parallel_size)
    by_default = default_step_tokens(*mixture) if gpu else 256
    budget = config.max_num_batched_tokens or largest_step(config, model) or by_default
    seqs = config.max_num_seqs or default_max_num_seqs(budget, *_kv_bytes(config, model, budget))
    config = dataclasses.replace(config, max_num_seqs=seqs)
    if budget < seqs:
        raise ConfigError(
            "max_num_batched_tokens",
            budget,
            f"at least max_num_seqs={seqs}, a token for each running sequence",
        )
    most = max(seqs, _machine_bytes() // _step_token_bytes(model, dtype))
    if budget > most:
        raise ConfigError("max_num_batched_tokens", budget, f"at most {most}, which the memory may hold")
    config = dataclasses.replace(config, max_model_len=longest, max_num_batched_tokens=budget)
    return dataclasses.replace(config, plan=default_plan(config, model)) if config.plan == "auto" else config


def _kv_bytes(config: EngineConfig, model: ModelConfig, budget: int) -> tuple[float, float]:
    """Return the bytes for KV pages of one tensor-parallel shard over all stages, and
    the bytes of a sequence's pages.

    The sequence has `TOKENS_OF_SEQ` tokens, or `max_model_len` if that is less. On a CPU all shards share the
    free memory, of which pages use half (`memory_budget`). config: its dtypes are resolved.

    Args:
      budget: most tokens of a step.
    """
    tp, stages, ranks = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
    groups = page_groups(model, config.kv_cache_dtype, tp)
    tokens = min(TOKENS_OF_SEQ, config.max_model_len or model.max_position)
    sizes = page_bytes(groups, config.block_size, tp)
    seq_bytes = sum(
        group.pages_of(tokens, config.block_size) * size for group, size in zip(groups, sizes, strict=True)
    )
    weights = _shard_bytes(config, model)
    if on_gpu():
        step = budget * _step_token_bytes(model, config.dtype)
        return stages * ((1 - SPARE) * _usable_bytes(config) - step) - weights, seq_bytes
    shards = tp * ranks
    return (free_host_bytes() / shards - weights) * config.gpu_memory_utilization / 2, seq_bytes


def _shard_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return the bytes of all layers' weights on one tensor-parallel shard.
    config: its dtypes are resolved.
    """
    sizes = {TP: config.tensor_parallel_size, DP: config.data_parallel_size}
    tree = leaves(model, config.tensor_parallel_size, **weight_options(config))

    def shard(leaf: Leaf) -> int:
        arrays, specs = jax.tree.leaves(leaf.struct(jnp.dtype(config.dtype))), jax.tree.leaves(leaf.specs)
        return sum(
            array.size * array.dtype.itemsize // math.prod(sizes.get(axis, 1) for axis in _axes(spec))
            for array, spec in zip(arrays, specs, strict=True)
        )

    return sum(shard(leaf) for leaf in jax.tree.leaves(tree))


def _axes(spec: PartitionSpec) -> list[str]:
    """Return the mesh axes of a partition."""
    return [axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)]


def _usable_bytes(config: EngineConfig) -> float:
    """Return the bytes of a GPU that the engine uses; those of the card where no such GPU is present."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else config.gpu_memory_utilization * cost_device().memory_bytes


def _machine_bytes() -> int:
    """Return the bytes of memory that a step could have: of a device, or the free ones of the host."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else free_host_bytes()


def _step_token_bytes(model: ModelConfig, dtype: str) -> int:
    """Return the least bytes that a token of a step needs.

    These are residual, Q, K, V, the MLP's inner activations and the embeddings of each layer.
    """
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    inputs = model.num_layers * model.layer_input_size
    return jnp.dtype(dtype).itemsize * (2 * model.hidden_size + heads + 2 * model.widest_mlp + inputs)

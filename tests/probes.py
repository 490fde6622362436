"""The plain forward over the longest prompt of a golden, for tests of the parts of a model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import paths

from jaxflow.config import ModelConfig
from jaxflow.kv.device_cache import cache_shapes, page_groups
from jaxflow.model import ops, transformer
from jaxflow.model.batch import Batch
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context, Site
from pallas_kernels.kernel_set import REFERENCE

PAGE = 16
Weights = dict[str, Any]


@functools.cache
def model(name: str) -> tuple[ModelConfig, Weights]:
    """Return the config and the float32 weights of a small checkpoint."""
    opened = open_checkpoint(str(paths.MODELS / name))
    return opened.model_config, opened.load("float32")


def wanted_probes(name: str) -> np.ndarray:
    """Return the golden's raw logits of its probes at every token of its longest prompt."""
    return np.array(paths.golden(name)["prompts"][3]["prompt_probe_logits"])


def probes(name: str, config: ModelConfig, weights: Weights) -> np.ndarray:
    """Return what `wanted_probes` returns, by a config and weights that may differ from the checkpoint's."""
    golden, windows = paths.golden(name)["prompts"][3], model(name)[0].windows
    tokens = len(golden["prompt_ids"])
    groups, pages, at = len(windows), -(-tokens // PAGE), jnp.arange(tokens, dtype=jnp.int32)
    cache = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype),
        cache_shapes(page_groups(config, jnp.float32, 1), (pages,) * len(config.windows), PAGE),
    )
    batch = Batch(
        token_ids=jnp.asarray(golden["prompt_ids"], jnp.int32),
        positions=at,
        slots=jnp.broadcast_to(at, (groups, tokens)),
        page_table=jnp.broadcast_to(jnp.arange(pages, dtype=jnp.int32), (groups, 1, pages)),
        lengths=jnp.array([tokens], jnp.int32),
        num_decodes=jnp.int32(0),
        chunks=jnp.array([[0, tokens, 0, 0]], jnp.int32),
        sample_tokens=at,
    )
    context = Context(config, REFERENCE, windows=windows)
    hidden, _, _ = _forward(context, weights, cache, batch)
    return np.asarray(ops.logits(Site(context, weights), hidden))[:, golden["probe_ids"]]


_forward = jax.jit(transformer.forward, static_argnums=0)


def blanked(weights: Weights, key: str, value: float = 0.0) -> Weights:
    """Return the weights with one number in all arrays of this key, in the layers that have it."""
    layers = weights["layers"]
    return weights | {
        "layers": [w | ({key: jnp.full_like(w[key], value)} if key in w else {}) for w in layers]
    }

"""Padding of a step in a mixture: it reads no expert, and changes no token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import paths

from jaxflow.model import ops
from jaxflow.model.batch import NO_SLOT, Batch
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.weights import dummy_weights
from pallas_kernels.kernel_set import REFERENCE

TOKENS, SIZE = 3, 8


def batch(slots):
    none = jnp.zeros(SIZE, jnp.int32)
    return Batch(none, none, slots[None], none[None, None], none, jnp.int32(0), none[:0].reshape(0, 4), none)


def test_padding_reads_no_expert_and_changes_no_token():
    config = open_checkpoint(str(paths.MODELS / "tiny-qwen3_moe"), load_format="dummy").model_config
    w = dummy_weights(config, jnp.float32)["layers"][0]
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(SIZE, config.hidden_size)), jnp.float32)

    @jax.jit
    def run(slots):
        site = dataclasses.replace(Site(Context(config, REFERENCE), w), batch=batch(slots), stop=SIZE)
        routing = ops.router(site, h)
        rows = ops.expert_up_gate(site, h, routing)
        return rows.groups.sizes, routing.experts, ops.expert_down(site, rows, routing)

    every = jnp.arange(SIZE, dtype=jnp.int32)
    sizes, experts, found = run(jnp.where(every < TOKENS, every, NO_SLOT))
    np.testing.assert_array_equal(sizes, np.bincount(experts[:TOKENS].ravel(), minlength=config.num_experts))
    np.testing.assert_array_equal(found[:TOKENS], run(every)[2][:TOKENS])
    assert not found[TOKENS:].any()

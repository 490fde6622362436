"""Devices with tokens of their own, which exchange rows with the devices of the experts or gather all
tokens, against one device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from jax.sharding import PartitionSpec

from jaxflow.model import exchanged_experts, ops, weights
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.exchanged_experts import list_sent
from jaxflow.model.op_registry import Context, Site
from jaxflow.model.routing import Routing
from jaxflow.parallel.mesh import TP, make_mesh
from jaxflow.parallel.ragged import send_gathered
from pallas_kernels.gemm.grouped import groups as expert_groups
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.kernel_set import REFERENCE

CONFIG = open_checkpoint(str(paths.MODELS / "tiny-gpt_oss")).model_config  # experts with biases
EXPERTS, CHOSEN = CONFIG.num_experts, CONFIG.experts_per_token
EVERYWHERE, ROWS = PartitionSpec(), PartitionSpec(TP)


def send_with_nan(rows, pieces, axis, *, length):
    """Return the result of `send`, with NaN in the rows that are undefined on a GPU."""
    filled = send_gathered(jnp.ones((len(rows), 1)), pieces, axis, length=length)
    return jnp.where(filled > 0, send_gathered(rows, pieces, axis, length=length), jnp.nan)


@functools.cache
def spread(devices: int, align: int, gather: bool):
    list_groups = functools.partial(expert_groups.list_groups, rows=2 * align, align=align)
    kernels = dataclasses.replace(REFERENCE, list_groups=list_groups)
    specs = {
        name: leaf.spec
        for name, leaf in weights.leaves(CONFIG, devices, expert_parallel=True)["layers"][0].items()
        if name in weights.EXPERT_LEAVES
    }

    def run(w, h, experts, shares, is_token):
        c = Context(CONFIG, kernels, expert_axis=TP)
        groups = None if gather else list_sent(experts, c.config.num_experts, is_token)
        routing = Routing(experts, shares, groups, is_token=is_token)
        sent = ops.expert_dispatch(Site(c, w), h, routing)
        rows = ops.expert_up_gate(Site(c, w), sent, routing)
        return ops.expert_combine(Site(c, w), ops.expert_down(Site(c, w), rows, routing), routing)

    return jax.jit(
        jax.shard_map(
            run,
            mesh=make_mesh(devices),
            in_specs=(specs, ROWS, ROWS, ROWS, ROWS),
            out_specs=ROWS,
            check_vma=False,
        )
    )


PADDINGS = {  # the tokens among 24 rows
    "no padding": np.ones(24, bool),
    "some padding": np.arange(24) % 5 != 2,
    "a device without a token": np.arange(24) >= 12,
    "no token": np.zeros(24, bool),
}


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("gather", [False, True], ids=["exchange", "gather"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("routing", ["even", "skewed", "one device", "one expert a device"])
def test_the_experts_of_devices_are_the_layer_of_one_device(routing, padding, gather, devices, monkeypatch):
    """One device: all tokens choose experts 0 to 2 of 8, so that the later devices get no row."""
    tokens, rng, is_token = 24, np.random.default_rng(3), PADDINGS[padding]
    if routing in ("even", "skewed"):
        experts = draw_routing(rng, tokens, EXPERTS, CHOSEN, 2.0 if routing == "skewed" else 0.0)
    else:
        experts = np.tile([0, 1, 2] if routing == "one device" else [7, 2, 5], (tokens, 1))
    tree = weights.leaves(CONFIG)["layers"][0]
    w = {
        name: jnp.asarray(rng.normal(size=tree[name].shape) / 8, jnp.float32)
        for name in weights.EXPERT_LEAVES
    }
    h = jnp.asarray(rng.normal(size=(tokens, CONFIG.hidden_size)), jnp.float32)
    given = jnp.asarray(experts, jnp.int32), jnp.asarray(rng.random((tokens, CHOSEN)), jnp.float32)
    site, one = Site(Context(CONFIG, REFERENCE), w), Routing(*given)
    whole = jax.jit(lambda h: ops.expert_down(site, ops.expert_up_gate(site, h, one), one))
    wanted = np.asarray(whole(h))
    monkeypatch.setattr(exchanged_experts, "send", send_with_nan)
    monkeypatch.setattr(ops, "gathers", lambda c: gather and c.exchanges_tokens)
    for align in (1, 8):
        found = np.asarray(spread(devices, align, gather)(w, h, *given, jnp.asarray(is_token)))
        np.testing.assert_allclose(found[is_token], wanted[is_token], rtol=1e-4, atol=1e-5)
        assert not found[~is_token].any()
    assert np.abs(wanted).max() > 0.1

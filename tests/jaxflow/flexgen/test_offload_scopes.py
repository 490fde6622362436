"""Tests of the op names in the offloaded programs, by which a profile attributes their time."""

import concurrent.futures

import jax
import jax.numpy as jnp
import paths
import pytest

from jaxflow.flexgen import programs as programs_module
from jaxflow.flexgen.geometry import Geometry, place
from jaxflow.flexgen.policy import Policy, Shares
from jaxflow.flexgen.programs import OffloadPrograms
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import model_graph
from jaxflow.model.op_registry import Context
from jaxflow.parallel.mesh import axis_of, make_mesh
from pallas_kernels.kernel_set import REFERENCE


def scopes(jaxpr) -> set[str]:
    """Return every named scope of a jaxpr and of the jaxprs within it, except the specs of `jnp.einsum`."""
    found = set()
    for equation in jaxpr.eqns:
        parts = str(equation.source_info.name_stack).split("/")
        found |= {part for part in parts if part.isidentifier()}
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            found |= scopes(inner) if hasattr(inner, "eqns") else set()
    return found


@pytest.mark.parametrize(
    ("name", "tp", "host_attention", "percent"),
    [
        ("tiny-mixtral", 1, False, 100.0),
        ("tiny-gemma2", 1, True, 100.0),
        ("tiny-llama", 2, False, 100.0),
        ("tiny-llama", 1, False, 10.0),
    ],
)
def test_every_scope_of_the_offloaded_programs_is_an_op_of_the_graph(
    monkeypatch, name, tp, host_attention, percent
):
    config = open_checkpoint(str(paths.MODELS / name)).model_config
    host = Shares(device=50.0, host=50.0)
    policy = Policy(
        name, 8, 4, 4, 1, host, host, host, host_attention=host_attention, value_top_k_percent=percent
    )
    mesh = make_mesh(tp)
    programs = OffloadPrograms(
        Geometry(config, policy, jnp.dtype("float32"), 16, mesh), Context(config, REFERENCE, axis_of(mesh))
    )
    jaxprs, over_devices = {}, programs_module._over_devices

    def traced(function, *rest):
        jitted, arguments = over_devices(function, *rest)
        jaxprs[len(jaxprs)] = jitted.trace(*arguments).jaxpr
        return jitted, arguments

    monkeypatch.setattr(programs_module, "_over_devices", traced)
    monkeypatch.setattr(programs_module, "_compile", lambda lowered, mesh: None)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        programs_module._begin(programs, place(programs.geometry), pool, lambda program: None)
    found = set().union(*(scopes(jaxpr.jaxpr) for jaxpr in jaxprs.values()))
    ops = {op.name for op in model_graph(config, tp).ops()}
    assert found <= ops, found - ops
    assert ops - found <= {"attn_reduce", "mlp_reduce"}

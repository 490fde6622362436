"""The engine's step, compiled ahead of time for the H200: nothing copies the cache or a weight, and nothing needs the host."""

import dataclasses

import h200
import jax
import jax.numpy as jnp
import pytest

from jaxflow.engine.executor import Executor
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.programs import Programs
from jaxflow.mesh import axis_of
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.ops import Context
from jaxflow.model.weights import shapes, shardings
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handmade import sequential_plan
from pallas_kernels.kernel_set import REFERENCE, KernelSet, kernel_set_for

PAGES = 8192
LAYERS = 2


def compiled(model: str, tokens: int, *, tp: int = 1, kernels: KernelSet | None = None) -> tuple[h200.Compiled, Executor]:
    """A step of the model's first layers."""
    config = open_checkpoint(model, load_format="dummy").model_config
    config = dataclasses.replace(config, layers=config.layers[:LAYERS])
    if kernels is None:
        group = config.num_heads // config.num_kv_heads
        heads = {"head_dim": config.head_dim, "queries_per_kv_head": group}
        kernels = kernel_set_for("gpu", "9.0", **heads, page_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    mesh = h200.h200_mesh((tp,))
    specs = shardings(config, mesh)
    weights = h200.abstract(mesh, shapes(config, tp, jnp.bfloat16), specs)
    layout = StepLayout(tokens, min(tokens, 256), 256, 64, (), len(config.windows))
    programs = Programs(Context(config, kernels, axis_of(mesh)), mesh, specs)
    plan = sequential_plan(config, tokens, tp)
    made = Executor(programs, weights, [layout], lambda _: compile_plan(plan, config, tp), kv_dtype=jnp.bfloat16, max_model_len=8192)
    step = programs.step(layout, compile_plan(plan, config, tp))
    buffer = h200.abstract(mesh, jax.ShapeDtypeStruct((layout.size,), jnp.int32))
    arguments = (weights, *made._state((PAGES,) * len(config.windows)), buffer)
    return h200.compile_for_h200(step, *arguments), made


@pytest.mark.parametrize(("model", "tp"), [("llama-3.1-8b", 1), ("llama-3.1-8b", 4)])
@pytest.mark.parametrize("kernels", [REFERENCE, None], ids=["twins", "hopper"])
def test_nothing_copies_the_cache_or_a_weight(model, tp, kernels):
    step, executor = compiled(model, 256, tp=tp, kernels=kernels)
    config = executor.programs.context.config
    heads = config.num_kv_heads // tp
    assert step.machine_code
    for shape in [(PAGES, heads, 64, config.head_dim), (PAGES * heads * 64, config.head_dim)]:
        assert step.copies(shape) == 0
    for leaf in jax.tree.leaves(executor.weights["layers"]):
        if leaf.ndim == 2:
            local = leaf.sharding.shard_shape(leaf.shape)
            assert step.copies(local) == step.copies(local[::-1]) == 0
    cache = 2 * LAYERS * PAGES * heads * 64 * config.head_dim * 2
    assert step.memory.alias_size_in_bytes >= cache
    assert step.memory.temp_size_in_bytes < 0.1 * cache
    assert not any(thunk.kind in ("kInfeed", "kOutfeed", "kHostSend", "kHostRecv") for thunk in step.thunks)

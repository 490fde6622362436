"""The step of a plan, compiled ahead of time for H200s, and what must hold of any: caches and weights stay
where they are.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from h200 import Compiled, abstract, compile_for_h200, h200_mesh
from jax.sharding import Mesh, PartitionSpec

from jaxflow.config import ModelConfig
from jaxflow.kv.device_cache import cache_shapes, cache_spec, page_groups
from jaxflow.model import weights
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import Context
from jaxflow.parallel.mesh import axis_of, over_shards
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.plan import Plan, borders
from pallas_kernels.kernel_set import KernelSet
from pallas_kernels.pointwise.rope_append import api as rope_append

ROWS, PAGES_A_ROW, PAGES = 64, 4, 2048


def _some_attention(q, k_pages, v_pages, pages, **_):
    """Return a function that reads pages and multiplies.

    Only its structure matters. A side stream allows no loop.
    """
    grouped, shape = q.reshape(q.shape[0], k_pages.shape[1], -1, q.shape[2]), q.shape
    keys, values = k_pages[pages].astype(q.dtype), v_pages[pages].astype(q.dtype)
    scores = jnp.exp(jnp.einsum("tkgh,tpksh->tkgps", grouped, keys, preferred_element_type=jnp.float32))
    turned = "tpkhs" if v_pages.shape != k_pages.shape else "tpksh"
    return jnp.einsum(f"tkgps,{turned}->tkgh", scores.astype(q.dtype), values).reshape(shape)


def _some_decode_attention(q, k_pages, v_pages, table, lengths, *, into=None, **_):
    heads = _some_attention(q[: len(lengths)], k_pages, v_pages, table * (lengths > 0)[:, None])
    return (
        heads
        if len(heads) == len(q)
        else jnp.concatenate([heads, (jnp.zeros_like(q) if into is None else into)[len(heads) :]])
    )


# Use one kernel for an append, as on a GPU. XLA orders the two scatters of the reference implementation
# differently.
SIMPLE = KernelSet(
    "simple",
    decode_attention=_some_decode_attention,
    chunk_attention=lambda q, k, v, table, chunks, **rest: _some_attention(
        q, k, v, table[chunks[:1, 2]].repeat(len(q), 0)
    ),
    rope_append=rope_append.rope_append,
)


def compiled(
    plan: Plan,
    model: ModelConfig,
    kernels: KernelSet,
    tp: int = 1,
    quantization: str | None = None,
    mesh: Mesh | None = None,
    ep: bool = False,
    **options: Any,
) -> Compiled:
    """A step of the plan; quantization: of weights and cache, None or fp8. mesh:
    None for `tp` devices of one host.
    ep: experts are spread whole. options: XLA's.

    The cache of a device must be aliased whole and never copied, and no weight may be.
    """
    mesh, narrow = mesh or h200_mesh((tp,)), quantization == "fp8"
    context, forward = (
        Context(model, kernels, axis_of(mesh), expert_axis=axis_of(mesh) if ep else None),
        compile_plan(plan, model, tp, quantized=narrow),
    )
    how = {"quantization": quantization, "kv_scales": narrow, "expert_parallel": ep}

    def step(w, kv, batch):
        hidden, _, kv = forward(context, w, kv, batch)
        return hidden, kv

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens, chunks, table = plan.tokens, shape((ROWS + len(borders(plan)), 4)), shape((1, ROWS, PAGES_A_ROW))
    batch = Batch(
        shape((tokens,)),
        shape((tokens,)),
        shape((1, tokens)),
        table,
        shape((ROWS,)),
        shape(()),
        chunks,
        shape((ROWS,)),
    )
    dtype = jnp.float8_e4m3fn if narrow else jnp.bfloat16
    kv = cache_shapes(page_groups(model, dtype, tp), (PAGES,), 64)
    specs = (
        weights.shardings(model, mesh, **how),
        [(cache_spec(mesh),) * 2 for _ in kv],
        jax.tree.map(lambda _: PartitionSpec(), batch),
    )
    shapes = (weights.shapes(model, tp, jnp.bfloat16, **how), kv, batch)
    jitted = jax.jit(over_shards(step, mesh, specs, (PartitionSpec(), specs[1])), donate_argnums=(1,))
    found = compile_for_h200(jitted, *abstract(mesh, shapes, specs), options=xla_options(plan, tp) | options)
    arrays = [(x.shape[0], x.shape[1] // tp, *x.shape[2:]) for x in jax.tree.leaves(kv)]
    assert found.memory.alias_size_in_bytes == sum(math.prod(mine) * (1 if narrow else 2) for mine in arrays)
    assert not any(found.copies(mine) or found.copies((math.prod(mine[:3]), mine[3])) for mine in set(arrays))
    d, f, heads = model.hidden_size, model.intermediate_size // tp, model.num_heads * model.head_dim // tp
    both = heads + 2 * max(1, model.num_kv_heads // tp) * model.head_dim
    assert not any(found.copies(weight) for weight in ((2 * f, d), (d, f), (both, d), (d, heads)))
    return found

"""What XLA makes of plans for an H200: nano-batches stay apart, caches are not copied, streams are where the plan says."""

import functools
import re

import jax
import jax.numpy as jnp
from h200 import abstract, compile_for_h200, h200_mesh
from jax.sharding import PartitionSpec

from jaxflow.config import Layer, ModelConfig, Rope
from jaxflow.memory.kv_cache import cache_spec
from jaxflow.mesh import axis_of, over_shards
from jaxflow.model import ops, weights
from jaxflow.model.batch import Batch
from jaxflow.pipeline import streams
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handmade import phased_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import borders
from pallas_kernels import chunk_attention, decode_attention
from pallas_kernels.kernel_set import KernelSet, kernel_set_for

TOKENS, SPLIT, ROWS, PAGES_A_ROW, PAGES = 512, 192, 64, 4, 2048
MODEL = ModelConfig("llama", 32000, 1024, 8, 2, 128, 2816, (Layer(rope=Rope(1e4)),) * 2, 8192)
HOPPER = KernelSet("hopper", decode_attention=decode_attention.decode_attention, chunk_attention=chunk_attention.chunk_attention)
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}  # so that the schedule shows streams


def some_attention(q, k_pages, v_pages, pages, **_):
    """Reads pages and does products: for the structure alone, without the loops that a side stream cannot have."""
    grouped, shape = q.reshape(q.shape[0], k_pages.shape[1], -1, q.shape[2]), q.shape
    scores = jnp.exp(jnp.einsum("tkgh,tpksh->tkgps", grouped, k_pages[pages], preferred_element_type=jnp.float32))
    return jnp.einsum("tkgps,tpksh->tkgh", scores.astype(q.dtype), v_pages[pages]).reshape(shape)


def some_decode_attention(q, k_pages, v_pages, table, lengths, *, into=None, **_):
    heads = some_attention(q[: len(lengths)], k_pages, v_pages, table * (lengths > 0)[:, None])
    return heads if len(heads) == len(q) else jnp.concatenate([heads, into[len(heads) :]])


SIMPLE = KernelSet(
    "simple",
    decode_attention=some_decode_attention,
    chunk_attention=lambda q, k, v, table, chunks, **rest: some_attention(q, k, v, table[chunks[:1, 2]].repeat(len(q), 0)),
)


def compiled(plan, kernels, tp=1, **options):
    """A step of the plan; the cache of a device must be aliased whole and never copied."""
    mesh = h200_mesh((tp,))
    context, forward = ops.Context(MODEL, kernels, axis_of(mesh)), compile_plan(plan, MODEL, tp)

    def step(w, kv, batch):
        hidden, _, kv = forward(context, w, kv, batch)
        return hidden, kv

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    chunks = shape((ROWS + len(borders(plan)), 4))
    table = shape((1, ROWS, PAGES_A_ROW))
    batch = Batch(shape((TOKENS,)), shape((TOKENS,)), shape((1, TOKENS)), table, shape((ROWS,)), shape(()), chunks, shape((ROWS,)))
    cache = jax.ShapeDtypeStruct((PAGES, MODEL.num_kv_heads, 64, MODEL.head_dim), jnp.bfloat16)
    kv, kv_specs = [(cache, cache) for _ in MODEL.layers], [(cache_spec(mesh),) * 2 for _ in MODEL.layers]
    replicated = PartitionSpec()
    specs = (weights.shardings(MODEL, mesh), kv_specs, jax.tree.map(lambda _: replicated, batch))
    jitted = jax.jit(over_shards(step, mesh, specs, (replicated, kv_specs)), donate_argnums=(1,))
    args = abstract(mesh, (weights.shapes(MODEL, tp, jnp.bfloat16), kv, batch), specs)
    found = compile_for_h200(jitted, *args, options=xla_options(plan, tp) | options)
    mine = (PAGES, MODEL.num_kv_heads // tp, 64, MODEL.head_dim)
    flat = (mine[0] * mine[1] * mine[2], mine[3])
    assert found.memory.alias_size_in_bytes == 2 * 2 * len(MODEL.layers) * flat[0] * flat[1]
    assert found.copies(mine) == found.copies(flat) == 0
    return found


def rows_of_products(found):
    """Rows of every product that has a weight; XLA may have cut its inner dimension (a leading axis)."""
    shapes = [[int(n) for n in result[result.index("[") + 1 : -1].split(",")] for result in found.instructions("dot")]
    widths = {(MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim, MODEL.hidden_size, 2 * MODEL.intermediate_size}
    return sorted(shape[-2] for shape in shapes if shape[-1] in widths)


def test_nano_batches_stay_apart_and_caches_in_place():
    """The Hopper kernels, on the main stream: four products a layer for each half, none for both."""
    found = compiled(two_nano_batch_plan(MODEL, TOKENS, SPLIT), HOPPER)
    assert rows_of_products(found) == [SPLIT] * 8 + [TOKENS - SPLIT] * 8
    assert [thunk.kind for thunk in found.graph_thunks if not thunk.depth] == ["kCommandBuffer"], "the step is not one CUDA graph"


def test_without_barriers_xla_merges_the_nano_batches(monkeypatch):
    monkeypatch.setattr(streams, "together", lambda values: values)
    assert TOKENS in rows_of_products(compiled(two_nano_batch_plan(MODEL, TOKENS, SPLIT), SIMPLE))


def test_sums_over_devices_run_beside_products_of_the_other_half():
    found = compiled(two_nano_batch_plan(MODEL, TOKENS, SPLIT, tp=2), SIMPLE, tp=2, **NO_GRAPH)
    open_sums, beside = {}, []
    for thunk in found.thunks:
        if thunk.kind == "kAsyncStart" and thunk.stream.startswith("communication"):
            open_sums[thunk.async_id] = 0
        elif thunk.kind == "kAsyncDone" and thunk.async_id in open_sums:
            beside.append(open_sums.pop(thunk.async_id))
        elif "gemm" in thunk.name and not thunk.stream.startswith("communication"):
            open_sums = {key: count + 1 for key, count in open_sums.items()}
    # Two sums a layer for each half; the embeddings' is one more, and the very last has nothing left to hide behind.
    assert sum(count > 0 for count in beside) >= 4 * len(MODEL.layers) - 1, beside


def test_phases_on_streams():
    """Each attention is in a region of stream 1, with a region of products on stream 2 open beside it at some time."""
    found = compiled(phased_plan(MODEL, TOKENS, SPLIT), HOPPER, **NO_GRAPH)
    assert rows_of_products(found) == [SPLIT] * 8 + [TOKENS - SPLIT] * 8
    names = {1: "computation_stream[1]", 2: "computation_stream[2]"}
    spans = {stream: [] for stream in names}
    for start, thunk in enumerate(found.thunks):
        for stream, name in names.items():
            if thunk.kind == "kAsyncStart" and thunk.stream == name:
                stop = next(i for i, other in enumerate(found.thunks) if other.kind == "kAsyncDone" and other.async_id == thunk.async_id)
                spans[stream].append((start, stop))
    assert len(spans[1]) == 2 * len(MODEL.layers)
    for start, stop in spans[1]:
        assert any(first < stop and start < last for first, last in spans[2]), (start, stop, spans[2])
    outside = [thunk.name for thunk in found.thunks if "gemm" in thunk.name and thunk.stream not in names.values()]
    assert not outside, "products left the side streams"
    for nano in ("qkv/qkv.1", "out_proj/out_proj.0", "up_gate/up_gate.1", "down/down.0"):  # profiles find ops by these names
        assert re.search(rf'op_name="[^"]*compute_on/{nano}/dot_general"', found.hlo), nano


def test_shares_of_the_device_reach_the_kernels():
    """24 SMs for attention, 108 for the products beside it: in the grids of the kernels that the step launches."""
    kernels = kernel_set_for("gpu", "9.0", head_dim=128, queries_per_kv_head=4, page_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    found = compiled(phased_plan(MODEL, TOKENS, SPLIT, sms=(24, 108)), kernels, **NO_GRAPH)
    layers = len(MODEL.layers)
    names = re.findall(r"(decode_attention|chunk_attention|dense_gemm)_(\d+)", found.hlo)
    assert {name: {int(sms) for other, sms in names if other == name} for name, _ in names} == {
        "decode_attention": {24},
        "chunk_attention": {24},
        "dense_gemm": {108},
    }
    assert len(re.findall(r"custom-call[^\n]*dense_gemm_108", found.hlo)) >= 4 * 2 * layers - 1

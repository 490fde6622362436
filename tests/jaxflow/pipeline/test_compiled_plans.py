"""What XLA makes of plans for an H200: the schedule is the plan's, nano-batches stay apart, caches are not copied."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import msgspec
import paths
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.sharding import PartitionSpec
from schedule import check_schedule, kernels, read

from jaxflow.config import Layer, ModelConfig, Rope
from jaxflow.memory.kv_cache import cache_spec
from jaxflow.mesh import axis_of, over_shards
from jaxflow.model import ops, weights
from jaxflow.model.batch import Batch
from jaxflow.pipeline import streams
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handmade import copied, phased_plan, sequential_plan, swapped, two_nano_batch_plan
from jaxflow.pipeline.order import graph_of
from jaxflow.pipeline.plan import borders, load
from pallas_kernels import rope_append
from pallas_kernels.kernel_set import KernelSet, kernel_set_for

TOKENS, SPLIT, ROWS, PAGES_A_ROW, PAGES = 512, 192, 64, 4, 2048
MODEL = ModelConfig("llama", 32000, 1024, 8, 2, 128, 2816, (Layer(rope=Rope(1e4)),) * 3, 8192)


def some_attention(q, k_pages, v_pages, pages, **_):
    """Reads pages and does products: for the structure alone, without the loops that a side stream cannot have."""
    grouped, shape = q.reshape(q.shape[0], k_pages.shape[1], -1, q.shape[2]), q.shape
    scores = jnp.exp(jnp.einsum("tkgh,tpksh->tkgps", grouped, k_pages[pages], preferred_element_type=jnp.float32))
    return jnp.einsum("tkgps,tpksh->tkgh", scores.astype(q.dtype), v_pages[pages]).reshape(shape)


def some_decode_attention(q, k_pages, v_pages, table, lengths, *, into=None, **_):
    heads = some_attention(q[: len(lengths)], k_pages, v_pages, table * (lengths > 0)[:, None])
    return heads if len(heads) == len(q) else jnp.concatenate([heads, (jnp.zeros_like(q) if into is None else into)[len(heads) :]])


# Appends are one kernel, as they are on a GPU: the twin's two scatters are ordered otherwise.
SIMPLE = KernelSet(
    "simple",
    decode_attention=some_decode_attention,
    chunk_attention=lambda q, k, v, table, chunks, **rest: some_attention(q, k, v, table[chunks[:1, 2]].repeat(len(q), 0)),
    rope_append=rope_append.rope_append,
)


def arguments(plan, mesh, tp):
    """Shapes and shardings of a step's weights, cache and batch."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    tokens, chunks, table = plan.tokens, shape((ROWS + len(borders(plan)), 4)), shape((1, ROWS, PAGES_A_ROW))
    batch = Batch(shape((tokens,)), shape((tokens,)), shape((1, tokens)), table, shape((ROWS,)), shape(()), chunks, shape((ROWS,)))
    cache = jax.ShapeDtypeStruct((PAGES, max(tp, MODEL.num_kv_heads), 64, MODEL.head_dim), jnp.bfloat16)
    kv, kv_specs = [(cache, cache) for _ in MODEL.layers], [(cache_spec(mesh),) * 2 for _ in MODEL.layers]
    specs = (weights.shardings(MODEL, mesh), kv_specs, jax.tree.map(lambda _: PartitionSpec(), batch))
    return (weights.shapes(MODEL, tp, jnp.bfloat16), kv, batch), specs


def compiled(plan, kernels, tp=1, **options):
    """A step of the plan; the cache of a device must be aliased whole and never copied, and no weight may be."""
    mesh = h200_mesh((tp,))
    context, forward = ops.Context(MODEL, kernels, axis_of(mesh)), compile_plan(plan, MODEL, tp)

    def step(w, kv, batch):
        hidden, _, kv = forward(context, w, kv, batch)
        return hidden, kv

    shapes, specs = arguments(plan, mesh, tp)
    jitted = jax.jit(over_shards(step, mesh, specs, (PartitionSpec(), specs[1])), donate_argnums=(1,))
    found = compile_for_h200(jitted, *abstract(mesh, shapes, specs), options=xla_options(plan, tp) | options)
    mine = (PAGES, max(1, MODEL.num_kv_heads // tp), 64, MODEL.head_dim)
    flat = (mine[0] * mine[1] * mine[2], mine[3])
    assert found.memory.alias_size_in_bytes == 2 * 2 * len(MODEL.layers) * flat[0] * flat[1]
    assert found.copies(mine) == found.copies(flat) == 0
    d, f = MODEL.hidden_size, MODEL.intermediate_size // tp
    assert not any(found.copies(shape) for shape in ((2 * f, d), (d, f), ((8 + 2 * 2) * 128 // tp, d), (d, d // tp)))
    return found


def rows_of_products(found, tp=1):
    """Rows of every product that has a weight; XLA may have cut its inner dimension (a leading axis)."""
    shapes = [[int(n) for n in result[result.index("[") + 1 : -1].split(",")] for result in found.instructions("dot")]
    widths = {(MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim // tp, MODEL.hidden_size, 2 * MODEL.intermediate_size // tp}
    return sorted(shape[-2] for shape in shapes if shape[-1] in widths)


WAITING = load(paths.DATA / "plans" / "llama-3.1-8b-2048-waits.json")
SEARCHED = paths.DATA / "plans" / "llama-3.1-8b-2048.json"
PLANS = {
    "phases": (phased_plan(MODEL, TOKENS, 72), 1),  # halves as unequal as decodes and chunks are
    "searched": (load(SEARCHED), 1),
    "two nano-batches on two devices": (two_nano_batch_plan(MODEL, TOKENS, SPLIT, tp=2), 2),
    "two nano-batches, sums copied": (copied(two_nano_batch_plan(MODEL, TOKENS, SPLIT, tp=2)), 2),
    "two nano-batches, scattered": (two_nano_batch_plan(MODEL, 2 * TOKENS, TOKENS, tp=2, scattered=True), 2),
    "two nano-batches, sums swapped over four devices": (swapped(two_nano_batch_plan(MODEL, TOKENS, SPLIT, tp=4)), 4),
    "phases on two devices": (phased_plan(MODEL, TOKENS, SPLIT, tp=2), 2),
}


@functools.cache
def on_streams(name):
    """Without a CUDA graph, so that the schedule shows streams."""
    plan, tp = PLANS[name]
    return compiled(plan, SIMPLE, tp, **streams.GRAPHS["streams"])


@pytest.mark.parametrize("name", PLANS)
def test_the_schedule_is_the_plans(name):
    """Every nano-op on its stream in its order; attention beside its products; sums over devices under theirs."""
    (plan, tp), found = PLANS[name], on_streams(name)
    check_schedule(found.hlo, plan, graph_of(plan, MODEL, tp), ROWS)
    sizes = [nano.stop - nano.start for nano in plan.nano_ops if nano.op in ("qkv", "out_proj", "up_gate", "down")]
    assert set(rows_of_products(found, tp)) == set(sizes), "nano-batches were merged, or cut"


def edited(plan, name, **changes):
    return msgspec.structs.replace(
        plan, nano_ops=tuple(msgspec.structs.replace(n, **changes) if n.id == name else n for n in plan.nano_ops)
    )


def test_the_checker_knows_a_schedule_that_is_not_the_plans():
    """The phases' own schedule, held against plans that say otherwise."""
    (plan, _), hlo = PLANS["phases"], on_streams("phases").hlo
    graph = graph_of(plan, MODEL)
    assert {window.stream for window in read(hlo, plan)} == {0, 1, 2}
    for other, message in (
        (edited(plan, "up_gate.1", stream=0), "up_gate on stream"),
        (edited(plan, "chunk_attention.0", stream=2), "chunk_attention on stream"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_schedule(hlo, other, graph, ROWS)


def test_without_barriers_xla_merges_the_nano_batches(monkeypatch):
    """And the checker says so."""
    monkeypatch.setattr(streams, "together", lambda values: values)
    plan = two_nano_batch_plan(MODEL, TOKENS, SPLIT)
    found = compiled(plan, SIMPLE)
    assert TOKENS in rows_of_products(found)
    with pytest.raises(AssertionError, match="qkv on stream 0"):
        check_schedule(found.hlo, plan, graph_of(plan, MODEL), ROWS)


def test_what_is_behind_attentions_beginning_is_issued_behind_it(monkeypatch):
    """Without that XLA awaits products first that should run beside attention; the checker says so."""
    monkeypatch.setattr(streams, "zero_behind", lambda values: jnp.zeros((), jnp.int32))
    plan, _ = PLANS["phases"]
    found = compiled(plan, SIMPLE, **streams.GRAPHS["streams"])
    with pytest.raises(AssertionError, match="beside it should be"):
        check_schedule(found.hlo, plan, graph_of(plan, MODEL), ROWS)


def test_a_sequential_step_in_one_cuda_graph():
    plan = sequential_plan(MODEL, TOKENS)
    found = compiled(plan, SIMPLE, **streams.GRAPHS["whole"])
    assert [thunk.kind for thunk in found.graph_thunks if not thunk.depth] == ["kCommandBuffer"]
    check_schedule(found.hlo, plan, graph_of(plan, MODEL), ROWS)


@pytest.fixture(scope="module")
def on_hopper():
    """A searched plan, with waits, on the kernels that an H200 runs."""
    kernel_set = kernel_set_for("gpu", "9.0", head_dim=128, queries_per_kv_head=4, page_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    return compiled(WAITING, kernel_set)


def test_the_hopper_kernels_on_their_shares_of_the_device(on_hopper):
    """As the plan has them: in the grids of the kernels, on its streams, as one CUDA graph."""
    found = on_hopper
    check_schedule(found.hlo, WAITING, graph_of(WAITING, MODEL), ROWS)
    assert [thunk.kind for thunk in found.graph_thunks if not thunk.depth] == ["kCommandBuffer"], "the step is not one CUDA graph"
    names = re.findall(r"(decode_attention|chunk_attention|dense_gemm)_(\d+)", found.hlo)
    shares = {name: {int(sms) for other, sms in names if other == name} for name, _ in names}
    assert shares == {"decode_attention": {40}, "chunk_attention": {84, 132}, "dense_gemm": {84, 92, 100}}
    for nano in ("qkv/qkv.1", "out_proj/out_proj.1", "up_gate/up_gate.1", "down/down.1"):  # profiles find ops by these names
        assert re.search(rf'op_name="[^"]*compute_on/{nano}/', found.hlo), nano


def test_a_layer_is_its_nano_ops_and_little_else(on_hopper):
    """One kernel each, but for what is said here: no sums apart from their norms, no arrays joined, cut or copied for a kernel to read."""
    issued = kernels(on_hopper.hlo, WAITING)
    appends = [at for at, (nano, _) in enumerate(issued) if nano == "rope_append"]
    layer = issued[appends[-4] : appends[-2]]  # from the append of the last layer but one to the last one's
    ops = collections.Counter(nano for nano, what in layer if what == "op")
    empty = {"decode_attention.1"}  # behind all rows
    assert ops == {nano.id: 2 if nano.id == "rope_append" else 1 for nano in WAITING.nano_ops if nano.id not in empty}
    rest = collections.Counter((nano, what) for nano, what in layer if what != "op")
    partial_sums = {(f"{name}.1", "loop_broadcast_fusion"): 1 for name in ("qkv", "out_proj", "up_gate", "down")}  # their semaphores
    assert rest <= collections.Counter(
        {
            ("decode_attention.0", "loop_or_fusion"): 1,  # its wait, as data
            ("chunk_attention.0", "loop_or_fusion"): 1,  # its place behind the other nano-batch's products, as data
            ("out_proj.0", "loop_select_fusion"): 1,  # the heads of both attentions, which ran beside each other
            ("up_gate.0", "loop_convert_fusion"): 1,  # the activation, behind XLA's product
            ("down.0", "loop_reduce_fusion"): 1,  # XLA's product in two halves of its inner dimension, at these sizes
            (None, "loop_convert_fusion"): 3,  # `zero_behind` of three attentions, a number each
            **partial_sums,
        }
    )

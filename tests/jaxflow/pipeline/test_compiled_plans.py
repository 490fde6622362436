"""XLA's schedule of plans for an H200: the plan's order, separate nano-batches, no copy of a cache."""

import collections
import dataclasses
import functools
import re

import jax.numpy as jnp
import msgspec
import paths
import pytest
import schedule
from planned import ROWS, SIMPLE, compiled
from schedule import check_schedule, kernels, read, spans

from jaxflow.config import Layer, ModelConfig, Rope
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline import streams
from jaxflow.pipeline.handwritten import phased_plan, sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import SHIPPED, Plan, load
from jaxflow.pipeline.program import graph_of
from pallas_kernels.kernel_set import kernel_set_for

TOKENS, SPLIT = 512, 192
LAYERS = (Layer(rope=Rope(1e4)),) * 3
MODEL = ModelConfig("llama", 32000, 1024, 8, 2, 128, 2816, LAYERS, 8192)
TWO_LAYERS = dataclasses.replace(
    MODEL, layers=LAYERS[:2]
)  # for plans that are a layer ahead nowhere, or that show it in two
ONE_LAYER = dataclasses.replace(MODEL, layers=LAYERS[:1])
LLAMA = open_checkpoint("llama-3-70b", load_format="dummy").model_config
LLAMA = dataclasses.replace(LLAMA, layers=LLAMA.layers[:2])


def rows_of_products(found, model, tp=1):
    """Rows of every product that has a weight; XLA may have cut its inner dimension (a leading axis)."""
    shapes = [
        [int(n) for n in result[result.index("[") + 1 : -1].split(",")]
        for result in found.instructions("dot")
    ]
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim // tp
    widths = {heads, model.hidden_size, 2 * model.intermediate_size // tp}
    return sorted(shape[-2] for shape in shapes if shape[-1] in widths)


@dataclasses.dataclass(frozen=True)
class Case:
    """alone: collectives of the step without an overlapping nano-op in the plan; spanned: (overlapped, all)
    GEMMs and attention.
    """

    plan: Plan
    model: ModelConfig
    tp: int = 1
    quantization: str | None = None
    alone: int = 0
    spanned: int = 0


def shipped(name):
    return load(SHIPPED / f"h200-llama-3-70b-{name}.json")


TWO_DEVICES = paths.ROOT / "benchmarks/plans/h200/llama-3-70b/measured/tp2-bfloat16.json"
WAITING = load(paths.DATA / "plans" / "llama-3.1-8b-2048-waits.json")
SEARCHED = paths.DATA / "plans" / "llama-3.1-8b-2048.json"
PLANS = {
    "phases": Case(phased_plan(MODEL, TOKENS, 72), MODEL),  # halves as unequal as decodes and chunks are
    "searched": Case(load(SEARCHED), MODEL),
    "two nano-batches on two devices": Case(
        two_nano_batch_plan(MODEL, TOKENS, SPLIT, tp=2), TWO_LAYERS, 2, alone=1, spanned=8
    ),
    "two nano-batches, scattered": Case(
        two_nano_batch_plan(MODEL, 2 * TOKENS, TOKENS, tp=2, scattered=True),
        TWO_LAYERS,
        2,
        alone=2,
        spanned=15,
    ),
    "phases on two devices": Case(phased_plan(MODEL, TOKENS, SPLIT, tp=2), MODEL, 2, alone=2, spanned=14),
    # At their own shapes, with sums by the copy engines; the second is shipped.
    "Llama-3-70B on two devices": Case(load(TWO_DEVICES), LLAMA, 2, alone=1, spanned=9),
    "Llama-3-70B on four devices": Case(shipped("tp4-float8_e4m3fn"), LLAMA, 4, "fp8", alone=2, spanned=14),
}


@functools.cache
def on_streams(name):
    """Without a CUDA graph, so that the schedule shows streams."""
    case = PLANS[name]
    return compiled(case.plan, case.model, SIMPLE, case.tp, case.quantization, **streams.GRAPHS["streams"])


@pytest.mark.parametrize("name", PLANS)
def test_the_schedule_follows_the_plan(name):
    """Every nano-op runs on its stream in order, attention overlaps its GEMMs, and the given number of
    all-reduces overlap theirs.
    """
    case, found = PLANS[name], on_streams(name)
    plan, graph = case.plan, graph_of(case.plan, case.model, case.tp)
    check_schedule(found.hlo, plan, graph, ROWS)
    sizes = [
        nano.stop - nano.start for nano in plan.nano_ops if nano.op in ("qkv", "out_proj", "up_gate", "down")
    ]
    assert set(rows_of_products(found, case.model, case.tp)) == set(sizes), "nano-batches were merged, or cut"
    sent = spans(found.hlo, plan, graph, ROWS)
    assert len(sent) == sum(op.kind == "network" for layer in graph.layers for op in layer) * len(sizes) // 4
    assert sum(not one.beside for one in sent) == case.alone
    assert sum(len(one.spanned) for one in sent) >= case.spanned, sent


def edited(plan, name, **changes):
    return msgspec.structs.replace(
        plan,
        nano_ops=tuple(msgspec.structs.replace(n, **changes) if n.id == name else n for n in plan.nano_ops),
    )


def test_the_checker_refuses_a_schedule_of_another_plan():
    """The phases' own schedule, held against plans that say otherwise."""
    case, hlo = PLANS["phases on two devices"], on_streams("phases on two devices").hlo
    plan, graph = case.plan, graph_of(case.plan, case.model, 2)
    assert {window.stream for window in read(hlo, plan)} == {0, 1, 2}
    for other, message in (
        (edited(plan, "up_gate.1", stream=0), "up_gate on stream"),
        (edited(plan, "chunk_attention.0", stream=2), "chunk_attention on stream"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_schedule(hlo, other, graph, ROWS)


def test_the_checker_refuses_a_sum_without_overlap(monkeypatch):

    def awaited(hlo, plan):
        return [
            dataclasses.replace(w, last=0) if "reduce" in w.nano_ops[0] else w  # before all others begin
            for w in read(hlo, plan)
        ]

    monkeypatch.setattr(schedule, "read", awaited)
    case, hlo = PLANS["phases on two devices"], on_streams("phases on two devices").hlo
    with pytest.raises(AssertionError, match=r"_reduce\.\d of layer 0 runs beside none of"):
        check_schedule(hlo, case.plan, graph_of(case.plan, case.model, 2), ROWS)


def test_without_barriers_xla_merges_the_nano_batches(monkeypatch):
    """The checker reports the fault."""
    monkeypatch.setattr(streams, "together", lambda values: values)
    plan = two_nano_batch_plan(MODEL, TOKENS, SPLIT)
    found = compiled(plan, TWO_LAYERS, SIMPLE)
    assert TOKENS in rows_of_products(found, TWO_LAYERS)
    with pytest.raises(AssertionError, match="qkv on stream 0"):
        check_schedule(found.hlo, plan, graph_of(plan, TWO_LAYERS), ROWS)


def test_gemms_are_issued_after_attention_starts(monkeypatch):
    """Without the dependence XLA awaits the concurrent GEMMs first, and the checker reports the fault."""
    monkeypatch.setattr(streams, "zero_behind", lambda values: jnp.zeros((), jnp.int32))
    plan = PLANS["phases"].plan
    found = compiled(plan, MODEL, SIMPLE, **streams.GRAPHS["streams"])
    with pytest.raises(AssertionError, match="beside it should be"):
        check_schedule(found.hlo, plan, graph_of(plan, MODEL), ROWS)


def test_a_sequential_step_is_one_cuda_graph():
    plan = sequential_plan(MODEL, TOKENS)
    found = compiled(plan, ONE_LAYER, SIMPLE, **streams.GRAPHS["whole"])
    assert [thunk.kind for thunk in found.graph_thunks if not thunk.depth] == ["kCommandBuffer"]
    check_schedule(found.hlo, plan, graph_of(plan, ONE_LAYER), ROWS)


@pytest.fixture(scope="module")
def on_hopper():
    """A searched plan, with waits, on the kernels that an H200 runs."""
    dtypes = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    kernel_set = kernel_set_for(
        "gpu", "9.0", head_dim=128, queries_per_kv_head=4, page_size=64, device="NVIDIA H200", **dtypes
    )
    return compiled(WAITING, MODEL, kernel_set)


@pytest.mark.slow
def test_the_hopper_kernels_use_the_sms_of_the_plan(on_hopper):
    """As the plan has them: in the grids of the kernels, on its streams, as one CUDA graph."""
    found = on_hopper
    check_schedule(found.hlo, WAITING, graph_of(WAITING, MODEL), ROWS)
    assert [thunk.kind for thunk in found.graph_thunks if not thunk.depth] == ["kCommandBuffer"], (
        "the step is not one CUDA graph"
    )
    names = re.findall(r"(decode_attention|chunk_attention|dense_gemm)_(\d+)", found.hlo)
    shares = {name: {int(sms) for other, sms in names if other == name} for name, _ in names}
    assert shares == {"decode_attention": {40}, "chunk_attention": {84, 132}, "dense_gemm": {84, 92, 100}}
    for nano in (
        "qkv/qkv.1",
        "out_proj/out_proj.1",
        "up_gate/up_gate.1",
        "down/down.1",
    ):  # profiles find ops by these names
        assert re.search(rf'op_name="[^"]*compute_on/{nano}/', found.hlo), nano


@pytest.mark.slow
def test_a_layer_launches_its_nano_ops_and_few_other_kernels(on_hopper):
    """Each nano-op is one kernel, except for the listed ones: no all-reduce apart from its norm, and no array
    joined, cut or copied.
    """
    issued = kernels(on_hopper.hlo, WAITING)
    appends = [at for at, (nano, _) in enumerate(issued) if nano == "rope_append"]
    layer = issued[appends[-4] : appends[-2]]  # from the append of the last layer but one to the last one's
    ops = collections.Counter(nano for nano, what in layer if what == "op")
    empty = {"decode_attention.1"}  # behind all rows
    assert ops == {
        nano.id: 2 if nano.id == "rope_append" else 1 for nano in WAITING.nano_ops if nano.id not in empty
    }
    rest = collections.Counter((nano, what) for nano, what in layer if what != "op")
    partial_sums = {
        (f"{name}.1", "loop_broadcast_fusion"): 1 for name in ("qkv", "out_proj", "up_gate", "down")
    }  # their semaphores
    assert rest <= collections.Counter(
        {
            # The wait of decode attention, and the order of chunk attention after the other nano-batch's
            # GEMMs, both expressed as data.
            (None, "loop_or_fusion"): 2,
            (
                "out_proj.0",
                "loop_select_fusion",
            ): 1,  # the heads of the two concurrent attentions
            (
                "up_gate.0",
                "loop_convert_fusion",
            ): 1,  # the activation, behind XLA's product at this width; 8B's is within dense's
            (
                "down.0",
                "loop_reduce_fusion",
            ): 1,  # XLA's product in two halves of its inner dimension, at these sizes
            (None, "loop_convert_fusion"): 3,  # `zero_behind` of three attentions, a number each
            **partial_sums,
        }
    )

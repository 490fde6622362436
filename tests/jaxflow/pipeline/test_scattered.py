"""Sums over devices scattered to their own rows: every such plan is the plain forward, too, and what cannot
be one is refused.
"""

import drawn
import msgspec
import pytest

from jaxflow.model.composition import Composition
from jaxflow.model.graph import FP8, Widths, model_graph
from jaxflow.pipeline.choice import is_sequential
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import phased_plan, sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import NanoOp, PlanError
from jaxflow.pipeline.program import check, graph_of

TOKENS = 16
WORK = ((8, (3, 2)), (2, (9, 4)), (3, ()))
LLAMA = drawn.config_of("tiny-llama")


@pytest.mark.parametrize(
    ("make", "name", "tp", "numbers"),
    [
        (two_nano_batch_plan, "tiny-gemma2", 2, {}),
        (two_nano_batch_plan, "tiny-mixtral", 2, {}),
        (phased_plan, "tiny-llama", 4, {"quantization": "fp8", "kv": "float8_e4m3fn"}),
        (two_nano_batch_plan, "tiny-gemma4_e2b", 2, {}),
    ],
    ids=["post-norms", "experts", "fp8, phases", "embeddings of each layer"],
)
def test_scattered_plans_compute_the_plain_forward(make, name, tp, numbers):
    """The cut falls among decodes and into a chunk; the plain forward sums by all-reduces."""
    model = drawn.Bench(drawn.config_of(name), tp, **numbers)
    plan = make(model.config, TOKENS, 8, tp, scattered=True)
    assert graph_of(plan, model.config, tp).scattered
    model.check(plan, *(drawn.step(model.config, TOKENS, (8,), *work) for work in WORK))


def test_the_scattered_form_sends_equal_bytes_and_norms_rows_once():
    step, widths = Composition(5, 7, ((9, 3),)), Widths()
    for name in ("tiny-llama", "tiny-gemma2", "tiny-mixtral"):
        config = drawn.config_of(name)
        whole, parts = (model_graph(config, 4, widths, scattered=scattered) for scattered in (False, True))
        assert whole.work(step).network_bytes == pytest.approx(parts.work(step).network_bytes)
        one, other = ({op.name: op.work(step) for op in graph.layers[1]} for graph in (whole, parts))
        for norm in ("attn_norm", "mlp_norm", *(["post_mlp_norm"] if config.post_norms else [])):
            assert one[norm].activation_bytes == pytest.approx(4 * other[norm].activation_bytes)
        assert {"attn_scatter", "attn_gather", "mlp_scatter", "mlp_gather"} == {
            op.name for op in parts.layers[0] if op.kind == "network"
        }
    narrow = {op.name: op.work(step) for op in model_graph(LLAMA, 4, FP8, scattered=True).layers[0]}
    assert narrow["mlp_gather"].network_bytes == pytest.approx(
        narrow["mlp_scatter"].network_bytes / 2
    )  # e4m3 is what up_gate reads


def test_an_unsplit_scattered_plan_is_not_sequential():
    """A sequential step uses all-reduces; a measurement must tell the faster form."""
    plan = sequential_plan(LLAMA, TOKENS, 2, scattered=True)
    check(plan, graph_of(plan, LLAMA, 2))
    assert plan.name == "sequential, sums scattered" and not is_sequential(plan)


def test_invalid_scattered_plans_are_refused_by_name():
    with pytest.raises(ValueError, match="tp is 1"):
        model_graph(LLAMA, 1, scattered=True)
    plan = two_nano_batch_plan(LLAMA, TOKENS, 8, 2, scattered=True)
    graph = graph_of(plan, LLAMA, 2)
    check(plan, graph)
    aside = msgspec.structs.replace(
        plan, nano_ops=tuple(_with(nano, "mlp_norm", stream=2) for nano in plan.nano_ops)
    )
    with pytest.raises(PlanError, match=r"mlp_norm.0: stream=2: mlp_norm runs on the main stream"):
        check(aside, graph)
    cut = msgspec.structs.replace(
        plan, nano_ops=tuple(_moved(nano) if nano.op == "mlp_norm" else nano for nano in plan.nano_ops)
    )
    with pytest.raises(PlanError, match="mlp_norm: is cut at"):
        check(cut, graph)
    with pytest.raises(PlanError, match="do not divide"):
        compile_plan(two_nano_batch_plan(LLAMA, TOKENS, 7, 2, scattered=True), LLAMA, 2)
    both = msgspec.structs.replace(
        plan, nano_ops=(*plan.nano_ops, NanoOp("attn_reduce", "attn_reduce", 0, TOKENS))
    )
    with pytest.raises(PlanError, match="attn_reduce"):
        check(both, graph)


def _with(nano, op, **changes):
    return msgspec.structs.replace(nano, **changes) if nano.op == op else nano


def _moved(nano):
    return msgspec.structs.replace(nano, start=min(nano.start, 7), stop=7 if nano.stop == 8 else nano.stop)

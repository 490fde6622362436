"""Tests of law 1: every plan computes the plain forward, for drawn plans and steps, on several devices.

Most drawn plans are evaluated op by op, since compiling the step of one plan takes seconds. The usual suite
draws 2 plans of one family; with --slow it draws 20 of each family (`tests/slow_cases.py`). A failure
reports the seed and the number of examples that draw the same plan again. A longer run draws more:

    LAW_SEED=740000 LAW_EXAMPLES=200 LAW_COMPILED=8 \
        python -m pytest -n0 -m "slow or not slow" tests/jaxflow/pipeline/test_compiler.py
"""

import dataclasses
import os

import drawn
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, seed, settings
from hypothesis import strategies as st

from jaxflow.model import ops
from jaxflow.model.graph import model_graph
from jaxflow.pipeline import compiler, streams
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import four_qkv_plan, phased_plan, sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import PlanError, borders
from pallas_kernels.gemm.expert_mlp import reference as expert_mlp_reference
from pallas_kernels.gemm.grouped import groups as grouped
from pallas_kernels.gemm.grouped import reference as grouped_reference
from pallas_kernels.gemm.sorted_rows import reference as sorted_rows
from pallas_kernels.kernel_set import REFERENCE
from pallas_kernels.pointwise.norm import reference as norm_reference
from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.pointwise.quantize.reference import quantize_rows

TOKENS, SPLIT = 16, 6
EXAMPLES = int(os.environ.get("LAW_EXAMPLES", "20"))  # drawn plans of each family, evaluated op by op
COMPILED = int(os.environ.get("LAW_COMPILED", "1"))  # drawn plans of each family, compiled
SEED = int(os.environ.get("LAW_SEED", "20"))
# A failing example is not shrunk: each compiles a step.
LAW = settings(
    suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate], print_blob=True
)
FP8 = {"quantization": "fp8", "kv": "float8_e4m3fn"}


def bench(name, tp=1, **numbers):
    return drawn.Bench(drawn.config_of(name), tp, **numbers)


FAMILIES = pytest.mark.parametrize(
    ("name", "tp", "form", "streams", "numbers"),
    [
        ("tiny-llama", 1, "", True, {}),
        ("tiny-mixtral", 1, "", True, {}),
        ("tiny-gemma2", 2, "", True, {}),
        ("tiny-llama", 2, "copied", True, {}),
        ("tiny-llama", 2, "scattered", True, {}),
        ("tiny-llama", 4, "swapped", True, {}),
        ("tiny-opt", 1, "", False, {"kv": "int8"}),
        ("tiny-glm4_moe", 1, "", True, {}),
        ("tiny-deepseek_v3", 2, "", True, {}),
        ("tiny-gemma4_e2b", 1, "", True, {}),
    ],
)


def draw_plan(data, model, form, streams, **settings):
    """Draw a plan of the family's form, and a step with chunks that straddle its split points."""
    note(f"LAW_SEED={SEED} LAW_EXAMPLES={EXAMPLES} LAW_COMPILED={COMPILED} draw this plan again")
    graph = model_graph(model.config, model.tp, scattered=form == "scattered", swapped=form == "swapped")
    sums = "copies" if form in ("copied", "swapped") else "kernels"
    plan = data.draw(drawn.plans(graph, TOKENS, streams, sums, **settings))
    assume(len(borders(plan)) > 0 and (not streams or len({nano.stream for nano in plan.nano_ops}) == 3))
    return plan, drawn.step(model.config, TOKENS, borders(plan), 3, (9, 4))


def check_drawn_plan(data, model, form, streams):
    plan, step = draw_plan(data, model, form, streams, places=(4, 12), sms=(None,))
    model.check_op_by_op(plan, step, data.draw(drawn.steps(model.config, TOKENS, borders(plan))))


@FAMILIES
@seed(SEED)
@settings(LAW, max_examples=EXAMPLES)
@given(data=st.data())
def test_drawn_plans(name, tp, form, streams, numbers, data):
    check_drawn_plan(data, bench(name, tp, **numbers), form, streams)


@seed(SEED)
@settings(LAW, max_examples=2)
@given(data=st.data())
def test_some_drawn_plans(data):
    check_drawn_plan(data, bench("tiny-llama"), "", True)


@FAMILIES
@seed(SEED)
@settings(LAW, max_examples=COMPILED)
@given(data=st.data())
def test_drawn_plans_compiled(name, tp, form, streams, numbers, data):
    model = bench(name, tp, **numbers)
    plan, step = draw_plan(data, model, form, streams)
    model.check(plan, step, *(data.draw(drawn.steps(model.config, TOKENS, borders(plan))) for _ in "ab"))


@pytest.mark.parametrize(
    ("make", "name", "tp", "numbers"),
    [
        (phased_plan, "tiny-gemma2", 2, {}),
        (phased_plan, "tiny-llama", 4, {}),
        (phased_plan, "tiny-llama", 1, FP8),
        (two_nano_batch_plan, "tiny-mixtral", 2, {}),
        (four_qkv_plan, "tiny-llama", 2, {}),
        (phased_plan, "tiny-gemma4_e2b", 2, FP8),
        (four_qkv_plan, "tiny-gemma4_e2b", 1, {}),
    ],
)
@settings(LAW, max_examples=3)
@given(data=st.data())
def test_a_plan_runs_every_composition(make, name, tp, numbers, data):
    """Made for so many decodes before its cut, it takes fewer, more or none, chunks anywhere, and nothing but
    padding.
    """
    model = bench(name, tp, **numbers)
    plan = make(model.config, TOKENS, SPLIT, tp)
    known = ((8, (3, 2)), (2, (9, 4)), (6, (10,)), (3, ()), (0, (16,)), (0, ()))
    steps = (drawn.step(model.config, TOKENS, (SPLIT,), *work) for work in known)
    model.check(plan, *steps, data.draw(drawn.steps(model.config, TOKENS, (SPLIT,))))


def test_two_nano_batches_with_4_bit_weights():
    model = bench("tiny-qwen3", 2, quantization="int4")
    model.check(
        two_nano_batch_plan(model.config, TOKENS, SPLIT, 2),
        drawn.step(model.config, TOKENS, (SPLIT,), 2, (9, 4)),
    )


def test_the_sequential_plan_is_the_plain_forward_bit_for_bit():
    model = bench("tiny-llama")
    step = drawn.step(model.config, TOKENS, (), 4, (7, 3))
    w, kv, plain = drawn.plain(model)
    got = model.jitted(compile_plan(sequential_plan(model.config, TOKENS), model.config))(w, kv, step)
    jax.tree.map(np.testing.assert_array_equal, got, plain(w, kv, step))


def compare_unless_cut(model, forward, cut):
    """Run a sequential plan beside the plain forward. Only trace a plan that cuts the tokens: its kernels are
    those of the plans that other tests run.
    """
    step = drawn.step(model.config, TOKENS, (SPLIT,), 4, (7, 3))
    w, kv, plain = drawn.plain(model)
    if cut:
        jax.eval_shape(model.jitted(forward), w, kv, step)
        return
    real = step.lengths > 0
    got, want = (np.asarray(each(w, kv, step)[0])[real] for each in (model.jitted(forward), plain))
    drawn.alike(got, want)


@pytest.mark.parametrize("cut", [False, True])
def test_ops_leave_work_to_their_readers_only_where_no_plan_cuts_the_tokens(cut):
    """The products of experts run in one kernel, and the norm adds the experts' rows."""
    config = drawn.config_of("tiny-qwen3_moe")
    config = dataclasses.replace(config, hidden_size=128, expert_intermediate_size=128)
    model, seen = drawn.Bench(config, 1, **FP8), []

    def sort_rows(*args, **settings):
        padded = grouped.list_groups(args[1], args[2], 8, 8, used=settings["used"])
        rows = sorted_rows.gather(quantize_rows(args[0]), padded)
        return dataclasses.replace(padded, arrived=jnp.zeros_like(padded.experts)), rows

    def expert_mlp(
        x, up, down, groups, **gates
    ):  # rounded as two ops, so that both plans compute one function
        seen.append("expert_mlp")
        a = grouped_reference.grouped_gemm(x, up, groups, **gates)
        return grouped_reference.grouped_gemm(quantize_rows(a), down, groups)

    def add_norm(x, y, *args, **settings):
        seen.extend(["rows"] * isinstance(y, WeightedRows))
        return norm_reference.add_norm(x, y, *args, **settings)

    few = {"expert_mlp_max_tokens": TOKENS, "norm_of_rows_max_tokens": TOKENS}
    own = dataclasses.replace(REFERENCE, sort_rows=sort_rows, expert_mlp=expert_mlp, add_norm=add_norm, **few)
    plan = two_nano_batch_plan(config, TOKENS, SPLIT) if cut else sequential_plan(config, TOKENS)
    made = compile_plan(plan, config, quantized=True)

    def forward(c, *given):
        return made(dataclasses.replace(c, kernels=own), *given)

    compare_unless_cut(model, forward, cut)
    assert set(seen) == (set() if cut else {"expert_mlp", "rows"})


@pytest.mark.parametrize("cut", [False, True])
def test_experts_take_unsorted_tokens_only_where_no_plan_cuts_them(cut, monkeypatch):
    monkeypatch.setattr(ops.expert_mlp_limits, "supports_few", lambda *_: True)  # the weights are in float32
    config = drawn.config_of("tiny-qwen3_moe")
    model, seen = drawn.Bench(config), []

    def few_expert_mlp(x, experts, up, down, *, used, **gates):
        seen.append("unsorted")
        groups = grouped.list_groups(experts, config.num_experts, 8, 8, used=used)
        rows = x[groups.pairs // experts.shape[1]]
        return expert_mlp_reference.expert_mlp(rows, up, down, groups, **gates), groups.places

    own = dataclasses.replace(REFERENCE, few_expert_mlp=few_expert_mlp, expert_mlp_bf16_max_tokens=TOKENS)
    plan = two_nano_batch_plan(config, TOKENS, SPLIT) if cut else sequential_plan(config, TOKENS)
    made = compile_plan(plan, config)

    def forward(c, *given):
        return made(dataclasses.replace(c, kernels=own), *given)

    compare_unless_cut(model, forward, cut)
    assert bool(seen) != cut


def test_a_wait_for_a_pending_sum_is_for_the_same_layer(monkeypatch):
    """A wait must not take the sum of the previous layer, the only one traced by then."""
    model, found, order = bench("tiny-llama", 2), [], compiler._StepTrace.order
    plan = two_nano_batch_plan(model.config, TOKENS, SPLIT, 2)
    waiting = {"attn_norm.1": "attn_reduce.0"}  # the one is issued right behind the other
    plan = msgspec.structs.replace(
        plan,
        nano_ops=tuple(
            msgspec.structs.replace(n, waits=(waiting[n.id],)) if n.id in waiting else n
            for n in plan.nano_ops
        ),
    )

    def ordered(trace, entry):
        made = (made for wait in entry.nano.waits for made in trace.made.get(wait, []))
        found.extend((entry.layer, one.value[0]) for one in made)
        order(trace, entry)

    monkeypatch.setattr(compiler._StepTrace, "order", ordered)
    w, kv, _ = drawn.plain(model)
    model.jitted(compile_plan(plan, model.config, 2)).lower(
        w, kv, drawn.step(model.config, TOKENS, (SPLIT,), 4, (7, 3))
    )
    assert found == [(layer, layer) for layer in range(model.config.num_layers)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int32", "uint8"])
def test_zero_behind_returns_zero_for_any_values(dtype):
    values = [
        jnp.asarray(x, "float32").astype(dtype)
        for x in (-7.3, [[1.5, 2]], [3], np.zeros((0, 4)), [np.pi] * 5)
    ]
    zero = streams.zero_behind([*values, jnp.asarray(float("nan"))])
    assert zero.dtype == jnp.int32 and zero.shape == () and zero == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32", "uint8"])
def test_behind_returns_its_argument_unchanged(dtype):
    """Bit for bit, the first of a tree's arrays, too; nothing at all is nothing still."""
    bits = np.random.default_rng(0).integers(0, 256, 64, np.uint8)
    small = (jnp.asarray(bits.view(dtype)), jnp.arange(3))
    made = jax.jit(streams.behind)([jnp.full((2, 2), -1.0), jnp.arange(4, 6)], small)
    assert np.asarray(made[0]).tobytes() == bits.tobytes()
    assert np.array_equal(made[1], small[1])
    assert streams.behind([jnp.ones(1)], None) is None


def test_a_batch_of_another_size_is_refused():
    model = bench("tiny-llama")
    w, kv, _ = drawn.plain(model)
    with pytest.raises(PlanError, match="steps of 24 tokens, not of 16"):
        model.jitted(compile_plan(sequential_plan(model.config, 24), model.config))(
            w, kv, drawn.step(model.config, TOKENS, (), 4, ())
        )

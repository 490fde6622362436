"""Law 1: every plan computes the plain forward; drawn plans, drawn steps, several families, one and two devices."""

import drawn
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handmade import phased_plan, sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import PlanError, borders

TOKENS = 16
# Each example compiles a step: few are drawn, and a failing one is not shrunk.
LAW = settings(suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


def bench(name, tp=1, **numbers):
    return drawn.Bench(drawn.config_of(name), tp, **numbers)


@pytest.mark.parametrize(("name", "streams"), [("tiny-llama", True), ("tiny-gemma2", False), ("tiny-mixtral", True), ("tiny-opt", False)])
@settings(LAW, max_examples=2)
@given(data=st.data())
def test_drawn_plans(name, streams, data):
    model = bench(name)
    plan = data.draw(drawn.plans(model.graph, TOKENS, streams=streams))
    model.check(plan, data.draw(drawn.steps(model.config, TOKENS, borders(plan))))


@settings(LAW, max_examples=2)
@given(data=st.data())
def test_drawn_plans_on_two_devices(data):
    model = bench("tiny-gemma2", tp=2)
    plan = data.draw(drawn.plans(model.graph, TOKENS))
    model.check(plan, data.draw(drawn.steps(model.config, TOKENS, borders(plan))))


@pytest.mark.parametrize(
    ("name", "tp", "kv"),
    [("tiny-llama", 1, "float8_e4m3fn"), ("tiny-mixtral", 2, "float8_e4m3fn"), ("tiny-gemma2", 1, "int8")],
)
@settings(LAW, max_examples=1)
@given(data=st.data())
def test_drawn_plans_of_8_bits(name, tp, kv, data):
    model = bench(name, tp, quantization="fp8", kv=kv)
    plan = data.draw(drawn.plans(model.graph, TOKENS))
    model.check(plan, data.draw(drawn.steps(model.config, TOKENS, borders(plan))))


@pytest.mark.parametrize(
    ("make", "name", "tp"),
    [
        (two_nano_batch_plan, "tiny-llama", 1),
        (two_nano_batch_plan, "tiny-mixtral", 2),
        (phased_plan, "tiny-gemma2", 1),
        (phased_plan, "tiny-llama", 2),
    ],
)
@pytest.mark.parametrize("numbers", [{}, {"quantization": "fp8", "kv": "float8_e4m3fn"}], ids=["float32", "fp8"])
def test_two_nano_batches(make, name, tp, numbers):
    """One compiled plan over several steps: the cut falls among decodes, into a chunk, into the padding."""
    model = bench(name, tp, **numbers)
    plan = make(model.config, TOKENS, 6, tp)
    model.check(plan, *(drawn.step(model.config, TOKENS, (6,), *work) for work in ((8, (3, 2)), (2, (9, 4)), (6, (10,)), (3, ()))))


@pytest.mark.parametrize(("make", "tp"), [(two_nano_batch_plan, 2), (phased_plan, 1)])
def test_two_nano_batches_on_weights_of_4_bits(make, tp):
    model = bench("tiny-qwen3", tp, quantization="int4")
    model.check(make(model.config, TOKENS, 6, tp), drawn.step(model.config, TOKENS, (6,), 2, (9, 4)))


def test_the_sequential_plan_is_the_plain_forward_bit_for_bit():
    model = bench("tiny-llama")
    step = drawn.step(model.config, TOKENS, (), 4, (7, 3))
    w, kv, plain = drawn.plain(model)
    got = model.jitted(compile_plan(sequential_plan(model.config, TOKENS), model.config))(w, kv, step)
    jax.tree.map(np.testing.assert_array_equal, got, plain(w, kv, step))


def test_a_batch_of_another_size_is_refused():
    model = bench("tiny-llama")
    w, kv, _ = drawn.plain(model)
    with pytest.raises(PlanError, match="a batch of 16 tokens in a plan for 24"):
        model.jitted(compile_plan(sequential_plan(model.config, 24), model.config))(w, kv, drawn.step(model.config, TOKENS, (), 4, ()))

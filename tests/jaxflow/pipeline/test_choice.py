"""A step runs the plan that is predicted fastest for its composition, and the sequential plan without a
prediction.
"""

import drawn
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.pipeline.choice import Gain, between, is_sequential, pick, portfolio
from jaxflow.pipeline.handwritten import phased_plan, sequential_plan, two_nano_batch_plan
from jaxflow.pipeline.plan import PlanError, Predictions, from_json, to_json

LLAMA = drawn.config_of("tiny-llama")
AXIS = st.lists(st.integers(0, 2000), min_size=1, max_size=5, unique=True).map(
    lambda axis: tuple(sorted(axis))
)
SECONDS = st.floats(1e-3, 1e3)


@st.composite
def predictions(draw):
    decodes, contexts = draw(AXIS), draw(AXIS)
    tables = [tuple(tuple(draw(SECONDS) for _ in contexts) for _ in decodes) for _ in range(2)]
    return Predictions(decodes, contexts, *tables)


def predicting(plan, **changes):
    """The plan, half as long as the sequential one everywhere."""
    return msgspec.structs.replace(plan, predictions=Predictions((0,), (1,), ((1.0,),), ((2.0,),)), **changes)


@given(predictions())
def test_a_gain_equals_the_predictions_at_their_compositions(predicted):
    gain = Gain.of(predicted)
    for i, decodes in enumerate(predicted.decode_tokens):
        for j, context in enumerate(predicted.mean_context_tokens):
            assert gain.at(decodes, context) == pytest.approx(
                predicted.sequential_s[i][j] / predicted.step_s[i][j]
            )


@given(predictions(), st.floats(-10, 3000), st.floats(-10, 3000))
def test_an_interpolated_gain_lies_between_its_predictions(predicted, decodes, context):
    """Interpolate along either axis as numpy does, and extend the last value beyond the predicted range."""
    xs, ys, table = predicted.decode_tokens, predicted.mean_context_tokens, predicted.step_s
    found = between(xs, ys, table, decodes, context)
    along_y = [np.interp(context, ys, row) for row in table]
    assert found == pytest.approx(float(np.interp(decodes, xs, along_y)))
    assert np.min(table) * (1 - 1e-9) <= found <= np.max(table) * (1 + 1e-9)


@given(
    st.lists(st.none() | predictions().map(Gain.of), min_size=1, max_size=5),
    st.integers(0, 2000),
    st.integers(0, 4000),
)
def test_the_picked_plan_is_predicted_to_be_no_slower_than_any(gains, decodes, context):
    values = [1.0 if gain is None else gain.sure(decodes, context) for gain in gains]
    assert values[pick(gains, decodes, context)] == max(values)


@given(predictions(), st.floats(0, 1), st.integers(0, 2000), st.integers(0, 4000))
def test_a_plan_is_picked_only_if_its_gain_exceeds_the_margin(predicted, margin, decodes, context):
    gain = Gain.of(msgspec.structs.replace(predicted, margin=margin))
    assert (pick([None, gain], decodes, context) == 1) == (gain.at(decodes, context) > 1 + margin)


def test_predictions_without_a_margin_get_the_default_margin():
    """Files without a margin: on an H200 their predicted gains of 1.09 to 1.21 were losses of 3 to 7 %."""
    old = from_json(to_json(predicting(phased_plan(LLAMA, 24, 8))))
    assert old.predictions is not None and old.predictions.margin == 0.3
    with pytest.raises(ValueError, match=r"margin=-0\.1"):
        Predictions((0,), (1,), ((1.0,),), ((2.0,),), margin=-0.1)


def test_each_composition_gets_its_plan_and_the_others_are_sequential():
    """One plan gains where many decode on long contexts, one where few do; with short contexts there is
    nothing to overlap.
    """
    many = Gain((100, 600), (100, 1000), ((0.8, 0.9), (0.9, 1.2)))
    few = Gain((100, 600), (100, 1000), ((0.8, 1.1), (0.9, 0.9)))
    gains = [None, many, few]
    picked = {(d, k): pick(gains, d, k) for d in (0, 100, 600, 2000) for k in (0, 100, 1000, 9000)}
    assert picked == {(d, k): (0 if k <= 100 else 2 if d <= 100 else 1) for d, k in picked}


def test_a_bucket_with_compared_plans_has_the_sequential_plan():
    made = predicting(two_nano_batch_plan(LLAMA, 24, 7))
    other = predicting(phased_plan(LLAMA, 24, 8))
    alone = two_nano_batch_plan(LLAMA, 40, 8)
    found = portfolio([made, other, alone], (8, 24), lambda tokens: sequential_plan(LLAMA, tokens))
    assert {tokens: [plan.name for plan in plans] for tokens, plans in found.items()} == {
        8: ["sequential"],
        24: ["sequential", made.name, other.name],
        40: [alone.name],
    }
    assert from_json(to_json(made)) == made


def test_a_searched_sequential_plan_adds_no_plan():
    sequential = predicting(sequential_plan(LLAMA, 16), name="searched")
    assert is_sequential(sequential) and not is_sequential(phased_plan(LLAMA, 16, 8))
    assert portfolio([sequential], (8,), lambda tokens: sequential_plan(LLAMA, tokens)) == {
        tokens: (sequential_plan(LLAMA, tokens),) for tokens in (8, 16)
    }


@pytest.mark.parametrize(
    "changes",
    [{"sms": 4}, {"ahead": 1}, {"waits": ("qkv",)}, {"stream": 1}, {"stop": 8}, {"op": "qkv"}],
    ids=str,
)
def test_one_changed_op_makes_a_plan_not_sequential(changes):
    plan = sequential_plan(LLAMA, 16)
    edited = tuple(
        msgspec.structs.replace(nano, **changes) if nano.op == "down" else nano for nano in plan.nano_ops
    )
    assert is_sequential(plan) and not is_sequential(msgspec.structs.replace(plan, nano_ops=edited))


def test_the_sms_of_a_sum_leave_a_plan_sequential():
    """NCCL decides its SMs; the search's solver records its assumption."""
    plan = sequential_plan(LLAMA, 16, 2)
    few = tuple(
        msgspec.structs.replace(nano, sms=24) if nano.op.endswith("_reduce") else nano
        for nano in plan.nano_ops
    )
    assert few != plan.nano_ops and is_sequential(msgspec.structs.replace(plan, nano_ops=few))


def test_an_empty_plan_is_not_sequential():
    assert not is_sequential(msgspec.structs.replace(sequential_plan(LLAMA, 10**9), nano_ops=()))


@given(predictions(), st.floats(0, 1), st.integers(0, 2000), st.integers(0, 4000))
def test_a_plan_without_a_sure_gain_is_never_picked(predicted, margin, decodes, context):
    predicted = msgspec.structs.replace(predicted, margin=margin)
    plan = msgspec.structs.replace(phased_plan(LLAMA, 24, 8), predictions=predicted)
    (found,) = portfolio([plan], (), lambda tokens: sequential_plan(LLAMA, tokens)).values()
    assert plan in found or pick([None, Gain.of(predicted)], decodes, context) == 0


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        (
            [two_nano_batch_plan(LLAMA, 24, 7), predicting(phased_plan(LLAMA, 24, 8))],
            "7 [+] 17: has no predictions",
        ),
        ([predicting(phased_plan(LLAMA, 24, 8))] * 2, "two plans for 24 tokens have this name"),
        ([predicting(phased_plan(LLAMA, 24, 8), name="sequential")], "sequential: two plans for 24 tokens"),
    ],
)
def test_plans_of_one_name_or_without_predictions_are_refused(plans, message):
    with pytest.raises(PlanError, match=message):
        portfolio(plans, (24,), lambda tokens: sequential_plan(LLAMA, tokens))

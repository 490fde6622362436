"""A plan's predictions brought to what was measured: never surer than the measurement, and the shipped plan is made so."""

import json

import msgspec
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ConfigError
from jaxflow.pipeline.choice import Gain, pick
from jaxflow.pipeline.plan import SHIPPED, Plan, Predictions, load
from search.__main__ import main
from search.correct import Point, corrected, points

PLAN = load(paths.ROOT / "benchmarks" / "plans" / "lean" / "1024-512-92-40.json")
REPORT = paths.ROOT / "benchmarks" / "h200-plans-llama-3.1-8b-lean.json"
FOUND = PLAN.predictions
SECONDS = st.floats(0.01, 0.1)
pytestmark = pytest.mark.usefixtures("no_flags")


@given(
    st.lists(SECONDS, min_size=8, max_size=8),
    st.lists(st.tuples(st.integers(0, 900), st.floats(100, 3000), st.floats(0.7, 1.4), st.floats(0, 0.02)), min_size=1, max_size=5),
)
def test_no_corrected_gain_is_surer_than_what_was_measured(seconds, measured):
    tables = [((a, b), (c, d)) for a, b, c, d in (seconds[:4], seconds[4:])]
    plan = Plan("one", 64, (), predictions=Predictions((200, 600), (500, 2000), *tables))
    found = [Point(*point) for point in measured]
    gains = Gain.of(msgspec.json.decode(msgspec.json.encode(corrected(plan, found).predictions), type=Predictions))
    for point in found:
        assert gains.sure(point.decode_tokens, point.mean_context_tokens) <= point.gain * (1 + 1e-9)


def test_one_measurement_is_believed_where_it_was_made():
    at = FOUND.decode_tokens[2], FOUND.mean_context_tokens[2]
    gains = Gain.of(corrected(PLAN, [Point(*at, 1.05, 0.01)]).predictions)
    assert gains.at(*at) == pytest.approx(1.05) and gains.margin == pytest.approx(0.01)


def test_the_shipped_plan_is_the_searched_one_as_it_was_measured(tmp_path, capsys):
    out = tmp_path / "corrected.json"
    named = [
        "--plan",
        str(paths.ROOT / "benchmarks" / "plans" / "lean" / "1024-512-92-40.json"),
        "--report",
        str(REPORT),
        "--out",
        str(out),
    ]
    assert main(["search", "correct", *named]) == 0
    assert "measured 1.029" in capsys.readouterr().out
    made, shipped = load(out), load(SHIPPED / "h200-llama-3.1-8b-bfloat16.json")
    assert made == shipped
    gain = Gain.of(shipped.predictions)
    for point in points(shipped, json.loads(REPORT.read_text("utf-8"))):
        at = point.decode_tokens, point.mean_context_tokens
        best = max(1.0, point.gain)
        picked = (1.0, point.gain)[pick([None, gain], *at)]
        assert picked >= 1.0 and best / picked <= 1.03  # never a loss, and within 3 % of the better


def test_a_report_without_the_plan_and_a_plan_without_predictions_are_refused(tmp_path, capsys):
    other = tmp_path / "report.json"
    other.write_text(json.dumps({"plans": []}))
    line = ["--plan", str(SHIPPED / "h200-llama-3.1-8b-bfloat16.json"), "--report", str(other), "--out", str(tmp_path / "out.json")]
    assert main(["search", "correct", *line]) == 1
    assert "a report of plan '92+40 1024/512' for 2048 tokens" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="a plan with predictions"):
        corrected(msgspec.structs.replace(PLAN, predictions=None), [Point(1, 1.0, 1.0, 0.0)])

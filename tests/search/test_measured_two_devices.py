"""Steps of Llama-3-70B on two H200s as they are predicted, against those measured (benchmarks/h200-plans-llama-3-70b-tp2*.json)."""

import dataclasses
import functools
import json
import statistics

import paths
import pytest

from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, model_graph
from jaxflow.pipeline.handmade import sequential_plan
from jaxflow.pipeline.plan import load
from search.clock import shipped_card
from search.copies import copied
from search.modelled import modelled_profile
from search.plan import KEYS
from search.predict import outside_s
from search.shares import Shares, product_columns
from search.simulate import simulate
from search.structure import Load

BENCHMARKS = paths.ROOT / "benchmarks"
H200, POWER, CARD = DEVICES["H200"], shipped_power("H200"), shipped_card("H200")
LLAMA = open_checkpoint("llama-3-70b", load_format="dummy").model_config
assert CARD is not None
KINDS = {"fp8": ("-fp8", FP8, "float8_e4m3fn"), "bfloat16": ("", BFLOAT16, "bfloat16")}  # the report's name, widths, dtype


@dataclasses.dataclass(frozen=True)
class Row:
    measured: dict
    seconds: float
    clock_mhz: float

    @property
    def error(self) -> float:
        return 1e3 * self.seconds / self.measured["step_ms"] - 1


@functools.cache
def rows(kind: str) -> list[Row]:
    """Of the cost model and the card's constants alone: nothing was fitted to these steps."""
    report, widths, dtype = KINDS[kind]
    graph, columns = model_graph(LLAMA, 2, widths), product_columns(LLAMA, 2)
    settings = {"tp": 2, "widths": widths, "dtype": dtype, "kv_dtype": dtype, "keys": KEYS}
    profile = modelled_profile("llama-3-70b", LLAMA, H200, **settings)
    forms = {"kernels": Shares(profile, graph, columns), "copies": Shares(copied(profile, graph, CARD), graph, columns)}
    plans = {plan.name: plan for plan in (load(path) for path in (BENCHMARKS / "plans" / "tp2" / kind).glob("*.json"))}
    found = []
    for row in json.loads((BENCHMARKS / f"h200-plans-llama-3-70b-tp2{report}.json").read_text("utf-8"))["plans"]:
        plan = plans.get(row["plan"].rpartition(", ")[0]) or sequential_plan(LLAMA, row["tokens"], 2)
        keys = Load.steady_state(row["tokens"], *map(int, row["workload"].split("/"))).chunk_keys
        step, own = Load(row["tokens"], row["decode_tokens"], row["mean_context_tokens"], keys), forms[plan.sums]
        timeline = simulate(plan, graph, own, step, device=H200, power=POWER)
        assert timeline.clock_hz is not None
        seconds = timeline.step_s + outside_s(graph, step.part(0, step.tokens), H200, dtype)
        found.append(Row(row, seconds, timeline.clock_hz / 1e6))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_two_devices_are_predicted(kind):
    """Eight of each: with decodes and of prefill alone, sums by kernels and by copies, whole and in two."""
    errors = [abs(row.error) for row in rows(kind)]
    assert len(errors) == 8 and statistics.mean(errors) < 0.035 and max(errors) < 0.06, errors
    for row in rows(kind):
        assert row.clock_mhz == pytest.approx(row.measured["sm_clock_mhz"], rel=0.06)


def table() -> list[str]:
    """The page's rows."""
    lines = []
    for kind in KINDS:
        for row in rows(kind):
            measured = row.measured
            alone = next(r for r in rows(kind) if r.measured["sequential"] and r.measured["workload"] == measured["workload"])
            gains = alone.measured["step_ms"] / measured["step_ms"], alone.seconds / row.seconds
            cells = (
                kind, measured["workload"], measured["plan"].rpartition(", ")[0], f"{measured['tokens_per_s']:,.0f}",
                f"{measured['step_ms']:.1f}", f"{1e3 * row.seconds:.1f}", f"{gains[0]:.3f}", f"{gains[1]:.2f}",
                f"{measured['watts']:.0f} at {measured['sm_clock_mhz']:.0f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_page_has_the_steps_of_two_devices():
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    assert text.partition("<!-- two devices -->\n")[2].partition("\n<!-- /two devices -->")[0].splitlines()[2:] == table()

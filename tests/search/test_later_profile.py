"""Llama-3.1-8B's profile of an H200 measured anew, with joules: what it says otherwise, and why plans are not
made with it.
"""

import functools
import statistics

import measured_steps as steps
import msgspec
import paths
from test_energy_fit import MEASURED

from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import bound, shipped_power
from jaxflow.model.graph import Widths, Work, model_graph
from jaxflow.pipeline.choice import Gain
from jaxflow.pipeline.plan import load
from search.nanobatch.shares import Shares, product_shapes
from search.profile.energy_fit import errors, load_runs, lowered, of_profile
from search.profile.measure import interpolation_errors
from search.profile.op_times import OpTime, Profile, load_profile

FIRST, LATER = (
    load_profile(paths.ROOT / "search" / "profiles" / f"h200-llama-3.1-8b{kind}.json")
    for kind in ("", "-joules")
)
GRAPH = model_graph(steps.LLAMA, 1, Widths())
POWER = shipped_power("H200")
assert POWER is not None
REPORTS = {"bfloat16": "bf16", "lean": "lean", "variants": "variants", "traces": "traces", "fourth": "fourth"}


def page(name: str = "overlap") -> str:
    return " ".join((paths.ROOT / "docs" / f"{name}.md").read_text("utf-8").split())


@functools.cache
def shares(later: bool) -> Shares:
    return Shares(LATER if later else FIRST, GRAPH, product_shapes(steps.LLAMA, 1))


@functools.cache
def rows(name: str, later: bool) -> list[steps.Row]:
    """A report's steps in bfloat16, predicted with either profile."""
    base = shares(later)
    return (
        steps.rows(name, base)
        if name in steps.FILES
        else {"lean": steps.lean_rows, **steps.GAINS}[name](base)
    )


def mean_error(found: list[steps.Row]) -> float:
    return 100 * statistics.mean(abs(row.error) for row in found)


def times(profile: Profile) -> dict[tuple, OpTime]:
    return {(time.op, time.tokens, time.keys, time.sms): time for time in profile.op_times}


def test_the_page_says_how_their_times_differ():
    first, later = times(FIRST), times(LATER)
    assert first.keys() < later.keys() and len(FIRST.pairs) == len(LATER.pairs) == 24
    ratios = {key: later[key].seconds / first[key].seconds for key in first}
    whole = [ratio for (op, _, _, sms), ratio in ratios.items() if op == "up_gate" and sms == 132]
    few = [ratio for (op, _, _, sms), ratio in ratios.items() if op == "decode_attention" and sms < 132]
    off = interpolation_errors(LATER, steps.LLAMA)
    said = (
        f"{len(later)} times and {len(LATER.pairs)} pairs",
        f"The {len(ratios)} times that both have are {statistics.median(ratios.values()):.3f} of the first's in the median, "
        f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f};",
        (
            f"`up_gate` on all SMs {statistics.median(whole):.2f}, decode attention on 24 to 48 SMs "
            f"{statistics.median(few):.2f},"
        ),
        (
            f"{shares(True).beside:.2f} times as long beside others, where the first says "
            f"{shares(False).beside:.2f};"
        ),
        "off by {:.1f} % along tokens, {:.1f} along keys and {:.1f} along SMs,".format(
            *(100 * off[axis] for axis in ("tokens", "keys", "sms"))
        ),
        (
            f"{sum(time.watts > 707 for time in LATER.op_times)} of its {len(later)} times stand at more "
            f"than 707 W"
        ),
    )
    assert all(time.joules for time in LATER.op_times) and [one for one in said if one not in page()] == []


def table() -> list[str]:
    """The page's rows: mean errors of each report's steps with either profile, and of all."""
    found = {label: [rows(name, later) for later in (False, True)] for name, label in REPORTS.items()}
    together = [[row for each in found.values() for row in each[at]] for at in (0, 1)]
    kinds = {True: "all, sequential", False: "all, under plans"}
    for alone, label in kinds.items():
        found[label] = [[row for row in each if row.measured["sequential"] == alone] for each in together]
    found["all"] = together
    return [
        f"| {label} | {len(first)} | {mean_error(first):.1f}% | {mean_error(later):.1f}% |"
        for label, (first, later) in found.items()
    ]


def test_the_page_has_the_errors_with_both_and_plans_are_predicted_worse_with_the_later():
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    assert (
        text.partition("<!-- profiles -->\n")[2].partition("\n<!-- /profiles -->")[0].splitlines()[2:]
        == table()
    )
    first, later = ([row for name in REPORTS for row in rows(name, which)] for which in (False, True))
    assert mean_error(first) < mean_error(later)


def test_the_page_has_what_either_predicts_of_plans():
    """Of the plan that gained, where it did, and of what the search finds with the later one, which nobody
    measured.
    """
    gained = []
    for later in (False, True):
        found = [row for row in rows("fourth", later) if row.measured["workload"] == "1024/512"]
        alone, plan = (
            next(row for row in found if row.measured["plan"].startswith(name))
            for name in ("sequential", "92+40 1024/512")
        )
        gained.append(alone.seconds / plan.seconds)
    promised = []
    for kind in ("", "-joules"):
        plan = load(paths.ROOT / "benchmarks" / "plans" / "searched" / f"llama-3.1-8b-768{kind}.json")
        assert plan.predictions is not None and plan.target is not None
        promised.append(
            Gain.of(plan.predictions).at(plan.target.decode_tokens, plan.target.mean_context_tokens)
        )
    said = (
        "for a gain of {1:.2f} instead of {0:.2f}".format(*gained),
        "promises {1:.3f} instead of {0:.3f}".format(*promised),
    )
    assert [one for one in said if one not in page()] == []


def test_the_page_has_its_joules_beside_the_bound():
    """By the counter and by the sensor of the same windows, which do not agree on what lies below it; none
    was faster than the bound.
    """
    measured = load_runs(MEASURED)
    bare = msgspec.structs.replace(
        LATER, op_times=tuple(msgspec.structs.replace(time, joules=None) for time in LATER.op_times)
    )
    bare = msgspec.structs.replace(
        bare, pairs=tuple(msgspec.structs.replace(pair, joules=None) for pair in LATER.pairs)
    )
    by_counter, by_sensor = (of_profile(measured, profile, GRAPH) for profile in (LATER, bare))
    counter, sensor = (errors(found, POWER) for found in (by_counter, by_sensor))
    both = sum(max(pair) < 1 for pair in zip(counter, sensor, strict=True))
    apart = [time.joules / time.seconds / time.watts for time in LATER.op_times]
    first = by_counter.runs[counter.index(min(counter))].name
    assert first == "llama-3.1-8b down 512 0 on 132"
    for run in by_counter.runs:
        assert (
            bound(
                Work(run.flops_per_s, kv_bytes=run.bytes_per_s), DEVICES["H200"], POWER, run.dtype
            ).longest_s
            < 1.0
        ), run.name
    low = lowered(POWER, by_counter.runs)
    joules = [
        (1e12 * was.joules, 1e12 * now.joules)
        for was, now in ((POWER.flop["bfloat16"], low.flop["bfloat16"]), (POWER.byte, low.byte))
    ]
    less, fewer = (sum(ratio < 1 for ratio in found) for found in (counter, sensor))
    said = (
        f"{less} of its {len(counter)} entries, products, attention and pairs, needed less than the bound says by the counter, "
        f"down to {min(counter):.3f} (`down` of 512 tokens)",
        (
            f"by the sensor, of the same windows, {fewer}, down to {min(sensor):.3f}, of which {both} "
            f"are the same"
        ),
        (
            f"Counter over sensor is {statistics.median(apart):.2f} in the median, {min(apart):.2f} to "
            f"{max(apart):.2f}"
        ),
        (
            "a FLOP of bfloat16 would cost {1:.3f} pJ instead of {0:.3f} and a byte {3:.0f} instead of "
            "{2:.0f}"
        ).format(*joules[0], *joules[1]),
    )
    assert [one for one in said if one not in page("cost-model")] == []

"""Steps as they are predicted, against those that an H200 took (`measured_steps`): what the search and the
engine believe.
"""

import json
import statistics

import paths
import pytest
from measured_steps import (
    BENCHMARKS,
    FILES,
    GAINS,
    H200,
    LLAMA,
    POWER,
    REPORTS,
    Row,
    by_workload,
    fourth_rows,
    lean_fp8_rows,
    lean_rows,
    modelled,
    name_of,
    picked,
    rows,
    shares,
    trace_rows,
    variant_rows,
)  # fmt: skip
from wanted import reached

from jaxflow.pipeline.handmade import sequential_plan
from search.nanobatch.layer_tasks import Load
from search.nanobatch.predict import MARGIN, outside_s
from search.nanobatch.simulate import simulate
from search.profile.clock import Governor, governor_of, of_kernels, shipped_card

CARD = shipped_card("H200")
FITTED = (
    "1024/512",
)  # the workloads whose rows the card's factor of joules is taken from; the others are held out


@pytest.mark.parametrize(("dtype", "mean", "most"), [("bfloat16", 0.03, 0.06), ("float8_e4m3fn", 0.05, 0.08)])
def test_steps_are_predicted(dtype, mean, most):
    """12 and 20 of them, on plans that win nothing; those held out as well as those that the one fitted
    constant comes from.
    """
    found = rows(dtype, shares(dtype))
    held_out = [abs(row.error) for row in found if row.measured["workload"] not in FITTED]
    assert len(found) >= 12 and len(held_out) >= len(found) / 2
    assert statistics.mean(abs(row.error) for row in found) < mean > statistics.mean(held_out)
    assert max(abs(row.error) for row in found) < most
    for row in found:
        assert row.timeline.clock_hz is not None and row.timeline.clock_hz / 1e6 == pytest.approx(
            row.measured["sm_clock_mhz"], rel=0.12
        )


def test_sequential_steps_after_another_start_of_the_machine_are_predicted():
    """Two sizes, with decodes and of prefill alone: nothing of the model comes from these."""
    base, errors = shares("bfloat16"), {}
    for row in json.loads((BENCHMARKS / "h200-plans-llama-3.1-8b-sequential.json").read_text("utf-8"))[
        "plans"
    ]:
        if row["prefill_tokens"]:
            prompt, output = map(int, row["workload"].split("/"))
            chunk_keys = Load.steady_state(row["tokens"], prompt, output).chunk_keys
            load_ = Load(row["tokens"], row["decode_tokens"], row["mean_context_tokens"] or 0.0, chunk_keys)
            timeline = simulate(
                sequential_plan(LLAMA, row["tokens"], 1), base.graph, base, load_, device=H200, power=POWER
            )
            outside = outside_s(base.graph, load_.part(0, row["tokens"]), H200, "bfloat16")
            errors[row["workload"], row["tokens"]] = (timeline.step_s + outside) / (row["step_ms"] / 1e3) - 1
    assert set(errors) == {("1024/512", 512), ("1024/512", 2048), ("1024/1", 512), ("1024/1", 2048)}
    assert all(
        abs(error) < (0.02 if workload == "1024/512" else 0.08) for (workload, _), error in errors.items()
    ), errors


def test_of_8b_in_bf16_a_step_of_1024_rows_is_predicted_to_make_more_than_that_of_512_and_does():
    """Where the cache has not decodes enough for 2048: the page says by how much. It was predicted before it
    was measured.
    """
    base, gains, measured = shares("bfloat16"), [], []
    rows = json.loads((BENCHMARKS / REPORTS["fourth"]).read_text("utf-8"))["plans"]
    for lengths in ((512, 1024), (1000, 1000)):
        made = []
        for tokens in (512, 1024):
            step = Load.steady_state(tokens, *lengths)
            timeline = simulate(
                sequential_plan(LLAMA, tokens, 1), base.graph, base, step, device=H200, power=POWER
            )
            made.append(
                tokens / (timeline.step_s + outside_s(base.graph, step.part(0, tokens), H200, "bfloat16"))
            )
        gains.append(round(100 * made[1] / made[0] - 100))
        alone = {
            row["tokens"]: row
            for row in rows
            if row["sequential"] and row["workload"] == "{}/{}".format(*lengths)
        }
        assert alone[1024]["against_best_sequential"] == 1.0
        measured.append(
            (
                alone[1024]["tokens_per_s"],
                100 * alone[1024]["tokens_per_s"] / alone[512]["tokens_per_s"] - 100,
            )
        )
    assert gains == [6, 6]
    (first, more), (second, also) = measured
    text = " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())
    said = (
        f"steps of 1,024 rows, predicted to make 6 % more, make {first:,.0f} and {second:,.0f}, "
        f"{more:.1f} and {also:.1f} % more"
    )
    assert said in text


def test_the_page_says_what_plans_of_the_fourth_start_lose():
    """To the best sequential step, to that of their size, and how much slower than they are the model takes
    them for.
    """
    found = [row for row in fourth_rows() if not row.measured["sequential"]]
    by: dict[str, list[Row]] = {}
    for row in found:
        by.setdefault(name_of(row.measured), []).append(row)
    gained, three, parts, cut = by.values()
    alone, beside = (
        [row for row in found if (row.measured["workload"] == "1024/512") == at] for at in (True, False)
    )
    best = [row.measured["against_best_sequential"] for row in beside]
    lost = [
        [100 - 100 * row.measured["against_sequential_of_its_size"] for row in of]
        for of in (three, parts, cut)
    ]
    off = [[100 * row.error for row in of] for of in (gained, [*three, *parts, *cut])]
    assert min(map(min, off)) > 0 and len(alone) == 4
    said = (
        (
            f"makes {max(row.measured['against_best_sequential'] for row in alone):.3f} times as many "
            f"tokens as they do"
        ),
        (
            f"plans lose {100 - 100 * max(best):.0f} to {100 - 100 * min(best):.0f} % to the sequential "
            f"step of 1,024 rows"
        ),
        (
            "Three nano-batches lose {:.0f} to {:.0f} %, attention in two phases {:.0f} to {:.0f} %, the "
            "cut at 640 {:.0f} to {:.0f} %"
        ).format(*(end(each) for each in lost for end in (min, max))),
        "{:.0f} to {:.0f} % the one that gained, {:.0f} to {:.0f} % the others".format(
            *(end(each) for each in off for end in (min, max))
        ),
    )
    text = " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())
    assert [one for one in said if one not in text] == []


def test_the_model_alone_predicts_them_nearly_as_well():
    """bfloat16 without its profile: constants of a card, no times of ops."""
    assert statistics.mean(abs(row.error) for row in rows("bfloat16", modelled("bfloat16"))) < 0.05


def test_the_joules_of_a_hot_card_are_those_of_the_fitted_rows():
    """Watts, clock and time of the rows, over what ordinary kernels take in short windows: alike in both
    dtypes.
    """
    assert POWER is not None and CARD is not None
    factors = []
    for dtype in FILES:
        cool = Governor(of_kernels(POWER, CARD), dtype)
        for row in rows(dtype, shares(dtype)):
            if row.measured["sequential"] and row.measured["workload"] in FITTED:
                taken = (row.measured["watts"] - POWER.idle_w) * row.measured["step_ms"] / 1e3
                factors.append(
                    taken / cool.joules(row.timeline.work + row.outside, 1e6 * row.measured["sm_clock_mhz"])
                )
    assert CARD.hot_factor == pytest.approx(statistics.mean(factors), abs=0.01), factors
    hot = governor_of("H200", "bfloat16")
    assert hot is not None and (hot.power, hot.hot_factor) == (of_kernels(POWER, CARD), CARD.hot_factor)


def test_steps_of_a_layer_that_is_issued_otherwise_are_predicted_too():
    """14 steps of six plans that were made after the model: within the tenth that predictions are to be good
    for, and two plans gain.
    """
    errors = [abs(row.error) for row in lean_rows()]
    assert len(errors) == 14 and statistics.mean(errors) < 0.07 and max(errors) < 0.16, errors


def test_steps_of_variants_of_the_plan_that_gained_are_predicted():
    """36 steps at six workloads, prefill alone among them, by a model that had seen none of these plans."""
    errors = [abs(row.error) for row in variant_rows()]
    assert len(errors) == 36 and statistics.mean(errors) < 0.05 and max(errors) < 0.1, errors


def test_sequential_steps_at_traces_lengths_and_in_fp8_are_predicted():
    """Eleven that the model had not seen. Of plans beside ten it is 14 % off in bf16, on the safe side, and 9
    % in fp8, on the other.
    """
    alone = [
        abs(row.error)
        for row in (*trace_rows(), *lean_fp8_rows(), *lean_fp8_rows("-lmsys"))
        if row.measured["sequential"]
    ]
    assert len(alone) == 11 and statistics.mean(alone) < 0.025 and max(alone) < 0.06, alone
    others = {
        name: [row.error for row in GAINS[name]() if not row.measured["sequential"]]
        for name in ("traces", "lean fp8")
    }
    assert min(others["traces"]) > 0.05 and -0.17 < statistics.mean(others["lean fp8"]) < 0, others


def test_the_page_has_the_sequential_steps_of_fp8():
    """At LMSYS's lengths of three sizes; and how far off predictions of steps of 2048 rows are."""
    off = max(
        abs(row.error)
        for name in ("lean fp8", "lean fp8 lmsys")
        for row in GAINS[name]()
        if row.measured["sequential"]
    )
    found = json.loads((BENCHMARKS / REPORTS["lean fp8 lmsys"]).read_text("utf-8"))["plans"]
    small, middle, full = (f"{row['tokens_per_s']:,.0f}" for row in found if row["sequential"])
    said = f"{full} at LMSYS's lengths, where the steps of 512 and 1,024 rows make {small} and {middle}."
    text = " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())
    assert f"{said} Sequential steps are predicted within {100 * off:.1f} %;" in text


@pytest.mark.parametrize(
    ("dtype", "within"),
    [
        *((name, 1.03) for name in (*FILES, "lean", "variants", "lean fp8", "lean fp8 lmsys")),
        ("traces", 1.04),
        ("fourth", 1.04),
    ],
    ids=lambda value: str(value),
)
def test_no_plan_is_picked_that_loses(dtype, within):
    """A gain is never predicted more than the margin too large, so with it the pick is within 3 % of the
    best; of two starts, 4 %.
    """
    for found in by_workload(dtype):
        alone = next(row for row in found if row.measured["sequential"])
        for row in found:
            gained = alone.measured["step_ms"] / row.measured["step_ms"]
            assert alone.seconds / row.seconds < (1 + MARGIN) * gained
        shortest = min(row.measured["step_ms"] for row in found)
        assert picked(found).measured["step_ms"] < within * shortest
        assert picked(found) is alone


def picks() -> list[str]:
    """The page's rows: how much longer than the best of a workload what is picked took, at worst, without the
    margin and with it.
    """
    lines = []
    for name, file in REPORTS.items():
        lost = []
        for found in by_workload(name):
            shortest = min(row.measured["step_ms"] for row in found)
            both = min(found, key=lambda row: row.seconds), picked(found)
            lost.append([row.measured["step_ms"] / shortest - 1 for row in both])
        worst = [f"{max(each):.1%}" for each in zip(*lost, strict=True)]
        link = f"[{file.removeprefix('h200-plans-llama-3.1-8b').removesuffix('.json').removeprefix('-') or 'bf16'}](../benchmarks/{file})"
        lines.append(f"| {' | '.join((link, str(len(lost)), *worst))} |")
    return lines


def test_the_page_says_how_far_off_steps_are():
    """Of each report, and of all together. Plans are told by their names, those that were searched also by
    their report's first name.
    """
    found = {name: [row for each in by_workload(name) for row in each] for name in REPORTS}
    means = {name: statistics.mean(abs(row.error) for row in rows) for name, rows in found.items()}
    together = [row.error for rows in found.values() for row in rows]
    plans = {
        (name.removesuffix(" lmsys") if "searched" in row.measured["plan"] else "", name_of(row.measured))
        for name, rows in found.items()
        for row in rows
    }
    figures = (
        statistics.mean(map(abs, together)),
        min(means.values()),
        max(means.values()),
        max(together, key=abs),
    )
    mean, least, most, largest = (100 * figure for figure in figures)
    said = (
        f"8B {mean:.1f} % over all {len(together)} steps of {len(plans) - 1} plans and the sequential one, "
        f"{least:.1f} to {most:.1f} % by report, one step {largest:.1f} % too long;"
    )
    assert reached("steps predicted").startswith(said)


def test_the_page_says_what_is_picked_on_one_device():
    """Where what is predicted best is not, by more than 3 %; and with the margin."""
    losses, margins = {}, {}
    for name in REPORTS:
        for found in by_workload(name):
            shortest = min(row.measured["step_ms"] for row in found)
            best, chosen = min(found, key=lambda row: row.seconds), picked(found)
            key = name, found[0].measured["workload"]
            losses[key], margins[key] = (
                100 * row.measured["step_ms"] / shortest - 100 for row in (best, chosen)
            )
            assert (
                losses[key] < 3
                or not best.measured["sequential"]
                or key in (("traces", "1024/512"), ("fourth", "1024/512"))
            )
            assert chosen.measured["sequential"]
    one, other, third = (
        losses[key] for key in (("lean", "1024/512"), ("lean fp8", "512/1024"), ("lean fp8", "1000/1000"))
    )
    said = (
        f"8B at worst {one:.1f} % off in bf16 (1024 / 512), {other:.1f} and {third:.1f} % in fp8 (512 / "
        f"1024, 1000 / 1000), each a plan"
    )
    assert reached("the search's pick").startswith(said)
    *_, before, fourth, third = sorted(margins.values())
    assert (margins["fourth", "1024/512"], margins["traces", "1024/512"]) == (fourth, third)
    fp8 = max(lost for (name, _), lost in margins.items() if "fp8" in REPORTS[name])
    said = (
        f"on one device the sequential step everywhere: {fp8:.1f} % in fp8, {before:.1f} % in bf16 "
        f"but for {third:.1f} and {fourth:.1f} % at 1024 / 512 in two of four starts"
    )
    assert reached("the same").startswith(said)


def test_the_page_has_what_is_picked():
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    assert text.partition("<!-- picks -->\n")[2].partition("\n<!-- /picks -->")[0].splitlines()[2:] == picks()


def table() -> list[str]:
    """The page's rows: each plan on each workload, launched as the engine does."""
    lines = []
    for dtype, name in (("bfloat16", "bf16"), ("float8_e4m3fn", "fp8")):
        found = [row for row in rows(dtype, shares(dtype)) if row.measured["graphs"] is None]
        for row in found:
            measured, plan = row.measured, name_of(row.measured).removeprefix("searched llama-3.1-8b 2048 ")
            alone = next(
                r
                for r in found
                if r.measured["sequential"] and r.measured["workload"] == measured["workload"]
            )
            gains = alone.measured["step_ms"] / measured["step_ms"], alone.seconds / row.seconds
            cells = (
                name,
                measured["workload"],
                plan,
                f"{measured['step_ms']:.1f}",
                f"{1e3 * row.seconds:.1f}",
                *(f"{g:.2f}" for g in gains),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_page_has_the_steps():
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    assert text.partition("<!-- steps -->\n")[2].partition("\n<!-- /steps -->")[0].splitlines()[2:] == table()


def gains(found: list[Row]) -> list[str]:
    """The page's gains, measured (predicted) [against the best sequential step, where that is of another
    size]: a row for each plan.
    """
    workloads, names = (
        list(dict.fromkeys(row.measured[key] for row in found)) for key in ("workload", "plan")
    )
    by = {(row.measured["workload"], row.measured["plan"]): row for row in found}
    lines = [f"| plan | {' | '.join(workloads)} |", "| --- |" + " --- |" * len(workloads)]
    for name in names[1:]:
        pairs = [(by[workload, names[0]], by[workload, name]) for workload in workloads]
        cells = [
            f"{a.measured['step_ms'] / b.measured['step_ms']:.3f} ({a.seconds / b.seconds:.2f})"
            + (
                f" [{b.measured['against_best_sequential']:.3f}]"
                if a.measured["against_best_sequential"] < 1
                else ""
            )
            for a, b in pairs
        ]
        lines.append(
            f"| {name_of(by[workloads[0], name].measured).removeprefix('searched llama-3.1-8b 2048 ')} | "
            f"{' | '.join(cells)} |"
        )
    return lines


@pytest.mark.parametrize("name", GAINS)
def test_the_page_has_the_gains(name):
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    assert text.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[0].splitlines() == gains(
        GAINS[name]()
    )

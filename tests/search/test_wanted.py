"""The page's table of what was wanted and what was reached: the cells that reports say by themselves.

Those that need predictions are held in test_measured_steps.py and test_measured_two_devices.py.
"""

import json
import math

import paths
from wanted import reached

LLAMA = "h200-llama-3.1-8b"
PLANS = "h200-plans-llama-3.1-8b"
# Of Llama-3.1-8B, by report: requests a second, below what the engine does and above it.
BELOW = {
    "rate": (50,),
    "rate-sharegpt-55": (55,),
    "rate-azure": (22, 26),
    "rate-lmsys": (80, 95),
    "fp8-rate": (70, 85),
}
PAST = {
    "rate": (60,),
    "rate-sharegpt-75": (75,),
    "rate-sharegpt-90": (90,),
    "rate-lmsys-135": (115, 135),
    "rate-azure-40": (32, 40),
}


def report(name: str) -> dict:
    """Of the figures, or of the settings that were tried."""
    folder = paths.ROOT / "benchmarks"
    path = folder / f"{name}.json"
    return json.loads((path if path.exists() else folder / "settings" / path.name).read_text("utf-8"))


def points(runs: dict[str, tuple[int, ...]]) -> list[dict]:
    """Of the sweeps over rates, in the order of `runs`."""
    found = {
        name: {point["request_rate"]: point for point in report(f"{LLAMA}-{name}")["points"]} for name in runs
    }
    return [found[name][rate] for name, rates in runs.items() for rate in rates]


def gain(plans: list[dict], workload: str, plan: str) -> float:
    """Over the sequential step of as many rows."""
    (row,) = [row for row in plans if row["workload"] == workload and row["plan"].startswith(plan)]
    return row["against_sequential_of_its_size"]


def mean_ms(point: dict) -> float:
    return point["mean_normalized_latency_ms"]


def tail(point: dict) -> float:
    """The 99th percentile over the mean."""
    return point["p99_normalized_latency_ms"] / mean_ms(point)


def idle(run: dict) -> float:
    """The most that the device can have waited between steps, by the host's clock, in per cent."""
    return 100 * run["steps"]["device_idle_share"]


def test_plans_on_one_device():
    reports = [report(f"{PLANS}-{name}")["plans"] for name in ("traces", "fourth", "lean", "variants")]
    starts = [gain(plans, "1024/512", "92+40 1024/512") for plans in reports]
    best = max(
        (row for row in reports[1] if row["workload"] == "1024/512" and row["sequential"]),
        key=lambda row: row["tokens_per_s"],
    )
    (over,) = {
        row["against_best_sequential"]
        for row in reports[1]
        if row["plan"].startswith("92+40 1024/512") and row["workload"] == "1024/512"
    }
    said = (
        "{:.3f}, {:.3f}, {:.3f} and {:.3f} in four starts at 1024 / 512, {:.3f} over the best sequential "
        "step, of {:,} rows;"
    )
    assert reached("8B in bf16, plans").startswith(said.format(*starts, over, best["tokens"]))
    fp8, lmsys = (report(f"{PLANS}-lean-fp8{lengths}") for lengths in ("", "-lmsys"))
    fp8_rows = [*fp8["plans"], *lmsys["plans"]]
    lost = [100 - 100 * row["against_best_sequential"] for row in fp8_rows if not row["sequential"]]
    asked, ran = (
        fp8["command"].partition("--workloads ")[2].split()[0].split(","),
        {row["workload"] for row in fp8["plans"]},
    )
    assert {row["workload"] for row in lmsys["plans"]} == {*asked} - ran == {"92/206"} and len(asked) == 7
    said = f"1.00: on all seven workloads plans make {min(lost):.0f} to {max(lost):.0f} % less"
    assert reached("8B in fp8, plans").startswith(said)


def test_what_ended_plans_in_bf16():
    """Power: fewer cycles of a slower clock, of the plan that gained in the third start and in the fourth."""
    starts = [
        [row for row in report(f"{PLANS}-{name}")["plans"] if row["workload"] == "1024/512"]
        for name in ("traces", "fourth")
    ]
    alone = [next(row for row in rows if row["sequential"] and row["tokens"] == 2048) for rows in starts]
    plans = [next(row for row in rows if row["plan"].startswith("92+40 1024/512")) for rows in starts]
    cycles = [
        row["step_ms"] * row["sm_clock_mhz"] / (other["step_ms"] * other["sm_clock_mhz"])
        for row, other in zip(plans, alone, strict=True)
    ]
    clocks, slower = ([f"{row['sm_clock_mhz']:.0f}" for row in rows] for rows in (alone, plans))
    watts = [row["watts"] for row in (*alone, *plans)]
    assert {f"{share:.2f}" for share in cycles} == {"0.88"} and {f"{1 / share:.2f}" for share in cycles} == {
        "1.13"
    }
    told = (
        f"the plan takes {cycles[0]:.3f} and {cycles[1]:.3f} times as many clock cycles",
        (
            f"at the cap, {min(watts):.0f} to {max(watts):.0f} W under either, it has {slower[0]} and "
            f"{slower[1]} MHz"
        ),
        f"where the sequential step has {clocks[0]} and {clocks[1]}.",
    )
    text = " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())
    assert [one for one in told if one not in text] == []
    said = (
        f"it has {slower[1]} and {slower[0]} MHz where the sequential step has {clocks[1]} and "
        f"{clocks[0]}; and joins"
    )
    assert said in reached("8B in bf16, plans")


def test_what_ended_plans_in_fp8():
    """Not watts: more cycles, and with them joules, of steps of 2048 rows beside the sequential ones."""
    rows = [
        row
        for lengths in ("", "-lmsys")
        for row in report(f"{PLANS}-lean-fp8{lengths}")["plans"]
        if row["tokens"] == 2048
    ]
    alone = {row["workload"]: row for row in rows if row["sequential"]}
    plans = [row for row in rows if not row["sequential"]]
    pairs = [(row, alone[row["workload"]]) for row in plans]
    watts, in_turn = (
        f"{min(drawn):.0f} to {max(drawn):.0f}"
        for drawn in ([row["watts"] for row in of] for of in (plans, alone.values()))
    )
    cycles = [
        row["step_ms"] * row["sm_clock_mhz"] / (other["step_ms"] * other["sm_clock_mhz"])
        for row, other in pairs
    ]
    joules = [row["joules_per_token"] / other["joules_per_token"] for row, other in pairs]
    slower, *faster = sorted(row["sm_clock_mhz"] - other["sm_clock_mhz"] for row, other in pairs)
    assert slower < 0 < faster[0]
    times = [f"{min(found):.2f} to {max(found):.2f}" for found in (cycles, joules)]
    said = (
        f"**missed**: cycles: at as many watts ({watts}, in sequence {in_turn}) plans take {times[0]} "
        f"times as many of them, "
    )
    assert f"{said}and {times[1]} times the joules a token:" in reached("8B in fp8, plans")
    told = (
        (
            f"at {watts} W under plans and {in_turn} in sequence, but plans take {times[0]} times as "
            f"many clock cycles a step"
        ),
        (
            f"under {len(faster)} of the {len(plans)} is {faster[0]:.0f} to {faster[-1]:.0f} MHz higher) "
            f"and {times[1]} times"
        ),
    )
    text = " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())
    assert [one for one in told if one not in text] == []


def test_the_share_of_the_optimum():
    """The least and the most of the page's table, which is held to the reports in test_measured_workloads.py."""
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    table = text.partition("<!-- fractions -->\n")[2].partition("\n<!-- /fractions -->")[0].splitlines()[2:]
    spans = []
    for model in ("8B bf16", "8B fp8", "70B bf16", "70B fp8"):
        cells = [line.split(" | ") for line in table if line.startswith(f"| {model}")]
        for column in (5, 6):
            found = [int(row[column].removesuffix("%")) for row in cells]
            spans.append(f"{min(found)} to {max(found)} %")
    said = (
        "[steps](#how-near-the-optimum-steps-are) of 8B in bf16 {} and {}, in fp8 {} and {}; of 70B in "
        "bf16 {} and {}, in fp8 {} and {};"
    )
    assert reached("the share of the optimum").startswith(said.format(*spans))


def test_the_ablation():
    """Of 8B and of 70B: each adds to the one before it."""
    copied, few = (
        "two nano-batches, 1024 + 1024, sums copied",
        report("h200-plans-llama-3-70b-16-layers-tp2-fp8-ablation")["plans"],
    )
    one = [(report(f"{PLANS}-variants")["plans"], plan) for plan in ("nano-batches alone", "92+40 1024/512")]
    two = [(few, f"{copied}, {how}") for how in ("waited for", "2048", "attention on 48 SMs")]
    gains = [
        gain(plans, workload, plan) for plans, plan in (*one, *two) for workload in ("1024/512", "512/0")
    ]
    said = (
        "8B in bf16: nano-batches alone {:.3f} and {:.3f}, with memory overlap {:.3f} and {:.3f}; "
        "sixteen layers of 70B in fp8, two devices: nano-batches alone {:.3f} and {:.3f}, "
        "with network overlap {:.3f} and {:.3f}, with memory overlap, too, {:.3f} and {:.3f} |"
    )
    assert reached("an ablation").startswith(said.format(*gains))


def test_tokens_a_second_on_one_device():
    last = report(f"{LLAMA}-1024-512")
    starts = (
        "640-sequences",
        *(f"1024-512-{how}" for how in ("another-start", "512-sequences", "640-sequences")),
    )
    starts += tuple(f"1024-512-640-sequences-{how}" for how in ("later", "steps-of-2048"))
    before = [point for days in ("", "-earlier") for point in report(f"{LLAMA}-lengths{days}")["points"]]
    before = [point for point in before if (point["input_len"], point["output_len"]) == (1024, 512)]
    before += [report(f"{LLAMA}-{start}") for start in starts]
    least, *_, most = sorted(run["total_token_throughput"] for run in before)
    slow, *_, fast = sorted(run["power"]["mean_sm_clock_mhz"] for run in before)
    assert most < 28_000 < last["total_token_throughput"]
    assert reached("8B in bf16, 28,000").startswith(
        f"{last['total_token_throughput']:,.0f} on a card at {last['power']['mean_sm_clock_mhz']:.0f} MHz; {least:,.0f} to {most:,.0f}"
        f" in {('seven', 'eight')[len(before) - 7]} runs before, at {slow:.0f} to {fast:.0f} MHz |"
    )
    assert reached("8B in fp8, 43,000").startswith(
        f"{report(f'{LLAMA}-fp8-1024-512')['total_token_throughput']:,.0f} |"
    )


def test_what_neither_smaller_steps_nor_the_plan_reached():
    """End to end with 640 sequences; the first two on one card."""
    runs = [
        report(f"{LLAMA}-1024-512-640-sequences-{how}")
        for how in ("steps-of-2048", "steps-of-1536", "plan-92-40")
    ]
    full, small, plan = (f"{run['total_token_throughput']:,.0f}" for run in runs)
    assert [run["engine_config"]["max_num_batched_tokens"] for run in runs] == [2048, 1536, 2048]
    assert max(run["total_token_throughput"] for run in runs) < 28_000
    assert (
        runs[2]["engine_stats"]["steps_by_plan"]["92+40 1024/512"]
        == runs[2]["steps"]["by_bucket"]["2048"]["steps"]
        == 770
    )
    of_2048 = [run["steps"]["by_bucket"]["2048"]["mean_ms"] for run in runs[::2]]
    settled = [run["steady_state"]["total_token_throughput"] for run in runs[::2]]
    said = (
        f"640 sequences made {full} with steps of 2048 rows and {small} with `--max_num_batched_tokens 1536`",
        "{steps:,} full steps of {mean_ms:.1f} ms instead of 770 of ".format(
            **runs[1]["steps"]["by_bucket"]["1536"]
        )
        + f"{of_2048[0]:.1f}.",
        f"in all 770 steps of 2048 rows made {plan} ([json](",
        "{1:.1f} ms a step instead of {0:.1f}, in their steady states".format(*of_2048),
        "{1:,.0f} and {0:,.0f} tokens/s.".format(*settled),
    )
    text = " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())
    assert [one for one in said if one not in text] == []


def test_plans_on_four_devices():
    fp8, bf16 = (report(f"h200-plans-llama-3-70b-tp4{kind}")["plans"] for kind in ("-fp8", ""))
    whole, cell = report("h200-llama-3-70b-tp4-fp8-1024-512"), reached("70B on four devices")
    gains = [
        gain(plans, workload, "two nano-batches")
        for plans in (fp8, bf16)
        for workload in ("1024/512", "224/318")
    ]
    gains.insert(2, whole["total_token_throughput"] / whole["sequential"]["total_token_throughput"])
    said = "in fp8 {:.3f}, at ShareGPT's means {:.3f}, end to end {:.3f}; in bf16 {:.3f} and {:.3f} |"
    assert cell.startswith(said.format(*gains))
    hidden = [row for row in bf16 if row["plan"].startswith("two nano-batches")]
    watts, alone = (
        [row["watts"] for row in hidden],
        [row["sm_clock_mhz"] for row in bf16 if row["sequential"]],
    )
    (clock,) = {row["sm_clock_mhz"] for row in hidden}
    assert (
        f"{min(watts):.0f} to {max(watts):.0f} W, {clock:.0f} MHz instead of {min(alone):.0f} to "
        f"{max(alone):.0f} |"
    ) in cell


def test_the_highest_rate():
    _, before, highest, _, lmsys, _, azure = points(PAST)
    said = (
        f"bf16: ShareGPT 90 a second for {highest['arrivals_s']:.0f} s take {mean_ms(highest):.0f} ms, "
        f"of the later half of the requests {mean_ms(highest['settled']):.0f} "
        f"(75 for {before['arrivals_s']:.0f} s: {mean_ms(before):.0f}, {mean_ms(before['settled']):.0f}); "
        f"LMSYS 135 for {lmsys['arrivals_s']:.0f} s {mean_ms(lmsys):.0f}, Azure 40 for {azure['arrivals_s']:.0f} s {mean_ms(azure):.0f} |"
    )
    assert reached("the highest rate").startswith(said)


def test_the_99th_percentile():
    below, past, at_75 = [tail(point) for point in points(BELOW)], points(PAST), points(PAST)[1]
    beside = f"{at_75['p99_normalized_latency_ms']:,.0f} ms beside {mean_ms(at_75):.0f}"
    said = (
        "past it ShareGPT {:.1f} at 60 a second, {:.1f} at 75 ({beside}) and {:.1f} at 90, LMSYS {:.1f} at 115 and {:.1f} at 135, "
        "Azure {:.1f} at 32 and {:.1f} at 40 |"
    ).format(*map(tail, past), beside=beside)
    assert reached("p99").startswith(f"below capacity {min(below):.1f} to {max(below):.1f}; {said}")


def test_how_long_the_device_waited():
    cell = reached("the device idle")
    one, two = (
        report(name)["profile"] for name in (f"{LLAMA}-fp8-1024-1", "h200-llama-3-70b-tp2-fp8-1024-1")
    )
    shares = one["idle_share_between_steps"], one["idle_share"]
    assert (
        "under the profiler: {:.2f} % (no kernel runs for {:.2f} %)".format(
            *(100 * share for share in shares)
        )
        in cell
    )
    assert f"Two: {100 * two['idle_share_between_steps']:.1f} %, traced" in cell
    at_once = [
        point
        for name in ("lengths-earlier", "lengths", "fp8-lengths")
        for point in report(f"{LLAMA}-{name}")["points"]
    ]
    at_once += [report(f"{LLAMA}-fp8-{name}") for name in ("1024-512", "1024-1")]
    assert f"at most {math.ceil(100 * max(map(idle, at_once))) / 100} % at constant lengths" in cell
    *bf16, second, first, slow, fast = map(idle, points(BELOW))
    bf16 += map(idle, points(PAST))
    bounds = min(bf16), max(bf16), first, second, fast, slow
    said = "{:.1f} to {:.1f} % in bf16, but for {:.1f} and {:.1f} % of LMSYS, and {:.1f} and {:.1f} % in fp8."
    assert said.format(*bounds) in cell


def test_warm_up():
    cold, warm = (report(f"{LLAMA}-start-{kind}")["warm_up_s"] for kind in ("cold", "warm"))
    assert reached("8B warm").startswith(f"{cold:.0f} s, {warm:.1f} s |")

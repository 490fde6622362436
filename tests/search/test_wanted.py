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
BELOW = {"rate": (50,), "rate-sharegpt-55": (55,), "rate-azure": (22, 26), "rate-lmsys": (80, 95), "fp8-rate": (70, 85)}
PAST = {"rate": (60,), "rate-sharegpt-75": (75,), "rate-sharegpt-90": (90,), "rate-lmsys-135": (115, 135), "rate-azure-40": (32, 40)}


def report(name: str) -> dict:
    """Of the figures, or of the settings that were tried."""
    folder = paths.ROOT / "benchmarks"
    path = folder / f"{name}.json"
    return json.loads((path if path.exists() else folder / "settings" / path.name).read_text("utf-8"))


def points(runs: dict[str, tuple[int, ...]]) -> list[dict]:
    """Of the sweeps over rates, in the order of `runs`."""
    found = {name: {point["request_rate"]: point for point in report(f"{LLAMA}-{name}")["points"]} for name in runs}
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
    starts = [gain(report(f"{PLANS}-{name}")["plans"], "1024/512", "92+40 1024/512") for name in ("traces", "lean", "variants")]
    assert reached("8B in bf16, plans").startswith("{:.3f}, {:.3f} and {:.3f} in three starts at 1024 / 512;".format(*starts))
    fp8 = report(f"{PLANS}-lean-fp8")
    lost = [100 - 100 * row["against_best_sequential"] for row in fp8["plans"] if not row["sequential"]]
    asked, ran = fp8["command"].partition("--workloads ")[2].split()[0].split(","), {row["workload"] for row in fp8["plans"]}
    assert (len(asked), len(ran), {*asked} - ran) == (7, 6, {"92/206"})
    said = f"1.00: on six of seven workloads (not LMSYS's) plans make {min(lost):.0f} to {max(lost):.0f} % less"
    assert reached("8B in fp8, plans").startswith(said)


def test_tokens_a_second_on_one_device():
    bf16 = report(f"{LLAMA}-lengths-earlier")["points"][0]
    assert (bf16["input_len"], bf16["output_len"]) == (1024, 512)
    made = bf16["total_token_throughput"]
    assert reached("8B in bf16, 28,000").startswith(f"{made:,.0f} | **missed** by {100 - made / 280:.2f} %:")
    assert reached("8B in fp8, 43,000").startswith(f"{report(f'{LLAMA}-fp8-1024-512')['total_token_throughput']:,.0f} |")


def test_plans_on_four_devices():
    fp8, bf16 = (report(f"h200-plans-llama-3-70b-tp4{kind}")["plans"] for kind in ("-fp8", ""))
    whole, cell = report("h200-llama-3-70b-tp4-fp8-1024-512"), reached("70B on four devices")
    gains = [gain(plans, workload, "two nano-batches") for plans in (fp8, bf16) for workload in ("1024/512", "224/318")]
    gains.insert(2, whole["total_token_throughput"] / whole["sequential"]["total_token_throughput"])
    said = "in fp8 {:.3f}, at ShareGPT's means {:.3f}, end to end {:.3f}; in bf16 {:.3f} and {:.3f} |"
    assert cell.startswith(said.format(*gains))
    hidden = [row for row in bf16 if row["plan"].startswith("two nano-batches")]
    watts, alone = [row["watts"] for row in hidden], [row["sm_clock_mhz"] for row in bf16 if row["sequential"]]
    (clock,) = {row["sm_clock_mhz"] for row in hidden}
    assert f"{min(watts):.0f} to {max(watts):.0f} W, {clock:.0f} MHz instead of {min(alone):.0f} to {max(alone):.0f} |" in cell


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
    one, two = (report(name)["profile"] for name in (f"{LLAMA}-fp8-1024-1", "h200-llama-3-70b-tp2-fp8-1024-1"))
    shares = one["idle_share_between_steps"], one["idle_share"]
    assert "under the profiler: {:.2f} % (no kernel runs for {:.2f} %)".format(*(100 * share for share in shares)) in cell
    assert f"Two: {100 * two['idle_share_between_steps']:.1f} %, traced" in cell
    at_once = [point for name in ("lengths-earlier", "lengths", "fp8-lengths") for point in report(f"{LLAMA}-{name}")["points"]]
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

"""The fit of joules: finds what made the data, is a bound for the runs it was made of, and is what the release ships."""

import json
import re

import msgspec
import numpy as np
import paths
import pytest

from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import Curve, bound, shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, Work, model_graph
from pallas_kernels.checks.script import SHAPES
from search.energy_fit import Run, errors, fit, load_runs, with_profile
from search.op_times import Pair, Profile, load_profile

MEASURED = paths.ROOT / "benchmarks" / "h200-energy.json"
LLAMA = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config


def test_what_is_shipped_is_the_fit_of_the_committed_runs():
    shipped, made = shipped_power("H200"), fit(load_runs(MEASURED))
    assert shipped is not None and made.flop.keys() == shipped.flop.keys()
    for ours, theirs in ((made.byte, shipped.byte), *((made.flop[k], shipped.flop[k]) for k in made.flop)):
        assert ours.joules == pytest.approx(theirs.joules, rel=0.02) and ours.fixed == pytest.approx(theirs.fixed, abs=0.02)


def test_no_run_needed_fewer_joules_and_none_was_faster_than_the_bound():
    measured, power = load_runs(MEASURED), shipped_power("H200")
    assert power is not None
    assert min(errors(measured, power)) >= 0.995
    for run in measured.runs:
        second = bound(Work(run.flops_per_s, kv_bytes=run.bytes_per_s), DEVICES["H200"], power, run.dtype)
        assert second.longest_s < 1.0, run.name


@pytest.mark.parametrize("path", sorted((paths.ROOT / "profiles").glob("*.json")), ids=lambda path: path.stem)
def test_the_frozen_bound_lies_below_every_entry_of_a_profile(path):
    """Products and attention, on all SMs and on some: in joules at the clock of each, and in time."""
    measured, power, profile = load_runs(MEASURED), shipped_power("H200"), load_profile(path)
    assert power is not None
    config = open_checkpoint(profile.model, load_format="dummy").model_config
    graph = model_graph(config, profile.tensor_parallel_size, FP8 if profile.dtype == "float8_e4m3fn" else BFLOAT16)
    found = msgspec.structs.replace(measured, runs=with_profile(measured, profile, graph).runs[len(measured.runs) :])
    assert found.runs and min(errors(found, power)) >= 1.0
    for run in found.runs:
        second = bound(Work(run.flops_per_s, kv_bytes=run.bytes_per_s), DEVICES["H200"], power, run.dtype)
        assert second.longest_s < 1.0, run.name


def test_of_the_profile_in_fp8_the_page_says_how_many_entries_need_fewer_joules():
    """Attention over keys that the L2 holds, and few products; in time none is below the bound."""
    measured, power = load_runs(MEASURED), shipped_power("H200")
    assert power is not None
    profile = load_profile(paths.ROOT / "benchmarks" / "settings" / "h200-measure-llama-3.1-8b-fp8.json")
    found = with_profile(measured, profile, model_graph(LLAMA, 1, FP8)).runs[len(measured.runs) :]
    ratios = errors(msgspec.structs.replace(measured, runs=found), power)
    less = {run.name: ratio for run, ratio in zip(found, ratios, strict=True) if ratio < 1}
    attention, products = ([r for name, r in less.items() if ("attention" in name) is kind] for kind in (True, False))
    said = f"{len(less)} of its {len(found)} products and attentions need fewer than the constants say"
    least = f"chunk attention down to {min(attention):.2f} of it, products down to {min(products):.2f}."
    assert f"{said}, {least}" in (paths.ROOT / "docs" / "cost-model.md").read_text("utf-8").replace("\n", " ")
    times = [bound(Work(run.flops_per_s, kv_bytes=run.bytes_per_s), DEVICES["H200"], power, run.dtype).longest_s for run in found]
    assert max(times) == pytest.approx(0.90, abs=0.005)


def timed_products():
    """(group, case, way, run, its timing) of every product of the kernels' report in bfloat16 and e4m3, with its weight's bytes alone."""
    for row in json.loads((paths.ROOT / "benchmarks" / "h200-kernels.json").read_bytes())["rows"]:
        about = re.fullmatch(r"(8B|70B/tp4) (\w+) M (\d+)", row["case"])
        if not about or "gemm" not in row["group"]:
            continue
        n, k = SHAPES[about[1]][about[2]]
        dtype = "float8_e4m3fn" if row["group"].startswith("fp8") else "bfloat16"
        for way, t in row["ways"].items():
            if way != "int4":
                flops, moved = 2e6 * int(about[3]) * n * k / t["us"], 1e6 * n * k * (1 if dtype == "float8_e4m3fn" else 2) / t["us"]
                yield row["group"], row["case"], way, Run(way, dtype, flops, moved, t["watts"], t["mhz"]), t


def test_the_kernels_report_is_held_to_the_bound_in_time_and_its_watts_are_not_joules():
    measured, power, products = load_runs(MEASURED), shipped_power("H200"), list(timed_products())
    assert power is not None and len(products) > 300
    for group, case, way, run, _ in products:
        second = bound(Work(run.flops_per_s, weight_bytes=run.bytes_per_s), DEVICES["H200"], power, run.dtype)
        assert second.longest_s < 1.0, (group, case, way)
    doc = (paths.ROOT / "docs" / "cost-model.md").read_text("utf-8").replace("\n", " ")
    dense = [run for group, *_, run, _ in products if group.startswith(("dense_gemm", "fp8_gemm"))]
    ratios = errors(msgspec.structs.replace(measured, runs=dense), power)
    less = sum(ratio < 1 for ratio in ratios)
    assert (
        f"{less} of the {len(dense)} timings of dense products need less than the constants say, the least {min(ratios):.3f} of it" in doc
    )
    twice = [t for _, case, way, _, t in products if (case, way) == ("70B/tp4 qkv M 1", "flat")]
    (watts, us), (later_watts, later_us) = sorted((t["watts"], t["us"]) for t in twice)
    assert f"{watts:.0f} W and at {later_watts:.0f} W, in {us:.1f} and in {later_us:.1f} µs" in doc


def test_a_profile_is_fitted_as_runs_are():
    """With the shipped one's entries: a bound of all. The frozen one, which is below them all anyhow, is the tighter."""
    measured, shipped = load_runs(MEASURED), shipped_power("H200")
    profile = load_profile(paths.ROOT / "profiles" / "h200-llama-3.1-8b.json")
    assert shipped is not None
    both = with_profile(measured, profile, model_graph(LLAMA))
    assert len(both.runs) > 100 + len(measured.runs)
    made = fit(both)
    assert min(errors(both, made)) >= 0.995
    for ours, theirs in ((made.byte, shipped.byte), *((made.flop[kind], shipped.flop[kind]) for kind in made.flop)):
        assert 0.85 < ours.at(0.77) / theirs.at(0.77) < 1.0  # where products settle, 1525 MHz
    with pytest.raises(ValueError, match="device='abacus'"):
        with_profile(measured, msgspec.structs.replace(profile, device="abacus"), model_graph(LLAMA))


def test_what_a_pair_needed_is_a_run_too():
    pair = Pair("down", "decode_attention", 100, 32, 0.7, 0.5, 700.0, 1500.0, 0.2, 4e-4, 1024, 256, 800)
    profile = Profile(
        "NVIDIA H200", {}, "toy", 1, "bfloat16", "bfloat16", 132, "drawn", (), (pair, msgspec.structs.replace(pair, keys=None))
    )
    measured = load_runs(MEASURED)
    (run,) = with_profile(measured, profile, model_graph(LLAMA)).runs[len(measured.runs) :]
    assert run.watts == pytest.approx(0.2 / 4e-4) and run.clock_mhz == 1500.0  # the counter's
    ops = {op.name: op for op in model_graph(LLAMA).layers[0]}
    works = [ops[name].work(Composition(tokens, keys)) for name, tokens, keys in (("down", 1024, 1), ("decode_attention", 256, 800))]
    assert run.bytes_per_s == pytest.approx(sum(work.memory_bytes for work in works) / 4e-4)


def test_it_finds_the_joules_that_made_the_data():
    measured = load_runs(MEASURED)
    flop, byte = Curve(0.9e-12, 0.3), Curve(1.2e-10, 0.7)
    rng = np.random.default_rng(0)

    def run(i):
        flops, moved, mhz = rng.uniform(0, 6e14), rng.uniform(2e11, 4e12), rng.uniform(900, 1980)
        share = mhz / measured.highest_clock_mhz
        watts = measured.idle_w + flops * flop.at(share) + moved * byte.at(share)
        return Run(f"made {i}", "bfloat16", flops, moved, float(watts), mhz)

    found = fit(msgspec.structs.replace(measured, runs=[run(i) for i in range(600)]))
    assert found.flop["bfloat16"].joules == pytest.approx(flop.joules, rel=0.03)
    assert found.byte.joules == pytest.approx(byte.joules, rel=0.03)
    assert found.flop["bfloat16"].fixed == pytest.approx(flop.fixed, abs=0.06)


def test_runs_of_an_unknown_dtype_are_refused():
    measured = load_runs(MEASURED)
    odd = msgspec.structs.replace(measured.runs[0], dtype="int3")
    with pytest.raises(ValueError, match="int3"):
        fit(msgspec.structs.replace(measured, runs=[odd]))

"""The fit of joules: recovery of known constants, bounds for runs and profiles, and the shipped values."""

import functools
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import paths
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import JoulesCurve, bound, shipped_power
from jaxflow.model.graph import BFLOAT16, FP8, Work, model_graph
from pallas_kernels.gemm.model_shapes import SHAPES
from search.profile import energy as energy_fit
from search.profile.clock import of_kernels, shipped_card
from search.profile.energy import PowerRun, PowerRuns, errors, fit, load_runs, lowered, of_profile, watts_of
from search.profile.op_times import OpTime, Pair, Profile, load_profile

MEASURED = paths.ROOT / "benchmarks" / "settings/h200-energy-runs.json"
SETTINGS = paths.ROOT / "benchmarks" / "settings"
PROFILES = (
    SETTINGS / "h200-llama-3.1-8b-first-profile.json",
    *(SETTINGS / f"h200-llama-3.1-8b-fp8-profile{kind}.json" for kind in ("", "-cold")),
    paths.ROOT / "search" / "profiles" / "h200-llama-3-70b-tp2-fp8.json",
)
LLAMA = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
POWER = shipped_power("H200")
assert POWER is not None


@functools.cache
def entries(path: Path) -> PowerRuns:
    """Return power runs of a profile: products and attention, on all SMs and on some."""
    profile = load_profile(path)
    config = open_checkpoint(profile.model, load_format="dummy").model_config
    graph = model_graph(
        config, profile.tensor_parallel_size, FP8 if profile.dtype == "float8_e4m3fn" else BFLOAT16
    )
    return of_profile(load_runs(MEASURED), profile, graph)


def test_what_is_shipped_is_what_the_committed_runs_and_profiles_give():
    """Profiles lower the joules of an e4m3 FLOP, and no other constant."""
    shipped, runs = shipped_power("H200"), fit(load_runs(MEASURED))
    made = lowered(runs, [run for path in PROFILES for run in entries(path).runs])
    assert shipped is not None and made.flop.keys() == shipped.flop.keys()
    for ours, theirs in ((made.byte, shipped.byte), *((made.flop[k], shipped.flop[k]) for k in made.flop)):
        assert ours.joules == pytest.approx(theirs.joules, rel=0.02) and ours.fixed == pytest.approx(
            theirs.fixed, abs=0.02
        )
    assert (made.byte, made.flop["bfloat16"]) == (runs.byte, runs.flop["bfloat16"])
    assert made.flop["float8_e4m3fn"].joules < 0.75 * runs.flop["float8_e4m3fn"].joules


def test_plans_are_predicted_with_what_the_runs_alone_say():
    """Plans use the joules of ordinary kernels, which the card's other constants were fitted with.

    A profile that lowers the bound does not change them.
    """
    runs, card = fit(load_runs(MEASURED)), shipped_card("H200")
    assert card is not None
    kernels = of_kernels(POWER, card)
    for ours, theirs in (
        (kernels.byte, runs.byte),
        *((kernels.flop[dtype], runs.flop[dtype]) for dtype in runs.flop),
    ):
        assert ours.joules == pytest.approx(1.08 * theirs.joules, rel=0.02)


def test_no_run_needed_fewer_joules_and_none_was_faster_than_the_bound():
    measured, power = load_runs(MEASURED), shipped_power("H200")
    assert power is not None
    assert min(errors(measured, power)) >= 0.995
    for run in measured.runs:
        second = bound(Work(run.flops_per_s, kv_bytes=run.bytes_per_s), DEVICES["H200"], power, run.dtype)
        assert second.longest_s < 1.0, run.name


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_frozen_bound_lies_below_every_entry_of_a_profile(path):
    """The bound holds for joules at each entry's clock, and for time."""
    found, power = entries(path), shipped_power("H200")
    assert power is not None and found.runs and min(errors(found, power)) >= 1.0
    for run in found.runs:
        second = bound(Work(run.flops_per_s, kv_bytes=run.bytes_per_s), DEVICES["H200"], power, run.dtype)
        assert second.longest_s < 1.0, run.name


def test_keys_that_stay_in_the_l2_tell_nothing_of_the_memorys_joules(monkeypatch):
    """Keys of 33 MB (128 decodes, 256 keys) would lower a byte's joules to 0.8, so the fit omits them."""
    held, runs = entries(PROFILES[-1]), fit(load_runs(MEASURED))
    monkeypatch.setattr(energy_fit, "_L2_BYTES", 0)
    every = entries.__wrapped__(PROFILES[-1])
    left = [
        (run.name, ratio)
        for run, ratio in zip(every.runs, errors(every, POWER), strict=True)
        if run not in held.runs
    ]
    assert [name.startswith("llama-3-70b decode_attention 128 256 on ") for name, _ in left] == [True] * 5
    ratios = sorted(ratio for _, ratio in left)
    assert ratios[3] < 1.0 < ratios[4]
    assert min(errors(held, POWER)) > 1.0
    assert "llama-3-70b decode_attention 256 256 on 132" in {run.name for run in held.runs}
    assert (
        lowered(runs, held.runs).byte == runs.byte
        and lowered(runs, every.runs).byte.joules < 0.8 * runs.byte.joules
    )


@st.composite
def drawn_runs(draw):
    """Draw (run, ratio of its joules to the shipped constants' joules). Some ratios are below 1."""
    dtype, share = draw(st.sampled_from(sorted(POWER.flop))), draw(st.floats(0.4, 1.0))
    flops, moved = (
        draw(st.sampled_from((0.0, 1.0))) * draw(st.floats(1e12, 1e15)),
        draw(st.floats(1e10, 4e12)),
    )
    ratio = draw(st.floats(0.2, 0.99) | st.floats(1.01, 3.0))
    run = PowerRun("drawn", dtype, flops, moved, 0.0, share * POWER.highest_clock_hz / 1e6)
    return msgspec.structs.replace(run, watts=POWER.idle_w + ratio * sum(watts_of(run, POWER))), ratio


@given(st.lists(drawn_runs(), max_size=6))
def test_runs_that_needed_less_lower_what_is_theirs_alone(drawn):
    runs, less = [run for run, _ in drawn], [run for run, ratio in drawn if ratio < 1]
    made = lowered(POWER, runs)
    assert made == lowered(POWER, less) == lowered(POWER, runs[::-1])
    for run in runs:
        assert sum(watts_of(run, made)) <= (run.watts - POWER.idle_w) * (1 + 1e-9)
    by_bytes = [
        run
        for run in less
        if watts_of(run, POWER)[1] >= min(watts_of(run, POWER)[0], run.watts - POWER.idle_w)
    ]
    assert made.byte == POWER.byte or (
        by_bytes and made.byte.joules < POWER.byte.joules and made.byte.fixed == POWER.byte.fixed
    )
    for dtype, curve in made.flop.items():
        own, was = [run for run in less if run.dtype == dtype and run.flops_per_s], POWER.flop[dtype]
        assert curve == was or (0 <= curve.joules < was.joules and curve.fixed == was.fixed)
        nearest = min(((run.watts - POWER.idle_w) / sum(watts_of(run, made)) for run in own), default=1.0)
        # Constants are no lower than a run's, except for rounding.
        assert curve == was or (own and (nearest < 1.003 or not curve.joules))


def test_what_cannot_lower_the_constants_is_refused():
    run = PowerRun("odd", "bfloat16", 1e14, 1e12, POWER.idle_w, 1500.0)
    for odd in (run, msgspec.structs.replace(run, watts=500.0, dtype="float32")):
        with pytest.raises(ValueError, match="run 'odd'"):
            lowered(POWER, [odd])


def timed_products():
    """Yield (group, case, implementation, run, timing) of every product in the kernels' reports.

    A run counts the bytes of its weight only.
    """
    reports = (paths.ROOT / "benchmarks" / "h200" / "kernels").glob("*.json")
    found = [json.loads(path.read_bytes()) for path in sorted(reports)]
    for row in (row for report in found if report.get("command_name") == "kernels" for row in report["rows"]):
        about = re.fullmatch(r"(8B|70B/tp4) (\w+) M (\d+)", row["case"])
        if not about or "gemm" not in row["group"]:
            continue
        n, k = SHAPES[about[1]][about[2]]
        dtype = "float8_e4m3fn" if row["group"].startswith("fp8") else "bfloat16"
        for way, t in row["implementations"].items():
            if way != "int4":
                flops, moved = (
                    2e6 * int(about[3]) * n * k / t["us"],
                    1e6 * n * k * (1 if dtype == "float8_e4m3fn" else 2) / t["us"],
                )
                yield (
                    row["group"],
                    row["case"],
                    way,
                    PowerRun(way, dtype, flops, moved, t["watts"], t["mhz"]),
                    t,
                )


def test_the_kernels_report_is_held_to_the_bound_in_time_and_its_watts_are_not_joules():
    power, products = shipped_power("H200"), list(timed_products())
    assert power is not None and len(products) > 300
    for group, case, way, run, _ in products:
        second = bound(Work(run.flops_per_s, weight_bytes=run.bytes_per_s), DEVICES["H200"], power, run.dtype)
        assert second.longest_s < 1.0, (group, case, way)


def test_a_profile_of_another_device_holds_no_runs():
    profile = msgspec.structs.replace(load_profile(PROFILES[0]), device="abacus")
    with pytest.raises(ValueError, match="device='abacus'"):
        of_profile(load_runs(MEASURED), profile, model_graph(LLAMA))


def test_attention_over_a_cache_of_8_bits_is_of_8_bits():
    """Attention counts with the dtype of the cache, and a product with the dtype of the weights."""
    cases = ("qkv", 0), ("chunk_attention", 999), ("decode_attention", 999)
    times = [OpTime(op, 256, keys, 132, 1e-3, 600.0, 1500.0) for op, keys in cases]
    for dtype, cache, found in (
        ("bfloat16", "float8_e4m3fn", "bee"),
        ("float8_e4m3fn", "bfloat16", "ebb"),
        ("bfloat16", "int8", "bbb"),
    ):
        profile = Profile("NVIDIA H200", {}, "toy", 1, dtype, cache, 132, "drawn", tuple(times))
        runs = of_profile(load_runs(MEASURED), profile, model_graph(LLAMA)).runs
        assert [run.dtype for run in runs] == [{"b": "bfloat16", "e": "float8_e4m3fn"}[one] for one in found]


def test_what_a_pair_needed_is_a_run_too():
    pair = Pair("down", "decode_attention", 100, 32, 0.7, 0.5, 700.0, 1500.0, 0.2, 4e-4, 1024, 256, 800)
    profile = Profile(
        "NVIDIA H200",
        {},
        "toy",
        1,
        "bfloat16",
        "bfloat16",
        132,
        "drawn",
        (),
        (pair, msgspec.structs.replace(pair, keys=None)),
    )
    (run,) = of_profile(load_runs(MEASURED), profile, model_graph(LLAMA)).runs
    assert run.watts == pytest.approx(0.2 / 4e-4) and run.clock_mhz == 1500.0  # from the energy counter
    ops = {op.name: op for op in model_graph(LLAMA).layers[0]}
    works = [
        ops[name].work(Composition(tokens, keys))
        for name, tokens, keys in (("down", 1024, 1), ("decode_attention", 256, 800))
    ]
    assert run.bytes_per_s == pytest.approx(sum(work.memory_bytes for work in works) / 4e-4)


def test_it_finds_the_joules_that_made_the_data():
    measured = load_runs(MEASURED)
    flop, byte = JoulesCurve(0.9e-12, 0.3), JoulesCurve(1.2e-10, 0.7)
    rng = np.random.default_rng(0)

    def run(i):
        flops, moved, mhz = rng.uniform(0, 6e14), rng.uniform(2e11, 4e12), rng.uniform(900, 1980)
        share = mhz / measured.highest_clock_mhz
        watts = measured.idle_w + flops * flop.at(share) + moved * byte.at(share)
        return PowerRun(f"made {i}", "bfloat16", flops, moved, float(watts), mhz)

    found = fit(msgspec.structs.replace(measured, runs=[run(i) for i in range(600)]))
    assert found.flop["bfloat16"].joules == pytest.approx(flop.joules, rel=0.03)
    assert found.byte.joules == pytest.approx(byte.joules, rel=0.03)
    assert found.flop["bfloat16"].fixed == pytest.approx(flop.fixed, abs=0.06)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"watts": 50.0}, "run 'bf16 layers M=16': 50 W .* idle 119.6 W"),
        ({"watts": 119.6}, "run 'bf16 layers M=16'"),
        ({"flops_per_s": 0.0, "bytes_per_s": 0.0}, "run 'bf16 layers M=16': .* 0 FLOPs and 0 bytes a second"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(odd, said):
    """Bad runs among good ones: an unknown dtype, idle watts, no work."""
    measured = load_runs(MEASURED)
    first, *others = measured.runs
    with pytest.raises(ValueError, match=said):
        fit(msgspec.structs.replace(measured, runs=[msgspec.structs.replace(first, **odd), *others]))


@pytest.mark.parametrize("odd", [{"cap_w": 100.0}, {"lowest_clock_mhz": 3000.0}])
def test_a_card_that_cannot_be_is_refused(odd):
    with pytest.raises(ValueError, match=r"cap_w=\d+ with idle_w=119.6, clocks \d+ to 1980 MHz"):
        fit(msgspec.structs.replace(load_runs(MEASURED), **odd))


@pytest.mark.parametrize(
    ("place", "field", "number"),
    [
        ("$", "highest_clock_mhz", 0),
        ("$", "idle_w", -1),
        ("$.runs[0]", "clock_mhz", 0),
        ("$.runs[0]", "bytes_per_s", -1e12),
    ],
)
def test_numbers_that_no_card_has_are_refused(tmp_path, place, field, number):
    written = json.loads(MEASURED.read_bytes())
    (written if place == "$" else written["runs"][0])[field] = number
    (tmp_path / "odd.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=re.escape(f"{place}.{field}")) as refused:
        load_runs(tmp_path / "odd.json")
    assert "odd.json: Expected `float` >" in str(refused.value)

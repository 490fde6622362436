"""The fit of joules: finds what made the data, is a bound for the runs it was made of, and is what the release ships."""

import msgspec
import numpy as np
import paths
import pytest

from jaxflow.model.cost import DEVICES
from jaxflow.model.energy import Curve, bound, shipped_power
from jaxflow.model.graph import Work
from search.energy_fit import Run, errors, fit, load_runs

MEASURED = paths.ROOT / "benchmarks" / "h200-energy.json"


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

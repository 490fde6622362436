"""Constants of a machine: fit, file, refusals, and a measurement on the test machine."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.placement.machine import measure
from search.placement.machine_curves import (
    CURVES,
    CurvePoint,
    MachineError,
    MeasuredCurves,
    TimeCurve,
    errors,
    fit_curve,
    fit_machine,
    load_machine,
    save_machine,
)

SIZES = np.geomspace(1e6, 1e9, 7)


@settings(max_examples=10)
@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e12))
def test_a_curve_is_found_in_its_own_points(fixed_s, rate):
    truth = TimeCurve(fixed_s, rate)
    found = fit_curve([CurvePoint(size, truth.seconds(size)) for size in SIZES])
    for size in SIZES:
        assert found.seconds(size) == pytest.approx(truth.seconds(size), rel=0.03)


def test_noise_does_not_move_a_curve_far():
    truth, noise = TimeCurve(1e-4, 2e10), np.random.default_rng(0)
    points = [
        CurvePoint(size, truth.seconds(size) * noise.uniform(0.9, 1.1)) for size in SIZES for _ in range(5)
    ]
    assert fit_curve(points).units_per_s == pytest.approx(truth.units_per_s, rel=0.1)


def test_nothing_costs_no_fixed_time():
    curve = TimeCurve(1.0, 10.0)
    assert curve.seconds(0) == 0 and curve.seconds(20) == 3


@pytest.mark.parametrize(
    "points",
    [[], [CurvePoint(1, 1)], [CurvePoint(1, 1), CurvePoint(1, 2)], [CurvePoint(1, 1), CurvePoint(2, 0)]],
)
def test_too_few_points_are_refused(points):
    with pytest.raises(ValueError, match="two sizes"):
        fit_curve(points)


def test_a_machine_is_read_as_it_was_written_and_refused_otherwise(tmp_path):
    machine, path = load_machine("h200"), tmp_path / "machine.json"
    save_machine(machine, path)
    assert load_machine(path) == machine
    fields = msgspec.to_builtins(machine)
    for change, word in (
        ({"schema_version": 2}, "schema_version=2"),
        ({"disk_to_host": {"fixed_s": 0, "units_per_s": 0}}, "units_per_s=0"),
        ({"host_attention": 3}, "host_attention"),
    ):
        path.write_bytes(msgspec.json.encode(fields | change))
        with pytest.raises(MachineError, match=word):
            load_machine(path)
    with pytest.raises(MachineError, match="one of h200"):
        load_machine("t1000")


def test_what_is_measured_here_makes_a_machine(tmp_path):
    measured = measure("here", tmp_path, largest_mb=2, repeats=1)
    assert set(measured.points) == set(CURVES)
    machine = fit_machine(measured)
    assert all(np.isfinite(error) for error in errors(measured, machine).values())
    assert not list(tmp_path.iterdir())
    fewer = MeasuredCurves(
        name="here", method="", points={name: measured.points[name] for name in CURVES[1:]}
    )
    with pytest.raises(ValueError, match=f"{CURVES[0]} were not measured"):
        fit_machine(fewer)


def test_curves_of_a_real_machine_are_lines_enough():
    """Curves of a busy two-core machine: mean errors below 40 %, and below 25 % for copies and files."""
    measured = msgspec.json.decode(
        (Path(__file__).parent / "two_cores.json").read_bytes(), type=MeasuredCurves
    )
    machine = fit_machine(measured)
    off = errors(measured, machine)
    assert max(off.values()) < 0.4
    assert (
        max(
            off[name]
            for name in ("host_to_device", "device_to_host", "disk_to_host", "host_to_disk", "device_memory")
        )
        < 0.25
    )
    assert (
        machine.disk_to_host.units_per_s
        < machine.host_to_device.units_per_s
        < machine.device_memory.units_per_s
    )

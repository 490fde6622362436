"""Laws of the kernels beside nano-ops, additions and copies of rows, and of the power cap."""

import dataclasses

import measured_reports as measured
import msgspec
import pytest
from measured_reports import CARD, FOUR_GPUS, H200, ONE_GPU, POWER, TWO_GPUS

from jaxflow.model.energy import Power
from jaxflow.pipeline.handwritten import (
    copied,
    gemms_in_two_plan,
    sequential_plan,
    swapped,
    two_nano_batch_plan,
)
from jaxflow.pipeline.plan import Plan
from jaxflow.pipeline.program import program
from search.nanobatch.layer_tasks import StepShape
from search.nanobatch.side_kernels import ADDITION, SideKernels, side_kernels, with_additions
from search.nanobatch.simulate import simulate
from search.profile.clock import governor_of

LOAD = StepShape.steady_state(2048, 1024, 512)
TP4 = FOUR_GPUS["70b-tp4"]


def short(report: measured.PlansReport) -> measured.PlansReport:
    """Return the report with four layers."""
    return dataclasses.replace(report, num_layers=4, plans=())


def two(tp: int, cut: int = 1024) -> Plan:
    report = short(TP4)
    sent = {1: lambda plan: plan, 2: copied, 4: swapped}[tp]
    return sent(two_nano_batch_plan(measured.model_of(report), 2048, cut, tp))


def sides(plan: Plan, tp: int) -> list[SideKernels]:
    graph = measured.graph_of(
        dataclasses.replace(short(TP4), tp=tp), swapped=tp == 4 and plan.sums == "copies"
    )
    return side_kernels(with_additions(program(plan, graph), plan), plan, LOAD)


@pytest.mark.parametrize(
    "report", [ONE_GPU["8b"], ONE_GPU["8b-fp8"], TWO_GPUS["70b-fp8"], TP4], ids=lambda r: r.file
)
def test_a_sequential_step_has_no_side_kernels(report):
    """The prediction of the step has its ops alone."""
    report = short(report)
    plan = sequential_plan(measured.model_of(report), 2048, report.tp)
    runs = program(plan, measured.graph_of(report))
    assert with_additions(runs, plan) == runs
    assert not any(side.kernels or side.moved for side in side_kernels(runs, plan, LOAD))


def test_nano_batches_with_equal_cuts_copy_no_rows():
    assert not any(side.kernels or side.moved for side in sides(two(1), 1))
    sums = 2 * 2 * 4  # a layer's, of both nano-batches
    for tp, additions in ((2, 0), (4, sums)):
        assert sum(side.kernels for side in sides(two(tp), tp)) == additions


def test_an_addition_runs_between_the_two_exchanges_of_its_sum():
    times = measured.forms_of(short(TP4), True, False, True)
    found = simulate(two(4), times.graph, times, LOAD, device=H200, power=POWER)
    entries = {(entry.run.nano.id, entry.run.op.name, entry.run.layer): entry for entry in found.entries}
    added = [key for key in entries if key[1] == ADDITION]
    assert len(added) == 2 * 2 * 4
    for nano, _, layer in added:
        name = nano.partition(".")[0]
        first = entries[nano.replace("_reduce", "_swap"), name.replace("_reduce", "_swap"), layer]
        addition, second = entries[nano, ADDITION, layer], entries[nano, name, layer]
        assert first.stop_s <= addition.start_s < addition.stop_s <= second.start_s
        assert addition.stop_s - addition.start_s > CARD.kernel_s


def test_an_op_whose_tokens_are_not_one_piece_reads_a_copy():
    """With products in two around whole attention, queries are put together, and heads are cut."""
    report = dataclasses.replace(short(TP4), tp=2)
    plan = gemms_in_two_plan(measured.model_of(report), 2048, 1024, 2)
    runs = program(plan, measured.graph_of(report))
    moved = {
        run.nano.op for run, side in zip(runs, side_kernels(runs, plan, LOAD), strict=True) if side.moved
    }
    assert {"chunk_attention", "decode_attention"} & moved and "out_proj" in moved
    assert not {"rope_append", "up_gate", "down"} & moved


def test_a_step_never_gets_shorter_by_side_kernels(monkeypatch):
    """With exchanges the step is longer than without their additions; a step with NCCL's sums is the same."""
    report = short(TP4)
    own, plain = (measured.forms_of(report, sums, False, sums) for sums in (True, False))

    def seconds() -> list[float]:
        plans = (two(4), own), (sequential_plan(measured.model_of(report), 2048, 4), plain)
        return [simulate(plan, t.graph, t, LOAD, device=H200, power=POWER).step_s for plan, t in plans]

    with_sides = seconds()
    monkeypatch.setattr(SideKernels, "seconds", lambda self, bytes_per_s, kernel_s: 0.0)
    without = seconds()
    assert with_sides[0] > without[0] and with_sides[1] == without[1]


def test_overlap_at_a_lower_cap_takes_longer_and_stays_below_the_cap():
    times = measured.forms_of(short(TP4), True, False, True)
    governor, last = governor_of("H200", "bfloat16"), 0.0
    assert governor is not None
    for cap_w in (700.0, 600.0, 500.0):
        power: Power = msgspec.structs.replace(governor.power, cap_w=cap_w)
        own = dataclasses.replace(governor, power=power)
        found = simulate(two(4), times.graph, times, LOAD, device=H200, governor=own)
        assert own.watts(found.work, found.clock_hz, found.busy_s) < 1.01 * cap_w
        assert found.busy_s > last
        last = found.busy_s

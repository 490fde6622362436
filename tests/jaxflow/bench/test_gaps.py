"""Gaps between kernels, of traces written by hand."""

import pytest

from jaxflow.bench.engine.gaps import STEP_US, shares, watch
from jaxflow.bench.report.trace_events import Kernel


def kernel(start_us, us, program="a", name="k"):
    return Kernel(name, name, (program, "1"), "", "Stream #1", start_us * 1e-6, us * 1e-6)


def test_shares_of_time_without_a_kernel():
    kernels = [
        kernel(0, 100),
        kernel(20, 30),  # beside it, on another stream
        kernel(101, 99),  # 1 us, within a step
        kernel(204, 96, "b"),  # 4 us, to the sampler
        kernel(302, 8, name="MemcpyD2H"),  # no kernel
        kernel(340, 60, "b"),  # 40 us, of the same program: the host was late
    ]
    found = shares(kernels)
    assert found["seconds"] == pytest.approx(400e-6) and found["kernels"] == 5 and found["programs"] == 2
    assert found["idle_share"] == pytest.approx(45 / 400) and found[
        "idle_share_between_steps"
    ] == pytest.approx(44 / 400)
    assert found["longest_gap_us"] == pytest.approx(40) and found["longest_gap_us"] > STEP_US
    assert {
        name: (one["gaps"], round(400 * one["share"]))
        for name, one in found["by_length"].items()
        if one["gaps"]
    } == {
        "0 to 2 us": (1, 1),
        "2 to 5 us": (1, 4),
        "20 to 50 us": (1, 40),
    }


def test_a_block_that_ends_early_has_no_trace():
    with watch(0.1, lambda: False) as watched:
        pass
    assert watched.summary() is None

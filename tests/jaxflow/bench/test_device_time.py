"""Busy time and hidden collectives, of traces written by hand and against a count of moments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.report.device_time import covered, overlap_of, seconds_of, summary
from jaxflow.bench.report.trace_events import Kernel


def kernel(start, stop, name="gemm", instruction="fusion.1"):
    return Kernel(name, instruction, ("step", "1"), "", "Stream #1", float(start), float(stop - start))


def test_a_collective_is_hidden_where_another_kernel_of_its_device_runs():
    first = [
        kernel(0, 4),
        kernel(3, 8, "ncclDevKernel_AllGather", "all-gather-start.2"),
        kernel(6, 7, "copy", "reduce-scatter"),  # a collective by its instruction, inside the other
        kernel(7, 10),
        kernel(0, 20, "MemcpyD2H"),
    ]
    row, other = summary([first, [kernel(0, 20)]])
    assert row["busy_share"] == pytest.approx(10 / 20) and other["busy_share"] == 1
    assert row["collective_s"] == pytest.approx(5) and row["hidden_s"] == pytest.approx(2)
    assert row["hidden_share"] == pytest.approx(0.4)
    assert {name: each["runs"] for name, each in row["collectives"].items()} == {
        "all-gather-start: ncclDevKernel_AllGather": 1,
        "reduce-scatter: copy": 1,
    }
    assert other["collective_s"] == 0 and other["hidden_share"] is None


def test_a_trace_without_kernels_has_no_row():
    assert summary([]) == summary([[], [kernel(0, 1, "MemcpyH2D")]]) == []


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8)


@given(SPANS, SPANS)
def test_overlap_is_the_number_of_moments_in_both(left, right):
    def moments(spans):
        return {moment for start, length in spans for moment in range(start, start + length)}

    one, two = (covered(kernel(start, start + length) for start, length in spans) for spans in (left, right))
    assert seconds_of(one) == len(moments(left))
    assert overlap_of(one, two) == overlap_of(two, one) == len(moments(left) & moments(right))

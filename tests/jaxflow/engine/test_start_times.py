"""The time line of a start."""

import threading
import time

import pytest

from jaxflow.engine import start_times
from jaxflow.engine.deferred import DeferredProgram
from jaxflow.engine.start_times import COMPILED, StartTimes, describe, num_compiled, process_seconds


@pytest.fixture
def clock(monkeypatch):
    """Let seconds pass by `clock.append(seconds)` only."""
    passed: list[float] = []
    monkeypatch.setattr(start_times.time, "perf_counter", lambda: sum(passed))
    return passed


def test_a_phase_sums_its_blocks_even_where_one_fails(clock):
    times = StartTimes()
    with times.phase("weights"):
        clock.append(2.0)
    clock.append(1.0)
    with pytest.raises(OSError), times.phase("weights"):
        clock.append(4.0)
        raise OSError
    with times.phase("lowering"):
        clock.append(8.0)
    found = times.summary()
    assert (found["weights_s"], found["lowering_s"], found["total_s"]) == (6.0, 8.0, 15.0)
    assert describe(found).startswith("start: ") and "weights 6.0 s, lowering 8.0 s" in describe(found)


def test_only_compilations_since_the_begin_and_none_of_deferred_programs_count():
    event = COMPILED
    start_times._count_compilation(event, 5.0)
    times, before = StartTimes(), num_compiled()
    start_times._count_compilation(event, 2.0)
    start_times._count_compilation("/jax/core/compile/jaxpr_trace_duration", 1.0)
    start_times._count_compilation(event, 1.0)
    DeferredProgram(lambda: start_times._count_compilation(event, 64.0) or print).ready()
    found = times.summary()
    assert (found["programs"], found["xla_threads_s"]) == (2, 3.0)
    assert num_compiled() == before + 2


def test_phases_of_threads_add(clock):
    times, both = StartTimes(), threading.Barrier(2)

    def run():
        with times.phase("lowering"):
            both.wait()
            if both.wait() == 0:
                clock.append(3.0)
            both.wait()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert times.summary()["lowering_s"] == 6.0


@pytest.mark.parametrize(("lowering", "overlap"), [((0, 1), None), ((1, 4), 3), ((3, 9), 3), ((0, 9), 5)])
def test_overlap_is_the_time_of_weights_and_programs_at_once(lowering, overlap):
    times = StartTimes()
    times._spans = {"weights": [(1, 6)], "lowering": [lowering], "memory": [(0, 9)]}
    assert times.summary().get("overlap_s") == overlap


def test_the_rate_of_reading_weights_is_that_of_their_phase(clock):
    times = StartTimes()
    with times.phase("weights"):
        clock.append(2.0)
    assert start_times.RATE not in times.summary()
    times.count_read(3 * 10**9)
    times.count_read(5 * 10**9)
    clock.append(7.0)
    found = times.summary()
    assert (found["weights_gb"], found[start_times.RATE]) == (8.0, 4.0)
    assert "8.0 GB of weights at 4.0 GB/s" in describe(found)


def test_the_age_of_the_process_grows_with_the_clock():
    first = process_seconds()
    assert first is not None
    begin = time.monotonic()
    while time.monotonic() - begin < 0.05:
        pass
    second = process_seconds()
    assert second is not None
    assert 0 < first < second

"""A lost server is started again, a bounded number of times; a refused or a stopped one is not."""

import pytest

from jaxflow.parallel.launch import LOST
from serving.supervise import STEADY_S, restart, without_restarts


def run(statuses, most, lives=(), stop_after=None):
    """Return the last status and the number of starts, of servers that end with
    these statuses after these lives.
    """
    clock, starts = [0.0], []

    def one() -> int:
        clock[0] += lives[len(starts)] if len(starts) < len(lives) else 1.0
        starts.append(1)
        return statuses[len(starts) - 1]

    def stopping() -> bool:
        return stop_after is not None and len(starts) >= stop_after

    found = restart(one, most, stopping, clock=lambda: clock[0], sleep=lambda seconds: None)
    return found, len(starts)


@pytest.mark.parametrize(
    ("statuses", "most", "expected"),
    [
        ([0], 3, (0, 1)),
        ([1], 3, (1, 1)),  # refused: starting again does not help
        ([LOST, 0], 3, (0, 2)),
        ([-9, LOST, 0], 3, (0, 3)),
        ([LOST] * 9, 3, (LOST, 4)),
        ([-9] * 9, 2, (137, 3)),
    ],
)
def test_bounded(statuses, most, expected):
    assert run(statuses, most) == expected


def test_a_steady_server_counts_anew():
    lives = [1.0, 1.0, STEADY_S, 1.0, 1.0]
    assert run([LOST] * 9, 2, lives) == (LOST, 5)


def test_a_stopped_server_stays_ended():
    assert run([LOST] * 9, 5, stop_after=2) == (LOST, 2)


@pytest.mark.parametrize(
    "given", [["--max_restarts=3"], ["--max-restarts", "3"], ["-max_restarts=3"], ["--max_restarts", "3"]]
)
def test_the_server_itself_gets_the_other_flags(given):
    assert without_restarts(["--model", "3", *given, "--port=1"]) == ["--model", "3", "--port=1"]

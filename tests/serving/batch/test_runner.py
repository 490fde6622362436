"""A run answers every line once: alone, beside other writers, after kills, on a full disk."""

import asyncio
import contextlib
import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import paths
import pytest
from batch_fakes import FakeEndpoints, open_journal, opened, text_of, write_input
from hypothesis import given
from hypothesis import strategies as st

from serving.batch import runner as module
from serving.batch.runner import EngineStopped, Runner, write_output
from serving.batch.window import Window


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"RETRY_S": 0.001, "POLL_S": 0.01, "COMMIT_INTERVAL_S": 0.0}.items():
        monkeypatch.setattr(module, name, value)


def run(source, journal, leases, endpoints, *, window=8, **settings):
    asyncio.run(Runner(source, journal, leases, endpoints, Window(window), **settings).run())


def check_output(path: Path, count: int) -> None:
    """Every line is answered, once, in the order of the input, by its own answer."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r-{i}" for i in range(count)]
    assert len({line["id"] for line in lines}) == count
    for i, line in enumerate(lines):
        assert line["error"] is None and line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"] == [{"text": text_of(f"p{i}")}]
        assert line["response"]["request_id"] == f"cmpl-p{i}"


@pytest.mark.parametrize("count", [1, 7, 600])
def test_a_whole_run(tmp_path, count):
    source = opened(write_input(tmp_path / "in", count))
    journal, leases = open_journal(source, tmp_path / "j")
    endpoints, seen = FakeEndpoints(), []
    run(source, journal, leases, endpoints, on_finished=seen.extend)
    assert endpoints.most == min(count, 8)
    assert sorted(endpoints.asked) == sorted(f"p{i}" for i in range(count))
    assert sorted(answer.line for answer in seen) == list(range(1, count + 1))
    assert write_output(journal, tmp_path / "out") == count
    check_output(tmp_path / "out", count)
    assert not list(tmp_path.glob(".out*"))


def test_blank_lines_are_no_requests(tmp_path):
    path = write_input(tmp_path / "in", 3)
    path.write_text("\n" + path.read_text("utf-8").replace("\n", "\n\n  \n"), "utf-8")
    source = opened(path)
    journal, leases = open_journal(source, tmp_path / "j")
    run(source, journal, leases, FakeEndpoints())
    write_output(journal, tmp_path / "out")
    check_output(tmp_path / "out", 3)


@given(statuses=st.lists(st.sampled_from([429, 503, 500]), max_size=5))
def test_a_refusal_is_tried_again_and_a_fault_a_few_times(statuses, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retries")
    source = opened(write_input(folder / "in", 2))
    journal, leases = open_journal(source, folder / "j")
    endpoints = FakeEndpoints(faults={"p1": statuses})
    run(source, journal, leases, endpoints)
    given_up = statuses.count(500) >= module.MAX_FAULTS
    assert [json.loads(output)["response"]["status_code"] for _, output in journal.outputs()] == [
        200,
        500 if given_up else 200,
    ]
    assert journal.num_failed == given_up


def test_a_refused_line_is_an_answer_in_the_file_of_errors(tmp_path):
    source = opened(write_input(tmp_path / "in", 3))
    journal, leases = open_journal(source, tmp_path / "j")
    run(source, journal, leases, FakeEndpoints(faults={"p1": [400]}))
    assert [
        write_output(journal, tmp_path / name, failed=name == "errors") for name in ("out", "errors")
    ] == [2, 1]
    (line,) = (tmp_path / "errors").read_text("utf-8").splitlines()
    assert json.loads(line)["response"]["body"]["error"]["message"] == "a fault"


def test_an_endpoint_that_raises_fails_its_line_only(tmp_path):
    class Broken(FakeEndpoints):
        async def answer(self, path, body, *, priority=0):
            status, answer = await super().answer(path, body, priority=priority)
            return status, answer if b'"p1"' not in body else 1 / 0

    source = opened(write_input(tmp_path / "in", 3))
    journal, leases = open_journal(source, tmp_path / "j")
    run(source, journal, leases, Broken())
    assert [journal.failed(line) for line in (1, 2, 3)] == [False, True, False]


def test_a_dead_engine_finishes_no_line(tmp_path):
    source = opened(write_input(tmp_path / "in", 40))
    journal, leases = open_journal(source, tmp_path / "j")
    endpoints = FakeEndpoints(faults={f"p{i}": [500] * 9 for i in range(10, 40)})
    endpoints.alive = lambda: len(endpoints.asked) <= 10
    with pytest.raises(EngineStopped):
        run(source, journal, leases, endpoints)
    assert 0 < journal.num_finished <= 10 and journal.num_failed == 0
    assert endpoints.running == 0
    leases.close()
    journal, leases = open_journal(source, tmp_path / "j")
    run(source, journal, leases, FakeEndpoints())
    write_output(journal, tmp_path / "out")
    check_output(tmp_path / "out", 40)


def test_cancellation_keeps_what_is_done_and_ends_what_runs(tmp_path):
    source = opened(write_input(tmp_path / "in", 200))
    journal, leases = open_journal(source, tmp_path / "j")
    endpoints = FakeEndpoints(0.002)

    async def cancelled():
        task = asyncio.create_task(Runner(source, journal, leases, endpoints, Window(8)).run())
        while journal.num_finished < 20:
            await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled() and len(asyncio.all_tasks()) == 1

    asyncio.run(cancelled())
    done = journal.num_finished
    assert 20 <= done < 200 and endpoints.running == 0
    journal.close()
    leases.close()
    journal, leases = open_journal(source, tmp_path / "j")
    assert journal.num_finished == done
    rest = FakeEndpoints()
    run(source, journal, leases, rest)
    assert len(rest.asked) == 200 - done
    write_output(journal, tmp_path / "out")
    check_output(tmp_path / "out", 200)


def test_several_writers_share_a_journal(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LINES_A_LEASE", 16)
    source = opened(write_input(tmp_path / "in", 300))
    writers = [(*open_journal(source, tmp_path / "j"), FakeEndpoints(0.001)) for _ in range(3)]

    async def together():
        runs = [Runner(source, j, leases, e, Window(4)).run() for j, leases, e in writers]
        await asyncio.gather(*runs)

    asyncio.run(together())
    asked = [prompt for *_, endpoints in writers for prompt in endpoints.asked]
    assert sorted(asked) == sorted(f"p{i}" for i in range(300))
    assert all(len(endpoints.asked) > 16 for *_, endpoints in writers)
    for number, (journal, *_) in enumerate(writers):
        journal.refresh()
        write_output(journal, tmp_path / f"out{number}")
        check_output(tmp_path / f"out{number}", 300)


def test_kills_at_random_times_repeat_no_finished_line(tmp_path):
    """Two processes share the journal; each is killed again and again, until all lines are finished."""
    count, draw = 400, random.Random(7)
    source = opened(write_input(tmp_path / "in", count))
    command = [sys.executable, str(Path(__file__).with_name("killed_run.py")), str(tmp_path / "in")]
    path = os.pathsep.join(map(str, (paths.ROOT, paths.ROOT / "tests", Path(__file__).parent)))

    def begin(number: int) -> subprocess.Popen:
        process = subprocess.Popen(
            [*command, str(tmp_path / "j"), str(tmp_path / f"asked-{number}")],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        return process

    runs, kills, asked = 0, 0, []
    finished: set[int] = set()
    while len(finished) < count:
        before = set(finished)
        processes = [begin(runs), begin(runs + 1)]
        for number, process in zip((runs, runs + 1), processes, strict=True):
            # The process is killed after it has asked for some lines, so that a slow machine kills as often.
            file, most = tmp_path / f"asked-{number}", draw.randrange(60)
            while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < most):
                time.sleep(draw.uniform(0, 0.004))
            kills += process.poll() is None
            process.kill()
            process.wait()
        now = [
            int(prompt[1:])
            for number in (runs, runs + 1)
            if (tmp_path / f"asked-{number}").exists()
            for prompt in (tmp_path / f"asked-{number}").read_text("utf-8").split()
        ]
        assert not before & set(now), "a finished line ran again"
        asked += now
        runs += 2
        journal, leases = open_journal(source, tmp_path / "j")
        leases.close()
        finished = {i for i in range(count) if journal.finished(i + 1)}
        assert before <= finished, "a finished line was lost"
        assert runs < 200
    assert kills >= 2 and set(asked) == set(range(count))
    write_output(journal, tmp_path / "out")
    check_output(tmp_path / "out", count)


@pytest.mark.parametrize("write_number", [0, 1, 5, 8])
def test_a_full_disk_ends_the_run_and_a_later_run_continues(tmp_path, monkeypatch, write_number):
    source = opened(write_input(tmp_path / "in", 100))
    journal, leases = open_journal(source, tmp_path / "j")
    write, calls = os.write, iter(range(10_000))

    def full(descriptor, data):
        if next(calls) >= write_number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    endpoints = FakeEndpoints()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            run(source, journal, leases, endpoints)
    assert endpoints.running == 0
    done = journal.num_finished
    journal.close()
    leases.close()
    journal, leases = open_journal(source, tmp_path / "j")
    assert journal.num_finished == done < 100
    rest = FakeEndpoints()
    run(source, journal, leases, rest)
    assert len(rest.asked) == 100 - done
    write_output(journal, tmp_path / "out")
    check_output(tmp_path / "out", 100)


def test_a_full_disk_leaves_no_half_output(tmp_path, monkeypatch):
    source = opened(write_input(tmp_path / "in", 5))
    journal, leases = open_journal(source, tmp_path / "j")
    run(source, journal, leases, FakeEndpoints())

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_output(journal, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "j"]
    assert write_output(journal, tmp_path / "out") == 5


@given(
    sizes=st.lists(st.integers(0, 150), min_size=1, max_size=60),
    cancelled=st.sets(st.integers(0, 59)),
)
def test_the_window_bounds_requests_and_bytes_and_loses_no_place(sizes, cancelled):
    async def check():
        window, inside = Window(4, 200), []

        async def one(size):
            await window.enter(size)
            inside.append(size)
            assert len(inside) <= 4 and (sum(inside) <= 200 or len(inside) == 1)
            try:
                await asyncio.sleep(0)
            finally:
                inside.remove(size)
                window.leave(size)

        tasks = [asyncio.create_task(one(size)) for size in sizes]
        await asyncio.sleep(0)
        for i in cancelled & set(range(len(tasks))):
            tasks[i].cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert (window._used, window._used_bytes, len(window._waiting)) == (0, 0, 0)

    asyncio.run(check())

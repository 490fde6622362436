"""Commands in turns: order, figures, failures, servers and the time limit, with small Python programs."""

import json

import pytest

from benchmarks import in_turns
from pallas_kernels.measure.provenance import KEYS

WRITE = "import json, os, sys; json.dump({}, open(sys.argv[-1], 'w'))"


def settings(folder, *sides, **more):
    """Write a settings file and return its path."""
    path = folder / "settings.json"
    path.write_text(json.dumps({"what": "two programs", "sides": list(sides), **more}))
    return path


def run(folder, *sides, turns=2, arguments=(), **more):
    """Run the sides in turns. Return the exit status and the report."""
    out = folder / "report.json"
    given = [str(settings(folder, *sides, **more)), "--turns", str(turns), "--output_json", str(out)]
    status = in_turns.main([*given, *arguments])
    return status, json.loads(out.read_text())


def program(name, report, **more):
    """Return a side that writes `report`, an expression in which `os` is known."""
    return {"name": name, "command": ["-c", WRITE.format(report)], **more}


def test_sides_take_turns_and_ratios_divide_by_the_first_side(tmp_path):
    rate = "dict(total_token_throughput={}, power=dict(mean_watts=600.0, mean_sm_clock_mhz={}))"
    status, found = run(
        tmp_path, program("a", rate.format(20.0, 1500)), program("b", rate.format(19.0, 1400)), turns=3
    )
    assert status == 0
    assert [(one["turn"], one["side"]) for one in found["runs"]] == [(t, s) for t in range(3) for s in "ab"]
    assert found["figures"]["total_token_throughput"]["b"] == {
        "values": [19.0] * 3,
        "median": 19.0,
        "range": [19.0, 19.0],
        "ratio": 0.95,
    }
    assert (found["clock_mhz"], found["watts"]) == (1450.0, 600.0)
    assert set(KEYS) <= set(found) and found["command"].startswith("python -m benchmarks.in_turns ")


def test_a_figure_is_a_path_of_keys_and_indexes(tmp_path):
    side = program("a", "dict(host=[dict(ms=1.0), dict(ms=2.0)])")
    _, found = run(tmp_path, side, figures=["host.1.ms"])
    assert found["figures"]["host.1.ms"]["a"]["values"] == [2.0, 2.0]


def test_a_side_runs_in_its_folder_with_its_commit_and_environment(tmp_path):
    (tmp_path / "old").mkdir()
    report = "dict(where=os.getcwd(), commit=os.environ['JAXFLOW_COMMIT'], x=os.environ['X'])"
    side = program("old", report, folder=str(tmp_path / "old"), commit="abc", env={"X": "1"})
    _, found = run(tmp_path, side, turns=1, figures=[])
    assert found["runs"][0]["report"] == {"where": str(tmp_path / "old"), "commit": "abc", "x": "1"}


@pytest.mark.parametrize("code", ["import sys; print('broken'); sys.exit(3)", "import time; time.sleep(60)"])
def test_a_failed_run_keeps_its_log_and_fails_the_comparison(tmp_path, code):
    status, found = run(
        tmp_path, {"name": "a", "command": ["-c", code]}, program("b", "dict(total_token_throughput=1.0)"),
        turns=1, arguments=["--run_s", "2"],
    )  # fmt: skip
    failed, fine = found["runs"]
    assert status == 1 and failed["report"] is None and failed["exit_status"] in (3, 124)
    assert "command" in failed["logs"] and fine["exit_status"] == 0
    assert list(found["figures"]["total_token_throughput"]) == ["b"]


def test_a_server_runs_beside_its_command_and_is_stopped(tmp_path):
    server = (
        "import pathlib, signal, sys, time; here = pathlib.Path('up')\n"
        "signal.signal(signal.SIGTERM, lambda *_: (here.unlink(), sys.exit(0)))\n"
        "here.touch(); time.sleep(60)"
    )
    client = "import pathlib, time\nwhile not pathlib.Path('up').exists(): time.sleep(0.02)\n" + WRITE.format(
        "dict(total_token_throughput=1.0)"
    )
    side = {"name": "a", "folder": str(tmp_path), "server": ["-c", server], "command": ["-c", client]}
    status, found = run(tmp_path, side, turns=2)
    assert status == 0 and not (tmp_path / "up").exists()
    assert [one["server_exit_status"] for one in found["runs"]] == [0, 0]


def test_no_run_begins_that_would_end_after_the_limit(tmp_path):
    slow = {"name": "a", "command": ["-c", "import time; time.sleep(1.0)\n" + WRITE.format("{}")]}
    status, found = run(tmp_path, slow, turns=5, arguments=["--limit_s", "1.5"], figures=[])
    assert status == 1 and len(found["runs"]) == 1 and set(KEYS) <= set(found)


def test_missing_and_broken_settings_are_named(tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path in (tmp_path / "none.json", broken):
        with pytest.raises(SystemExit):
            in_turns.main([str(path), "--output_json", str(tmp_path / "out.json")])
        assert path.name in capsys.readouterr().err

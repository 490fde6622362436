"""Named commands: those asked for run, each within its limit, and a fault does not stop the others."""

import argparse

import pytest

from benchmarks.named_commands import add_flags, run_all


def writes(path, more=""):
    return ["-c", f"{more}import sys; open(sys.argv[2], 'w').close()", "--output_json", str(path)]


def given(names, words):
    parser = argparse.ArgumentParser()
    add_flags(parser, names)
    return parser.parse_args(words)


@pytest.fixture
def commands(tmp_path):
    return {
        "slow": writes(tmp_path / "slow", "import time; time.sleep(60); "),
        "faulty": writes(tmp_path / "faulty", "import nothing_of_this_name; "),
        "good": writes(tmp_path / "new" / "good"),
        "other": writes(tmp_path / "other"),
    }


def test_a_fault_and_a_limit_do_not_stop_the_next_command(commands, tmp_path, capfd):
    words = ["--only", "slow,faulty,good", "--seconds", "1"]
    assert run_all(given(list(commands), words), commands) == 1
    assert "failed: slow, faulty" in capfd.readouterr().err
    assert (tmp_path / "new" / "good").exists()
    assert not any((tmp_path / name).exists() for name in ("slow", "faulty", "other"))


def test_a_command_that_the_system_ends_is_told(tmp_path, capfd):
    commands = {"large": writes(tmp_path / "large", "import os; os.kill(os.getpid(), 9); ")}
    assert run_all(given(list(commands), []), commands) == 1
    assert "large: ended by SIGKILL" in capfd.readouterr().err


def test_commands_are_shown_without_running(commands, tmp_path, capfd):
    assert run_all(given(list(commands), ["--show"]), commands) == 0
    assert len(capfd.readouterr().out.splitlines()) == len(commands)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "wanted"), [([], " --repeats 3"), (["--repeats", "1"], "")])
def test_only_throughput_is_repeated(words, wanted, capfd):
    lines = {
        "rates": ["-m", "jaxflow.bench", "throughput", "--output_json", "a.json"],
        "other": ["-m", "jaxflow.bench", "collectives", "--output_json", "b.json"],
    }
    assert run_all(given(list(lines), [*words, "--show"]), lines) == 0
    rates, other = capfd.readouterr().out.splitlines()
    assert rates.endswith("throughput --output_json a.json" + wanted) and other.endswith("b.json")


def test_an_unknown_name_is_refused(commands, capfd):
    assert run_all(given(list(commands), ["--only", "good,nothing"]), commands) == 2
    assert "nothing" in capfd.readouterr().err

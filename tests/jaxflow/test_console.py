"""Test the console command `jaxflow`."""

import subprocess
import sys
import tomllib

import paths
import pytest

import jaxflow


def console(*arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [program] if program else [sys.executable, "-m", "jaxflow"]
    return subprocess.run(
        [*command, *arguments], cwd=paths.ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("serve", ("--port", "--model")),
        ("ask", ("--chat", "--temperature")),
        ("batch", ("--input_file", "--journal")),
        ("bench", ("throughput", "kernels")),
        ("search", ("measure", "plan")),
        ("compile", ("--out", "--model")),
    ],
)
def test_help_of_a_command(command, shown):
    done = console(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in shown)


def test_flags_of_a_command_reach_its_module():
    done = console("bench", "throughput", "--no_such_flag")
    assert done.returncode == 2 and "no_such_flag" in done.stderr


def test_help_lists_the_commands():
    for arguments, status in ((("--help",), 0), ((), 2)):
        done = console(*arguments)
        assert done.returncode == status
        assert all(f"\n  {name} " in done.stdout for name in ("serve", "ask", "batch", "bench", "search"))


def test_unknown_command_is_one_line():
    done = console("train")
    assert done.returncode == 2
    assert done.stderr == (
        "error: unknown command 'train'; accepted: serve, ask, batch, bench, search, compile, --version, "
        "--help\n"
    )


def test_version_needs_no_dependency():
    program = "import sys; sys.path.insert(0, '.'); sys.argv[1:] = ['--version']; import runpy; "
    program += "runpy.run_module('jaxflow', run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], cwd=paths.ROOT, capture_output=True)
    assert (done.stdout.decode(), done.stderr.decode()) == (f"jaxflow {jaxflow.__version__}\n", "")


def test_pyproject_takes_command_and_version_from_the_source():
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["scripts"] == {"jaxflow": "jaxflow.__main__:main"}
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "jaxflow.__version__"}

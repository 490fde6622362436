"""Test run.py on machines with other Python installations, and .ci/run."""

import ast
import os
import subprocess
import sys

import paths
import pytest

import run


def script(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body + "\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an old Python only. PATH is tmp/bin and HOME is tmp/home."""
    script(tmp_path / "bin" / "python3", "echo Python 3.9.1")
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python3"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / "3.9.1"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    monkeypatch.delenv("UV_PYTHON_INSTALL_DIR", raising=False)
    real = run.os.path.exists
    monkeypatch.setattr(
        run.os.path, "exists", lambda path: str(path).startswith(str(tmp_path)) and real(path)
    )
    monkeypatch.setattr(run, "LAUNCHER", str(tmp_path / "launcher"))
    return tmp_path


def test_syntax_is_accepted_by_python_3_8():
    ast.parse((paths.ROOT / "run.py").read_text("utf-8"), feature_version=(3, 8))


def test_find_python_returns_none_without_a_supported_python(machine):
    assert run.find_python() is None


@pytest.mark.parametrize(
    "place",
    [
        "bin/python3.12",
        "home/.pyenv/versions/3.12.7/bin/python",
        "elsewhere/3.12.1/bin/python",
        "home/.local/share/uv/python/cpython-3.12.3-x/bin/python3.12",
    ],
)
def test_find_python_finds_a_python_that_is_not_the_default(machine, place):
    script(machine / place, "echo Python 3.12.7")
    assert run.find_python() == str(machine / place)


def test_find_python_skips_a_shim_that_fails(machine):
    script(machine / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    script(machine / "bin" / "python3.13", "echo Python 3.13.0")
    assert run.find_python() == str(machine / "bin" / "python3.13")


def test_find_uv_skips_an_old_uv(machine):
    script(machine / "bin" / "uv", "echo uv 0.99.1")
    assert run.find_uv(None) == str(machine / "bin" / "uv")
    script(machine / "bin" / "uv", "echo uv 0.4.9")
    script(machine / "launcher" / "bin" / "uv", "echo uv 0.13.8")
    assert run.find_uv(None) == str(machine / "launcher" / "bin" / "uv")


def test_find_uv_installs_into_a_folder_without_venv(machine):
    python = machine / "bin" / "python3.12"
    made = machine / "launcher" / "bin" / "uv"
    script(
        python,
        f"""case "$2 $3" in
"venv --clear") echo "ensurepip is not available"; exit 1;;
"pip install") mkdir -p {made.parent}; printf '#!/bin/sh\\necho uv 0.13.8\\n' > {made}; chmod +x {made};;
esac""",
    )
    (machine / "bin" / "mkdir").symlink_to("/bin/mkdir")
    (machine / "bin" / "chmod").symlink_to("/bin/chmod")
    assert run.find_uv(str(python)) == str(made)


def test_find_uv_prints_the_errors_of_failed_installations(machine):
    script(machine / "bin" / "python3", "echo no network; exit 1")
    with pytest.raises(SystemExit, match=r"(?s)no network.*Could not install uv"):
        run.find_uv(None)


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["nonsense"], 2), (["exec"], 2)])
def test_help(arguments, status):
    done = subprocess.run(
        [sys.executable, str(paths.ROOT / "run.py"), *arguments], capture_output=True, text=True
    )
    assert done.returncode == status
    assert "python3 run.py test" in done.stdout and (status == 0 or arguments[0] in done.stderr)


@pytest.mark.parametrize(
    ("arguments", "failing", "status", "failed"),
    [
        ((), "", 0, []),
        ((), "pyright", 1, ["failed: types (exit status 3)"]),
        (("--slow",), "slow or not slow", 1, ["failed: tests (exit status 3)"]),
        (("--quick",), "", 2, ["usage: .ci/run [--slow]"]),
    ],
)
def test_ci_prints_the_failed_checks(tmp_path, arguments, failing, status, failed):
    """python3 is a script that fails for the command line that holds `failing`."""
    script(tmp_path / "python3", f'[ -z "{failing}" ] && exit 0\ncase "$*" in *"{failing}"*) exit 3;; esac')
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [paths.ROOT / ".ci" / "run", *arguments], env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.splitlines()) == (status, failed)


def test_ci_skips_a_shim_that_fails(tmp_path):
    for name in ("python3", "python"):
        script(tmp_path / name, "echo 'pyenv: version `3.12` is not installed' >&2; exit 1")
    script(tmp_path / "python3.12", "exit 0")
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([paths.ROOT / ".ci" / "run"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"tests: {tmp_path / 'python3.12'} run.py test" in done.stdout

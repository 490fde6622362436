"""The launcher finds what it needs on machines unlike this one."""

import ast
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
    """A machine whose only Python is an old one: a PATH of tmp/bin, a home of its own."""
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


def test_its_syntax_is_that_of_old_pythons():
    ast.parse((paths.ROOT / "run.py").read_text("utf-8"), feature_version=(3, 8))


def test_no_python_is_found_where_there_is_none(machine):
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
def test_a_python_that_is_not_the_default_is_found(machine, place):
    script(machine / place, "echo Python 3.12.7")
    assert run.find_python() == str(machine / place)


def test_a_shim_that_cannot_run_is_passed_over(machine):
    script(machine / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    script(machine / "bin" / "python3.13", "echo Python 3.13.0")
    assert run.find_python() == str(machine / "bin" / "python3.13")


def test_a_recent_uv_is_used_and_an_old_one_is_not(machine):
    script(machine / "bin" / "uv", "echo uv 0.99.1")
    assert run.find_uv(None) == str(machine / "bin" / "uv")
    script(machine / "bin" / "uv", "echo uv 0.4.9")
    script(machine / "launcher" / "bin" / "uv", "echo uv 0.13.8")
    assert run.find_uv(None) == str(machine / "launcher" / "bin" / "uv")


def test_uv_is_installed_into_a_folder_where_venv_is_missing(machine):
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


def test_what_went_wrong_is_said_when_uv_cannot_be_installed(machine):
    script(machine / "bin" / "python3", "echo no network; exit 1")
    with pytest.raises(SystemExit, match=r"(?s)no network.*Could not install uv"):
        run.find_uv(None)


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["nonsense"], 2), (["exec"], 2)])
def test_the_help(arguments, status):
    done = subprocess.run(
        [sys.executable, str(paths.ROOT / "run.py"), *arguments], capture_output=True, text=True
    )
    assert done.returncode == status
    assert "python3 run.py test" in done.stdout

#!/usr/bin/env python3
"""Install JaxFlow in this folder and run it. Any Python 3 from 3.8 on can start this script.

  python3 run.py                    install, serve a small chat model, ask a question and stream the answer
  python3 run.py demo "a question"  the same with your question
  python3 run.py test [ARGS]        install and run the tests on CPU; ARGS go to pytest
  python3 run.py exec COMMAND       run COMMAND in the environment, e.g. exec python -m search plan --help

The script creates two folders here. .venv holds the package versions that uv.lock pins, with the packages of
the extra `search`. .cache holds the installer uv, unless a recent uv is on the PATH. Downloads and compiled
programs are kept in ~/.cache/uv and ~/.cache/jaxflow.
"""

# Only the standard library and the syntax of Python 3.8: an older Python may run this script to find a newer
# one.
import glob
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
ENVIRONMENT = os.path.join(ROOT, ".venv")
LAUNCHER = os.path.join(ROOT, ".cache", "launcher")
UV = "uv==0.13.8"
OLDEST_UV = (0, 10)  # the oldest version that [tool.uv] in pyproject.toml accepts
PYTHONS = ((3, 12), (3, 13), (3, 14))  # versions that the locked wheels support, in order of preference


def version_of(*command):
    """Return the (major, minor) version that a command prints, or () if the command fails.

    A shim of pyenv fails if its Python version is not installed.
    """
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found and done.returncode == 0 else ()


def python_candidates():
    """Yield paths that may be a Python: on the PATH, next to the running one, and those of
    pyenv, uv, Homebrew and conda.
    """
    yield sys.executable
    home, path = os.path.expanduser("~"), os.environ.get("PATH", "").split(os.pathsep)
    pyenvs = [
        os.environ.get("PYENV_ROOT"),
        os.path.join(home, ".pyenv"),
        *(os.path.dirname(p) for p in path if p.endswith("/shims")),
    ]
    managed = os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.join(home, ".local", "share", "uv", "python")
    for major, minor in PYTHONS:
        name = f"python{major}.{minor}"
        yield shutil.which(name)
        for versions in [
            os.path.dirname(sys.prefix),
            *(os.path.join(root, "versions") for root in pyenvs if root),
        ]:
            yield from sorted(glob.glob(os.path.join(versions, f"{major}.{minor}.*", "bin", "python")))
        yield from sorted(glob.glob(os.path.join(managed, f"cpython-{major}.{minor}.*", "bin", name)))
        yield from (
            os.path.join(folder, name)
            for folder in ("/usr/local/bin", "/usr/bin", "/opt/homebrew/bin", "/opt/conda/bin")
        )


def find_python():
    """Return a Python that the locked wheels support, or None."""
    for candidate in python_candidates():
        if candidate and os.path.exists(candidate) and version_of(candidate, "--version") in PYTHONS:
            return candidate
    return None


def find_uv(python):
    """Return a recent uv: the one on the PATH, or one that is installed into .cache."""
    on_path = shutil.which("uv")
    if on_path and version_of(on_path, "--version") >= OLDEST_UV:
        return on_path
    own = os.path.join(LAUNCHER, "bin", "uv")
    if version_of(own, "--version") >= OLDEST_UV:
        return own
    log(f"Installing {UV} into {os.path.relpath(LAUNCHER)}")
    failures = []
    for interpreter in dict.fromkeys([python or sys.executable, sys.executable]):
        # pip may always install into a virtual environment. Some systems ship Python without venv, where pip
        # can still install into a folder.
        for commands in (
            [
                [interpreter, "-m", "venv", "--clear", LAUNCHER],
                [os.path.join(LAUNCHER, "bin", "python"), "-m", "pip", "install", "-q", UV],
            ],
            [[interpreter, "-m", "pip", "install", "-q", "--upgrade", "--target", LAUNCHER, UV]],
        ):
            output = ""
            for command in commands:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                output += done.stdout
                if done.returncode:
                    break
            if version_of(own, "--version"):
                return own
            failures.append("{} failed:\n{}".format(" ".join(command), output.strip()))
    sys.exit(
        "\n\n".join(
            [
                *failures,
                "Could not install uv. Install uv as https://docs.astral.sh/uv describes, and run this "
                "again.",
            ]
        )
    )


def log(message):
    """Print a progress message."""
    print("==> " + message, file=sys.stderr, flush=True)


def main(arguments):
    """Run one command. Return an exit status, or replace this process by uv."""
    command, rest = (arguments[0], arguments[1:]) if arguments else ("demo", [])
    if command == "demo":
        inside = ["--no-default-groups", "--group", "model", "python", "-m", "serving.demo", *rest]
    elif command == "test":
        # Two workers more than cores: some tests wait for timers, files and processes of their own.
        workers = min(4, (os.cpu_count() or 1) + 2)
        # The tests of a file share its fixtures, which load and compile models, so they run in one worker.
        numbers = [f"--numprocesses={workers}", "--dist=loadfile"]
        inside = ["--group", "aot", "pytest", *numbers, *rest]
    elif command == "exec" and rest:
        inside = rest
    else:
        print((__doc__ or "").strip())
        if command in ("-h", "--help", "help"):
            return 0
        reason = "exec needs a command" if command == "exec" else "unknown command " + repr(command)
        print("\nerror: " + reason + "; accepted: demo, test, exec, help", file=sys.stderr)
        return 2

    installed = version_of(os.path.join(ENVIRONMENT, "bin", "python"), "--version")
    python = None if installed else find_python()
    uv = find_uv(python)
    environ = dict(os.environ)
    environ.pop("VIRTUAL_ENV", None)
    if environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        # Without any bytecode files, every process would compile all its packages again.
        environ.setdefault("PYTHONPYCACHEPREFIX", os.path.join(ROOT, ".cache", "bytecode"))
    if not installed:
        if python is None:
            log(
                "No Python 3.12 to 3.14 found, so uv downloads one. If the download fails, install Python "
                "3.12 and run this again."
            )
        else:
            environ.setdefault("UV_PYTHON", python)
        log("Installing JaxFlow into " + os.path.relpath(ENVIRONMENT))
    os.chdir(ROOT)
    os.execve(uv, [uv, "run", "--locked", *inside], environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The origin of a measurement: the keys that every report holds."""

import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import pynvml

KEYS = ("command", "commit", "versions", "driver", "device", "clock_mhz", "watts", "date")
COMMIT_VARIABLE = "JAXFLOW_COMMIT"
_PACKAGES = ("jaxflow", "jax", "jaxlib", "numpy")


def provenance(command: str) -> dict[str, Any]:
    """Return the keys of `KEYS` for a measurement of this process.

    command: the command line that makes the report. Clock and watts are None until a measurement fills
    them in. The date is a day in UTC.
    """
    driver, cuda = _driver()
    versions = {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    return {
        "command": command,
        "commit": commit(),
        "versions": versions | ({"cuda": cuda} if cuda else {}),
        "driver": driver,
        "device": jax.devices()[0].device_kind,
        "clock_mhz": None,
        "watts": None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def commit() -> str | None:
    """Return the commit of the code: $JAXFLOW_COMMIT, or that of the git checkout. None without either.

    A checkout with changed files gets the suffix `-dirty`.
    """
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    return _checkout()


@functools.cache
def _checkout() -> str | None:
    """Return the commit of the git checkout, with `-dirty` if a file changed, or None without a checkout."""
    found = _git("rev-parse", "HEAD")
    return f"{found}-dirty" if found and _git("status", "--porcelain", "--untracked-files=no") else found


def _git(*words: str) -> str | None:
    """Return the output of a git command in the folder of the sources, or None
    if it fails or prints nothing.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # an installed package in the environment of another checkout
        return None
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str:
    """Return a package's version, or `source` for a checkout that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _driver() -> tuple[str | None, str | None]:
    """Return the versions of the NVIDIA driver and of the newest CUDA that the driver supports.

    Both are None without a driver.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
    finally:
        pynvml.nvmlShutdown()

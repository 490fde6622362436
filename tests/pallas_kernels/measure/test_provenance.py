"""The origin of a measurement: commit, versions, driver and date."""

import datetime
import re
import subprocess

import jax
import paths
import pynvml
import pytest

from pallas_kernels.measure import provenance


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    provenance._checkout.cache_clear()
    monkeypatch.delenv(provenance.COMMIT_VARIABLE, raising=False)
    yield
    provenance._checkout.cache_clear()


def test_every_key_is_there_and_clock_and_watts_are_open():
    found = provenance.provenance("python -m one --flag")
    assert tuple(found) == provenance.KEYS
    assert found["command"] == "python -m one --flag" and found["device"] == "cpu"
    assert found["clock_mhz"] is None and found["watts"] is None
    assert found["versions"]["jax"] == jax.__version__ and "python" in found["versions"]
    assert abs(datetime.date.fromisoformat(found["date"]) - datetime.date.today()).days <= 1


def test_the_commit_is_the_checkouts():
    if not (paths.ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    head = subprocess.run(
        ["git", "-C", paths.ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert re.fullmatch(rf"{head}(-dirty)?", provenance.commit() or "")


def test_a_commit_can_be_passed_in(monkeypatch):
    monkeypatch.setenv(provenance.COMMIT_VARIABLE, "abc123")
    assert provenance.commit() == "abc123"


def test_without_git_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert provenance.commit() is None


def test_the_driver_names_its_version_and_cuda(monkeypatch):
    for name, value in {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetCudaDriverVersion": 12080,
        "nvmlSystemGetDriverVersion": "570.1",
    }.items():
        monkeypatch.setattr(pynvml, name, lambda value=value: value)
    found = provenance.provenance("")
    assert (found["driver"], found["versions"]["cuda"]) == ("570.1", "12.8")

"""The folder of compiled programs: a later start finds all of them there."""

import json
import os
import subprocess
import sys

import paths
import pytest

from jaxflow import compile as command
from jaxflow.cli.engine_flags import parse

MODEL = paths.MODELS / "tiny-llama"
FLAGS = ("--model", str(MODEL), "--max_num_seqs", "2", "--step_sizes", "16", "--max_num_batched_tokens", "16")
START = """
import json, sys
import jax
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.llm import LLM

found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rpartition("/")[2]))
settings = dict(max_num_seqs=2, step_sizes="16", max_num_batched_tokens=16)
with LLM(sys.argv[1], compilation_cache_dir=sys.argv[2], **settings):
    wait_until_compiled()
    print(json.dumps([found.count("cache_hits"), found.count("cache_misses")]))
"""


def run(*arguments, environ) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False, env=environ
    )


@pytest.fixture
def environ(monkeypatch):
    """Return the environment of a machine that never compiled a program."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    return dict(os.environ) | {"PYTHONPATH": str(paths.ROOT)}


def test_a_later_start_compiles_nothing(tmp_path, environ):
    made = run("-m", "jaxflow.compile", *FLAGS, "--out", tmp_path / "made", environ=environ)
    assert made.returncode == 0, made.stderr
    later = run("-c", START, MODEL, tmp_path / "made", environ=environ)
    hits, misses = json.loads(later.stdout)
    assert hits > 0 and misses == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--model", "/nowhere", "--out", "made"), "/nowhere"),
        ((*FLAGS, "--out", "made", "--compilation_cache_dir", "other"), "compilation_cache_dir"),
        ((*FLAGS, "--out", "/proc/made"), "/proc/made"),
    ],
)
def test_what_cannot_be_compiled_is_named(monkeypatch, capsys, tmp_path, no_flags, arguments, named):
    monkeypatch.chdir(tmp_path)
    command.define_flags()
    parse(["compile", *arguments])
    assert command.main(["compile"]) == 2
    assert named in capsys.readouterr().err

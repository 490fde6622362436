"""The demo serves a model, asks one question, and ends."""

import re
import subprocess
import sys

import paths
import pytest

from serving import default_model

# The demo of a server that compiles one small step. The server of the usual steps compiles for 15 s.
SMALL = """
from serving import demo
launch = demo.launch_server
small = "--max_num_batched_tokens=16 --step_sizes=16 --max_num_seqs=4 --max_model_len=512"
small += " --num_kv_pages=64 --block_size=16"
demo.launch_server = lambda *arguments: launch(*arguments, *small.split())
demo.run_command(demo.main)
"""


def demo(*arguments):
    return subprocess.run(
        [sys.executable, "-c", SMALL, *arguments],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_demo_serves_asks_and_ends():
    done = demo("--model", str(paths.MODELS / "stories260K"), "--max_tokens=24", "Once upon a time")
    assert done.returncode == 0, done.stderr
    serve, ask, *rest = re.split(r"^\$ ", done.stdout, flags=re.M)[1:]
    assert rest == []
    assert re.search(r"^ready on 127\.0\.0\.1:\d+ and http://127\.0\.0\.1:\d+$", serve, re.M)
    command, answer, *end = ask.splitlines()
    assert command.endswith("'Once upon a time'")
    assert answer.strip()
    assert end[-1] == "drained, 0 aborted"
    assert "  from openai import OpenAI" in end and any(
        "curl http://127.0.0.1:8000/v1/" in line for line in end
    )
    assert "24 tokens" in done.stderr


def test_demo_ends_with_an_error_if_the_server_cannot_start():
    done = demo("--model", str(paths.MODELS / "not-there"))
    assert done.returncode == 1
    assert "not-there" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_default_model_is_the_locked_one(smollm2_gguf):
    assert smollm2_gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm2_gguf.stat().st_size == 98_362_432


def test_without_the_model_package_the_error_names_the_installation(monkeypatch):
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="uv sync --group model"):
        default_model.default_model()

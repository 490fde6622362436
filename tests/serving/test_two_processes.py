"""A server of two processes: it answers, starts again after the loss of one, and
drains when any is asked to stop.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import paths
import pytest
from test_command import SMALL

MODEL = "stories260K"
PROMPT = paths.golden(MODEL)["prompts"][1]


def start(rank: int, coordinator: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "serving", "--port=0", "--admin_port=0", "--http_port=0", *SMALL]
    command += [f"--model={paths.MODELS / MODEL}", "--tensor_parallel_size=2", "--max_restarts=3"]
    command += [f"--coordinator={coordinator}", "--num_processes=2", f"--process_id={rank}"]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} if rank == 0 else {}
    return subprocess.Popen(command, cwd=paths.ROOT, env=environment, text=True, **pipes)


def ready_url(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None and server.stderr is not None
    for line in server.stdout:
        if found := re.fullmatch(r"ready on \S+ and (http://\S+)\n", line):
            return found.group(1)
    raise AssertionError(server.stderr.read())


def check_answer(url: str) -> None:
    tokens = len(PROMPT["greedy_ids"])
    asked = {
        "model": MODEL,
        "prompt": PROMPT["text"],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status().json()
    assert answer["choices"][0]["text"] == PROMPT["greedy_text"]


@pytest.mark.slow
def test_it_answers_restarts_and_drains():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    first, second = start(0, coordinator), start(1, coordinator)
    try:
        check_answer(ready_url(first))
        (server,) = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
        os.kill(int(server), signal.SIGKILL)
        check_answer(ready_url(first))
        second.send_signal(signal.SIGTERM)
        assert (first.wait(timeout=60), second.wait(timeout=60)) == (0, 0)
    finally:
        for process in (first, second):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

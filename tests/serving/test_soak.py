"""No stream is lost: many short answers at once through the real servers, with
the client in a second process.
"""

import asyncio
import json
import os
import subprocess
import sys
import time

import paths
import pytest
from harness import serving
from http_harness import running_server
from soak_client import WHOLE

from jaxflow.bench.transport.paced_engine import PacedLLM

ROWS = 640
CALLERS = 1600  # more than the calls that gRPC's core holds by default until its server takes them up
STEP_S = 0.064  # 10,000 tokens a second


def ask(kind: str, port: int, streams: int, max_tokens: int) -> dict:
    """Return the client's counts."""
    script = paths.ROOT / "tests" / "serving" / "soak_client.py"
    numbers = map(str, (streams, CALLERS, max_tokens, 7))
    command = [sys.executable, str(script), kind, f"127.0.0.1:{port}", *numbers]
    began = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(paths.ROOT)}, check=True
    )
    print(f"{streams} streams over {kind} in {time.perf_counter() - began:.1f} s")
    return json.loads(done.stdout)


def check(found: dict, llm: PacedLLM, streams: int) -> None:
    assert found["ends"] == {WHOLE: streams}
    stats = llm.driver.stats()
    assert stats.completion_tokens == found["tokens"]
    assert (stats.running_requests, stats.waiting_requests) == (0, 0)


def soak_grpc(streams: int, step_s: float, max_tokens: int) -> None:
    async def run() -> None:
        llm = PacedLLM(ROWS, step_s)
        async with serving(llm) as (server, _):  # type: ignore[arg-type]  # of the same shape
            found = await asyncio.to_thread(ask, "grpc", server.port, streams, max_tokens)
            check(found, llm, streams)

    asyncio.run(run())


def soak_http(streams: int, step_s: float, max_tokens: int) -> None:
    llm = PacedLLM(ROWS, step_s)
    with running_server(llm) as opened:
        check(ask("http", opened.port, streams, max_tokens), llm, streams)
        assert opened.errors == []


@pytest.mark.parametrize("soak", [soak_grpc, soak_http])
def test_as_many_streams_as_callers(soak):
    soak(CALLERS, STEP_S / 4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("soak", [soak_grpc, soak_http])
def test_100000_streams(soak):
    soak(100_000, STEP_S, 32)

"""Throughput of the HTTP server on one core, without a device: chunks of streams, and plain requests.

  python -m jaxflow.bench transport
  python -m jaxflow.bench transport --runs 5 --output_json benchmarks/cpu/engine/transport.json

The server runs in a process of its own, on one core. An engine of paced steps in this process gives one token
a step to each request. The clients run in the process of the command, on the other cores. A chunk is one
event of a stream. A step that comes before the last one is written adds its tokens to the same chunk.

The report also holds chunks and requests per second of the server's CPU time, because other programs may use
the core. The same clients then load `bare_server`: uvicorn alone, with the same bytes as its answers.
Finally, `first_token` measures the delay of first tokens while streams run.
"""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from absl import flags

from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import line
from jaxflow.bench.transport import first_token
from jaxflow.bench.workload.http_connection import HttpClient
from jaxflow.config import ConfigError

PACKAGES = ("uvicorn", "uvloop", "httptools", "starlette", "msgspec")
CHAT = "/v1/chat/completions"
STREAM_TOKENS = 256
PLAIN_TOKENS = 16
PLAIN_CALLERS = 256
PLAIN_STEP_S = 0.004
BUSY_STREAMS = 300
BUSY_STEP_S = 0.015
LABELS = {
    "streamed_chunks": "Chunks",
    "bare_uvicorn_chunks": "Bare uvicorn, chunks",
    "plain_requests": "Plain requests",
    "bare_uvicorn_requests": "Bare uvicorn, requests",
}
DELAY_LABELS = {
    "to_engine_ms": "Request to engine",
    "to_caller_ms": "First token to caller",
    "added_ms": "Added to TTFT",
}


def define_flags() -> None:
    flags.DEFINE_integer("streams", 256, "Streams at once.", lower_bound=1)
    flags.DEFINE_integer("prompt_len", 200, "Tokens of a prompt, of one byte each.", lower_bound=1)
    flags.DEFINE_float("step_s", 0.008, "Seconds of the engine's step with streams.", lower_bound=0.0)
    flags.DEFINE_float("seconds", 5.0, "Duration of a run.", lower_bound=0.1)
    flags.DEFINE_integer("runs", 3, "Runs. The report holds all of them and their median.", lower_bound=1)
    flags.DEFINE_integer("probes", 200, "Requests whose first tokens are timed.", lower_bound=1)
    flags.DEFINE_integer("core", 0, "CPU core of the server; -1 for any.", lower_bound=-1)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


class ServerProcess:
    """A server process: a module of this folder, on one core."""

    def __init__(self, module: str, core: int, *arguments: object):
        command = [sys.executable, "-m", f"jaxflow.bench.transport.{module}", str(core), *map(str, arguments)]
        root = str(Path(__file__).resolve().parents[3])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            self.close()
            raise ConfigError("core", core, "a core of this machine, on which the server starts")
        self.url = f"http://127.0.0.1:{port}"

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process so far."""
        after_name = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")

    def first_tokens(self) -> list[list[float]]:
        """Return `PacedDriver.first_tokens` of a `paced_server`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextlib.contextmanager
def running(module: str, core: int, *arguments: object) -> Iterator[ServerProcess]:
    """A running server."""
    server = ServerProcess(module, core, *arguments)
    try:
        yield server
    finally:
        server.close()


def body(prompt_tokens: int, tokens: int, stream: bool) -> bytes:
    """Return the body of a chat request."""
    message = {"role": "user", "content": "a" * prompt_tokens}
    return msgspec.json.encode(
        {"messages": [message], "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    )


async def load(
    url: str,
    callers: int,
    data: bytes,
    count: Callable[[bytes], int],
    seconds: float,
    cpu_s: Callable[[], float],
) -> dict[str, float]:
    """Repeat a request in `callers` callers. Return the counted answers and the CPU time a second.

    count: the answers in a part of a body. A caller's first request is not counted.
    """
    client = HttpClient(url)
    counted, warm, stopping = 0, 0, False
    ready = asyncio.Event()

    def take(part: bytes) -> None:
        nonlocal counted
        counted += count(part)

    async def caller() -> None:
        nonlocal warm
        while not stopping:
            if await client.stream(CHAT, data, take) != 200:
                raise ConnectionError("the server refused a request")
            warm += 1
            if warm == callers:
                ready.set()

    tasks = [asyncio.create_task(caller()) for _ in range(callers)]
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    began, cpu_began, counted = time.perf_counter(), cpu_s(), 0
    if waiting.done():
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    wall, cpu, found = time.perf_counter() - began, cpu_s() - cpu_began, counted
    stopping = True
    waiting.cancel()
    await asyncio.gather(*tasks)  # raises the error of a caller
    client.close()
    return {"per_s": found / wall, "per_cpu_s": found / cpu, "server_cores": cpu / wall}


def whole_answers(part: bytes) -> int:
    """Return the number of plain answers that begin in a part of a body."""
    return part.startswith(b"{")


def chunks(part: bytes) -> int:
    """Return the number of events in a part of a stream."""
    return part.count(b"data: {")


def repeat(work: Callable[[], Coroutine[Any, Any, dict[str, float]]], runs: int) -> dict[str, Any]:
    """Return all runs and the median of each figure."""
    found = [asyncio.run(work()) for _ in range(runs)]
    return {**{name: median(run[name] for run in found) for name in found[0]}, "runs": found}


def answer_to(url: str, data: bytes) -> str:
    """Return the body of the answer to one request."""

    async def ask() -> bytes:
        client, parts = HttpClient(url), []
        await client.stream(CHAT, data, parts.append)
        client.close()
        return b"".join(parts)

    return asyncio.run(ask()).decode()


def measure(
    streams: int, prompt_tokens: int, step_s: float, seconds: float, runs: int, core: int, probes: int
) -> dict[str, Any]:
    """Return the figures of streams, of plain requests, of uvicorn alone, and of first tokens."""
    result: dict[str, Any] = {}
    streamed = body(prompt_tokens, STREAM_TOKENS, stream=True)
    plain = body(prompt_tokens, PLAIN_TOKENS, stream=False)

    def chunks_of(server: ServerProcess) -> dict[str, Any]:
        return repeat(lambda: load(server.url, streams, streamed, chunks, seconds, server.cpu_s), runs)

    def requests_of(server: ServerProcess) -> dict[str, Any]:
        return repeat(
            lambda: load(server.url, PLAIN_CALLERS, plain, whole_answers, seconds, server.cpu_s), runs
        )

    with running("paced_server", core, streams, step_s) as server:
        result["streamed_chunks"] = chunks_of(server)
        a_chunk = answer_to(server.url, streamed).split("\n\n")[1] + "\n\n"
    with running("paced_server", core, PLAIN_CALLERS, PLAIN_STEP_S) as server:
        result["plain_requests"] = requests_of(server)
        whole = answer_to(server.url, plain)
    with running("bare_server", core, STREAM_TOKENS, whole, a_chunk) as server:
        result["bare_uvicorn_chunks"] = chunks_of(server)
        result["bare_uvicorn_requests"] = requests_of(server)
    with running("paced_server", core, BUSY_STREAMS + 1, BUSY_STEP_S) as server:
        result["first_tokens"] = first_token.delays(server.url, BUSY_STREAMS, probes, server.first_tokens)
    return result


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, OSError."""
    f = flags.FLAGS
    cores = os.sched_getaffinity(0)
    if f.core >= 0:
        if f.core not in cores or len(cores) < 2:
            raise ConfigError("core", f.core, f"one of the cores {sorted(cores)}, of at least two")
        os.sched_setaffinity(0, cores - {f.core})
    workload = {
        "streams": f.streams,
        "prompt_tokens": f.prompt_len,
        "stream_tokens": STREAM_TOKENS,
        "step_s": f.step_s,
        "plain_callers": PLAIN_CALLERS,
        "plain_tokens": PLAIN_TOKENS,
        "plain_step_s": PLAIN_STEP_S,
        "seconds": f.seconds,
        "busy_streams": BUSY_STREAMS,
        "busy_step_s": BUSY_STEP_S,
        "probes": f.probes,
    }
    result: dict[str, Any] = {"command_name": "transport", **machine.describe(), "workload": workload}
    result["versions"] |= {name: importlib.metadata.version(name) for name in PACKAGES}
    before = os.getloadavg()[0]
    result |= measure(f.streams, f.prompt_len, f.step_s, f.seconds, f.runs, f.core, f.probes)
    result["load_average"] = [before, os.getloadavg()[0]]
    print(" Transport Benchmark Result ".center(50, "="))
    for name, label in LABELS.items():
        print(line(f"{label} (/s):", result[name]["per_s"]))
        print(line(f"{label} (/CPU s of the server):", result[name]["per_cpu_s"]))
        print(line("Cores of the server:", result[name]["server_cores"]))
    for name, label in DELAY_LABELS.items():
        for figure, found in result["first_tokens"][name].items():
            print(line(f"{label}, {figure} (ms):", found))
    print(machine.where(result))
    return result

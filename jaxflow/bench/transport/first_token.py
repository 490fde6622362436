"""Measurement of the delay that the HTTP server adds to a first token while many streams run.

The engine of paced steps notes when a request arrives and when its first token is made. The caller notes when
it sends the request and when it receives the first part of the answer. All of these times are of the system's
monotonic clock. So the report has two delays: from the caller to the engine, and from the engine to the
caller. Another process reads the running streams:

  python -m jaxflow.bench.transport.first_token URL STREAMS
"""

import contextlib
import random
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import msgspec

PATH = "/v1/completions"
PROMPT_CHARS = 200
LONG_TOKENS = 7900  # of a running stream, so that it runs longer than the measurement
PAUSE_S = (0.005, 0.04)  # between two requests, drawn uniformly
PART_BYTES = 1 << 16


def request_bytes(host: str, tokens: int, seed: int | None) -> bytes:
    """Return a streamed request. `seed`: marks it for the engine's notes."""
    settings = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    if seed is not None:
        settings["seed"] = seed
    body = msgspec.json.encode({"prompt": "a" * PROMPT_CHARS, **settings})
    head = f"POST {PATH} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def connect(url: str) -> tuple[socket.socket, str]:
    """Return a connection to the server, and its name."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return socket.create_connection((parts.hostname, parts.port)), parts.netloc


def probe(connection: socket.socket, request: bytes) -> tuple[float, float]:
    """Send a request. Return the seconds of the clock at the sending and at the first event of the answer."""
    sent_s = time.monotonic()
    connection.sendall(request)
    received = b""
    first_s = 0.0
    while not received.endswith(b"\r\n0\r\n\r\n"):
        part = connection.recv(PART_BYTES)
        if not part:
            raise ConnectionError("the server closed the connection within an answer")
        received += part
        if not first_s and b"data: {" in received:
            first_s = time.monotonic()
    return sent_s, first_s


@contextlib.contextmanager
def running_streams(url: str, streams: int) -> Iterator[None]:
    """Streams that run and are read, by another process."""
    command = [sys.executable, "-m", "jaxflow.bench.transport.first_token", url, str(streams)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise ConnectionError("the running streams could not be opened")
        yield
    finally:
        process.communicate()


def read_streams(url: str, streams: int) -> None:
    """Open streams and read them. Print a line once all have begun. Return when the standard input ends."""
    poller = selectors.DefaultSelector()
    silent = set()
    for _ in range(streams):
        connection, host = connect(url)
        connection.sendall(request_bytes(host, LONG_TOKENS, None))
        poller.register(connection, selectors.EVENT_READ)
        silent.add(connection)
    poller.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in poller.select():
            if key.fileobj is sys.stdin:
                return
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(PART_BYTES):
                raise ConnectionError("a running stream ended")
            if silent:
                silent.discard(key.fileobj)
                if not silent:
                    print("all run", flush=True)


def delays(url: str, streams: int, probes: int, notes: Callable[[], Sequence[Sequence[float]]]) -> dict:
    """Return the median and the 99th percentile of the delays, in milliseconds.

    Args:
      notes: returns when each marked request arrived at the engine, and when its first token was made.
    """
    draw = random.Random(0)
    with running_streams(url, streams):
        connection, host = connect(url)
        with connection:
            seen = []
            for number in range(probes):
                time.sleep(draw.uniform(*PAUSE_S))
                seen.append(probe(connection, request_bytes(host, 2, number)))
        found = list(zip(seen, notes(), strict=True))
    to_engine = [arrived_s - sent_s for (sent_s, _), (arrived_s, _) in found]
    to_caller = [first_s - made_s for (_, first_s), (_, made_s) in found]
    both = [a + b for a, b in zip(to_engine, to_caller, strict=True)]
    return {
        "to_engine_ms": _summary(to_engine),
        "to_caller_ms": _summary(to_caller),
        "added_ms": _summary(both),
    }


def _summary(seconds: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {"median": 1000 * median(ordered), "p99": 1000 * ordered[int(0.99 * (len(ordered) - 1))]}


if __name__ == "__main__":
    read_streams(sys.argv[1], int(sys.argv[2]))

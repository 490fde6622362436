"""Hostile callers and failing parts, over real sockets. After each fault the
server serves, and nothing is left.

The numbers are those of a list of 40 faults. Faults 25, 31, 38 and 40 are in `test_http_faults_engine`, 34
and 35 in `test_http_faults_batch`, and signals in `test_command`.
"""

import asyncio
import contextlib
import gzip
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable

import pytest
from fake_llm import FAULT_TOKEN, FakeLLM
from http_harness import (
    CHAT,
    COMPLETIONS,
    HELLO,
    RunningServer,
    events,
    read_to_end,
    request_bytes,
    running_server,
    wait_for,
)

from serving.http.limits import Limits
from serving.http.protocol import LimitedProtocol

BODY_BYTES = 100_000
LONG = {"prompt": [5, 6, 7], "max_tokens": 4000}
STREAM = LONG | {"stream": True}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 2}
Fault = Callable[[RunningServer], None]
FAULTS: dict[str, Fault] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    def keep(work: Fault) -> Fault:
        FAULTS[name] = work
        return work

    return keep


@pytest.fixture(scope="module")
def shared():
    with running_server(limits=Limits(body_bytes=BODY_BYTES), max_pending_tokens=64) as opened:
        yield opened


@pytest.fixture
def own():
    """Open servers that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda llm=None, **settings: stack.enter_context(running_server(llm, **settings))


def sockets() -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket")
    return found


def check_nothing_is_left(opened: RunningServer, before: int) -> None:
    opened.check_serves()
    opened.check_idle()
    wait_for(lambda: opened.connections() == 0)
    wait_for(lambda: sockets() <= before)


def status_of(data: bytes) -> int:
    return int(data.split(b" ", 2)[1])


def answers(data: bytes) -> list[int]:
    """Return the statuses of the answers on a connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


def exchange(opened: RunningServer, *parts: bytes) -> bytes:
    """Send bytes, and return what comes until the server closes."""
    with opened.connect() as connection:
        for part in parts:
            connection.sendall(part)
        return read_to_end(connection)


def refused(opened: RunningServer, path: str, body: object, status: int = 400, **more) -> dict:
    answer = opened.post(path, body, **more)
    assert answer.status_code == status, answer.text[:300]
    error = answer.json()["error"]
    assert "Traceback" not in error["message"] and len(error["message"]) <= 1000
    return error


# ---- callers that leave


@fault("1 close before the headers end")
def _(opened):
    with opened.connect() as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")
        wait_for(lambda: opened.connections() == 1)


@fault("2 close within the body")
def _(opened):
    with opened.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, SHORT)[:-5])
        wait_for(lambda: opened.connections() == 1)


def leave(opened: RunningServer, body: dict, *, after: int) -> None:
    """Close the connection of a request after `after` events of its stream; 0: before the first token."""
    driver = opened.llm.driver
    aborted = len(driver.aborted)
    if after == 0:
        driver.gate.clear()
    try:
        with opened.connect() as connection:
            submitted = len(driver.submitted)
            connection.sendall(request_bytes(COMPLETIONS, body))
            wait_for(lambda: len(driver.submitted) > submitted)
            seen = b""
            while after and seen.count(b"data: ") < after:
                seen += connection.recv(65536)
        wait_for(lambda: len(driver.aborted) > aborted)
    finally:
        driver.gate.set()


@fault("3 close while the request waits")
def _(opened):
    leave(opened, STREAM, after=0)


@fault("4 close of several prompts before the first token")
def _(opened):
    leave(opened, STREAM | {"prompt": [[5, 6], [7, 8]]}, after=0)


@fault("5 close within a stream")
def _(opened):
    leave(opened, STREAM, after=3)


@fault("6 close of a plain request")
def _(opened):
    leave(opened, LONG, after=0)


@fault("7 a half-closed connection is answered")
def _(opened):
    for body in (SHORT, SHORT | {"stream": True}):
        with opened.connect() as connection:
            connection.sendall(request_bytes(COMPLETIONS, body, "connection: close"))
            connection.shutdown(socket.SHUT_WR)
            data = read_to_end(connection)
        assert 200 in answers(data) and (b"[DONE]" in data or b'"finish_reason":"length"' in data)


# ---- bytes that are no request


@fault("12 pipelined requests are answered in order")
def _(opened):
    parts = [request_bytes(COMPLETIONS, SHORT | {"max_tokens": n}) for n in (1, 2)]
    last = request_bytes(COMPLETIONS, SHORT | {"max_tokens": 3}, "connection: close")
    data = exchange(opened, b"".join([*parts, last]))
    assert answers(data) == [200, 200, 200]
    order = [data.index(b'"completion_tokens":%d' % n) for n in (1, 2, 3)]
    assert order == sorted(order)


@fault("13 content-length is too small")
def _(opened):
    data = request_bytes(COMPLETIONS, SHORT).replace(b"content-length: ", b"content-length: 0\r\nx: ")
    assert 200 not in answers(exchange(opened, data))  # the body is no second request


@fault("13 two values of content-length")
def _(opened):
    data = request_bytes(COMPLETIONS, SHORT, "content-length: 5")
    assert answers(exchange(opened, data)) == [400]


@fault("13 a content-length beyond the limit")
def _(opened):
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n" % COMPLETIONS.encode()
    with opened.connect() as connection:
        connection.sendall(head)
        assert b" 413 " in connection.recv(65536).partition(b"\r\n")[0]


def chunked(size: int, *headers: str) -> bytes:
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "host: x", "transfer-encoding: chunked", *headers, "", ""]
    return "\r\n".join(lines).encode() + b"%x\r\n" % size


@fault("14 a chunked body without end")
def _(opened):
    data = b""
    with opened.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(chunked(2**40))
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                connection.sendall(b" " * 10_000)
        data = connection.recv(65536)
    assert not data or status_of(data) == 413


@fault("14 a length beside chunks")
def _(opened):
    body = chunked(2, "content-length: 3", "connection: close") + b"{}\r\n0\r\n\r\n"
    assert answers(exchange(opened, body)) == [400]


@fault("15 a compressed body")
def _(opened):
    body = gzip.compress(b" " * 10_000_000)
    for headers in ({"content-encoding": "gzip"}, {"content-type": "application/gzip"}):
        assert refused(opened, COMPLETIONS, body, 415, headers=headers)["code"] == "unsupported_media_type"


BAD_JSON = {
    "16 no UTF-8": b'{"prompt":"\xff\xfe"}',
    "16 a lone surrogate": b'{"prompt":"\\ud800"}',
    "16 NaN": b'{"prompt":[5],"temperature":NaN}',
    "16 an infinite number": b'{"prompt":[5],"temperature":1e999}',
    "16 no object": b"[1]",
    "16 nothing": b"",
    "16 a number of 5,000 digits": b'{"prompt":[5],"seed":' + b"9" * 5000 + b"}",
    "17 JSON of 10,000 levels": b'{"metadata":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "17 content of 10,000 levels": b'{"messages":[{"role":"user","content":'
    + b"[" * 10_000
    + b"]" * 10_000
    + b"}]}",
    "18 n of 2^31": b'{"prompt":[5],"n":2147483648}',
    "18 n of 10^30": b'{"prompt":[5],"n":1000000000000000000000000000000}',
    "18 a long stop string": json.dumps({"prompt": [5], "stop": "x" * 90_000}).encode(),
    "18 many stop strings": json.dumps({"prompt": [5], "stop": ["x"] * 5_000}).encode(),
    "18 a large logit_bias": json.dumps(
        {"prompt": [5], "logit_bias": dict.fromkeys(range(6000), 1)}
    ).encode(),
    "18 too many prompts": json.dumps({"prompt": [[5]] * 3000}).encode(),
    "22 a schema": b'{"prompt":[5],"structured_outputs":{"json":"{"}}',
    "22 a schema of 9,000 levels": b'{"prompt":[5],"guided_json":' + b'{"a":' * 9000 + b"1" + b"}" * 9001,
    "23 a regex": b'{"prompt":[5],"structured_outputs":{"regex":""}}',
    "24 choices": json.dumps({"prompt": [5], "guided_choice": list(map(str, range(5000)))}).encode(),
}


def bad_json(body: bytes) -> Fault:
    def ask(opened: RunningServer) -> None:
        path = CHAT if b"messages" in body else COMPLETIONS
        refused(opened, path, body)

    return ask


FAULTS |= {name: bad_json(body) for name, body in BAD_JSON.items()}


@fault("16 a key twice")
def _(opened):
    answer = opened.post(COMPLETIONS, b'{"prompt":[5],"max_tokens":3,"max_tokens":1}')
    assert answer.json()["usage"]["completion_tokens"] in (1, 3)


@fault("18 a body beyond the limit")
def _(opened):
    assert refused(opened, COMPLETIONS, b" " * (BODY_BYTES + 1), 413)["code"] == "request_too_large"


@fault("10 headers beyond the limit")
def _(opened):
    for headers in (["x: " + "y" * 20_000], [f"x{i}: y" for i in range(101)]):
        data = exchange(opened, request_bytes(COMPLETIONS, SHORT, *headers))
        assert answers(data) == [431]


@fault("10 no HTTP")
def _(opened):
    for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        assert answers(exchange(opened, data)) == [400]


@fault("39 an adapter that is not loaded")
def _(opened):
    body = SHORT | {"model": "base:adapter"}
    assert refused(opened, COMPLETIONS, body, 404)["code"] == "model_not_found"


# ---- parts that fail


@fault("20 a template that raises")
def _(opened):
    body = {"messages": [{"role": "robot", "content": "x"}]}
    assert refused(opened, CHAT, body)["param"].startswith("messages")


@fault("21 a tokenizer that raises")
def _(opened):
    tokenizer = opened.llm.tokenizer
    tokenizer.encode, kept = _raise, tokenizer.encode
    try:
        assert "fault" in refused(opened, COMPLETIONS, {"prompt": "x"}, 500)["message"]
    finally:
        tokenizer.encode = kept


def _raise(*given, **named):
    raise ZeroDivisionError("a secret of the tokenizer")


@fault("25 a fault of the engine in one request")
def _(opened):
    body = SHORT | {"prompt": [5, FAULT_TOKEN]}
    error = refused(opened, COMPLETIONS, body, 500)
    assert error["type"] == "server_error" and "secret" not in error["message"]
    text = opened.post(COMPLETIONS, body | {"stream": True}).text
    last = [line for line in text.split("\n\n") if line.startswith("data: ")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error" and "[DONE]" not in text


@fault("32 an event loop that is blocked")
def _(opened):
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "seed": 1}
    plain = opened.post(COMPLETIONS, body).json()["choices"][0]["text"]
    opened.loop.call_soon_threadsafe(lambda: opened.loop.call_later(0.02, time.sleep, 0.3))
    told = events(opened.post(COMPLETIONS, body | {"stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == plain


@fault("33 no more descriptors")
def _(opened):
    clients = [socket.socket() for _ in range(20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd") if name.isdecimal())
    fillers = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for client in clients:
            client.connect(("127.0.0.1", opened.port))
        wait_for(lambda: opened.errors)  # asyncio reports that it cannot accept, and tries again after 1 s
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
        for client in clients:
            client.close()
    opened.call(asyncio.sleep(0))  # asyncio reports each connection of the backlog
    assert {type(context["exception"]) for context in opened.errors} == {OSError}
    opened.errors.clear()


@fault("36 a clock that jumps")
def _(opened):
    body = {"prompt": [5, 6, 7], "max_tokens": 50, "seed": 1}
    plain = opened.post(COMPLETIONS, body).json()["choices"][0]["text"]
    real = time.time
    jumps = iter([0, 7200, -7200] * 10_000)
    time.time = lambda: real() + next(jumps)
    try:
        headers = {"x-request-timeout-ms": "60000"}
        told = events(opened.post(COMPLETIONS, body | {"stream": True}, headers=headers).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in told) == plain
    finally:
        time.time = real


@fault("37 one request_id twice")
def _(opened):
    found = []

    def ask() -> None:
        found.append(opened.post(COMPLETIONS, SHORT | {"max_tokens": 50, "request_id": "same"}).json())

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer["usage"]["completion_tokens"] for answer in found] == [50, 50]


@fault("a deadline that passes")
def _(opened):
    headers = {"x-request-timeout-ms": "100"}
    opened.llm.driver.gate.clear()
    try:
        assert refused(opened, COMPLETIONS, SHORT, 504, headers=headers)["code"] == "deadline_exceeded"
        text = opened.post(COMPLETIONS, STREAM, headers=headers).text
        assert '"code":"deadline_exceeded"' in text and "[DONE]" not in text
    finally:
        opened.llm.driver.gate.set()
    assert refused(opened, COMPLETIONS, SHORT, 504, headers={"x-request-timeout-ms": "0"})
    assert refused(opened, COMPLETIONS, SHORT, 400, headers={"x-request-timeout-ms": "-1"})


@pytest.mark.parametrize("name", sorted(FAULTS, key=lambda name: (len(name.split()[0]), name)))
def test_fault(shared, name):
    before = sockets()
    FAULTS[name](shared)
    check_nothing_is_left(shared, before)


# ---- faults that need a server of their own


def test_8_a_reader_that_stops_loses_its_stream(own):
    opened = own(FakeLLM(step_s=0.0), max_pending_tokens=64, limits=Limits(write_stall_s=1.0))
    driver = opened.llm.driver
    before = sockets()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", opened.port))
        connection.sendall(request_bytes(COMPLETIONS, STREAM | {"logprobs": 20, "n": 16}))
        wait_for(lambda: driver.aborted)
        opened.check_serves()
        wait_for(lambda: opened.connections() == 0)
    check_nothing_is_left(opened, before)


def test_8_a_reader_that_stops_near_the_end_loses_its_connection(own, monkeypatch):
    """The rest of the answer is below the limit at which the server stops writing."""
    made = LimitedProtocol.connection_made

    def with_large_limit(self, transport):
        made(self, transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(high=1 << 30)

    monkeypatch.setattr(LimitedProtocol, "connection_made", with_large_limit)
    opened = own(FakeLLM(step_s=0.0), limits=Limits(write_stall_s=0.2))
    before = sockets()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", opened.port))
        connection.sendall(request_bytes(COMPLETIONS, STREAM | {"logprobs": 20, "n": 16}))
        wait_for(lambda: opened.connections() == 1)
        wait_for(lambda: opened.connections() == 0)
    check_nothing_is_left(opened, before)


def test_9_10_slow_bodies_and_headers_end(own):
    opened = own(limits=Limits(body_s=1.0, header_s=1.0))
    before = sockets()
    assert answers(exchange(opened, request_bytes(COMPLETIONS, SHORT)[:-5])) == [408]
    assert answers(exchange(opened, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")) == [408]
    assert answers(exchange(opened)) == [408]
    check_nothing_is_left(opened, before)


def test_11_connections_have_a_limit(own):
    opened = own(limits=Limits(connections=8))
    before = sockets()
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(opened.connect()) for _ in range(8)]
        wait_for(lambda: opened.connections() == 8)
        for _ in range(20):
            data = exchange(opened)
            assert answers(data) == [503] and b"retry-after" in data
        for connection in first:
            connection.sendall(request_bytes(COMPLETIONS, SHORT, "connection: close"))
            assert answers(read_to_end(connection)) == [200]
    check_nothing_is_left(opened, before)


@pytest.mark.parametrize("template", ["{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**9 }}"])
def test_19_a_template_that_does_not_end(own, template):
    opened = own(FakeLLM(chat_template=template))
    before = sockets()
    refused(opened, CHAT, {"messages": HELLO})
    check_nothing_is_left(opened, before)


def test_26_a_full_queue_says_when_to_come_back(own):
    opened = own(FakeLLM(max_waiting=1))
    before = sockets()
    opened.llm.driver.gate.clear()
    waiting = threading.Thread(target=opened.post, args=(COMPLETIONS, SHORT))
    waiting.start()
    wait_for(lambda: opened.llm.driver.submitted)
    full = opened.post(COMPLETIONS, SHORT)
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["type"] == "rate_limit_error"
    opened.llm.driver.gate.set()
    waiting.join()
    check_nothing_is_left(opened, before)


@pytest.mark.parametrize("timeout_s", [30.0, 0.0])
def test_27_a_drain_ends_streams_in_order(own, timeout_s):
    opened = own()
    driver = opened.llm.driver
    driver.gate.clear()
    texts = []
    body = STREAM | {"max_tokens": 40}
    asking = threading.Thread(target=lambda: texts.append(opened.post(COMPLETIONS, body).text))
    asking.start()
    wait_for(lambda: driver.submitted)
    draining = threading.Thread(target=lambda: opened.call(opened.served.drain(timeout_s)))
    draining.start()
    wait_for(lambda: opened.served.draining)
    error = refused(opened, COMPLETIONS, SHORT, 503)
    assert error["code"] == "server_shutting_down"
    assert opened.get("/health/ready").status_code == 503 and opened.get("/health/live").status_code == 200
    if timeout_s:
        driver.gate.set()
    draining.join()
    asking.join()
    driver.gate.set()
    if timeout_s:
        assert events(texts[0])[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert '"code":"server_shutting_down"' in texts[0] and "[DONE]" not in texts[0]
    opened.check_idle()


def test_29_the_engine_dies_within_a_stream(own):
    opened = own(FakeLLM(step_s=0.01))
    texts = []
    asking = threading.Thread(target=lambda: texts.append(opened.post(COMPLETIONS, STREAM).text))
    asking.start()
    wait_for(lambda: opened.llm.driver.steps > 2)
    opened.llm.driver.die(MemoryError("a secret of the device"))
    asking.join()
    assert '"type":"server_error"' in texts[0] and "[DONE]" not in texts[0] and "secret" not in texts[0]
    for path in ("/health", "/health/live", "/health/ready"):
        assert opened.get(path).status_code == 503
    opened.check_idle()


def test_30_a_hung_engine_is_not_live_until_it_advances(own):
    opened = own()
    opened.operations.health._stall_s = 0.2
    before = sockets()
    opened.llm.driver.gate.clear()
    asking = threading.Thread(target=opened.post, args=(COMPLETIONS, SHORT))
    asking.start()
    wait_for(lambda: opened.get("/health/live").status_code == 503)
    assert opened.get("/health/ready").status_code == 503
    opened.llm.driver.gate.set()
    asking.join()
    wait_for(lambda: opened.get("/health/live").status_code == 200)
    check_nothing_is_left(opened, before)


def test_a_model_that_loads_is_refused_with_a_delay():
    with running_server(load=False) as opened:
        for path, body in ((COMPLETIONS, SHORT), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "x"})):
            answer = opened.post(path, body)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_loading"
            assert int(answer.headers["retry-after"]) >= 1
        assert opened.get("/v1/models").status_code == 503
        assert opened.get("/health/startup").status_code == 503
        assert opened.get("/health/live").status_code == 200


WAYS = {
    "a stream": STREAM,
    "a plain request": LONG,
    "two prompts": STREAM | {"prompt": [[5, 6], [7, 8]]},
    "four choices": LONG | {"n": 4},
}


@pytest.mark.parametrize("body", WAYS.values(), ids=WAYS)
def test_a_caller_that_leaves_frees_its_pages_within_two_steps(own, body):
    opened = own(FakeLLM(step_s=0.5))
    driver = opened.llm.driver
    with opened.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, body))
        wait_for(lambda: driver.steps >= 1)
        steps = driver.steps
    wait_for(lambda: driver.aborted)
    assert driver.steps - steps <= 2
    opened.check_idle()

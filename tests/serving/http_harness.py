"""An HTTP server of a fake model on a thread of its own, and ways to ask it."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
from fake_llm import PAGES, TEMPLATE, FakeLLM

from serving.frontend.access import BearerTokens
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.http.app import HttpApp
from serving.http.batch_mount import BatchConfig, batch_routes, open_batches
from serving.http.endpoints import Endpoints
from serving.http.limits import Limits
from serving.http.server import HttpServer
from serving.operations import Operations

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Once upon a time there was a dog."}]


class RunningServer:
    """A served model behind a `HttpServer`. `call` runs a coroutine on the server's event loop."""

    def __init__(self, llm: Any, *, limits: Limits | None = None, load: bool = True, app=None, **settings):
        self.llm = llm
        self.limits = limits or Limits()
        self.served = ServedModel(ServerConfig(**settings))
        self.operations = Operations(self.served)
        self.endpoints = Endpoints(self.served)
        self.app = app or {}
        self._load = load
        self.loop = asyncio.new_event_loop()
        self.errors: list[dict] = []
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def open(self) -> None:
        self._thread.start()
        self.call(self._start())

    async def _start(self) -> None:
        app = HttpApp(
            self.endpoints,
            self.operations,
            BearerTokens(self.served.config.auth_tokens),
            limits=self.limits,
            **{"more_routes": batch_routes(None), **self.app},
        )
        self.server = HttpServer(app, self.served.config, 0, self.limits)
        await self.server.start()
        if self._load:
            await self.served.serve(self.llm)

    def close(self) -> None:
        self.call(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        self.llm.close()

    def call[T](self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any = None, **more) -> httpx.Response:
        with httpx.Client(timeout=60, verify=False) as client:  # no certificates are read
            if isinstance(body, bytes):
                headers = {"content-type": "application/json", **more.pop("headers", {})}
                return client.post(self.url + path, content=body, headers=headers, **more)
            return client.post(self.url + path, json=body, **more)

    def get(self, path: str, **more) -> httpx.Response:
        with httpx.Client(timeout=60, verify=False) as client:  # no certificates are read
            return client.get(self.url + path, **more)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def connections(self) -> int:
        return len(self.server._state.connections)

    def check_idle(self) -> None:
        """Nothing runs, all pages are free, and no task is left."""
        driver = self.llm.driver
        wait_for(lambda: driver.stats().kv_pages_free == PAGES)
        wait_for(lambda: not self.server._state.tasks)
        assert self.errors == []

    def check_serves(self) -> None:
        answer = self.post(COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3


@contextlib.contextmanager
def running_server(llm: Any = None, **settings) -> Iterator[RunningServer]:
    """A running server; by default of a fake model with a chat template."""
    opened = RunningServer(llm or FakeLLM(chat_template=TEMPLATE), **settings)
    opened.open()
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def running_batches(llm: Any, folder: Path, name: str = "fake") -> Iterator[RunningServer]:
    """A running server of a model called `name` that runs the batches of a folder."""
    opened = RunningServer(llm)
    opened._thread.start()

    async def mounted():
        found = open_batches(BatchConfig(folder), opened.endpoints, opened.operations, name)
        assert found is not None
        opened.app["more_routes"] = batch_routes(found)
        await opened._start()
        found.start()
        return found

    batches = opened.call(mounted())
    try:
        yield opened
    finally:
        opened.call(batches.close())
        opened.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for `condition`. Fail after `timeout_s`; the timeout only ends a broken test."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def request_bytes(path: str, body: Any, *headers: str, method: str = "POST") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(data)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_to_end(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


def events(text: str) -> list[dict]:
    """Return the data of a complete stream, without the `[DONE]` at its end."""
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines[:3]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

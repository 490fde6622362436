"""A served fake model, without a server."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import time

import uvicorn
from fake_llm import FakeLLM
from starlette.applications import Starlette

from jaxflow.request import Finished, SamplingParams
from serving.operations import Operations, routes


@dataclasses.dataclass
class State:
    llm: FakeLLM
    loaded: bool = True
    draining: bool = False


class Box:
    def __init__(self):
        self.ended = threading.Event()

    def post(self, events):
        if any(isinstance(event, Finished) for event in events):
            self.ended.set()


def submit(llm: FakeLLM) -> Box:
    box = Box()
    llm.driver.submit(llm.request([5, 6], SamplingParams(max_tokens=2), request_id="one"), box)
    return box


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def in_loop(test):
    """Run a coroutine function as a test."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


@contextlib.contextmanager
def http_server(operations: Operations):
    """The routes of operation on a port of the system's choice, on a thread. Yields the port."""
    app = Starlette(routes=routes(operations))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)

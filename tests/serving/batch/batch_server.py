"""An HTTP server of `/v1/files` and `/v1/batches` over a fake engine, on a thread
with an event loop of its own.
"""

import asyncio
import contextlib
import threading
from pathlib import Path

import uvicorn
from batch_fakes import FakeEndpoints, check
from starlette.applications import Starlette
from starlette.requests import Request

from serving.batch.batches import Batches, BatchModel
from serving.batch.input_file import FileLimits
from serving.batch.routes import routes
from serving.batch.store import Store, StoreLimits
from serving.batch.window import Window


def caller_name(request: Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ")


class BatchServer:
    """A server that runs inside the `with` block. `url` is the base of OpenAI's clients.

    kill: ends the server without ending its batches in order, as far as one process can.
    """

    def __init__(
        self, folder: Path, endpoints: FakeEndpoints, *, limits=None, store_limits=None, window: int = 8
    ):
        self.endpoints = endpoints
        self._folder, self._window = folder, window
        self._limits: FileLimits = limits or FileLimits()
        self._store_limits: StoreLimits | None = store_limits
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.error: BaseException | None = None

    def __enter__(self) -> "BatchServer":
        self._thread.start()
        assert self._ready.wait(30)
        if self.error is not None:
            raise self.error
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        try:
            store = Store(self._folder, self._store_limits)
        except Exception as error:
            self.error = error
            self._ready.set()
            return
        model = BatchModel("fake", self.endpoints, check)
        self.batches = Batches(store, model, Window(self._window), priority=7, limits=self._limits)
        self.batches.start()
        app = Starlette(routes=routes(self.batches, caller_name=caller_name, limits=self._limits))
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        self._ready.set()
        await task
        await self.batches.close()
        assert self.endpoints.running == 0
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)

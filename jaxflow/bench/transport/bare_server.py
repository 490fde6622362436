"""A server of uvicorn alone, which answers with given bytes. No server on uvicorn is faster.

  python -m jaxflow.bench.transport.bare_server CORE CHUNKS PLAIN CHUNK

CORE is the number of a CPU core, or -1 for any. A request whose body holds `"stream":true` is answered with
CHUNKS times the text CHUNK, a chunk each time the event loop comes around. Any other request is answered with
the text PLAIN. The command prints the port, and ends when its standard input ends.
"""

import asyncio
import os
import socket
import sys

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config, Server

BACKLOG = 2048


def application(chunks: int, plain: bytes, chunk: bytes) -> ASGIApp:
    """Return the ASGI application."""
    length = (b"content-length", str(len(plain)).encode())

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if b'"stream":true' not in body:
            headers = [(b"content-type", b"application/json"), length]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": plain})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer


async def serve(app: ASGIApp) -> None:
    """Serve until the standard input ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    config = Config(app, http="httptools", ws="none", lifespan="off", log_level="critical", access_log=False)
    server = Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    print(listener.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


def main(core: int, chunks: int, plain: str, chunk: str) -> None:
    """Run the server on one core."""
    if core >= 0:
        os.sched_setaffinity(0, {core})
    uvloop.run(serve(application(chunks, plain.encode(), chunk.encode())))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

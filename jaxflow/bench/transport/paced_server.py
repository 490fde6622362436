"""The HTTP server of a paced engine, in a process of its own that uses one core.

  python -m jaxflow.bench.transport.paced_server CORE ROWS STEP_S

CORE is the number of a CPU core, or -1 for any. The command prints the port, and ends when its standard input
ends. For each line of its standard input it prints `PacedDriver.first_tokens` as JSON.
"""

import asyncio
import json
import os
import sys

import uvloop

from jaxflow.bench.transport.paced_engine import PacedLLM
from jaxflow.engine.heap import freeze_heap
from serving.__main__ import raise_file_limit
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.http.config import HttpConfig
from serving.http.endpoints import Endpoints
from serving.operations import Operations

SWITCH_S = 0.0005  # the interval of `serving.__main__`


async def serve(rows: int, step_s: float) -> None:
    """Serve until the standard input ends."""
    sys.setswitchinterval(SWITCH_S)
    llm = PacedLLM(rows, step_s)
    served = ServedModel(ServerConfig())
    operations = Operations(served)
    server = HttpConfig(port=0).server(Endpoints(served), operations)
    await server.start()
    await served.serve(llm)  # type: ignore[arg-type]  # of the same shape
    watching = asyncio.create_task(operations.run())
    freeze_heap()  # as `serving.__main__` does before the first request
    print(server.port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(llm.driver.first_tokens), flush=True)
    watching.cancel()
    await server.stop()
    llm.close()


def main(core: int, rows: int, step_s: float) -> None:
    """Run the server on one core."""
    if core >= 0:
        os.sched_setaffinity(0, {core})
    raise_file_limit()
    uvloop.run(serve(rows, step_s))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

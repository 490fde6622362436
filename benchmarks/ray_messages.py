"""Compare two ways of tokens from a Ray actor to the router: one message a step,
and a Ray Serve stream a request.

  pip install "ray[serve]>=2.60,<3"
  python -m benchmarks.ray_messages --output_json benchmarks/cpu/engine/ray-messages.json

No engine runs: the actor makes the events of a step at once. `serving.cluster` polls an actor,
and one answer has the events of all requests. Ray Serve's handle opens a stream for each
request, and each token is a message.
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]
except ImportError:
    sys.exit('error: this command needs pip install "ray[serve]>=2.60,<3"')

from pallas_kernels.measure.provenance import provenance

AGENT_TIMEOUT_MS = "120000"  # a busy machine takes longer than Ray's 15 s to start Ray


class Engine:
    """An engine without work. A step makes one token of each stream."""

    async def step(self, streams: int) -> list[tuple[int, int]]:
        """Return the events of one step: (stream, token)."""
        return [(stream, 7) for stream in range(streams)]

    async def stream(self, tokens: int):
        """Yield the tokens of one stream."""
        for _ in range(tokens):
            yield 7
            await asyncio.sleep(0)


async def polled(actor: Any, streams: int, tokens: int) -> int:
    """Take the streams' tokens, one message a step. Return their number."""
    return sum([len(await actor.step.remote(streams)) for _ in range(tokens)])


async def streamed(handle: Any, streams: int, tokens: int) -> int:
    """Take the streams' tokens, a message each. Return their number."""

    async def one() -> int:
        return sum([1 async for _ in handle.options(stream=True).stream.remote(tokens)])

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


async def measure(work: Callable[[], Coroutine[Any, Any, int]]) -> dict[str, float]:
    """Return tokens/s, and the milliseconds of this process's CPU for 1,000 tokens."""
    cpu_s, start_s = time.process_time(), time.perf_counter()
    tokens = await work()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return {"tokens_per_s": tokens / seconds, "cpu_ms_per_1000_tokens": 1e6 * cpu_s / tokens}


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both ways, in turns: medians and runs."""
    actor = ray.remote(Engine).options(max_concurrency=16).remote()  # type: ignore[attr-defined]
    handle = serve.run(serve.deployment(Engine, max_ongoing_requests=4 * args.streams).bind())
    ways = {
        "message_a_step": lambda: polled(actor, args.streams, args.tokens),
        "serve_stream_a_request": lambda: streamed(handle, args.streams, args.tokens),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for work in ways.values():
        await work()
    for _ in range(args.runs):
        for name, work in ways.items():
            runs[name].append(await measure(work))
    return {
        name: {figure: statistics.median(run[figure] for run in found) for figure in found[0]}
        | {"runs": found}
        for name, found in runs.items()
    }


def main() -> None:
    """Measure both ways and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="Of each stream.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output_json", type=Path, help="File of the report.")
    args = parser.parse_args()
    report: dict[str, Any] = {"command_name": "ray_messages"}
    report |= provenance(shlex.join(["python", "-m", "benchmarks.ray_messages", *sys.argv[1:]]))
    report["versions"] |= {"ray": ray.__version__}
    report |= {"cpu_cores": os.cpu_count(), "streams": args.streams, "tokens": args.tokens}
    before = os.getloadavg()[0]
    os.environ.setdefault("RAY_agent_register_timeout_ms", AGENT_TIMEOUT_MS)
    ray.init(address="local", log_to_driver=False, include_dashboard=False)
    serve.start(proxy_location="Disabled")
    found = asyncio.run(compare(args))
    report |= found | {"load_average": [before, os.getloadavg()[0]]}
    print(json.dumps(found, indent=1))
    if args.output_json:
        args.output_json.write_text(json.dumps(report, indent=1) + "\n")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

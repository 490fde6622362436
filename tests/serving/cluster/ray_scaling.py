"""Measure the lines a second of a batch over Ray, with one and with eight simulated engines.

  python tests/serving/cluster/ray_scaling.py --output_json benchmarks/cpu/engine/ray-batch.json

A simulated engine has 8 slots, and each of its steps takes 50 ms by sleeping. All runs answer the same file
through a journal. The clock runs from the first line, with all engines loaded, until the output file is
written: ramp-up and tail count. Needs Ray, and PYTHONPATH with the repository, tests, tests/serving and
tests/serving/cluster.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray_batch

from jaxflow.bench.report import machine
from serving.batch.file_batch import open_batch
from serving.batch.window import Window
from serving.cluster.batch_replicas import BatchReplicas
from serving.cluster.wanted import WantedReplicas
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.http.endpoints import Endpoints

STEP_S, SEQUENCES = 0.05, 8
FEWEST_TOKENS, MOST_TOKENS = 5, 15
REPLICAS = (8, 1)


def write_input(path: Path, lines: int) -> int:
    """Write the input, and return the number of its output tokens."""
    draw = random.Random(0)
    tokens = [draw.randint(FEWEST_TOKENS, MOST_TOKENS) for _ in range(lines)]
    with open(path, "w") as file:
        for number, count in enumerate(tokens):
            prompt = [3 + draw.randrange(290) for _ in range(32)]
            body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "seed": number}
            line = {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return sum(tokens)


@contextlib.asynccontextmanager
async def started(cluster, number: int):
    """Replicas that are all ready."""
    replicas = BatchReplicas(WantedReplicas(number, ray_batch.CONFIG), cluster.launch)
    try:
        await replicas.start()
        while len(replicas.process_ids) < number:
            await asyncio.sleep(0.1)
        yield replicas
    finally:
        await replicas.close()


async def seconds_of(source: Path, replicas: BatchReplicas, number: int) -> float:
    """Return the seconds of one batch."""
    with tempfile.TemporaryDirectory() as folder:
        endpoints = Endpoints(ServedModel(ServerConfig()))
        begun = time.perf_counter()
        batch = open_batch(source, Path(folder) / "journal", "fake", endpoints.check)
        try:
            await batch.run(replicas, Window(number * replicas.window))
            batch.write(Path(folder) / "out")
            assert batch.journal.num_finished == batch.source.num_requests and not batch.journal.num_failed
        finally:
            batch.close()
        return time.perf_counter() - begun


async def measure(
    cluster, source: Path, lines: int, runs: int, save: Callable[[dict[str, Any]], None]
) -> None:
    """Run the batch with each number of replicas in turns. Save the figures so far after each turn."""
    seconds: dict[int, list[float]] = {number: [] for number in REPLICAS}
    async with contextlib.AsyncExitStack() as stack:
        pools = {number: await stack.enter_async_context(started(cluster, number)) for number in REPLICAS}
        for _ in range(runs):
            for number, replicas in pools.items():
                seconds[number].append(await seconds_of(source, replicas, number))
                print(f"{number} replicas: {lines / seconds[number][-1]:.1f} lines/s", flush=True)
            medians = {number: statistics.median(found) for number, found in seconds.items()}
            rows = [
                {"replicas": number, "seconds": seconds[number], "lines_per_s": lines / medians[number]}
                for number in REPLICAS
            ]
            save({"runs": rows, "speedup": medians[1] / medians[8]})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1280)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output_json")
    given = parser.parse_args()
    loading = functools.partial(ray_batch.load, step_s=STEP_S, sequences=SEQUENCES)
    cluster = ray_batch.connect(sum(REPLICAS), loading)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "in.jsonl"
            tokens = write_input(source, given.lines)
            workload = {
                "lines": given.lines,
                "output_tokens": tokens,
                "step_s": STEP_S,
                "sequences": SEQUENCES,
            }
            told = machine.describe() | {"command": shlex.join(["python", *sys.argv])}
            head = {"command_name": "ray_batch", **told, "workload": workload}

            def save(found: dict[str, Any]) -> None:
                load = {"load_average": os.getloadavg()}
                machine.keep(given.output_json, head | load | found)
                print(f"8 replicas answer {found['speedup']:.2f} times the lines of one", flush=True)

            asyncio.run(measure(cluster, source, given.lines, given.runs, save))
    finally:
        cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Throughput of a batch file with its journal, and of `LLM.generate`, in turns over
the same prompts in one engine.

  python -m jaxflow.bench batch --model llama-3.1-8b --load_format dummy --input_len 1024 --output_len 512

A batch's time begins with the check of the input file, and ends when the output file is on disk. The file and
the journal are in --folder. Sampling is greedy, end tokens are ignored, and prompts are random token ids.
Prefix caching is off by default. `ratio` is the quotient of the median throughputs. `batch_rss_growth_bytes`
is the growth of the process's resident memory over each batch. `resume_s` begins with the check of the input
file of a batch with half of the answers, and ends when the engine has a line.
"""

import asyncio
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench.engine.throughput import head
from jaxflow.bench.report import machine
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.lengths import Item
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.heap import freeze_heap
from jaxflow.llm import LLM
from jaxflow.request import SamplingParams
from serving.batch.file_batch import FileBatch, open_batch
from serving.batch.journal import AnsweredLine, Journal
from serving.batch_command import run_lines
from serving.batch_engine import LocalEngine
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.http.endpoints import Endpoints

SOURCE, JOURNAL, OUTPUT = "in.jsonl", "journal", "out.jsonl"  # names in the folder of a batch


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False)
    options.define_workload()
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_integer("turns", 3, "Runs of each of the two ways.", lower_bound=1)
    flags.DEFINE_string("folder", None, "Folder for the files of the batches. Default: a temporary one.")


def measure(
    llm: LLM,
    items: Sequence[Item],
    folder: Path,
    *,
    turns: int = 1,
    seed: int = 0,
    on_turn: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Return the seconds and the tokens per second of both ways, and their ratio.

    A batch and `LLM.generate` take turns, and the order alternates. `on_turn` gets the result of the turns so
    far.

    Raises:
      RuntimeError: a line of a batch has an error.
    """
    prompts = workload.prompts(items, llm.model_config.vocab_size, seed)
    tokens = sum(item.prompt_tokens + item.output_tokens for item in items)
    seconds: dict[str, list[float]] = {"generate": [], "batch": []}
    grown: list[int] = []
    power: list[dict[str, Any] | None] = []
    for turn in range(turns):
        for way in ("generate", "batch") if turn % 2 == 0 else ("batch", "generate"):
            with machine.watch(llm.engine_config.parallel.devices) as readings:
                if way == "generate":
                    seconds[way].append(_generate(llm, items, prompts))
                else:
                    write_input(folder / str(turn), items, prompts)
                    with MemoryGrowth() as memory:
                        seconds[way].append(_batch(llm, folder / str(turn)))
                    grown.append(memory.bytes)
            power.append(machine.power_summary(readings))
            result = _result(llm, seconds, tokens) | {"batch_rss_growth_bytes": grown, "power": power}
            on_turn(result)
    return result | {"resume_s": resume_seconds(llm, folder / "0")}


def _result(llm: LLM, seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Return the rates of the turns so far. The ratio is None before both ways had a turn."""
    rates = {way: tokens / statistics.median(each) if each else None for way, each in seconds.items()}
    batch, generate = rates["batch"], rates["generate"]
    return {
        "seconds": seconds,
        "total_tokens": tokens,
        "total_token_throughput": rates,
        "ratio": batch / generate if batch and generate else None,
        "tokenizer": llm.tokenizer is not None,
    }


class MemoryGrowth:
    """The growth of this process's resident memory above the value at entry, sampled at intervals.

    Attributes:
      bytes: the largest growth seen.
    """

    def __init__(self, interval_s: float = 0.05):
        self.bytes = 0
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "MemoryGrowth":
        self._begin = resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(self._interval_s)
            self.bytes = max(self.bytes, resident_bytes() - self._begin)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def resume_seconds(llm: LLM, folder: Path) -> float:
    """Return the seconds from the start of a resumed batch until the engine runs a line of the batch.

    The resumed batch begins with the answers of the first half of the lines of the finished batch in
    `folder`. Half a batch of one line has no answer.
    """
    endpoints = Endpoints(ServedModel(ServerConfig()))
    finished = open_batch(folder / SOURCE, folder / JOURNAL, llm.name, endpoints.check)
    half = Journal(folder / "half", finished.journal.input)
    try:
        for line, output in itertools.islice(finished.journal.outputs(), finished.journal.num_finished // 2):
            half.append([AnsweredLine(line, False, output)])
    finally:
        half.close()
        finished.close()
    begun = time.perf_counter()
    batch = open_batch(folder / SOURCE, folder / "half", llm.name, endpoints.check)
    try:
        asyncio.run(_run_until_busy(batch, llm))
        return time.perf_counter() - begun
    finally:
        batch.close()


async def _run_until_busy(batch: FileBatch, llm: LLM) -> None:
    """Run a batch until the engine has a request, then cancel the rest."""
    run = asyncio.create_task(run_lines(batch, LocalEngine(llm)))
    while not run.done() and not _requests(llm):
        await asyncio.sleep(0.001)
    run.cancel()
    await asyncio.wait({run})
    while _requests(llm):
        await asyncio.sleep(0.001)


def _requests(llm: LLM) -> int:
    stats = llm.driver.stats()
    return stats.running_requests + stats.waiting_requests


def _generate(llm: LLM, items: Sequence[Item], prompts: Sequence[np.ndarray]) -> float:
    """Return the seconds of `LLM.generate`."""
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=item.output_tokens, ignore_eos=True, seed=0)
        for item in items
    ]
    begun = time.perf_counter()
    llm.generate([ids.tolist() for ids in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - begun


def write_input(folder: Path, items: Sequence[Item], prompts: Sequence[np.ndarray]) -> None:
    """Write the input file of a batch into a new folder."""
    folder.mkdir(parents=True)
    with open(folder / SOURCE, "w", encoding="utf-8") as file:
        for number, (item, ids) in enumerate(zip(items, prompts, strict=True)):
            body = {
                "prompt": ids.tolist(),
                "max_tokens": item.output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "seed": 0,
            }
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def _batch(llm: LLM, folder: Path) -> float:
    """Return the seconds of a batch with the input file in `folder`."""
    begun = time.perf_counter()
    endpoints = Endpoints(ServedModel(ServerConfig()))
    batch = open_batch(folder / SOURCE, folder / JOURNAL, llm.name, endpoints.check)
    try:
        asyncio.run(run_lines(batch, LocalEngine(llm)))
        batch.write(folder / OUTPUT)
        took = time.perf_counter() - begun
        if batch.journal.num_failed:
            raise RuntimeError(f"{batch.journal.num_failed} lines of the batch failed: see {folder / OUTPUT}")
    finally:
        batch.close()
    return took


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, WorkloadError for invalid flags."""
    f = flags.FLAGS
    config = engine_config_from_flags()
    options.check_workload(options.longest(config))
    with LLM.from_config(config) as llm, tempfile.TemporaryDirectory() as temporary:
        wait_until_compiled()
        freeze_heap()
        items, described = options.items_from_flags(llm.max_model_len)
        result = {"command_name": "batch", **head(llm), "workload": described}

        def save(so_far: dict[str, Any]) -> None:
            _print_turns(so_far)
            machine.keep(f.output_json, result | so_far)

        result |= measure(
            llm, items, Path(f.folder or temporary), turns=f.turns, seed=f.workload_seed, on_turn=save
        )
    print("Batch Benchmark Result".center(report.WIDTH, "="))
    for way, rate in result["total_token_throughput"].items():
        print(report.line(f"{way} (total tokens/s):", rate))
    print(report.line("batch / generate:", f"{result['ratio']:.4f}"))
    print(report.line("RSS growth of a batch (MB):", max(result["batch_rss_growth_bytes"]) / 1e6))
    print(report.line("Resume (s):", f"{result['resume_s']:.3f}"))
    return result


def _print_turns(result: dict[str, Any]) -> None:
    rates = {
        way: ", ".join(f"{result['total_tokens'] / each:,.0f}" for each in seconds)
        for way, seconds in result["seconds"].items()
    }
    print(
        "total tokens/s of each turn: " + "; ".join(f"{way} {text}" for way, text in rates.items()),
        flush=True,
    )

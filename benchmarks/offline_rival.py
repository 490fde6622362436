"""The parts that the runners of other offline engines share: flags, requests, the clock and the report.

A runner starts its engine and gives an `Ask`, which makes requests ready for this engine. Its report has the
keys of `bench throughput` that `benchmarks.in_turns` compares.
"""

import argparse
import importlib.metadata
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxflow.bench.engine.throughput import median_of
from jaxflow.bench.report.machine import joules_per_token, power_summary, watch
from jaxflow.bench.report.requests import write_json
from jaxflow.bench.workload import lengths
from jaxflow.bench.workload.lengths import Item

WARM_UP = ((64, 256, 32), (40, 1024, 8))  # requests, prompt tokens, output tokens

# From requests and token ids to a call that answers all of them and returns the tokens of each answer.
Ask = Callable[[Sequence[Item], Sequence[list[int]]], Callable[[], Sequence[int]]]


def module(name: str) -> Any:
    """Return a module of another engine or of PyTorch, which are no dependencies of JaxFlow."""
    return import_module(name)


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests and of the report. Flags of lengths have the names of `bench throughput`."""
    parser.add_argument("--lengths", choices=("constant", "lognormal"), default="constant")
    parser.add_argument("--input_len", type=int, default=1024, help="prompt tokens, or their mean")
    parser.add_argument("--output_len", type=int, default=512, help="output tokens, or their mean")
    parser.add_argument("--trace", help="file with the lengths of requests, .csv or Mooncake's .jsonl")
    parser.add_argument("--trace_filter", choices=tuple(lengths.TRACE_FILTERS), default="auto")
    parser.add_argument(
        "--max_model_len", type=int, default=4096, help="most tokens of a drawn request, prompt and output"
    )
    parser.add_argument("--num_requests", type=int, default=600)
    parser.add_argument("--max_num_seqs", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0, help="of lengths and token ids")
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of the requests in one engine, each with other token ids"
    )
    parser.add_argument("--output_json", type=Path, required=True)


def items_of(given: argparse.Namespace) -> list[Item]:
    """Return the requests that `bench throughput` draws with the same lengths, limits and seed.

    Raises: WorkloadError for a trace that cannot be read or has no such request, and for impossible means.
    """
    number, prompt, output, most = given.num_requests, given.input_len, given.output_len, given.max_model_len
    if given.trace:
        every = lengths.read_trace(given.trace, lengths.TRACE_FILTERS[given.trace_filter])
        return lengths.sample(lengths.fitting(every, most), number, given.seed)
    if given.lengths == "lognormal":
        return lengths.lognormal(
            number, prompt, output, limits=lengths.nanoflow_limits(most), seed=given.seed
        )
    return lengths.constant(number, prompt, output)


def measure(ask: Ask, items: Sequence[Item], vocab_size: int, seed: int) -> dict[str, Any]:
    """Run the items at once and return the figures of `bench throughput`.

    Raises: RuntimeError if an answer has another length.
    """
    answers = ask(items, [prompt.tolist() for prompt in lengths.prompts(items, vocab_size, seed)])
    with watch() as readings:
        begin = time.perf_counter()
        got = answers()
        seconds = time.perf_counter() - begin
    wrong = sum(tokens != item.output_tokens for tokens, item in zip(got, items, strict=True))
    if wrong:
        raise RuntimeError(f"{wrong} of {len(items)} answers have another number of tokens")
    power, output = power_summary(readings), sum(got)
    total = output + sum(item.prompt_tokens for item in items)
    return {
        "duration": seconds,
        "completed": len(items),
        "failed": 0,
        "errors": {},
        "total_token_throughput": total / seconds,
        "output_throughput": output / seconds,
        "joules_per_token": joules_per_token(power, seconds, total),
        "power": power,
    }


def run(
    name: str,
    packages: Sequence[str],
    arguments: Sequence[str],
    given: argparse.Namespace,
    vocab_size: int,
    start: Callable[[], Ask],
    started_with: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Start an engine, warm it up, run the requests and write the report, which is that of the median run.

    name: the runner's module. packages: those whose versions the report holds. given: the parsed `arguments`.
    started_with: returns more figures of the start, once the engine runs.
    """
    items = items_of(given)
    begin = time.perf_counter()
    ask = start()
    for requests, prompt, output in WARM_UP:
        measure(ask, lengths.constant(requests, prompt, output), vocab_size, seed=requests)
    started = time.perf_counter() - begin
    reports = [measure(ask, items, vocab_size, given.seed + i) for i in range(given.repeats)]
    found = median_of(reports)
    head = {
        "command_name": name,
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *arguments]),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "start_s": started,
        **started_with(),
    }
    write_json(given.output_json, head | found)
    print(f"{found['total_token_throughput']:.0f} tokens/s, prompts included", flush=True)

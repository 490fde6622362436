r"""Measure the decode of llama.cpp by its own llama-bench, and write a report
that `benchmarks.in_turns` reads.

    python -m benchmarks.llama_bench --binary llama-bench --model FILE.gguf --threads 2 --output_len 128 \
        --output_json REPORT.json

llama-bench generates the tokens of one sequence from an empty context, as `bench latency --batch_size 1
--input_len 1` does. CMake builds llama-bench from the folder vendor/llama.cpp of the source
distribution of llama-cpp-python.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxflow.bench.report.requests import write_json


def bench_line(binary: str, model: str, threads: int, output_len: int, repetitions: int) -> list[str]:
    """Return the command line of llama-bench: no prompt, `output_len` tokens, results as JSON."""
    numbers = {"-t": threads, "-p": 0, "-n": output_len, "-r": repetitions}
    return [binary, "-m", model, "-o", "json", *(word for flag in numbers.items() for word in map(str, flag))]


def report(found: Sequence[Mapping[str, Any]], output_len: int) -> dict[str, Any]:
    """Return the report of llama-bench's results: tokens per second under the key of `bench latency`.

    Raises: ValueError if there is no result, or several, for `output_len` tokens.
    """
    results = [one for one in found if one["n_gen"] == output_len and one["n_prompt"] == 0]
    if len(results) != 1:
        raise ValueError(f"llama-bench: {len(results)} results of {output_len} tokens: accepted is 1")
    [one] = results
    kept = ("build_commit", "build_number", "cpu_info", "model_type", "model_size", "n_threads", "samples_ts")
    return {"output_throughput": one["avg_ts"], **{key: one[key] for key in kept}}


def main(arguments: Sequence[str]) -> int:
    """Run llama-bench and write the report. Return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--binary", default="llama-bench", help="path of llama-bench")
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output_len", type=int, default=128, help="tokens that are generated")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output_json", type=Path, required=True)
    given = parser.parse_args(arguments)
    line = bench_line(given.binary, given.model, given.threads, given.output_len, given.repetitions)
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    found = report(json.loads(done.stdout), given.output_len)
    write_json(given.output_json, {"command_name": "llama_bench", "command": shlex.join(line), **found})
    print(f"{found['output_throughput']:.1f} tokens/s, {found['model_type']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

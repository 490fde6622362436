"""Run the measurements of pipeline stages, experts, offloading and processes on two or four GPUs of one host.

    python -m benchmarks.run_several --devices 2 --only stages-8b,replica-8b,tensor-8b

Each measurement is one command:
  check-8b          log-probabilities of an engine with stages beside those of the reference engine
  stages-MODEL      throughput of as many stages as devices, at 1024/512
  tensor-MODEL      throughput of tensor parallelism, at 1024/512
  replica-8b        throughput of one device with its share of the requests; N devices make N times it
  policies-8b       bubbles of stages under SARATHI's policies, beside the predicted ones
  MIXTURE-tensor    throughput of qwen3 or mixtral with cut experts
  MIXTURE-whole     the same with whole experts
  MIXTURE-ranks     the same with whole experts and data-parallel attention
  offload-opt       OPT-30B with weights on the host, over stages; FlexGen's Table 3
  followers         host time that process 0 spends for a second process
A report is benchmarks/h200/MODEL/WHAT-DEVICES.json.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.named_commands import add_flags, run_all

FOLDER = Path("benchmarks/h200")
DUMMY = ("--load_format", "dummy")
LENGTHS = ("--input_len", "1024", "--output_len", "512")
FP8 = ("--quantization", "fp8", "--kv_cache_dtype", "fp8")
MIXTURES = {"qwen3": "qwen3-30b-a3b", "mixtral": "mixtral-8x7b"}


def commands(devices: int) -> dict[str, list[str]]:
    """Return the command of each measurement on so many devices, without the interpreter."""
    n = str(devices)
    stages, tensor = ("--pipeline_parallel_size", n), ("--tensor_parallel_size", n)
    check = ["-m", "benchmarks.check_engine", "--layers", n, *stages]
    found = {
        "check-8b": _to("llama-3.1-8b", f"check-engine-pp{n}", check, "--model", "llama-3.1-8b"),
        "stages-8b": _throughput("llama-3.1-8b", f"stages-pp{n}", 300 * devices, 640, *stages),
        "tensor-8b": _throughput("llama-3.1-8b", f"stages-tp{n}", 300 * devices, 640, *tensor),
        "replica-8b": _throughput("llama-3.1-8b", "stages-one", 300, 640),
        "stages-70b": _throughput("llama-3-70b", f"stages-fp8-pp{n}", 300 * devices, 1200, *stages, *FP8),
        "tensor-70b": _throughput("llama-3-70b", f"stages-fp8-tp{n}", 300 * devices, 1200, *tensor, *FP8),
        "policies-8b": _to(
            "llama-3.1-8b",
            f"stages-policies-pp{n}",
            ["-m", "jaxflow.bench", "pipeline", *DUMMY, *stages, "--num_requests", "200", "--slots", "32"],
            "--model",
            "llama-3.1-8b",
        ),
        "followers": _to(
            "llama-3.1-8b",
            "followers-tp2",
            [
                "-m",
                "jaxflow.bench",
                "followers",
                *DUMMY,
                "--tensor_parallel_size",
                "2",
                "--batch_size",
                "256",
            ],
            "--input_len",
            "1024",
            "--output_len",
            "256",
            "--model",
            "llama-3.1-8b",
        ),
    }
    for name, model in MIXTURES.items():
        whole = "--enable_expert_parallel"
        ranks = ("--data_parallel_size", n, whole)
        found |= {
            f"{name}-tensor": _throughput(model, f"experts-tp{n}", 400 * devices, 400 * devices, *tensor),
            f"{name}-whole": _throughput(
                model, f"experts-ep{n}", 400 * devices, 400 * devices, *tensor, whole
            ),
            f"{name}-ranks": _throughput(model, f"experts-dp{n}", 400 * devices, 400, *ranks),
        }
    return found


def _throughput(model: str, report: str, requests: int, slots: int, *flags: str) -> list[str]:
    """Return `bench throughput` at 1024/512. slots: `max_num_seqs`, of each data-parallel rank."""
    sizes = ("--num_requests", str(requests), "--max_num_seqs", str(slots), "--max_model_len", "2048")
    line = ["-m", "jaxflow.bench", "throughput", *DUMMY, *LENGTHS, *sizes, *flags]
    return _to(model, report, line, "--model", model)


def _to(model: str, report: str, line: Sequence[str], *flags: str) -> list[str]:
    """Return a command that writes a model's report."""
    return [*line, *flags, "--output_json", str(FOLDER / model / f"{report}.json")]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, required=True, choices=(2, 4))
    add_flags(parser, list(commands(2)))
    given = parser.parse_args(arguments)
    return run_all(given, commands(given.devices))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

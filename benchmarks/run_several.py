"""Run the measurements of pipeline stages, experts, offloading and processes on two or four GPUs of one host.

    python -m benchmarks.run_several --devices 2 --only stages-8b,replica-8b,tensor-8b

Each measurement is one command:
  check-8b             log-probabilities of an engine with stages beside those of the reference engine
  stages-MODEL         throughput of as many stages as devices, at 1024/512
  grid-MODEL           the same of half as many stages of two devices each, on four devices
  tensor-MODEL         throughput of tensor parallelism, at 1024/512
  replica-MODEL        throughput of one device with its share of the requests; N devices make N times it
  busy-8b              busy share of each stage at 1024/512, under SARATHI and Orca-best
  stages-8b-profiled   busy share of each device in a profile at 1024/512
  policies-8b          bubbles of stages at SARATHI's lengths, under SARATHI and Orca-best
  MIXTURE-tensor       throughput of qwen3 or mixtral with cut experts
  MIXTURE-whole        the same with whole experts
  MIXTURE-ranks        the same with whole experts and data-parallel attention
  MIXTURE-ranks-processes  the same with a process for each rank
  MIXTURE-WAY-profiled collectives of the device's time, and the hidden part of them, of each of the three
  qwen3-ranks-nano-batches  qwen3-ranks-profiled with plans of two nano-batches
  qwen3-ranks-sequential    the same requests and step sizes with the sequential plan
  MIXTURE-WAY-staying  throughput and balance with skewed routes, for whole and ranks
  MIXTURE-WAY-moving   the same with `--enable_eplb`
  collectives          the collectives of a mixture layer alone
  offload-opt          OPT-30B with weights on the host, over stages; FlexGen's Table 3
  offload-opt-one      the same on one device
  followers            host time that process 0 spends for a second process
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
RANK_STEPS = ("--step_sizes", "256,512,1024,2048")  # tokens of a rank's steps
FEW_STEPS = ("--step_sizes", "512")  # a world of processes compiles all its steps before it serves
HOST_PROCESSES = ("-m", "benchmarks.host_processes", "--processes")
COPIES = {"qwen3": 16, "mixtral": 1}  # further experts of a device
PIPELINE = (
    *("-m", "jaxflow.bench", "pipeline", *DUMMY),
    *("--tensor_parallel_size", "1", "--policies", "sarathi,orca-best"),
)
HOST_GB = {1: 110, 2: 150, 4: 190}  # host memory of all stages together


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
        "stages-8b-profiled": _profiled("llama-3.1-8b", f"stages-pp{n}", 200 * devices, 640, *stages),
        "stages-70b": _throughput("llama-3-70b", f"stages-fp8-pp{n}", 150 * devices, 1200, *stages, *FP8),
        "tensor-70b": _throughput("llama-3-70b", f"stages-fp8-tp{n}", 150 * devices, 1200, *tensor, *FP8),
        "replica-70b": _throughput("llama-3-70b", "stages-fp8-one", 150, 1200, *FP8),
        "policies-8b": _to(
            "llama-3.1-8b",
            f"stages-policies-pp{n}",
            [*PIPELINE, *stages, "--num_requests", "160", "--slots", "32"],
            *("--model", "llama-3.1-8b", "--repeats", "3", "--step_sizes", "32,256,1024,1536,2048,3072"),
        ),
        "busy-8b": _to(
            "llama-3.1-8b",
            f"stages-busy-pp{n}",
            [*PIPELINE, *stages, "--num_requests", str(320 * devices), "--slots", "160"],
            *("--model", "llama-3.1-8b", "--repeats", "1", "--chunk_tokens", "1024"),
            *("--request_tokens", "1536,1536", "--pd_ratio", "2", "--step_sizes", "64,160,512,1024"),
        ),
        "collectives": _to(
            "kernels",
            f"collectives-of-{n}",
            ["-m", "jaxflow.bench", "collectives", "--data_parallel_size", n],
        ),
        "offload-opt": _offload(devices),
        "offload-opt-one": _offload(1),
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
    if devices == 4:
        grid = ("--pipeline_parallel_size", "2", "--tensor_parallel_size", "2")
        found |= {
            "grid-8b": _throughput("llama-3.1-8b", "stages-pp2-tp2", 1200, 640, *grid),
            "grid-70b": _throughput("llama-3-70b", "stages-fp8-pp2-tp2", 600, 1200, *grid, *FP8),
        }
    ranks = ("--data_parallel_size", n, "--enable_expert_parallel", *RANK_STEPS)
    plans = {"nano-batches": f"benchmarks/plans/h200/qwen3-30b-a3b/dp{n}", "sequential": "sequential"}
    for name, plan in plans.items():
        found[f"qwen3-ranks-{name}"] = _profiled(
            MIXTURES["qwen3"], f"experts-dp{n}-{name}", 200 * devices, 400, *ranks, "--plan", plan
        )
    for name, model in MIXTURES.items():
        whole = "--enable_expert_parallel"
        ways = {
            "tensor": (f"experts-tp{n}", 400 * devices, tensor),
            "whole": (f"experts-ep{n}", 400 * devices, (*tensor, whole)),
            "ranks": (f"experts-dp{n}", 400, ("--data_parallel_size", n, whole)),
        }
        for way, (report, slots, flags) in ways.items():
            found[f"{name}-{way}"] = _throughput(model, report, 400 * devices, slots, *flags)
            found[f"{name}-{way}-profiled"] = _profiled(model, report, 200 * devices, slots, *flags)
            if way == "ranks":
                line = _throughput(model, f"{report}-processes", 400 * devices, slots, *flags, *FEW_STEPS)
                found[f"{name}-{way}-processes"] = [*HOST_PROCESSES, n, *line]
            if way != "tensor":
                copies = str(max(2, COPIES[name] * devices))
                moving = ("--enable_eplb", "--num_redundant_experts", copies)
                found[f"{name}-{way}-staying"] = _skewed(model, f"{report}-staying", devices, slots, *flags)
                found[f"{name}-{way}-moving"] = _skewed(
                    model, f"{report}-moving", devices, slots, *flags, *moving
                )
    return found


def _profiled(model: str, report: str, requests: int, slots: int, *flags: str) -> list[str]:
    """Return `bench throughput` at 512/128, once more under a profiler. slots: as for `_throughput`."""
    sizes = ("--num_requests", str(requests), "--max_num_seqs", str(slots), "--max_model_len", "1024")
    lengths = ("--input_len", "512", "--output_len", "128", "--profiled_seconds", "0.5")
    line = ["-m", "jaxflow.bench", "throughput", *DUMMY, *lengths, *sizes, *flags]
    return _to(model, f"{report}-profiled", line, "--model", model)


def _skewed(model: str, report: str, devices: int, slots: int, *flags: str) -> list[str]:
    """Return `bench skewed_experts` at 512/128. slots: as for `_throughput`."""
    sizes = ("--num_requests", str(200 * devices), "--max_num_seqs", str(slots), "--max_model_len", "1024")
    line = ["-m", "jaxflow.bench", "skewed_experts", *DUMMY, *sizes, *RANK_STEPS, *flags]
    return _to(model, report, line, "--model", model)


def _offload(devices: int) -> list[str]:
    """Return the run of a policy in 16 GB of each device, with the host memory of `HOST_GB`."""
    policy = f"benchmarks/settings/opt-30b-of-{devices}.json"
    limits = ("--machine", "h200", "--gpu_mem", "16", "--cpu_mem", str(HOST_GB[devices]))
    line = ["-m", "search", "offload", "--model", "opt-30b", *limits, "--policies", policy]
    return _to("opt-30b", f"offload-of-{devices}", line)


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

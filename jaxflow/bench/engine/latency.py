"""Latency of one batch of requests in an engine in this process, repeated, as in `vllm bench latency`.

python -m jaxflow.bench latency --model llama-3.1-8b --load_format dummy --batch_size 8 --input_len 32
    --output_len 128
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from jaxflow.bench.engine.throughput import head, time_start, with_optimum
from jaxflow.bench.report import machine
from jaxflow.bench.report import requests as report
from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.drive import drive, greedy_requests
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.engine.heap import freeze_heap
from jaxflow.engine.start_times import describe
from jaxflow.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False)
    options.define_report()
    flags.DEFINE_integer("batch_size", 8, "Requests per batch, submitted at once.", lower_bound=1)
    flags.DEFINE_integer("input_len", 32, "Prompt tokens of each request.", lower_bound=1)
    flags.DEFINE_integer("output_len", 128, "Output tokens of each request.", lower_bound=1)
    flags.DEFINE_integer("num_iters_warmup", 10, "Warm-up batches before the measurement.", lower_bound=0)
    flags.DEFINE_integer("num_iters", 30, "Batches measured.", lower_bound=1)
    flags.DEFINE_integer("workload_seed", 0, "Seed of the random prompts.", lower_bound=0)


def measure(
    llm: LLM,
    batch_size: int,
    input_len: int,
    output_len: int,
    *,
    iterations: int,
    warm_up: int = 0,
    seed: int = 0,
    device: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run batches one after another and return the report without its head.

    Latencies are in seconds, under vLLM's key names. `cpu_seconds` are those of all threads of this process
    in each batch, and `load_average` is the machine's over the minute before the end.
    """
    items = workload.constant(batch_size, input_len, output_len)
    records: list[Record] = []
    latencies: list[float] = []
    cpu_seconds: list[float] = []
    steps = 0
    with machine.watch(llm.engine_config.parallel.devices) as readings:
        for i in tqdm(range(warm_up + iterations), disable=not progress, unit="batch"):
            prompts = workload.prompts(items, llm.model_config.vocab_size, seed + i)
            before, cpu_start = llm.driver.stats().steps, time.process_time()
            done, duration_s = drive(llm.driver, greedy_requests(items, prompts))
            if i >= warm_up:
                records += done
                cpu_seconds.append(time.process_time() - cpu_start)
                latencies.append(duration_s)
                steps += llm.driver.stats().steps - before
    power = machine.power_summary(readings)
    tokens = len(latencies) * batch_size * (input_len + output_len)
    result = (
        report.figures(records, sum(latencies))
        | {"power": power, "joules_per_token": machine.joules_per_token(power, sum(latencies), tokens)}
        | _statistics(latencies)
        | {"cpu_seconds": cpu_seconds, "load_average": os.getloadavg()[0]}
    )
    return result | with_optimum(result, llm, steps, device)


def _statistics(latencies: Sequence[float]) -> dict[str, Any]:
    percentiles = np.percentile(latencies, PERCENTILES).tolist()
    return {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": list(latencies),
        "percentiles": {str(p): value for p, value in zip(PERCENTILES, percentiles, strict=True)},
    }


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, WorkloadError for invalid flags."""
    f = flags.FLAGS
    with LLM.from_config(engine_config_from_flags()) as llm:
        start = time_start(llm)
        freeze_heap()
        if f.input_len + f.output_len > llm.max_model_len:
            raise workload.WorkloadError(
                f"--input_len {f.input_len} plus --output_len {f.output_len}: accepted is a sum of at "
                f"most {llm.max_model_len} tokens"
            )
        items = workload.constant(f.batch_size, f.input_len, f.output_len)
        described = options.describe(items, "batch")
        result = {"command_name": "latency", **head(llm), "start": start, "workload": described}
        result |= measure(
            llm,
            f.batch_size,
            f.input_len,
            f.output_len,
            iterations=f.num_iters,
            warm_up=f.num_iters_warmup,
            seed=f.workload_seed,
            device=f.optimal_device,
            progress=True,
        )
    print(
        report.text(
            "Latency Benchmark Result",
            result,
            {"Model": result["model"], "Requests in a batch": f.batch_size},
        )
    )
    print("Batch".center(report.WIDTH, "-"))
    print(report.line("Avg latency (s):", f"{result['avg_latency']:.4f}"))
    print(report.line("Std latency (s):", f"{result['std_latency']:.4f}"))
    for p, value in result["percentiles"].items():
        print(report.line(f"{p}% percentile latency (s):", f"{value:.4f}"))
    print(describe(result["start"]))
    print(machine.text(result))
    return result

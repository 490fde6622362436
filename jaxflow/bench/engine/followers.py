"""The host time that process 0 spends for its followers in each step, with two processes of this host.

  python -m jaxflow.bench followers --model MODEL --tensor_parallel_size 2

The command starts process 1 itself, and is process 0. Each process has one device. --pipeline_parallel_size 2
measures two stages instead. Each step is recorded for the follower before it is enqueued, and a thread sends
the record while the step runs. The overhead of a batch is the median time of a recording on the engine's
thread, over the median time from step to step. The overhead of the command is the median of its batches. The
report has the processor time of the sending thread as well.
"""

import os
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from jaxflow.bench.report import machine
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.drive import drive, greedy_requests
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.heap import freeze_heap
from jaxflow.engine.recorded_calls import CallRecorder
from jaxflow.llm import LLM
from jaxflow.parallel.links import Followers
from pallas_kernels.nvml import ENGINE_GPUS

PROCESSES = 2


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_integer("batch_size", 64, "Requests at once.", lower_bound=1)
    flags.DEFINE_integer("input_len", 32, "Prompt tokens of each request.", lower_bound=1)
    flags.DEFINE_integer("output_len", 128, "Output tokens of each request.", lower_bound=2)
    flags.DEFINE_integer("num_iters", 3, "Batches measured, after one to warm up.", lower_bound=1)


def arguments(rank: int, coordinator: str) -> dict[str, Any]:
    """Return the settings that make this command's process one of two."""
    return {"coordinator": coordinator, "num_processes": PROCESSES, "process_id": rank}


def local_address() -> str:
    """Return the address of a free port of this host, for a coordinator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def see_one_device(environment: dict[str, str], rank: int, processes: int = PROCESSES) -> None:
    """Let one of several processes see one GPU of those that this process sees, or one device of the CPU.

    Its reports have the watts of the GPUs of all processes.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(processes)))).split(",")
    environment[ENGINE_GPUS] = ",".join(visible[:processes])
    environment["CUDA_VISIBLE_DEVICES"] = visible[rank] if rank < len(visible) else ""
    environment["JAX_NUM_CPU_DEVICES"] = "1"


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError."""
    f = flags.FLAGS
    config = engine_config_from_flags()
    if config.process_id is not None:  # the second process, which this command started
        LLM.from_config(config, progress=False)
        raise AssertionError("a follower returned")
    if config.tensor_parallel_size * config.pipeline_parallel_size != PROCESSES:
        raise ConfigError("tensor_parallel_size", config.tensor_parallel_size, "2: one device a process")
    coordinator, other = local_address(), os.environ.copy()
    see_one_device(other, 1)
    given = [f"--{name}={value}" for name, value in arguments(1, coordinator).items()]
    command = [sys.executable, "-m", "jaxflow.bench", "followers", *_without_report(sys.argv[1:]), *given]
    with subprocess.Popen(command, env=other) as follower:
        try:
            own: dict[str, str] = dict(os.environ)
            see_one_device(own, 0)
            os.environ.update(own)
            jax.config.update("jax_num_cpu_devices", 1)
            for name, value in arguments(0, coordinator).items():
                f[name].value = value
            with LLM.from_config(engine_config_from_flags()) as llm:
                wait_until_compiled()
                freeze_heap()
                result = {"command_name": "followers", "model": llm.name, "processes": PROCESSES} | measure(
                    llm, f.batch_size, f.input_len, f.output_len, f.num_iters
                )
        except BaseException:
            follower.kill()
            raise
    result |= machine.describe()
    print(" Host Time of a Follower ".center(report.WIDTH, "="))
    print(report.line("Steps:", str(result["steps"])))
    print(report.line("Median step (ms):", f"{result['step_ms']:.3f}"))
    print(report.line("Median recording (us):", f"{result['record_us']:.1f}"))
    print(report.line("p99 recording (us):", f"{result['record_p99_us']:.1f}"))
    print(report.line("Sender's CPU a step (us):", f"{result['sender_cpu_us']:.1f}"))
    print(report.line("Bytes of a call:", str(result["call_bytes"])))
    print(report.line("Recording over step:", f"{100 * result['overhead']:.3f} %"))
    return result


def measure(llm: LLM, batch_size: int, input_len: int, output_len: int, iterations: int) -> dict[str, Any]:
    """Return the time of the recordings and of the steps of `iterations` batches, after one to warm up."""
    recorder = llm.executor.recorder
    records: list[float] = []
    sizes: list[int] = []
    assert isinstance(recorder, CallRecorder) and isinstance(recorder.channel, Followers)
    assert recorder.channel.sender.ident is not None
    record, sender = recorder.run, time.pthread_getcpuclockid(recorder.channel.sender.ident)

    def timed(layout: Any, buffer: np.ndarray, *rest: Any) -> None:
        began = time.perf_counter()
        record(layout, buffer, *rest)
        records.append(time.perf_counter() - began)
        sizes.append(buffer.nbytes)

    recorder.run = timed  # type: ignore[method-assign]
    items = workload.constant(batch_size, input_len, output_len)
    batches: list[tuple[list[float], list[float]]] = []  # seconds of the recordings and of the steps
    sending_s = 0.0
    for i in range(1 + iterations):
        prompts = workload.prompts(items, llm.model_config.vocab_size, i)
        llm.driver.log.take()
        records.clear()
        began_s = time.clock_gettime(sender)
        drive(llm.driver, greedy_requests(items, prompts))
        if i > 0:
            sending_s += time.clock_gettime(sender) - began_s
            steps = np.diff([step.read_s for step in llm.driver.log.take()[0]])
            batches.append((records.copy(), steps.tolist()))
    overheads = [float(np.median(recorded) / np.median(steps)) for recorded, steps in batches]
    record_s, step_s = (np.concatenate(each) for each in zip(*batches, strict=True))
    return {
        "steps": len(step_s),
        "step_ms": 1e3 * float(np.median(step_s)),
        "record_us": 1e6 * float(np.median(record_s)),
        "record_p99_us": 1e6 * float(np.percentile(record_s, 99)),
        "sender_cpu_us": 1e6 * sending_s / len(record_s),
        "call_bytes": int(np.median(sizes)),
        "overheads": overheads,
        "overhead": float(np.median(overheads)),
        "overhead_of_all": float(record_s.sum() / step_s.sum()),
    }


def _without_report(given: list[str]) -> list[str]:
    """Return this command's flags without the command's name and the report's file, in either spelling."""
    kept, skip = [], False
    for argument in given:
        if skip:
            skip = False
        elif argument.lstrip("-").replace("-", "_").startswith("output_json"):
            skip = "=" not in argument
        elif argument != "followers":
            kept.append(argument)
    return kept

"""What a run was measured on: device, clock, watts, versions, the command; and what that device could do at
best.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pynvml

from jaxflow.bench.report.requests import line
from jaxflow.config import ModelConfig
from jaxflow.model.cost import DEVICES, dense_parameters, find_device, optimal_throughput
from pallas_kernels.nvml import first_visible

SAMPLE_EVERY_S = 0.2


def _version(package: str) -> str:
    """A package's version; `source` for a checkout that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def need_gpu(command: str) -> None:
    """Raises: ValueError, which names the command, where JAX has no GPU."""
    if jax.default_backend() != "gpu":
        raise ValueError(f"bench {command} needs a GPU: JAX's backend here is {jax.default_backend()!r}")


def describe() -> dict[str, Any]:
    """Device, versions and the command of this process."""
    devices = jax.devices()
    return {
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "versions": {name: _version(name) for name in ("jaxflow", "jax", "jaxlib", "numpy")}
        | {"python": platform.python_version()},
        "command": shlex.join(["python", "-m", "jaxflow.bench", *sys.argv[1:]]),
    }


def _cpu_model() -> str:
    """The processor's own name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()


@dataclasses.dataclass
class Readings:
    """Samples of one card over a run; empty where there is no NVML."""

    watts: list[float] = dataclasses.field(default_factory=list)
    sm_clock_mhz: list[float] = dataclasses.field(default_factory=list)
    temperature_c: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, float] | None:
        """Mean and extremes; None without samples."""
        if not self.watts:
            return None
        return {
            "mean_watts": float(np.mean(self.watts)),
            "max_watts": float(np.max(self.watts)),
            "mean_sm_clock_mhz": float(np.mean(self.sm_clock_mhz)),
            "min_sm_clock_mhz": float(np.min(self.sm_clock_mhz)),
            "max_temperature_c": float(np.max(self.temperature_c)),
            "samples": len(self.watts),
        }


@contextlib.contextmanager
def watch() -> Iterator[Readings]:
    """Samples the first visible card while the block runs."""
    readings = Readings()
    try:
        pynvml.nvmlInit()
        handle = first_visible()
    except pynvml.NVMLError:  # no driver here: nothing to sample
        yield readings
        return
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            readings.watts.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
            readings.sm_clock_mhz.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
            readings.temperature_c.append(
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            )

    thread = threading.Thread(target=sample, name="nvml", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        done.set()
        thread.join()
        pynvml.nvmlShutdown()


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Dense FLOP/s of one device, and where the figure comes from."""

    flops_per_s: float
    source: str


@functools.cache
def ceiling(dtype: str, device: str | None = None) -> Ceiling:
    """Of a device of the cost model's table, or (None) of this machine's; measured here if the table lacks
    it.

    Raises:
      KeyError: for a named device or a dtype of it that the table lacks.
    """
    known = DEVICES[device] if device else find_device(jax.devices()[0].device_kind)
    for rates, source in (
        ((known.measured, "measured, sustained"), (known.datasheet, "datasheet")) if known else ()
    ):
        if rates and dtype in rates.flops_per_s:
            return Ceiling(rates.flops_per_s[dtype], f"{known.name if known else ''} {dtype}, {source}")
    if device:
        raise KeyError(f"no rate for {dtype} on {device}")
    return Ceiling(_measured_flops_per_s(dtype), f"{dtype} products of 1024, measured here")


def _measured_flops_per_s(dtype: str, size: int = 1024, seconds: float = 0.3) -> float:
    """Of square products, the best of several rounds."""
    x = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    product = jax.jit(lambda a: a @ a.T)
    product(x).block_until_ready()
    best, start = 0.0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        began = time.perf_counter()
        product(x).block_until_ready()
        best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def optimal(
    config: ModelConfig,
    prompt_tokens: float,
    output_tokens: float,
    *,
    dtype: str,
    tp: int = 1,
    device: str | None = None,
) -> dict[str, Any]:
    """NanoFlow's Eq. 5 for a model, a device and a workload (mean or total token counts; only their ratio
    matters).
    """
    best = ceiling(jnp.dtype(dtype).name, device)
    parameters = dense_parameters(config, output_tokens / (prompt_tokens + output_tokens))
    return {
        "optimal_token_throughput": optimal_throughput(tp * best.flops_per_s, parameters),
        "optimal_flops_per_s": tp * best.flops_per_s,
        "optimal_flops_source": best.source,
        "optimal_parameters": parameters,
    }


def text(result: Mapping[str, Any]) -> str:
    """The report's last lines: the optimum and the fraction reached, the machine, the command."""
    steady = result.get("steady_state") or {}
    lines = ["Optimal Throughput (NanoFlow Eq. 5)".center(50, "-")]
    if "optimal_token_throughput" in result:
        lines += [
            line("Optimal token throughput (tok/s):", result["optimal_token_throughput"]),
            line("Fraction of optimal:", f"{result['fraction_of_optimal']:.2%}"),
            *(
                [line("Fraction of the bound:", f"{result['fraction_of_bound']:.2%}, by {result['binding']}")]
                if result.get("fraction_of_bound")
                else []
            ),
            *(
                [line("Fraction of optimal, steady state:", f"{steady['fraction_of_optimal']:.2%}")]
                if "fraction_of_optimal" in steady
                else []
            ),
            line(
                "Dense TFLOP/s assumed:",
                f"{result['optimal_flops_per_s'] / 1e12:.3g} ({result['optimal_flops_source']})",
            ),
            line("Dense parameters a token:", f"{result['optimal_parameters'] / 1e9:.4g} B"),
        ]
    else:
        lines.append("unknown: the model's configuration was not found")
    return "\n".join([*lines, where(result)])


def where(result: Mapping[str, Any]) -> str:
    """The last of them: the machine, the command."""
    lines = [
        "Machine".center(50, "-"),
        line("Device:", f"{result['num_devices']} x {result['device']}"),
        line("CPU:", f"{result['cpu']}, {result['cpu_cores']} cores"),
    ]
    power = result.get("power")
    if power:
        lines.append(line("Watts, mean (max):", f"{power['mean_watts']:.0f} ({power['max_watts']:.0f})"))
        lines.append(
            line(
                "SM clock (MHz), mean (min):",
                f"{power['mean_sm_clock_mhz']:.0f} ({power['min_sm_clock_mhz']:.0f})",
            )
        )
    lines.append(
        line("Versions:", ", ".join(f"{name} {version}" for name, version in result["versions"].items()))
    )
    lines += [f"Command: {result['command']}", "=" * 50]
    return "\n".join(lines)

"""The machine of a report: command, commit, versions, device, clock, watts and date."""

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxflow.bench.report.requests import line, write_json
from jaxflow.config import ConfigError
from pallas_kernels.measure.provenance import KEYS, provenance
from pallas_kernels.measure.sensor import Readings, sample

SAMPLE_EVERY_S = 0.2
# keys under which reports hold clocks in MHz and watts of a part of their run
_CLOCKS = ("mean_sm_clock_mhz", "sm_clock_mhz", "mhz")
_WATTS = ("mean_watts", "watts")


def need_gpu(command: str) -> None:
    """Check that JAX has a GPU. Raises: ConfigError, which names the command."""
    if jax.default_backend() != "gpu":
        raise ConfigError("JAX backend", jax.default_backend(), f"gpu, for bench {command}")


def describe() -> dict[str, Any]:
    """Return the keys of `provenance` for this process, and its devices and CPU."""
    return provenance(shlex.join(["python", "-m", "jaxflow.bench", *sys.argv[1:]])) | {
        "num_devices": len(jax.devices()),
        "cpu": _cpu_model(),
        "cpu_cores": os.cpu_count(),
    }


def _cpu_model() -> str:
    """Return the processor's model name, or its architecture where Linux does not name the model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return names[0] if names else platform.machine()


def with_power(result: Mapping[str, Any], readings: Readings) -> dict[str, Any]:
    """Return a report with its clock and watts, and with the keys of `KEYS` at its start.

    Clock and watts are means over the measurements that the report holds. In a report without such
    measurements they are means over the entire command. A report without a GPU's readings keeps null.

    readings: samples over the entire command.
    """
    summary = power_summary(readings) or {}
    measured = {
        "clock_mhz": _mean(_values(result, _CLOCKS)) or summary.get("mean_sm_clock_mhz"),
        "watts": _mean(_values(result, _WATTS)) or summary.get("mean_watts"),
    }
    head = {"command_name": result["command_name"], **{key: result[key] for key in KEYS}}
    return head | measured | {key: value for key, value in result.items() if key not in head}


def keep(path: str | None, result: Mapping[str, Any]) -> None:
    """Write the report of the finished parts of a command, so that a command
    that is stopped later keeps them.

    path: `--output_json`; None or empty writes nothing.
    """
    if path:
        write_json(path, with_power(result, Readings()))


def _values(part: Any, names: tuple[str, ...]) -> list[float]:
    """Return the numbers under `names` at any depth of a report."""
    if isinstance(part, Mapping):
        here = [
            float(value) for key, value in part.items() if key in names and isinstance(value, float | int)
        ]
        return here + [v for value in part.values() for v in _values(value, names)]
    return [v for value in part for v in _values(value, names)] if isinstance(part, list) else []


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def watch(cards: int = 1) -> contextlib.AbstractContextManager[Readings]:
    """Sample the first `cards` cards of the engine, the cards that the run uses, while the block runs."""
    return sample(cards, every_s=SAMPLE_EVERY_S, counter_reads=4)


def power_summary(readings: Readings) -> dict[str, Any] | None:
    """Return the power, clock and temperature of the sampled cards, or None without samples.

    Watts are instant power summed over the cards. `counter_watts` is the same by the energy counters.
    """
    if readings.watts is None:
        return None
    clocks = [clock for card in readings.cards for clock in card.clock_mhz]
    return {
        "mean_watts": readings.watts,
        "max_watts": float(sum(max(card.watts) for card in readings.cards)),
        "watts_by_card": readings.watts_by_card,
        "counter_watts": readings.watts_by_counter,
        "mean_sm_clock_mhz": readings.clock_mhz,
        "min_sm_clock_mhz": float(min(clocks)),
        "max_temperature_c": float(max(max(card.temperature_c) for card in readings.cards)),
        "samples": min(len(card.watts) for card in readings.cards),
    }


def joules_per_token(power: Mapping[str, Any] | None, seconds: float, tokens: float) -> float | None:
    """Return the energy of all cards over a run, per prompt or output token.

    The energy counters come first; without them the sampled watts count. None without samples.

    power: from `power_summary`.
    """
    if power is None or not tokens:
        return None
    watts = power["counter_watts"] if power["counter_watts"] is not None else power["mean_watts"]
    return watts * seconds / tokens


def text(result: Mapping[str, Any]) -> str:
    """Return the last lines of a text report: the optimum, the reached
    fraction, the machine and the command.
    """
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
    if result.get("joules_per_token"):
        lines.append(line("Energy per token, all GPUs (mJ):", 1e3 * result["joules_per_token"]))
    return "\n".join([*lines, where(result)])


def where(result: Mapping[str, Any]) -> str:
    """Return the lines of a text report that name the machine and the command."""
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

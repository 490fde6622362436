"""Utilization of each resource over one layer of a step, for each plan, from a profiler trace (NanoFlow's
Figure 10).

  python -m jaxflow.bench trace --model llama-3.1-8b --load_format dummy --plans plan.json
      --workload 1024/512 --plot layer.png

The workload's average step runs back to back, first for --seconds to time it, then under the profiler. Every
kernel is assigned to its op. An op's counted FLOPs and bytes, divided by the time of its kernels and by the
device's datasheet peak, give the utilization. For a device outside the cost model's table the peak is the
highest rate in the trace.

Kernels are launched one by one, in the streams of the plan, because the profiler sees no ops in a CUDA graph.
Watts and clock are the GPU's sensor readings over many steps. The sensors are too slow for one layer, so the
chart shows the energy model's watts by kernel. On several devices the report shows the first device.
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from jaxflow.bench.plans import trace_plot
from jaxflow.bench.plans.bed import Bed, bed_of_flags
from jaxflow.bench.plans.steady import SteadyStep, StepWorkload, parse_workload
from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import line
from jaxflow.bench.report.trace_events import (
    RESOURCES,
    Kernel,
    LayerTrace,
    Used,
    means,
    one_layer,
    read_kernels,
    scopes,
    shares,
)
from jaxflow.bench.workload import flags as options
from jaxflow.engine.step_plans import products_dtype
from jaxflow.model.composition import Composition
from jaxflow.model.cost import DEVICES, FP8_PRODUCTS, find_device
from jaxflow.model.graph import Graph, Widths
from jaxflow.pipeline import program
from jaxflow.pipeline.plan import Plan
from pallas_kernels.measure.timing import interleaved

_LEAST_STEPS = 4  # minimum steps in a trace


def define_flags() -> None:
    options.define_bed()
    flags.DEFINE_string(
        "workload",
        "1024/512",
        "Workload of the step: prompt/output tokens (1024/512), or decodes x keys (256x1100).",
    )
    flags.DEFINE_float("seconds", 3.0, "Seconds to time each plan.", lower_bound=0.0)
    flags.DEFINE_float("traced_seconds", 0.5, "Seconds to run each plan under the profiler.", lower_bound=0.0)
    flags.DEFINE_string(
        "trace_dir",
        None,
        "Folder for the profiler's files, for other viewers; default: the files are deleted.",
    )
    flags.DEFINE_string("plot", None, "Chart file (.png, .svg, .pdf).")
    flags.DEFINE_enum(
        "optimal_device",
        None,
        sorted(DEVICES),
        "Device with the datasheet peaks; default: this machine's device.",
    )


def traced(steady: SteadyStep, step_s: float, seconds: float, folder: Path) -> list[Kernel]:
    """Return the kernels of back-to-back steps over `seconds`, with at least `_LEAST_STEPS` steps."""
    settings = jax.profiler.ProfileOptions()
    settings.python_tracer_level = 0
    steps = max(_LEAST_STEPS, round(seconds / step_s))
    before: Any = None
    with jax.profiler.trace(str(folder), profiler_options=settings):
        for _ in range(steps):
            tokens = steady.enqueue()
            if before is not None:
                before.block_until_ready()
            before = tokens
        jax.block_until_ready(before)
    return read_kernels(
        max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    )  # the folder may hold older traces


def peaks_of(device: str | None, dtype: str, trace: LayerTrace) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the source and the peaks for `shares`.

    device: a device of the table, or None for this machine's device. An unknown device gets the highest rates
    in the trace.
    """
    known = DEVICES[device] if device else find_device(jax.devices()[0].device_kind)
    wide = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    if known is not None and {dtype, wide} <= set(known.datasheet.flops_per_s):
        flops = known.datasheet.flops_per_s
        compute = {"": flops[wide]} | (dict.fromkeys(FP8_PRODUCTS, flops[dtype]) if dtype != wide else {})
        memory, network = known.datasheet.memory_bytes_per_s, known.datasheet.network_bytes_per_s
        return f"{known.name}, datasheet", {
            "compute": compute,
            "memory": {"": memory},
            "network": {"": network},
        }

    def most(amounts: list[float]) -> dict[str, float]:
        return {
            "": max(
                [*(a / one.seconds for a, one in zip(amounts, trace.used, strict=True) if a and one.seconds)],
                default=1.0,
            )
        }

    return "the highest rate in this trace", {
        "compute": most([one.work.flops for one in trace.used]),
        "memory": most([one.work.memory_bytes for one in trace.used]),
        "network": most([one.work.network_bytes for one in trace.used]),
    }


def described(
    bed: Bed, name: str, step: Composition, kernels: list[Kernel], text: str, device: str | None
) -> dict[str, Any]:
    """Return the report of one plan's layer. text: the compiled program of the step."""
    plan, _ = bed.variants[name]
    trace = one_layer(kernels, scopes(text), plan, graph_of(bed, plan), step)
    source, peaks = peaks_of(device, products_dtype(bed.config), trace)
    rows = shares(trace, peaks)
    assigned = sum(one.seconds for one in trace.used if one.nano is not None)
    return {
        "plan": name,
        "tokens": plan.tokens,
        "decode_tokens": step.decode_tokens,
        "prefill_tokens": step.chunk_tokens,
        "mean_context_tokens": step.decode_keys,
        "layer_us": 1e6 * trace.seconds,
        "traced_step_ms": 1e3 * trace.step_s,
        "traced_idle_ms": 1e3 * trace.idle_s,
        "longest_pause_ms": 1e3 * trace.pause_s,
        "assigned_share_of_kernel_time": assigned / sum(one.seconds for one in trace.used),
        "peaks": source,
        "mean_shares": means(rows),
        "kernels": [_shown(one) for one in trace.used],
        "shares": rows,
    }


def _shown(one: Used) -> dict[str, Any]:
    return {
        "name": one.kernel.name,
        "op": one.nano.op if one.nano else None,
        "kind": one.kind,
        "nano_op": one.nano.id if one.nano else None,
        "stream": one.kernel.stream,
        "start_us": 1e6 * one.start_s,
        "us": 1e6 * one.seconds,
        "blocks": one.kernel.blocks,
        "flops": one.work.flops,
        "memory_bytes": one.work.memory_bytes,
        "network_bytes": one.work.network_bytes,
    }


def graph_of(bed: Bed, plan: Plan) -> Graph:
    """Return the graph of a plan's form, with the byte widths of the engine's dtypes."""
    config = bed.config
    weights, kv, wide = (
        jnp.dtype(dtype).itemsize for dtype in (products_dtype(config), config.kv_cache_dtype, config.dtype)
    )
    return program.graph_of(plan, bed.model, config.tensor_parallel_size, Widths(weights, kv, wide, wide))


def measure(
    bed: Bed, workload: StepWorkload, seconds: float, traced_seconds: float, folder: Path, device: str | None
) -> list[dict[str, Any]]:
    """Return every plan's layer, timed and traced. Raises: TraceError for a trace without the plan's ops."""
    ready = bed.ready(workload)
    timings = interleaved(
        {name: steady.enqueue for name, (steady, _) in ready.items()},
        seconds=seconds,
        cards=bed.config.tensor_parallel_size,
    )
    found = []
    for number, (name, (steady, step)) in enumerate(ready.items()):
        own = folder / str(number)
        with machine.watch(bed.config.tensor_parallel_size) as readings:
            kernels = traced(steady, timings[name].us / 1e6, traced_seconds, own)
        text, timing = bed.executor.compiler.program(steady.layout).as_text(), timings[name]
        assert text is not None
        times = {
            "step_ms": timing.us / 1e3,
            "watts": timing.watts,
            "sm_clock_mhz": timing.mhz,
            "traced_power": machine.power_summary(readings),
        }
        found.append(described(bed, name, step, kernels, text, device) | times)
    return found


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, PlanError, CheckpointError, TraceError."""
    f, begun = flags.FLAGS, time.monotonic()
    workload = parse_workload(f.workload, "workload")
    bed = bed_of_flags([workload], ["streams"], "workload")
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(
            bed, workload, f.seconds, f.traced_seconds, Path(f.trace_dir or temporary), f.optimal_device
        )
    result = {
        "command_name": "trace",
        "model": Path(bed.config.model).name,
        "num_layers": bed.model.num_layers,
        "engine_config": dataclasses.asdict(bed.config),
        "workload": workload.name,
        "seconds": time.monotonic() - begun,
        "plans": found,
        **machine.describe(),
    }
    print(text(result))
    if f.plot:
        trace_plot.save(result, f.plot)
        print(f"wrote {f.plot}", file=sys.stderr)
    return result


def text(result: Mapping[str, Any]) -> str:
    """Return the report as text."""
    lines = ["Resource Use of One Layer".center(50, "=")]
    for plan in result["plans"]:
        lines += [
            plan["plan"].center(50, "-"),
            line("Step, not traced (ms):", plan["step_ms"]),
            line("Step, traced (ms):", plan["traced_step_ms"]),
            line("Time without a kernel (ms):", plan["traced_idle_ms"]),
            line("Longest gap without a kernel (ms):", plan["longest_pause_ms"]),
            line("One layer, traced (us):", plan["layer_us"]),
            *(line(f"Mean share of {name}:", f"{plan['mean_shares'][name]:.1%}") for name in RESOURCES),
            line("Kernel time assigned to ops:", f"{plan['assigned_share_of_kernel_time']:.1%}"),
            line("Peaks:", plan["peaks"]),
            line(
                "Watts:",
                "-" if plan["watts"] is None else f"{plan['watts']:.0f} at {plan['sm_clock_mhz']:.0f} MHz",
            ),
        ]
    return "\n".join([*lines, machine.where(result)])

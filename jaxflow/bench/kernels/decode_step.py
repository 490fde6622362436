"""Time of a decode step of Llama-3.1-8B with each method of launching its kernels, and the time of each
kernel.

  python -m jaxflow.bench decode_step --precision fp8 --requests 1,64,256 --output_json FILE
  python -m jaxflow.bench decode_step --precision fp8 --requests 1,64 --steps 1000 --output_json FILE

The second form times nothing and compares outputs (`graph_steps`).

All requests repeatedly decode their last token over a random cache, including the output head and sampling.
The methods take turns in one process:

    graph              one CUDA graph, as for larger steps
    graph and chunks   the same with the kernel for prefill chunks, although the step has no chunks
    one by one         each kernel launched separately
    pdl                each kernel launched separately with programmatic dependent launch
                       (`pallas_kernels.hopper.pdl`), as for small steps

The report also compares the hidden states of each method with those of the first method, bit by bit. Above 64
rows XLA's products may differ, because XLA tunes each program separately. The report holds the host's time to
enqueue a step. Finally a profiler measures the separately launched kernels, because the profiler does not see
the kernels of a graph.
"""

import collections
import dataclasses
import functools
import os
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from jaxflow.bench.kernels.graph_steps import agreement, packed
from jaxflow.bench.kernels.step import CONTEXT, MODEL, PRECISIONS, REQUESTS, fill_cache
from jaxflow.bench.report import machine
from jaxflow.bench.report.trace_events import read_kernels
from jaxflow.config import EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.layout import SlotSampling, StepLayout
from jaxflow.engine.programs import PLAIN, head
from jaxflow.engine.settings import resolve
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import sequential_plan
from pallas_kernels.measure.timing import interleaved

FORMATS: dict[str, dict[str, Any]] = PRECISIONS | {"mxfp4": {"quantization": "mxfp4"}}
# (a name in jaxflow.pipeline.streams.GRAPHS, programmatic dependent launch, a kernel for chunks)
LAUNCHES = {
    "graph": ("xla", False, False),
    "graph and chunks": ("xla", False, True),
    "one by one": ("streams", False, False),
    "pdl": ("streams", True, False),
}


class Steps:
    """Compiled steps for one number of requests, by launch method.

    All steps share the executor's cache: each step takes the cache and returns it.
    """

    def __init__(self, executor: Executor, requests: int, tokens: int, context: int, quantized: bool):
        self.executor, self.requests, self.tokens, self.context = executor, requests, tokens, context
        model = executor.programs.context.config
        plan = sequential_plan(model, tokens)
        base = executor.layouts[tokens][0]
        layouts = {
            launch: dataclasses.replace(base, decodes=not chunks)
            for launch, (_, _, chunks) in LAUNCHES.items()
        }
        self.buffers = {launch: jnp.asarray(self._buffer(layout)) for launch, layout in layouts.items()}
        self.lowered, self.options, self.programs = {}, {}, {}
        for launch, (graphs, pdl, _) in LAUNCHES.items():
            forward = compile_plan(plan, model, quantized=quantized, pdl=pdl)
            step = executor.programs.step(layouts[launch], forward)
            state = (executor.weights, executor.kv, executor.page_table, executor.last_tokens)
            self.lowered[launch] = step.lower(*state, self.buffers[launch], *executor.expert_counts)
            self.options[launch] = xla_options(plan, 1, graphs)
        self.sampler = executor.programs.sample_plain()

    def _buffer(self, layout: StepLayout) -> np.ndarray:
        table = SlotSampling.empty(self.executor.slots)
        table.sampler[:] = PLAIN
        return packed(layout, table, self.requests, self.context - 1)

    def compile(self, launch: str) -> None:
        self.programs[launch] = self.lowered[launch].compile(compiler_options=self.options[launch] or None)

    def forward(self, launch: str, last: jax.Array) -> tuple[jax.Array, Any]:
        hidden, _, rows = self.executor.run_program(self.programs[launch], self.buffers[launch], last)
        return hidden, rows

    def run(self, launch: str) -> jax.Array:
        """Enqueue a full step and return its hidden states. The next step reads its drawn tokens."""
        e = self.executor
        tokens, e.last_tokens = self.sampler(
            head(e.weights), *self.forward(launch, e.last_tokens), e.last_tokens
        )
        return tokens

    def same_bits(self, times: int = 8) -> dict[str, bool]:
        """Return, for each method, True if every run gives the first method's hidden states bit by bit."""
        last = jnp.zeros_like(self.executor.last_tokens)
        last = jax.device_put(last, self.executor.last_tokens.sharding)
        wanted = np.asarray(self.forward(next(iter(LAUNCHES)), last)[0])[: self.requests]
        return {
            launch: all(
                np.array_equal(wanted, np.asarray(self.forward(launch, last)[0])[: self.requests])
                for _ in range(times)
            )
            for launch in LAUNCHES
        }

    def enqueue_us(self, launch: str, times: int = 5) -> float:
        """Return the median time in microseconds for the host to enqueue a step on an idle device."""
        took = []
        for _ in range(times):
            jax.block_until_ready(self.executor.kv)
            start = time.perf_counter()
            tokens = self.run(launch)
            took.append(time.perf_counter() - start)
            tokens.block_until_ready()
        return 1e6 * float(np.median(took))


def kernels_of(run: Callable[[], jax.Array], steps: int = 6) -> dict[str, Any]:
    """Return the count and total time of one step's kernels by name, and the time from the first kernel to
    the last."""
    with tempfile.TemporaryDirectory() as folder:
        settings = jax.profiler.ProfileOptions()
        settings.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=settings):
            jax.block_until_ready([run() for _ in range(steps)])
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = read_kernels(path)
    marks = [i for i, kernel in enumerate(found) if kernel.instruction == found[len(found) // 2].instruction]
    one = found[marks[-2] : marks[-1]]
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in one:
        by_name[re.sub(r"_mosaic_gpu_kernel$", "", kernel.name)].append(1e6 * kernel.seconds)
    rows = [{"kernel": name, "runs": len(times), "us": sum(times)} for name, times in by_name.items()]
    return {
        "step_us": 1e6 * (found[marks[-1]].start_s - found[marks[-2]].start_s),
        "kernels_us": sum(row["us"] for row in rows),
        "launches": len(one),
        "kernels": sorted(rows, key=lambda row: -row["us"]),
    }


def define_flags() -> None:
    flags.DEFINE_string("model", MODEL, "Model shapes; weights are dummy weights.")
    flags.DEFINE_enum(
        "precision",
        "bf16",
        sorted(FORMATS),
        "Precision of weights; fp8 also sets an fp8 KV cache. mxfp4 is for gpt-oss.",
    )
    flags.DEFINE_list("requests", [str(n) for n in REQUESTS], "Numbers of decoding requests to measure.")
    flags.DEFINE_list(
        "min_bucket",
        ["8"],
        (
            "Minimum tokens of a step's bucket (default 8; an engine uses 1 for one bfloat16 request). A "
            "list measures each."
        ),
    )
    flags.DEFINE_integer(
        "context", CONTEXT, "Tokens of each request, including the new token.", lower_bound=2
    )
    flags.DEFINE_float("seconds", 0.5, "Seconds to measure each launch method.", lower_bound=0.0)
    flags.DEFINE_integer(
        "steps",
        0,
        "Compare this many steps of a graph and of separate launches for equality, without timing. 0: time.",
        lower_bound=0,
    )
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def _executor(model: str, precision: str, sizes: list[int], context: int) -> Executor:
    """Return an executor without warm-up for steps of these sizes, in ascending order.

    Each slot has pages of a random cache.
    """
    checkpoint = open_checkpoint(model, load_format="dummy")
    most, per = sizes[-1], -(-(context + 1) // 64)
    settings = {
        "load_format": "dummy",
        "max_num_seqs": most,
        "max_num_batched_tokens": most,
        "num_kv_pages": most * per + 1,
    }
    config = resolve(
        EngineConfig(model, max_model_len=64 * per, **settings, **FORMATS[precision]),
        checkpoint.model_config,
    )
    plans = {tokens: (sequential_plan(checkpoint.model_config, tokens),) for tokens in sizes}
    executor = make_executor(config, checkpoint, plans, progress=False)
    fill_cache(executor)
    table = np.zeros(executor.page_table.shape, np.int32)
    table[:, :, :per] = np.random.default_rng(0).permutation(most * per).reshape(most, per)
    executor.page_table = jax.device_put(table, executor.page_table.sharding)
    return executor


def _compared(executor: Executor, wanted: list[tuple[int, int]]) -> dict[str, Any]:
    """Return comparisons for each (requests, tokens of a step), with decode-only steps and with steps that
    are mostly a chunk."""
    f, rows = flags.FLAGS, []
    given = {name: f[name].value for name in ("model", "precision", "context", "steps")}
    for n, tokens in wanted:
        few = 3 * tokens // 8
        for decodes, chunk in ((n, 0), (few, tokens - few)):
            if decodes:
                how = {
                    "context": f.context,
                    "steps": f.steps,
                    "quantized": f.precision == "fp8",
                    "with_pdl": not chunk,
                }
                rows.append(agreement(executor, tokens, decodes=decodes, chunk=chunk, **how))
                print(
                    (
                        f"{decodes:4} decodes, a chunk of {chunk:3}: first to differ of {f.steps} steps: "
                        f"{rows[-1]['first_difference']}"
                    ),
                    flush=True,
                )
    about = {
        "command_name": "decode_step",
        **machine.describe(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    return about | given | {"compared": rows, "same": all(row["same"] for row in rows)}


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises: ConfigError, CheckpointError; ConfigError without a GPU, because the
      default model needs gigabytes.
    """
    machine.need_gpu("decode_step")
    f = flags.FLAGS
    requests = [int(n) for n in f.requests]
    wanted = [
        (n, tokens) for n in requests for tokens in sorted({max(int(least), n) for least in f.min_bucket})
    ]
    executor = _executor(f.model, f.precision, sorted({tokens for _, tokens in wanted}), f.context)
    if f.steps:
        return _compared(executor, wanted)
    every = [Steps(executor, *one, f.context, f.precision == "fp8") for one in wanted]
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda job: job[0].compile(job[1]),
                [(steps, launch) for steps in every for launch in LAUNCHES],
            )
        )
    rows: list[dict[str, Any]] = []
    for steps in every:
        same = steps.same_bits()
        timings = interleaved(
            {launch: functools.partial(steps.run, launch) for launch in LAUNCHES}, seconds=f.seconds
        )
        launches = {
            launch: dataclasses.asdict(timings[launch])
            | {"same_bits": same[launch], "enqueue_us": steps.enqueue_us(launch)}
            for launch in LAUNCHES
        }
        for launch, row in launches.items():
            took = f"{row['us'] / 1e3:7.3f} ms ±{row['spread'] / 2:.1%}, the same bits: {same[launch]}"
            print(f"{steps.requests:4} requests in {steps.tokens}, {launch:17} {took}", flush=True)
        profiles = {
            launch: kernels_of(functools.partial(steps.run, launch))
            for launch, (graphs, *_) in LAUNCHES.items()
            if graphs == "streams"
        }
        rows.append(
            {"requests": steps.requests, "tokens": steps.tokens, "launches": launches, "profiles": profiles}
        )
    given = {name: f[name].value for name in ("model", "precision", "context", "seconds")}
    return {
        "command_name": "decode_step",
        **machine.describe(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **given,
        "steps": rows,
    }

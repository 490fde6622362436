"""Where a decode step's time goes: whole steps of Llama-3.1-8B under each way of launching their kernels, and
every kernel's time.

  python -m jaxflow.bench decode_step --precision fp8 --requests 1,64,256 --output_json FILE
  python -m jaxflow.bench decode_step --precision fp8 --requests 1,64 --steps 1000 --output_json FILE
  nothing is timed: `graph_steps`

All requests decode their last token over a random cache, again and again, head and sampling included. In
turn, in one process:

    graph              one CUDA graph, as larger steps are
    graph and chunks   the same with the kernel for prefill chunks, of which there are none
    one by one         its kernels launched by themselves
    early              launched by themselves, each before the one before it has ended
    (`pallas_kernels.dependent`), as small steps are

Beside each stands whether its hidden states are the first one's to the bit (of more than 64 rows XLA's
products may differ: it tunes each program for itself), and how long the host takes to enqueue a step. Then a
profiler watches the kernels that are launched by themselves; it does not see those of a graph.
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

from jaxflow.bench import machine
from jaxflow.bench.graph_steps import agreement, packed
from jaxflow.bench.kernels_step import CONTEXT, MODEL, PRECISIONS, REQUESTS, fill_cache
from jaxflow.bench.trace_events import read_kernels
from jaxflow.config import EngineConfig
from jaxflow.engine.build import make_executor, resolve
from jaxflow.engine.executor import Executor
from jaxflow.engine.layout import SlotTable, StepLayout
from jaxflow.engine.programs import PLAIN, head
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handmade import sequential_plan
from pallas_kernels.checks.timing import interleaved

# (a name in jaxflow.pipeline.streams.GRAPHS, whether kernels begin early, whether there is a kernel for
# chunks)
WAYS = {
    "graph": ("xla", False, False),
    "graph and chunks": ("xla", False, True),
    "one by one": ("streams", False, False),
    "early": ("streams", True, False),
}


class Steps:
    """Steps of one number of requests, by way. They share the executor's cache, which each step is given and
    gives back.
    """

    def __init__(self, executor: Executor, requests: int, tokens: int, context: int, quantized: bool):
        self.executor, self.requests, self.tokens, self.context = executor, requests, tokens, context
        model = executor.programs.context.config
        plan = sequential_plan(model, tokens)
        base = executor.layouts[tokens][0]
        layouts = {way: dataclasses.replace(base, decodes=not chunks) for way, (_, _, chunks) in WAYS.items()}
        self.buffers = {way: jnp.asarray(self._buffer(layout)) for way, layout in layouts.items()}
        self.lowered, self.options, self.programs = {}, {}, {}
        for way, (launched, early, _) in WAYS.items():
            forward = compile_plan(plan, model, quantized=quantized, early=early)
            step = executor.programs.step(layouts[way], forward)
            state = (executor.weights, executor.kv, executor.page_table, executor.last_tokens)
            self.lowered[way] = step.lower(*state, self.buffers[way])
            self.options[way] = xla_options(plan, 1, launched)
        self.sampler = executor.programs.sample_plain()

    def _buffer(self, layout: StepLayout) -> np.ndarray:
        table = SlotTable.empty(self.executor.slots)
        table.sampler[:] = PLAIN
        return packed(layout, table, self.requests, self.context - 1)

    def compile(self, way: str) -> None:
        self.programs[way] = self.lowered[way].compile(compiler_options=self.options[way] or None)

    def forward(self, way: str, last: jax.Array) -> tuple[jax.Array, Any]:
        e = self.executor
        hidden, _, rows, e.kv, e.page_table = self.programs[way](
            e.weights, e.kv, e.page_table, last, self.buffers[way]
        )
        return hidden, rows

    def run(self, way: str) -> jax.Array:
        """A whole step, enqueued; its drawn tokens are the next one's."""
        e = self.executor
        tokens, e.last_tokens = self.sampler(
            head(e.weights), *self.forward(way, e.last_tokens), e.last_tokens
        )
        return tokens

    def same_bits(self, times: int = 8) -> dict[str, bool]:
        """Whether each way gives the first one's hidden states, every time."""
        last = jnp.zeros_like(self.executor.last_tokens)
        last = jax.device_put(last, self.executor.last_tokens.sharding)
        wanted = np.asarray(self.forward(next(iter(WAYS)), last)[0])[: self.requests]
        return {
            way: all(
                np.array_equal(wanted, np.asarray(self.forward(way, last)[0])[: self.requests])
                for _ in range(times)
            )
            for way in WAYS
        }

    def enqueue_us(self, way: str, times: int = 5) -> float:
        """How long the host takes to enqueue a step while the device has nothing to do, the median."""
        took = []
        for _ in range(times):
            jax.block_until_ready(self.executor.kv)
            start = time.perf_counter()
            tokens = self.run(way)
            took.append(time.perf_counter() - start)
            tokens.block_until_ready()
        return 1e6 * float(np.median(took))


def kernels_of(run: Callable[[], jax.Array], steps: int = 6) -> dict[str, Any]:
    """One step's kernels by name: how often each ran and how long, in all; and how long the step took from
    the first to the last.
    """
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
    flags.DEFINE_string("model", MODEL, "Its shapes, with dummy weights.")
    flags.DEFINE_enum("precision", "bf16", sorted(PRECISIONS), "fp8: with an fp8 cache, too.")
    flags.DEFINE_list("requests", [str(n) for n in REQUESTS], "How many requests decode.")
    flags.DEFINE_list(
        "smallest",
        ["8"],
        (
            "Fewer requests run in a step of so many tokens (8; an engine's of one, in bfloat16, 1); "
            "several: in each."
        ),
    )
    flags.DEFINE_integer("context", CONTEXT, "Tokens of each request, the new one included.", lower_bound=2)
    flags.DEFINE_float("seconds", 0.5, "How long each way is measured.", lower_bound=0.0)
    flags.DEFINE_integer(
        "steps",
        0,
        "Times nothing: so many steps as a graph and launched one by one must be the same.",
        lower_bound=0,
    )
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def _executor(model: str, precision: str, sizes: list[int], context: int) -> Executor:
    """An executor, not warm, of steps of these sizes, ascending. Each of its slots has pages of a random
    cache.
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
        EngineConfig(model, max_model_len=64 * per, **settings, **PRECISIONS[precision]),
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
    """Of each (requests, tokens of a step): steps of decodes alone, and steps most of whose tokens are a
    chunk.
    """
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
                    "early": not chunk,
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
    """The command. Raises: ConfigError, CheckpointError; ValueError where there is no GPU: it holds a model
    of gigabytes by default.
    """
    machine.need_gpu("decode_step")
    f = flags.FLAGS
    requests = [int(n) for n in f.requests]
    wanted = [
        (n, tokens) for n in requests for tokens in sorted({max(int(least), n) for least in f.smallest})
    ]
    executor = _executor(f.model, f.precision, sorted({tokens for _, tokens in wanted}), f.context)
    if f.steps:
        return _compared(executor, wanted)
    every = [Steps(executor, *one, f.context, f.precision == "fp8") for one in wanted]
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(lambda job: job[0].compile(job[1]), [(steps, way) for steps in every for way in WAYS])
        )
    rows: list[dict[str, Any]] = []
    for steps in every:
        same = steps.same_bits()
        timings = interleaved({way: functools.partial(steps.run, way) for way in WAYS}, seconds=f.seconds)
        ways = {
            way: dataclasses.asdict(timings[way])
            | {"same_bits": same[way], "enqueue_us": steps.enqueue_us(way)}
            for way in WAYS
        }
        for way, row in ways.items():
            took = f"{row['us'] / 1e3:7.3f} ms ±{row['spread'] / 2:.1%}, the same bits: {same[way]}"
            print(f"{steps.requests:4} requests in {steps.tokens}, {way:17} {took}", flush=True)
        profiles = {
            way: kernels_of(functools.partial(steps.run, way))
            for way, (graphs, *_) in WAYS.items()
            if graphs == "streams"
        }
        rows.append({"requests": steps.requests, "tokens": steps.tokens, "ways": ways, "profiles": profiles})
    given = {name: f[name].value for name in ("model", "precision", "context", "seconds")}
    return {
        "command_name": "decode_step",
        **machine.describe(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **given,
        "steps": rows,
    }

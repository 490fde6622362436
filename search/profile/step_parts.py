"""The parts of a step as programs of their own: the step with fewer and fewer ops, and its ops in groups.

The nested parts run on the engine's own weights, cache and batch, and leave out more and more ops. A kernel
that is left out is replaced by a function that returns one of the kernel's inputs, so no other kernel takes
its place. The attention and the products of all layers also run on their own, in the order of the layers.

The difference of two nested parts is what the ops between them cost inside a step. Beside it stands what
these ops cost alone. A card at its power cap runs each part at another clock.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped
from jaxtyping import Array, Float

from jaxflow.bench.plans.steady import SteadyStep, StepWorkload
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.programs import Programs, head
from jaxflow.model import ops
from jaxflow.model.composition import Composition
from jaxflow.model.graph import Graph
from jaxflow.model.op_registry import KV, Context, Site, Weights
from jaxflow.pipeline import streams
from jaxflow.pipeline.program import ATTENTION
from pallas_kernels.kernel_set import KernelSet
from search.profile.op_bench import PAGE_SIZE, LayerBench, draw
from search.profile.step_joules import Accounting
from search.profile.sustain import Sustained, sustain

PRODUCTS = ("qkv", "out_proj", "up_gate", "down")
_NO_APPENDS = np.empty((0, 4), np.int32)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step. run: enqueues the part once. nested: the ops are some of those of the part before."""

    name: str
    ops: tuple[str, ...]
    run: Callable[[], Any]
    nested: bool = True


@dataclasses.dataclass(frozen=True)
class PartRun:
    """A part that ran back to back. host_s: the mean seconds until a run was enqueued."""

    name: str
    ops: tuple[str, ...]
    nested: bool
    found: Sustained
    host_s: float


@dataclasses.dataclass(frozen=True)
class PartJoules:
    """A part beside its ops alone. seconds, joules: of one run, by the energy counter, with idle power.

    watts, clock_mhz, temperature_c: of the sensor. host_s: see `PartRun`. now_s, now_joules: of the ops
    alone, at the clock of the part. alone_s, alone_joules: the same, each op at its own clock. What a driver
    reads is None without one.
    """

    name: str
    ops: tuple[str, ...]
    nested: bool
    seconds: float
    joules: float | None
    watts: float | None
    clock_mhz: float | None
    temperature_c: float | None
    host_s: float
    now_s: float
    now_joules: float
    alone_s: float
    alone_joules: float


# ---- programs


def without_attention(kernels: KernelSet) -> KernelSet:
    """Return the set with attention that returns its queries, without a kernel."""
    by_head_dim = tuple((width, without_attention(own)) for width, own in kernels.by_head_dim)
    return dataclasses.replace(
        kernels, chunk_attention=_queries, decode_attention=_queries, by_head_dim=by_head_dim
    )


def _queries(q: Float[Array, "t N H"], *_: Any, **__: Any) -> Float[Array, "t N H"]:
    return q


def layers(programs: Programs, layout: StepLayout, forward: Callable, *, attends: bool = True) -> Wrapped:
    """Return `Programs.step` without the embedding: its source is the residual stream [T, D]."""
    c = programs.context
    c = c if attends else dataclasses.replace(c, kernels=without_attention(c.kernels))
    return dataclasses.replace(programs, context=c, embeds=False).step(layout, forward)


def empty(programs: Programs, layout: StepLayout) -> Wrapped:
    """Return a `Programs.step` that takes the residual stream [T, D] and runs no op."""

    def forward(c: Context, weights: Weights, kv: list[KV], batch: Any) -> tuple[Array, Array, list[KV]]:
        return batch.hidden[: batch.num_rows], batch.hidden, kv

    return layers(programs, layout, forward)


def logits(c: Context) -> Wrapped:
    """Return (head, hidden) -> logits of as many rows as fill blocks of 8: XLA pads and copies others."""
    return jax.jit(lambda w, hidden: ops.logits(Site(c, w), hidden[: len(hidden) // 8 * 8 or len(hidden)]))


def attention(programs: Programs, layout: StepLayout) -> Wrapped:
    """Return (weights, kv, page_table, q [T, N, H], buffer) -> the heads of the last layer.

    A layer's heads are the next layer's queries.
    """
    c = programs.context

    def run(weights: Weights, kv: list[KV], page_table: Array, q: Array, buffer: Array) -> Array:
        _, batch, _ = dataclasses.replace(programs, embeds=False).inputs(layout, page_table, q, buffer)
        works: dict[Any, Any] = {}
        for index, (layer, w) in enumerate(zip(c.config.layers, weights["layers"], strict=True)):
            pages, heads = kv[c.config.cache_of(index)], ()
            for name in ("chunk_attention", "decode_attention"):
                if (key := (name, layer.window)) not in works:
                    works[key] = ops.attention_work(c, layer, batch, 0, layout.tokens, name, pages)
                site = Site(c, w, layer, batch, 0, layout.tokens, works[key])
                heads = (ops.find_op(name).jitted(site, q, pages, *heads),)
            (q,) = heads
        return q

    return jax.jit(run)


def products(c: Context, names: Sequence[str] = PRODUCTS) -> Wrapped:
    """Return (weights, given, kept) -> results: some products of each layer, with its own weights.

    given: the input of each product; `down` reads the result of `up_gate` if that is there. kept: the former
    results, donated.
    """

    def run(weights: Weights, given: dict[str, Any], kept: Any) -> list[dict[str, Any]]:
        made = []
        for layer, w in zip(c.config.layers, weights["layers"], strict=True):
            site, one = Site(c, w, layer), {}
            for name in names:
                x = one.pop("up_gate") if name == "down" and "up_gate" in one else given[name]
                one[name] = ops.find_op(name).jitted(site, x)
            given, one = streams.together([given, one])  # XLA would merge products that share an input
            made.append(one)
        return made

    return jax.jit(run, donate_argnums=2, keep_unused=True)


# ---- the parts of an executor's step


def parts(steady: SteadyStep, bench: LayerBench, graph: Graph) -> Iterator[Part]:
    """Compile the parts of a step on an executor, and yield them, the whole step first.

    The arrays of a part are made when the part is asked for. bench: a layer of the model, for the shapes of
    the products' inputs. graph: of the model. A model without one of `PRODUCTS` in each layer has no part of
    products.
    """
    executor, layout = steady.executor, steady.layout
    programs, weights, c = executor.programs, executor.weights, executor.programs.context
    forward, options = executor.lower.forward_of(layout), executor.compiler.options_of(layout)
    buffer, stream = jnp.asarray(steady.buffer), draw(bench.inputs("logits", layout.tokens))[0]
    q, every = draw(bench.inputs("chunk_attention", layout.tokens))[0], dict.fromkeys(_names(graph))
    some = [PRODUCTS, *((name,) for name in PRODUCTS)]
    some = some if all(name in w for w in weights["layers"] for name in PRODUCTS) else []

    def state(source: Array) -> tuple[Any, ...]:
        return weights, executor.kv, executor.page_table, source, buffer

    counts, rows = executor.expert_counts, executor.lower.hidden(layout.rows)
    lowered = {
        "logits": logits(c).lower(head(weights), rows),
        "layers": layers(programs, layout, forward).lower(*state(stream), *counts),
        "no attention": layers(programs, layout, forward, attends=False).lower(*state(stream), *counts),
        "no op": empty(programs, layout).lower(*state(stream), *counts),
        "attention": attention(programs, layout).lower(*state(q)),
    }
    inputs = {name: bench.inputs(name, layout.tokens)[0] for name in (PRODUCTS if some else ())}
    for names in some:
        program, given = products(c, names), {name: inputs[name] for name in names}
        lowered[names] = program.lower(weights, given, jax.eval_shape(program, weights, given, None))
    with ThreadPoolExecutor() as pool:
        ready = dict(zip(lowered, pool.map(lambda one: one.compile(options), lowered.values()), strict=True))

    def advance() -> tuple[Array, Array, Any]:
        return executor.advance(layout, steady.buffer, _NO_APPENDS, executor.last_tokens)

    def as_step(name: str) -> Callable[[], Any]:
        return lambda: executor.run_program(ready[name], buffer, stream)[:2]

    def without(*left_out: str) -> tuple[str, ...]:
        return tuple(name for name in every if name not in left_out)

    outside = ("sample", "logits", "embed")
    yield Part("step", without(), steady.enqueue)
    yield Part("without sampling", without("sample"), lambda: ready["logits"](head(weights), advance()[0]))
    yield Part("without logits", without("sample", "logits"), lambda: advance()[:2])
    yield Part("layers", without(*outside), as_step("layers"))
    yield Part("layers, no attention", without(*outside, *ATTENTION), as_step("no attention"))
    yield Part("no op", (), as_step("no op"), nested=False)
    yield Part("attention alone", ATTENTION, lambda: ready["attention"](*state(q)), nested=False)
    for names in some:
        given, kept = draw({name: inputs[name] for name in names}), lowered[names].out_info
        run = _again(functools.partial(ready[names], weights, given), kept)
        yield Part(f"{names[0] if len(names) == 1 else 'products'} alone", names, run, nested=False)


def _names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops()]


def _again(program: Callable[[Any], Any], shapes: Any) -> Callable[[], Any]:
    """Return a function that runs a program on its former results, which it donates."""
    state = [jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), shapes)]

    def run() -> Any:
        state[0] = program(state[0])
        return state[0]

    return run


def measure_part(part: Part, seconds: float) -> PartRun:
    """Run a part back to back for some seconds."""
    spent: list[float] = []

    def run() -> Any:
        start = time.perf_counter()
        made = part.run()
        spent.append(time.perf_counter() - start)
        return made

    found = sustain(run, seconds)
    return PartRun(part.name, part.ops, part.nested, found, float(np.median(spent)))


def pages_of(workload: StepWorkload, step: Composition) -> int:
    """Return the least pages of a KV cache that hold the step's sequences, and one that is reserved."""
    decodes = step.decode_tokens * (workload.prompt_tokens + workload.output_tokens / 2 + PAGE_SIZE)
    prompts = len(step.chunks) * (workload.prompt_tokens + PAGE_SIZE)
    return 2 + math.ceil((decodes + prompts) / PAGE_SIZE)


def joules_of_run(found: Sustained) -> float | None:
    """Return the joules of one run by the counter, else by the sensor's watts; None without either."""
    by_sensor = None if found.watts is None else found.watts * found.seconds
    return by_sensor if found.joules is None else found.joules


# ---- the table


def described(run: PartRun) -> str:
    """Return a line of a part for a person who waits."""
    found = run.found
    joules = joules_of_run(found)
    watts = "no watts" if joules is None else f"{joules / found.seconds:.0f} W"
    return f"{run.name}: {1e3 * found.seconds:.3f} ms, {watts}, {found.clock_mhz or 0:.0f} MHz"


def part_joules(run: PartRun, accounting: Accounting) -> PartJoules:
    """Return a part beside its ops alone."""
    found = run.found
    return PartJoules(
        run.name,
        run.ops,
        run.nested,
        found.seconds,
        joules_of_run(found),
        found.watts,
        found.clock_mhz,
        found.temperature_c,
        run.host_s,
        *accounting.of_ops(run.ops, found.clock_mhz),
        *accounting.of_ops(run.ops, None),
    )


def parts_table(found: Sequence[PartJoules], tokens: float) -> list[str]:
    """Return the lines of the table of parts. Joules are in millijoules per token, times in milliseconds."""
    names = ("MHz", "C", "W", "W counted", "ms", "mJ", "less ms", "less mJ", "ops ms", "ops mJ", "alone ms")
    lines = [f"{'part':20}" + "".join(f"{name:>10}" for name in (*names, "alone mJ", "host ms"))]
    before = None
    for part in found:
        mj = None if part.joules is None else 1e3 * part.joules / tokens
        counted = None if part.joules is None else part.joules / part.seconds
        less_ms = less_mj = None
        if part.nested and before is not None:
            less_ms = 1e3 * (before.seconds - part.seconds)
            if mj is not None and before.joules is not None:
                less_mj = 1e3 * before.joules / tokens - mj
        before = part
        cells = [
            (part.clock_mhz, 0),
            (part.temperature_c, 0),
            (part.watts, 0),
            (counted, 1),
            (1e3 * part.seconds, 2),
        ]
        cells += [
            (mj, 2),
            (less_ms, 2),
            (less_mj, 2),
            (1e3 * part.now_s, 2),
            (1e3 * part.now_joules / tokens, 2),
        ]
        cells += [(1e3 * part.alone_s, 2), (1e3 * part.alone_joules / tokens, 2), (1e3 * part.host_s, 2)]
        texts = ("-" if value is None else f"{value:.{digits}f}" for value, digits in cells)
        lines.append(f"{part.name:20}" + "".join(f"{text:>10}" for text in texts))
    return lines

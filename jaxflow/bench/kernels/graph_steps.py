"""Comparison of a step's replayed CUDA graph with its separately launched kernels (`bench decode_step --steps
1000`).

Each launch method runs the same number of steps in sequence, as a server does. A step reads the tokens that
the previous step drew. Positions increase by one per step and restart after `TURNS` steps. Therefore a method
reads only KV that it wrote itself since the last restart. The comparison keeps, for every step, the drawn
tokens and two sums over all bits of its hidden states.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflow.engine.executor import Executor
from jaxflow.engine.layout import SlotSampling, StepLayout, pack
from jaxflow.engine.programs import PLAIN, head
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import sequential_plan
from jaxflow.scheduler.state import Chunk, StepWork

TURNS = 16
LAUNCHES = {
    "graph": ("xla", False),
    "one by one": ("streams", False),
    "pdl": ("streams", True),
}  # (as in `streams.GRAPHS`, programmatic dependent launch)
_AHEAD = 50  # maximum steps in flight


@functools.partial(jax.jit, static_argnums=1)
def digest(hidden: jax.Array, rows: int) -> jax.Array:
    """Return uint32 [2] for the first rows of hidden [R, D]: the sum of all bits, and a position-weighted
    sum.

    The weights are odd numbers, so that the second sum detects swapped values.
    """
    bits = (
        lax.bitcast_convert_type(hidden[:rows], jnp.dtype(f"uint{8 * hidden.dtype.itemsize}"))
        .astype(jnp.uint32)
        .reshape(-1)
    )
    weights = lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * weights).sum(dtype=jnp.uint32)])


def packed(
    layout: StepLayout, table: SlotSampling, decodes: int, position: int, chunks: tuple[Chunk, ...] = ()
) -> np.ndarray:
    """Return the packed input of a step with decodes in the first slots, all at one position, and with
    `chunks`."""
    slots, positions, tokens = (
        np.arange(decodes, dtype=np.int32),
        np.full(decodes, position, np.int32),
        sum(one.tokens for one in chunks),
    )
    work = StepWork(
        np.empty(0, object),
        slots,
        positions,
        chunks,
        (),
        decodes + tokens,
        layout.tokens,
        np.empty((0, 4), np.int32),
    )
    return pack(layout, work, table)[0]


def buffers_of(
    layout: StepLayout, decodes: int, chunk: int, context: int, vocabulary: int
) -> list[jax.Array]:
    """Return the packed inputs of TURNS steps: decodes in the first slots and a `chunk`-token prompt in the
    next slot."""
    rng = np.random.default_rng(0)
    table = SlotSampling.empty(layout.slots)
    table.sampler[:], table.temperature[:], table.seeds[:] = (
        PLAIN,
        1.0,
        rng.integers(0, 2**32, table.seeds.shape),
    )
    prompt: Any = types.SimpleNamespace(token_ids=rng.integers(0, vocabulary, context).astype(np.int32))
    buffers = []
    for turn in range(TURNS):
        at = context - TURNS + turn
        chunks = (Chunk(prompt, decodes, at - chunk, chunk, samples=True),) if chunk else ()
        buffers.append(jnp.asarray(packed(layout, table, decodes, at, chunks)))
    return buffers


def agreement(
    executor: Executor,
    tokens: int,
    *,
    decodes: int,
    chunk: int,
    context: int,
    steps: int,
    quantized: bool,
    with_pdl: bool,
) -> dict[str, Any]:
    """Run `steps` steps with each launch method and compare their outputs with those of the first method.

    Returns the first differing step of each method except the first, or None.

    Args:
      executor: without warm-up; its slots have pages for `context` tokens.
      tokens: the bucket. decodes: decoding requests. chunk: prompt tokens of one more request; 0 means no
      chunk and no chunk kernel. with_pdl: include the method with programmatic dependent
      launch, for decode-only steps.
    """
    layout = dataclasses.replace(executor.layouts[tokens][0], decodes=not chunk)
    config, plan = executor.programs.context.config, sequential_plan(executor.programs.context.config, tokens)
    buffers, sampler = (
        buffers_of(layout, decodes, chunk, context, config.vocab_size),
        executor.programs.sample_plain(),
    )
    rows, histories = decodes + bool(chunk), {}
    for launch, (graphs, pdl) in LAUNCHES.items():
        if pdl and not with_pdl:
            continue
        step = executor.programs.step(layout, compile_plan(plan, config, quantized=quantized, pdl=pdl))
        state = executor.weights, executor.kv, executor.page_table, executor.last_tokens
        program = step.lower(*state, buffers[0], *executor.expert_counts).compile(
            compiler_options=xla_options(plan, 1, graphs) or None
        )
        histories[launch] = _history(executor, program, sampler, buffers, rows, steps)
    first, *others = histories.items()
    found = {launch: _first_difference(first[1], history) for launch, history in others}
    distinct = len(np.unique(first[1][1]))
    about = {
        "tokens": tokens,
        "decodes": decodes,
        "chunk": chunk,
        "steps": steps,
        "distinct_tokens_drawn": distinct,
    }
    return about | {
        "of": first[0],
        "first_difference": found,
        "same": all(step is None for step in found.values()),
    }


def _history(
    executor: Executor, program: Any, sampler: Any, buffers: list, rows: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (digests [steps, 2], drawn tokens [steps, rows]) of consecutive steps.

    The first step reads token 0 for every request.
    """
    e = executor
    e.last_tokens = jax.device_put(jnp.zeros_like(e.last_tokens), e.last_tokens.sharding)
    digests, drawn = [], []
    for i in range(steps):
        hidden, _, kept = e.run_program(program, buffers[i % TURNS])
        tokens, e.last_tokens = sampler(head(e.weights), hidden, kept, e.last_tokens)
        digests.append(digest(hidden, rows))
        drawn.append(tokens)
        if i >= _AHEAD:
            drawn[i - _AHEAD].block_until_ready()
    return np.asarray(jnp.stack(digests)), np.stack([np.asarray(tokens)[:rows] for tokens in drawn])


def _first_difference(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> int | None:
    differs = np.any([(a != b).any(1) for a, b in zip(one, other, strict=True)], axis=0)
    return int(differs.argmax()) if differs.any() else None

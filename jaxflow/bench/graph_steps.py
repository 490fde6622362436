"""Whether a step's CUDA graph, replayed, gives what its kernels give launched one by one: `bench decode_step
--steps 1000`.

Each way runs so many steps, one after the other, as a server does: a step reads the tokens that the last one
drew. Positions go up by one a step and begin again after `TURNS`, so that a way reads nothing that the way
before it wrote: what a step reads of these positions was written since they last began. Kept of every step
are the tokens drawn and two sums of all bits of its hidden states.
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
from jaxflow.engine.layout import SlotTable, StepLayout, pack
from jaxflow.engine.programs import PLAIN, head
from jaxflow.engine.work import Chunk, StepWork
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handmade import sequential_plan

TURNS = 16
WAYS = {
    "graph": ("xla", False),
    "one by one": ("streams", False),
    "early": ("streams", True),
}  # (as in `streams.GRAPHS`, kernels begin early)
_AHEAD = 50  # steps in flight at most


@functools.partial(jax.jit, static_argnums=1)
def digest(hidden: jax.Array, rows: int) -> jax.Array:
    """uint32 [2] of all bits of the first rows of hidden [R, D]: their sum, and their sum times odd numbers
    that tell places apart.
    """
    bits = (
        lax.bitcast_convert_type(hidden[:rows], jnp.dtype(f"uint{8 * hidden.dtype.itemsize}"))
        .astype(jnp.uint32)
        .reshape(-1)
    )
    weights = lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435761) | jnp.uint32(1)
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * weights).sum(dtype=jnp.uint32)])


def packed(
    layout: StepLayout, table: SlotTable, decodes: int, position: int, chunks: tuple[Chunk, ...] = ()
) -> np.ndarray:
    """The packed input of a step in which requests in the first slots decode, all at one position, beside
    chunks.
    """
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
    """The packed inputs of TURNS steps: requests in the first slots decode, `chunk` tokens are of the next
    slot's prompt.
    """
    rng = np.random.default_rng(0)
    table = SlotTable.empty(layout.slots)
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
    early: bool,
) -> dict[str, Any]:
    """Runs `steps` steps each way and says of each but the first which step is the first that differs from
    the first way's, if any.

    Args:
      executor: not warm, whose slots have pages of `context` tokens.
      tokens: the bucket. decodes: requests that decode. chunk: tokens of one more request's prompt; 0: none,
      nor a kernel for them. early: with the way whose kernels begin early, of decodes alone.
    """
    layout = dataclasses.replace(executor.layouts[tokens][0], decodes=not chunk)
    config, plan = executor.programs.context.config, sequential_plan(executor.programs.context.config, tokens)
    buffers, sampler = (
        buffers_of(layout, decodes, chunk, context, config.vocab_size),
        executor.programs.sample_plain(),
    )
    rows, histories = decodes + bool(chunk), {}
    for way, (launched, begins) in WAYS.items():
        if begins and not early:
            continue
        step = executor.programs.step(layout, compile_plan(plan, config, quantized=quantized, early=begins))
        state = executor.weights, executor.kv, executor.page_table, executor.last_tokens
        program = step.lower(*state, buffers[0]).compile(
            compiler_options=xla_options(plan, 1, launched) or None
        )
        histories[way] = _history(executor, program, sampler, buffers, rows, steps)
    first, *others = histories.items()
    found = {way: _first_difference(first[1], history) for way, history in others}
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
    """(digests [steps, 2], tokens drawn [steps, rows]) of steps one after the other, the first of which reads
    token 0 of every request.
    """
    e = executor
    e.last_tokens = jax.device_put(jnp.zeros_like(e.last_tokens), e.last_tokens.sharding)
    digests, drawn = [], []
    for i in range(steps):
        hidden, _, kept, e.kv, e.page_table = program(
            e.weights, e.kv, e.page_table, e.last_tokens, buffers[i % TURNS]
        )
        tokens, e.last_tokens = sampler(head(e.weights), hidden, kept, e.last_tokens)
        digests.append(digest(hidden, rows))
        drawn.append(tokens)
        if i >= _AHEAD:
            drawn[i - _AHEAD].block_until_ready()
    return np.asarray(jnp.stack(digests)), np.stack([np.asarray(tokens)[:rows] for tokens in drawn])


def _first_difference(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> int | None:
    differs = np.any([(a != b).any(1) for a, b in zip(one, other, strict=True)], axis=0)
    return int(differs.argmax()) if differs.any() else None

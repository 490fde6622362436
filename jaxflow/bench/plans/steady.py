"""The average step of a workload, run repeatedly on an executor without a scheduler.

Decodes are spread evenly over their output lengths. Prefill chunks are in the middle of their prompts. Every
row has separate pages. Such a step is the mean of an engine's steps in the steady state of requests of these
lengths (NanoFlow §3.1).
"""

import bisect
import dataclasses
import functools
import math
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.config import ConfigError, Window
from jaxflow.engine.executor import Executor
from jaxflow.engine.layout import SlotSampling, StepLayout, pack
from jaxflow.engine.programs import PLAIN
from jaxflow.kv.visible import unseen
from jaxflow.model.composition import Composition
from jaxflow.scheduler.state import Chunk, StepWork

_BLOCK = 256  # pages of random numbers; the cache repeats them
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 are evenly spread for any count
_NOTHING = np.empty((0, 4), np.int32)


@dataclasses.dataclass(frozen=True)
class StepWorkload:
    """Mean prompt and output tokens; or `decodes` decoding requests, each with `prompt_tokens` keys."""

    prompt_tokens: int
    output_tokens: int
    decodes: int | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.prompt_tokens}/{self.output_tokens}"
            if self.decodes is None
            else f"{self.decodes}x{self.prompt_tokens}"
        )

    @property
    def keys(self) -> int:
        """Return the keys of the longest sequence in any step."""
        return self.prompt_tokens + self.output_tokens


def parse_workload(text: str, flag: str = "workloads") -> StepWorkload:
    """Return the workload of a text.

    `1024/512` means prompt and output tokens. `256x1100` means 256 decodes with 1100 keys each.

    Raises: ConfigError that names the flag.
    """
    found = re.fullmatch(r"(\d+)([/x])(\d+)", text)
    first, kind, second = (int(found[1]), found[2], int(found[3])) if found else (0, "", 0)
    if not first or (kind == "x" and not second):
        raise ConfigError(flag, text, "prompt/output tokens (1024/512), or decodes x keys (256x1100)")
    return StepWorkload(first, second) if kind == "/" else StepWorkload(second, 0, decodes=first)


def average_step(
    workload: StepWorkload, tokens: int, *, most_rows: int, kv_tokens: int, page_size: int
) -> Composition:
    """Return the workload's step of at most `tokens` tokens, in integers.

    If the cache (`kv_tokens`) or the rows are too few to fill the step with decodes, the step has the most
    decodes that fit. Its prefill then matches the rate at which these decodes end.
    """
    p, d = workload.prompt_tokens, workload.output_tokens
    if workload.decodes is not None:
        each = page_size * math.ceil(p / page_size)
        return Composition(min(workload.decodes, tokens, most_rows, kv_tokens // each), float(p))
    decodes, prefill = round(tokens * d / (p + d)), tokens - round(tokens * d / (p + d))
    held = p + d / 2 + page_size  # KV tokens of a decode, including the rest of its last page
    prompts = max(1, math.ceil(prefill / p)) if prefill else 0
    fitting = min(int((kv_tokens - prompts * (p + page_size)) / held), most_rows - prompts)
    if d and fitting < decodes:
        decodes = max(0, fitting)
        prefill = round(decodes * p / d)
    pieces = math.ceil(prefill / p)
    sizes = [prefill // pieces + (i < prefill % pieces) for i in range(pieces)]
    return Composition(
        decodes,
        p + (d + 1) / 2 if decodes else 0.0,
        tuple((size, (p - size) // 2) for size in sizes),
        decodes,
    )


def fitting_step(
    workload: StepWorkload, tokens: int, *, rows: int, pages: int, page_size: int
) -> Composition:
    """Return the average step, as large as the rows and pages permit. One page is reserved.

    Raises: ConfigError if no step fits, with the minimum that would fit.
    """

    def step(rows: int, pages: int) -> Composition:
        return average_step(
            workload, tokens, most_rows=rows, kv_tokens=(pages - 1) * page_size, page_size=page_size
        )

    def runs(rows: int, pages: int) -> bool:
        found = step(rows, pages)
        prompts = sum(
            math.ceil((start + size) / page_size) for size, start in found.chunks
        )  # a step without decodes reserves no pages for decodes
        return 0 < rows_of(found) <= rows and prompts < pages

    if runs(rows, pages):
        return step(rows, pages)
    needed = f"for a step of {workload.name} with {tokens} tokens"
    least = bisect.bisect_left(range(tokens + 1), True, key=lambda n: runs(n, sys.maxsize))
    if rows < least:
        raise ConfigError("max_num_seqs", rows, f"at least {least}, {needed}")
    least = bisect.bisect_left(range(sys.maxsize), True, key=lambda n: runs(rows, n))
    raise ConfigError("num_kv_pages", pages, f"at least {least}, {needed}")


def rows_of(step: Composition) -> int:
    """Return the number of rows of a step: one for each decode, and one for each chunk."""
    return int(step.decode_tokens) + len(step.chunks)


def step_work(
    workload: StepWorkload, step: Composition, layout: StepLayout, vocabulary: int, seed: int = 0
) -> StepWork:
    """Return the work of a step with this composition.

    Row i uses slot i. A decode in slot i has the same position in steps of all sizes.
    """
    rng, n = np.random.default_rng(seed), int(step.decode_tokens)
    spread = np.arange(n) * _GOLDEN % 1 * workload.output_tokens
    positions = workload.prompt_tokens + spread.astype(np.int32) - np.int32(workload.decodes is not None)
    chunks = []
    for row, (size, start) in enumerate(step.chunks, start=n):
        prompt: Any = types.SimpleNamespace(
            token_ids=rng.integers(0, vocabulary, int(start + size)).astype(np.int32)
        )
        chunks.append(Chunk(prompt, row, int(start), int(size), samples=False))
    nobody: Any = np.full(n, None, object)
    return StepWork(
        nobody,
        np.arange(n, dtype=np.int32),
        positions,
        tuple(chunks),
        (),
        int(step.tokens),
        layout.tokens,
        _NOTHING,
    )


def page_appends(
    work: StepWork, num_pages: tuple[int, ...], windows: tuple[Window, ...], page_size: int, seed: int = 0
) -> np.ndarray:
    """Return page-table entries [n, 4] that give every row of the step separate pages in random order.

    All pages that a window or a span hides from the step are one shared page.

    Raises: ConfigError if there are too few pages.
    """
    rng = np.random.default_rng(seed)
    lengths = [*(work.decode_positions + 1).tolist(), *(chunk.start + chunk.tokens for chunk in work.chunks)]
    new = [1] * len(work.decode_positions) + [chunk.tokens for chunk in work.chunks]
    found = []
    for group, (pages, window) in enumerate(zip(num_pages, windows, strict=True)):
        hidden = [
            unseen(length - tokens, window, page_size) for length, tokens in zip(lengths, new, strict=True)
        ]
        rows = [
            (row, i)
            for row, length in enumerate(lengths)
            for i in range(-(-length // page_size))
            if i not in hidden[row]
        ]
        if len(rows) > pages - 1:
            raise ConfigError(
                "num_kv_pages", pages, f"at least {len(rows) + 1}, for the step's {len(lengths)} rows"
            )
        places = rng.permutation(pages - 1)[: len(rows)] + 1
        found += [(group, row, i, page) for (row, i), page in zip(rows, places.tolist(), strict=True)]
        found += [(group, row, i, 0) for row, pages_of_row in enumerate(hidden) for i in pages_of_row]
    return np.array(found, np.int32).reshape(-1, 4)


def fill_cache(executor: Executor) -> None:
    """Fill the cache with random numbers, because a GPU draws less power on zeros than on data."""
    keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(executor.kv)))
    executor.fill_kv(lambda i, a: _filled(a.shape, a.dtype, a.sharding)(a, keys[i]))


@functools.cache
def _filled(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    block = (min(_BLOCK, shape[0]), *shape[1:])

    def fill(old: jax.Array, key: jax.Array) -> jax.Array:
        del old  # donated: the result reuses its memory
        integers = jnp.issubdtype(dtype, jnp.integer)
        drawn = jax.random.randint(key, block, -100, 100) if integers else jax.random.normal(key, block)
        return drawn.astype(dtype)[jnp.arange(shape[0]) % block[0]]

    return jax.jit(fill, donate_argnums=0, out_shardings=sharding, keep_unused=True)


@dataclasses.dataclass(frozen=True)
class SteadyStep:
    """A step that is ready to run on an executor, with its rows' pages in the page table."""

    executor: Executor
    layout: StepLayout
    buffer: np.ndarray

    @classmethod
    def of(cls, executor: Executor, layout: StepLayout, work: StepWork) -> "SteadyStep":
        table = SlotSampling.empty(executor.slots)
        table.sampler[:] = PLAIN
        return cls(executor, layout, pack(layout, work, table)[0])

    def place(self, appends: np.ndarray) -> None:
        """Write the page table."""
        self.executor.run(self.layout, self.buffer, appends, full=False).tokens.block_until_ready()

    def enqueue(self) -> jax.Array:
        """Run the step once more and return its sampled tokens without waiting for the device."""
        return self.executor.run(self.layout, self.buffer, _NOTHING, full=False).tokens

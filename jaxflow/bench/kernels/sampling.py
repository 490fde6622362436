"""Benchmark cases of sampling: 1,024 rows of Llama 3's vocabulary, with plain sampling and with every
setting.

One read of the logits serves as the comparison.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxflow.bench.kernels.case import Case, Group, Way
from jaxflow.model import sampling, slot_params
from pallas_kernels.measure.timing import looped
from pallas_kernels.pointwise.sample.api import token_limits

ROWS, VOCABULARY = 1024, 128256
LOGITS = 4.0 * ROWS * VOCABULARY  # bytes
PLAIN_SECONDS, FULL_SECONDS = 0.6e-3, 2e-3  # upper limits of the sampling times, in seconds


def _rows():
    """Return logits with a softmax that is neither flat nor peaked, and a quarter of the rows greedy."""
    logits = 2.0 * jax.random.normal(jax.random.key(0), (ROWS, VOCABULARY), jnp.float32)
    temperature = jnp.where(jnp.arange(ROWS) % 4 == 0, 0.0, 0.8)
    seed = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (ROWS, 2)), jnp.uint32)
    return logits, temperature, seed, jnp.arange(ROWS, dtype=jnp.int32)


def _with_reading(name: str, run: Callable, logits: jax.Array) -> dict[str, Way]:
    read = looped(lambda x, _: x.max(-1), 8)
    return {name: Way(run, 1, LOGITS), "one reading": Way(lambda: read([logits], [None]), 8, LOGITS)}


def _plain():
    rows = _rows()
    program = jax.jit(sampling.plain)
    return _with_reading("plain", lambda: program(*rows), rows[0])


def _full(top_k: int, top_p: float, penalty: float):
    rows = _rows()
    params, counts = slot_params.empty_slots(ROWS, VOCABULARY)
    settings = {
        "top_k": jnp.int32(top_k),
        "top_p": jnp.float32(top_p),
        "repetition_penalty": jnp.float32(penalty),
    }
    params = dataclasses.replace(
        params, **{name: jnp.full((ROWS,), value) for name, value in settings.items()}
    )
    kept = [counts]

    def way(sampler: Callable) -> Callable:
        program = jax.jit(functools.partial(sampler, search=token_limits), donate_argnums=(6,))

        def run():
            tokens, kept[0], logprobs = program(*rows, rows[3], params, kept[0])
            return tokens, logprobs

        return run

    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    engines = functools.partial(sampling.full_by_rows, most=sampling.rows_at_once(memory, VOCABULARY))
    return _with_reading("full", way(engines), rows[0]) | {
        "rows together": Way(way(sampling.full), 1, LOGITS)
    }


GROUPS = (
    Group(
        "sampling",
        "TB/s",
        (
            Case("1024 rows plain", _plain, rate=LOGITS / PLAIN_SECONDS),
            Case(
                "1024 rows top-k 50 top-p 0.9 penalties",
                functools.partial(_full, 50, 0.9, 1.1),
                rate=LOGITS / FULL_SECONDS,
            ),
            Case("1024 rows top-p 0.9 of a flat softmax", functools.partial(_full, 0, 0.9, 1.0)),
            Case("1024 rows top-k 5000 top-p 0.9", functools.partial(_full, 5000, 0.9, 1.0)),
        ),
    ),
)

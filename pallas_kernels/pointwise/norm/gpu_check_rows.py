"""Check the norm that adds the rows of a mixture's experts against its reference on a GPU, and time it.

  python -m pallas_kernels.pointwise.norm.gpu_check_rows [--seconds 0.6] [--only check,time] [--json FILE]

`check` compares the sums and the norms, in bfloat16 and in e4m3, and the bits of two runs. `time` runs norms
of Qwen3-30B-A3B's layers, once with the rows and once after a sum by XLA. All programs compile at once.
"""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved
from pallas_kernels.pointwise.norm import reference
from pallas_kernels.pointwise.norm.api import add_norm
from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.pointwise.quantize.reference import dequantize

CASES = (  # tokens, columns, experts of a token, tokens at the end that add nothing
    (1, 2048, 8, 0),
    (8, 2048, 8, 7),
    (64, 2048, 8, 0),
    (64, 4096, 2, 3),
    (33, 896, 4, 5),
    (256, 2048, 8, 0),
    (1, 2880, 4, 0),
    (64, 2880, 4, 3),
)
TIMED, COLUMNS, CHOSEN, LAYERS = (1, 8, 64, 128), 2048, 8, 32


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)


def weighted_rows(rng, tokens, columns, chosen, adds_nothing=0) -> WeightedRows:
    """Return terms in a random order. The last ones may add nothing. Rows that no token has are NaN."""
    count = tokens * chosen
    places = jnp.asarray(rng.permutation(count).reshape(tokens, chosen), jnp.int32)
    rows = normal(rng, count + 8, columns).at[count:].set(jnp.nan)
    if adds_nothing:
        places = places.at[-adds_nothing:].set(count + 8)
    shares = jnp.asarray(rng.uniform(size=places.shape), jnp.float32)
    return WeightedRows(rows, places, shares, partial=adds_nothing > 0)


def checks(rows):
    rng = np.random.default_rng(time.time_ns())
    cases = [(*case, quantizes) for case in CASES for quantizes in (False, True)]

    def given(tokens, columns, chosen, adds_nothing):
        terms = weighted_rows(rng, tokens, columns, chosen, adds_nothing)
        return normal(rng, tokens, columns), terms, normal(rng, columns)

    inputs = {case: given(*case) for case in CASES}

    def compiled(case):
        how = {"eps": 1e-5, "quantize": case[-1]}
        made = [jax.jit(functools.partial(one, **how)) for one in (add_norm, reference.add_norm)]
        return [one.lower(*inputs[case[:-1]]).compile() for one in made]

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, cases))
    for case, (run, wanted) in zip(cases, programs, strict=True):
        xs, quantizes = inputs[case[:-1]], case[-1]
        want = wanted(*xs)
        poison_memory(want)
        (total, h), again = run(*xs), run(*xs)
        same = all(
            map(np.array_equal, *(jax.tree.map(np.asarray, jax.tree.leaves(x)) for x in ((total, h), again)))
        )
        found = error(*(dequantize(x) if quantizes else x for x in (h, want[1])))
        off = error(total, want[0])
        # XLA may take the norm of the sum before its rounding.
        ok = same and off < 1e-3 and found < (4e-2 if quantizes else 4e-3)
        about = dict(zip(("t", "d", "chosen", "adds_nothing", "quantizes"), case, strict=True))
        record(
            rows, what="check add_norm of rows", ok=ok, error=found, error_of_sum=off, same_bits=same, **about
        )


def times(rows, seconds):
    """Time chains of norms: each depends on the sum of the one before it, as in a step."""

    def layers(x, terms, weight, summed, quantizes):
        for one in terms:
            x, h = add_norm(x, one.total() if summed else one, weight, eps=1e-5, quantize=quantizes)
            x, h = jax.lax.optimization_barrier((x, h))
        return x, h

    rng = np.random.default_rng(0)
    inputs = {
        tokens: (
            normal(rng, tokens, COLUMNS),
            [weighted_rows(rng, tokens, COLUMNS, CHOSEN) for _ in range(LAYERS)],
            normal(rng, COLUMNS),
        )
        for tokens in TIMED
    }
    cases = [(t, quantizes, summed) for t in TIMED for quantizes in (False, True) for summed in (False, True)]

    def compiled(case):
        tokens, quantizes, summed = case
        return jax.jit(layers, static_argnums=(3, 4)).lower(*inputs[tokens], summed, quantizes).compile()

    with ThreadPoolExecutor(8) as pool:
        programs = dict(zip(cases, pool.map(compiled, cases), strict=True))
    for tokens in TIMED:
        for quantizes in (False, True):
            ways = {
                name: functools.partial(programs[tokens, quantizes, summed], *inputs[tokens])
                for name, summed in (("add_norm of rows", False), ("sum by xla, add_norm", True))
            }
            for name, t in interleaved(ways, calls=LAYERS, seconds=seconds).items():
                record(rows, what=name, t=tokens, quantizes=quantizes, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(
        __doc__,
        {"check": lambda rows, *_: checks(rows), "time": lambda rows, _, seconds: times(rows, seconds)},
    )

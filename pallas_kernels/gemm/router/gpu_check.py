"""Check the router's kernel against its reference on a GPU, and time it next to the product and the choice as
two kernels.

    python -m pallas_kernels.gemm.router.gpu_check [--seconds 0.6] [--only check,time] [--json FILE]

The logits of `check` are exact, and many are equal. So all experts are equal, and all bits of two runs. Sums
of sigmoids and biases may differ in the last bit, and with it a choice.
`time` has a weight of its own for each call, more of them than the L2 cache holds.
"""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gemm.flat.api import ROWS, flat_gemm
from pallas_kernels.gemm.router import reference
from pallas_kernels.gemm.router.api import route
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved, looped
from pallas_kernels.pointwise.top_k.api import top_k

MODELS = {  # experts, columns, experts per token, settings
    "qwen3-30b-a3b": (128, 2048, 8, {}),
    "gpt-oss-20b": (32, 2880, 4, {"bias": True}),
    "qwen3-235b-a22b": (128, 4096, 8, {}),
    "glm-4.5-air": (128, 4096, 8, {"sigmoid": True}),
    "softmax over all": (256, 2048, 8, {"normalized": False}),
}
TOKENS = (1, 7, 8, 9, 64, 128)
CALLS = 120  # of 0.5 MB each


def drawn(seed, tokens, experts, columns, exact):
    """Return x, w and two biases. exact: small integers over 4, whose sums are exact in float32."""

    def make(key, rows, width):
        if exact:
            return jax.random.randint(key, (rows, width), -1, 2).astype(jnp.bfloat16) / 4
        return jax.random.normal(key, (rows, width), jnp.bfloat16)

    keys = jax.random.split(jax.random.key(seed), 4)
    x, w = make(keys[0], tokens, columns), make(keys[1], experts, columns)
    biases = [make(key, 1, experts)[0].astype(jnp.float32) for key in keys[2:]]
    return x, w if exact else w * columns**-0.5, *biases


def program(one, model, settings):
    """Return the arguments' program for a model's router. settings: of `MODELS`."""
    how = {key: value for key, value in settings.items() if key == "normalized"}

    def run(x, w, bias, score_bias):
        of_bias = bias if "bias" in settings else None
        return one(
            x, w, of_bias, score_bias if "sigmoid" in settings else None, chosen=MODELS[model][2], **how
        )

    return jax.jit(run)


def check(rows, model, tokens, exact, programs, given):
    run, wanted = programs
    poison_memory(jax.eval_shape(program(route, model, MODELS[model][3]), *given))
    (weights, experts), again, want = run(*given), run(*given), wanted(*given)
    same = all(bool((a == b).all()) for a, b in zip((weights, experts), again, strict=True))
    off, equal = error(weights, want[0]), float((experts == want[1]).mean())
    sure = exact and "sigmoid" not in MODELS[model][3]
    ok = same and (off < 1e-5 and equal == 1 if sure else off < 1e-3 and equal > 0.98)
    record(
        rows,
        what="check route",
        model=model,
        t=tokens,
        exact=exact,
        ok=ok,
        err=off,
        equal=equal,
        same_bits=same,
    )


def checks(rows):
    cases = [(model, tokens, exact) for model in MODELS for tokens in TOKENS for exact in (True, False)]
    seed = time.time_ns() % 2**31

    def compiled(case):
        model, tokens, exact = case
        experts, columns, _, settings = MODELS[model]
        given = drawn(seed, tokens, experts, columns, exact)
        return given, [
            program(one, model, settings).lower(*given).compile() for one in (route, reference.route)
        ]

    with ThreadPoolExecutor(8) as pool:
        for case, (given, programs) in zip(cases, pool.map(compiled, cases), strict=True):
            check(rows, *case, programs, given)


def two_kernels(x, w, *, chosen):
    """Return what `route` returns, by a product and a choice."""
    return top_k(flat_gemm(x, w, out_dtype=jnp.float32), chosen, softmax=True)


def timings(rows, seconds):
    for model, counts in (("qwen3-30b-a3b", (1, 8, 16, 32, 64)), ("gpt-oss-20b", (8, 64))):
        experts, columns, chosen, _ = MODELS[model]
        rng = np.random.default_rng(0)
        ws = [drawn(int(rng.integers(2**31)), 1, experts, columns, exact=False)[1] for _ in range(CALLS)]
        for tokens in counts:
            assert tokens <= ROWS
            xs = [drawn(0, tokens, experts, columns, exact=False)[0]] * CALLS
            ways = {
                name: functools.partial(looped(jax.jit(functools.partial(one, chosen=chosen)), 4), xs, ws)
                for name, one in (("route", route), ("flat_gemm and top_k", two_kernels))
            }
            for name, t in interleaved(ways, calls=4 * CALLS, seconds=seconds).items():
                record(rows, what=name, model=model, t=tokens, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(
        __doc__,
        {"check": lambda rows, *_: checks(rows), "time": lambda rows, _, seconds: timings(rows, seconds)},
    )

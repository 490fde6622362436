"""Check the router's kernel against its reference on a GPU, and time it next to the product and the choice as
two kernels.

    python -m pallas_kernels.gemm.router.gpu_check [--seconds 0.6] [--only check,sort,time] [--json FILE]

The logits of `check` are exact, and many are equal. So all experts are equal, and all bits of two runs. Sums
of sigmoids and biases may differ in the last bit, and with it a choice. `sort` checks the rows that the
kernel sorts, with padding and without. `time` has a weight of its own for each call, more of them than the L2
cache holds.
"""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gemm.flat.api import flat_gemm
from pallas_kernels.gemm.router import reference
from pallas_kernels.gemm.router.api import route, route_and_sort
from pallas_kernels.gemm.router.limits import supports_sort
from pallas_kernels.gemm.sorted_rows.api import sort_by_xla, sort_rows
from pallas_kernels.gemm.sorted_rows.gpu_check import used
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
TOKENS = {"qwen3-30b-a3b": (1, 8, 9, 64, 128)}  # of the other models: 7 and 64
TIMED = (("qwen3-30b-a3b", 8), ("qwen3-30b-a3b", 64), ("gpt-oss-20b", 8))  # model, tokens
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
    about = {"model": model, "t": tokens, "exact": exact}
    record(rows, what="check route", **about, ok=ok, err=off, equal=equal, same_bits=same)


def checks(rows):
    cases = [(model, tokens) for model in MODELS for tokens in TOKENS.get(model, (7, 64))]
    seed = time.time_ns() % 2**31

    def inputs(case, exact):
        experts, columns, *_ = MODELS[case[0]]
        return drawn(seed, case[1], experts, columns, exact)

    def compiled(case):
        given = jax.eval_shape(lambda: inputs(case, True))
        ways = [program(one, case[0], MODELS[case[0]][3]) for one in (route, reference.route)]
        return [way.lower(*given).compile() for way in ways]

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, cases))
    for case, ways in zip(cases, programs, strict=True):
        for exact in (True, False):
            check(rows, *case, exact, ways, inputs(case, exact))


SORTS = (  # model, tokens, tokens before the padding, quantize
    ("qwen3-30b-a3b", 8, None, True),
    ("qwen3-30b-a3b", 8, 1, True),
    ("qwen3-30b-a3b", 8, 0, True),
    ("qwen3-30b-a3b", 1, None, False),
    ("qwen3-30b-a3b", 5, 3, False),
    ("qwen3-235b-a22b", 8, 7, True),
    ("softmax over all", 8, 8, True),
    ("gpt-oss-20b", 8, None, False),
    ("gpt-oss-20b", 8, 5, False),
    ("gpt-oss-20b", 1, None, False),
)


def sort_checks(rows):
    seed = time.time_ns() % 2**31

    def compiled(case):
        model, tokens, kept, quantize = case
        experts, columns, chosen, settings = MODELS[model]
        how = {"chosen": chosen, **{key: value for key, value in settings.items() if key != "bias"}}

        def of(bias):
            return bias if "bias" in settings else None

        def run(x, w, bias, number):
            sort = {"quantize": quantize, "used": None if kept is None else number}
            return route_and_sort(x, w, of(bias), **how, **sort)

        def wanted(x, w, bias, number):
            weights, picked = reference.route(x, w, of(bias), **how)
            sort = {"quantize": quantize, "used": None if kept is None else number}
            return weights, picked, *sort_by_xla(x, picked, experts, **sort)

        given = (*drawn(seed, tokens, experts, columns, True)[:3], jnp.int32(kept or 0))
        return (
            given,
            [jax.jit(one).lower(*given).compile() for one in (run, wanted)],
            jax.eval_shape(run, *given),
        )

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, SORTS))
    for (model, tokens, kept, quantize), (given, (run, wanted), shapes) in zip(SORTS, programs, strict=True):
        want = wanted(*given)
        poison_memory(shapes)
        got, again = run(*given), run(*given)
        found = [[np.asarray(one[1]), *used(*one[2:])] for one in (got, again, want)]
        same, right = (all(map(np.array_equal, found[0], other)) for other in found[1:])
        off = error(got[0], want[0])
        ok = same and right and off < 1e-5 and not np.asarray(got[2].arrived).any()
        about = {"model": model, "t": tokens, "used": kept, "quantize": quantize}
        record(rows, what="check route_and_sort", ok=ok, err=off, same_bits=same, **about)


def two_kernels(x, w, *, chosen):
    """Return what `route` returns, by a product and a choice."""
    return top_k(flat_gemm(x, w, out_dtype=jnp.float32), chosen, softmax=True)


def three_kernels(x, w, *, chosen):
    """Return what `route_and_sort` returns, by a product, a choice and a sort."""
    weights, picked = two_kernels(x, w, chosen=chosen)
    return weights, picked, *sort_rows(x, picked, w.shape[0], quantize=True)


def timings(rows, seconds):
    def inputs(model, tokens):
        experts, columns, *_ = MODELS[model]
        ws = [drawn(seed, 1, experts, columns, exact=False)[1] for seed in range(CALLS)]
        return [drawn(0, tokens, experts, columns, exact=False)[0]] * CALLS, ws

    def forms(model, tokens):
        found = {"route": route, "flat_gemm and top_k": two_kernels}
        experts, columns, chosen, _ = MODELS[model]
        if supports_sort(tokens, jax.ShapeDtypeStruct((experts, columns), jnp.bfloat16), chosen):
            found["route_and_sort"] = functools.partial(route_and_sort, quantize=True)
            found["flat_gemm, top_k and sort_rows"] = three_kernels
        return found

    def compiled(case):
        model, tokens, name = case
        one = jax.jit(functools.partial(forms(model, tokens)[name], chosen=MODELS[model][2]))
        return looped(one, 4).lower(*given[model, tokens]).compile()

    given = {case: inputs(*case) for case in TIMED}
    cases = [(*case, name) for case in TIMED for name in forms(*case)]
    with ThreadPoolExecutor(8) as pool:
        programs = dict(zip(cases, pool.map(compiled, cases), strict=True))
    for model, tokens in TIMED:
        ways = {
            name: functools.partial(programs[model, tokens, name], *given[model, tokens])
            for name in forms(model, tokens)
        }
        for name, t in interleaved(ways, calls=4 * CALLS, seconds=seconds).items():
            record(rows, what=name, model=model, t=tokens, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, *_: checks(rows),
            "sort": lambda rows, *_: sort_checks(rows),
            "time": lambda rows, _, seconds: timings(rows, seconds),
        },
    )

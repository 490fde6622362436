"""Check the sort of a mixture's rows against the groups and the gather of XLA on a GPU, and time both.

    python -m pallas_kernels.gemm.sorted_rows.gpu_check [--seconds 0.6] [--only NAMES] [--json FILE]

All integers are equal, and so are all bits of the rows. Skewed routings leave experts without a
token, or give them several tiles. `check` compares, and `time` times the sort. `check_by_64` compares rows of
an odd multiple of 64 columns. `padding` times the sort and
both products of Qwen3-30B-A3B's experts in e4m3 for one token in a step of 8 rows. Once the other rows have
experts of their own, and once they have none.

`check_larger` compares the sort of up to 2,048 tokens, and of the experts that one of several devices holds.
A program runs all routings of its size: even and skewed ones, one with the same experts for all tokens, and
steps whose last tokens are padding. `larger` times the sort of both, for Qwen3-30B-A3B. `check_adds`
checks the kernel of up to 128 tokens in more sizes.
"""

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gemm.grouped import api as grouped
from pallas_kernels.gemm.grouped.groups import HeldExperts
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.sorted_rows import api
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved, looped
from pallas_kernels.pointwise.quantize import api as quantize_api
from pallas_kernels.pointwise.quantize.reference import quantize_rows

MODELS = {  # experts, experts per token, columns
    "qwen3-30b-a3b": (128, 8, 2048),
    "mixtral-8x7b": (8, 2, 4096),
    "gpt-oss-20b": (32, 4, 2880),
    "deepseek-v3": (256, 8, 7168),
}
CALLS, ROUNDS = 8, 32  # calls in a loop's body, and rounds of the loop


def drawn(rng, tokens, experts, chosen, columns, zipf=0.0):
    """Return random rows and a random routing."""
    x = jax.random.normal(jax.random.key(rng.integers(2**31)), (tokens, columns), jnp.bfloat16)
    return x, jnp.asarray(draw_routing(rng, tokens, experts, chosen, zipf))


def used(groups, rows):
    """Return the parts of the groups that are defined, and the row of each pair that has one."""
    tiles, places = int(groups.count[0]), np.asarray(groups.places)
    places = places[places < len(groups.pairs)]
    listed = [np.asarray(one)[:tiles] for one in (groups.experts, groups.starts, groups.ends)]
    parts = jax.tree.leaves(rows)
    bits = [part.view(np.uint8) for part in (np.asarray(part[places]) for part in parts)]
    return [places, np.asarray(groups.pairs)[places], np.asarray(groups.sizes), *listed, *bits]


def check(rows, rng, tokens, experts, chosen, columns, quantize, zipf=0.0, sms=None, kept=None):
    """Compare one sort. kept: the tokens before the padding; None: no padding."""
    given: tuple = drawn(rng, tokens, experts, chosen, columns, zipf)
    run, wanted = (
        jax.jit(
            lambda *xs, sort=sort: sort(
                *xs[:2], experts, quantize=quantize, sms=sms, used=None if kept is None else xs[2]
            )
        )
        for sort in (api.sort_rows, api.sort_by_xla)
    )
    if kept is not None:
        given = (*given, jnp.int32(kept))
    poison_memory(jax.eval_shape(run, *given))
    got, again, want = (used(*one(*given)) for one in (run, run, wanted))
    ok, same = (all(map(np.array_equal, got, other)) for other in (want, again))
    case = {
        "t": tokens,
        "experts": experts,
        "d": columns,
        "quantize": quantize,
        "zipf": zipf,
        "sms": sms,
        "used": kept,
    }
    record(rows, what="check sort_rows", ok=ok and same, same_bits=same, **case)


def checks(rows):
    case = functools.partial(check, rows, np.random.default_rng(time.time_ns()))
    for experts, chosen, columns in MODELS.values():
        for tokens in (1, 8, 64, api.MOST_TOKENS):
            quantized = (False,) if columns % 128 else (False, True)
            for quantize in quantized:
                case(tokens, experts, chosen, columns, quantize)
    case(77, 128, 8, 2048, True, zipf=1.2)
    case(200, 128, 8, 2048, False, zipf=3.0)
    case(64, 33, 5, 384, True, zipf=1.2, sms=1)
    case(13, 500, 3, 16384, True)
    for kept in (0, 1, 7, 8):
        case(8, 128, 8, 2048, True, kept=kept)
    case(64, 128, 8, 2048, False, kept=33)
    case(128, 256, 8, 7168, True, zipf=1.2, kept=65)


def checks_by_64(rows):
    """Compare sorts of rows whose width is an odd multiple of 64."""
    case = functools.partial(check, rows, np.random.default_rng(time.time_ns()))
    experts, chosen, columns = MODELS["gpt-oss-20b"]
    for tokens, kept in ((1, None), (8, 1), (8, 8), (64, 64), (64, 33), (128, None), (300, 290)):
        case(tokens, experts, chosen, columns, False, kept=kept)
    case(64, experts, chosen, columns, True, zipf=1.2)
    case(33, 6, 2, 192, True)


LARGER = (  # tokens, experts, experts per token, columns, quantize, devices
    (64, 128, 8, 2048, False, 2),
    (512, 128, 8, 2048, False, 2),
    (2048, 128, 8, 2048, False, 1),
    (2048, 128, 8, 2048, True, 1),
    (128, 128, 8, 2048, True, 2),
    (512, 128, 8, 2048, True, 2),
    (256, 128, 8, 2048, False, 1),
    (512, 128, 8, 2048, True, 1),
    (2048, 128, 8, 2048, True, 8),
    (129, 128, 8, 2048, False, 1),
    (2048, 256, 8, 7168, True, 1),
    (1000, 130, 4, 384, False, 5),
)


def larger(sort, experts, quantize, devices):
    """Return (x, experts of the tokens, used or the device) -> groups and rows. One device has padding."""
    count = experts // devices

    def run(x, picked, number):
        placed = {"used": number} if devices == 1 else {"held": HeldExperts(number * count, count)}
        return sort(x, picked, experts, quantize=quantize, **placed)

    return jax.jit(run)


SORTS = {
    "mosaic": functools.partial(api.sort_rows, max_tokens=api.MOST_COUNTED, held_max_tokens=api.MOST_COUNTED),
    "xla": api.sort_by_xla,
}


def check_larger(rows):
    """Compare sorts of each size. Padding of several devices' tokens has an expert that no device holds."""
    rng = np.random.default_rng(time.time_ns())
    for tokens, experts, chosen, columns, quantize, devices in LARGER:
        run, wanted = (larger(sort, experts, quantize, devices) for sort in SORTS.values())
        for route in ("even", "zipf 1.2", "zipf 3", "equal", "padded"):
            zipf = float(route.split()[1]) if "zipf" in route else 0.0
            x, picked = drawn(rng, tokens, experts, chosen, columns, zipf)
            picked = jnp.tile(picked[:1], (tokens, 1)) if route == "equal" else picked
            kept = int(rng.integers(tokens)) if route == "padded" else tokens
            if devices > 1:
                picked = picked.at[kept:].set(experts)
            numbers = (kept,) if devices == 1 else (0, devices - 1)
            for number in numbers:
                given = x, picked, jnp.int32(number)
                if route == "even":
                    poison_memory(jax.eval_shape(run, *given))
                got, again, want = (used(*one(*given)) for one in (run, run, wanted))
                ok, same = (all(map(np.array_equal, got, other)) for other in (want, again))
                case = {"t": tokens, "experts": experts, "d": columns, "quantize": quantize}
                case |= {"devices": devices, "number": number, "route": route}
                record(rows, what="check larger", ok=ok and same, same_bits=same, **case)


def larger_timings(rows, seconds):
    experts, chosen, columns = MODELS["qwen3-30b-a3b"]
    rng = np.random.default_rng(0)
    for quantize in (False, True):
        for devices in (1, 2):
            for tokens in (64, 256, 512, 2048):
                number = jnp.int32(tokens if devices == 1 else 1)
                xs = [(*drawn(rng, tokens, experts, chosen, columns), number) for _ in range(CALLS)]

                def one(run, x, _):
                    return run(*x)

                ways = {
                    name: functools.partial(
                        looped(functools.partial(one, larger(sort, experts, quantize, devices)), ROUNDS),
                        xs,
                        [None] * CALLS,
                    )
                    for name, sort in SORTS.items()
                }
                for name, t in interleaved(ways, calls=CALLS * ROUNDS, seconds=seconds).items():
                    own = {"model": "qwen3-30b-a3b", "t": tokens, "quantize": quantize, "devices": devices}
                    record(rows, what=f"{name} larger", **own, **dataclasses.asdict(t))


ADDS = (  # tokens, experts, experts per token, columns, quantize, devices
    (1, 128, 8, 2048, True, 1),
    (8, 128, 8, 2048, True, 1),
    (64, 128, 8, 2048, True, 1),
    (128, 128, 8, 2048, False, 1),
    (64, 8, 2, 4096, False, 1),
    (77, 256, 8, 7168, True, 1),
    (13, 500, 3, 16384, True, 1),
    (64, 128, 8, 2048, True, 2),
)
BY_ADDS = functools.partial(api.sort_rows, held_max_tokens=api.MOST_TOKENS)


def check_adds(rows):
    """Compare sorts of each size. The last tokens are padding, or have the experts of no device."""
    rng = np.random.default_rng(time.time_ns())

    def compiled(case):
        tokens, experts, chosen, columns, quantize, devices = case
        shapes = [jax.ShapeDtypeStruct((tokens, columns), jnp.bfloat16)]
        shapes += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((tokens, chosen), ())]
        ways = [larger(sort, experts, quantize, devices) for sort in (BY_ADDS, api.sort_by_xla)]
        return [way.lower(*shapes).compile() for way in ways], jax.eval_shape(ways[0], *shapes)

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, ADDS))
    for (tokens, experts, chosen, columns, quantize, devices), (ways, shapes) in zip(
        ADDS, programs, strict=True
    ):
        for zipf in (0.0, 1.2, 3.0):
            kept = int(rng.integers(tokens + 1))
            for number in (kept, tokens) if devices == 1 else (0, 1):
                x, picked = drawn(rng, tokens, experts, chosen, columns, zipf)
                given = x, picked if devices == 1 else picked.at[kept:].set(experts), jnp.int32(number)
                poison_memory(shapes)
                got, again, want = (one(*given) for one in (ways[0], *ways))
                ok, same = (all(map(np.array_equal, used(*got), used(*other))) for other in (want, again))
                ok &= not np.asarray(got[0].arrived).any()
                case = {"t": tokens, "experts": experts, "d": columns, "quantize": quantize, "zipf": zipf}
                case |= {"devices": devices, "number": number}
                record(rows, what="check adds", ok=ok and same, same_bits=same, **case)


def timings(rows, seconds):
    rng = np.random.default_rng(0)
    for model, (experts, chosen, columns) in MODELS.items():
        for tokens in (1, 8, 64, api.MOST_TOKENS):
            if not api.supports(tokens, chosen, experts, columns):
                continue
            xs = [drawn(rng, tokens, experts, chosen, columns) for _ in range(CALLS)]
            for quantize in (False, True):

                def one(sort, x, _, experts=experts, quantize=quantize):
                    return sort(*x, experts, quantize=quantize)

                ways = {
                    name: functools.partial(
                        looped(jax.jit(functools.partial(one, sort)), ROUNDS), xs, [None] * CALLS
                    )
                    for name, sort in (("mosaic", api.sort_rows), ("xla", api.sort_by_xla))
                }
                for name, t in interleaved(ways, calls=CALLS * ROUNDS, seconds=seconds).items():
                    own = {"model": model, "t": tokens, "quantize": quantize}
                    record(rows, what=name, **own, **dataclasses.asdict(t))


def padding(rows, seconds):
    experts, chosen, columns = MODELS["qwen3-30b-a3b"]
    made = jax.jit(
        lambda key, n, k: quantize_rows(jax.random.normal(key, (experts, n, k))), static_argnums=(1, 2)
    )
    keys = jax.random.split(jax.random.key(0), 2)
    weights = made(keys[0], 2 * 768, columns), made(keys[1], columns, 768)
    rng = np.random.default_rng(0)
    xs = [drawn(rng, 8, experts, chosen, columns) for _ in range(CALLS)]
    # All rows of padding are equal, and so they choose the same experts.
    xs = [(x, picked.at[2:].set(picked[1])) for x, picked in xs]

    def way(used):
        def one(x, weights):
            groups, own = api.sort_rows(x[0], x[1], experts, quantize=True, used=used)
            a = grouped.grouped_gemm(own, weights[0], groups, activation="silu", gate_block=32)
            return grouped.grouped_gemm(quantize_api.quantize_rows(a), weights[1], groups)[groups.places[0]]

        return functools.partial(looped(jax.jit(one), 8), xs, [weights] * CALLS)

    ways = {"without rows": way(jnp.int32(1)), "with experts": way(None)}
    for name, t in interleaved(ways, calls=8 * CALLS, seconds=seconds).items():
        record(rows, what=f"padding {name}", model="qwen3-30b-a3b", t=8, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, *_: checks(rows),
            "check_by_64": lambda rows, *_: checks_by_64(rows),
            "time": lambda rows, _, seconds: timings(rows, seconds),
            "check_larger": lambda rows, *_: check_larger(rows),
            "larger": lambda rows, _, seconds: larger_timings(rows, seconds),
            "padding": lambda rows, _, seconds: padding(rows, seconds),
            "check_adds": lambda rows, *_: check_adds(rows),
        },
    )

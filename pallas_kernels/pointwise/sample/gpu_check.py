"""Check the kernel that draws under filters on a GPU, and time its search beside XLA's.

  python -m pallas_kernels.pointwise.sample.gpu_check [--seconds 0.5] [--only check,time] [--share 0/2]
      [--json FILE]

Limits are compared with those of a sort in float64. A limit may be off by the logits whose weights lie within
rounding of the target. Times are of the limits alone. `reading` finds the largest logit of each row.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved, looped
from pallas_kernels.pointwise.sample import limits, reference
from pallas_kernels.pointwise.sample.api import draw_filtered, token_limits

VOCABULARIES = (128_256, 151_936)
ROWS = (1, 64, 256, 640)
# (top-k, top-p); 0: no top-k
FILTERS = ((0, 0.9), (5000, 1.0), (5000, 0.9), (50, 0.9), (0, 0.5), (0, 0.99), (1000, 0.999))
ROUNDING = 2e-5  # of the sum of a row's weights
ROUNDS = 8  # calls in a program
LIMITS = jax.jit(token_limits)


def logits(kind: str, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return logits [R, V] of a kind of softmax."""
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    if kind == "flat":
        return 2 * x
    if kind == "even":
        return 0.1 * x
    if kind == "peaked":  # a few likely tokens far above the others
        x = 3 * x
        x[:, 1000:1020] += 20
        return x
    if kind == "ties":  # as many values as bfloat16 has
        return np.asarray(jnp.asarray(4 * x + 8, jnp.bfloat16).astype(jnp.float32))
    x[:, 7:] = np.where(np.arange(rows)[:, None] % 2, -np.inf, 1e-6 * x[:, 7:])
    return x


def arguments(x: np.ndarray, heat: float, top_k: int, top_p: float, min_p: float) -> tuple:
    rows, n = x.shape
    peak, one = x.max(-1), np.ones(rows, np.float32)
    floor = peak + heat * np.log(min_p) if min_p else one * -np.inf
    given = (x, peak, one * heat, floor, one * (top_k or n), one * top_p, np.ones(rows, bool))
    return tuple(jnp.asarray(a if a.dtype == bool else np.float32(a)) for a in given)


def bounds(x: np.ndarray, heat: float, top_k: int, top_p: float, min_p: float) -> tuple[float, float]:
    """Return the largest and the smallest limit of a row that rounding allows, by a sort in float64."""
    values = np.sort(x.astype(np.float64))[::-1]
    low = values[0] + heat * np.log(min_p) if min_p else -np.inf
    low = max(low, values[top_k - 1]) if top_k else low
    kept = values[values >= np.float32(low)]
    if top_p >= 1:
        return low, low
    mass = np.cumsum(np.exp((kept - values[0]) / heat))
    shares = (top_p * (1 - ROUNDING), top_p * (1 + ROUNDING))
    high, least = (kept[min(np.searchsorted(mass, s * mass[-1]), len(kept) - 1)] for s in shares)
    return max(high, low), max(least, low)


def check_limits(rows, rng, kind, columns, heat):
    x = logits(kind, rng, 16, columns)
    for (top_k, top_p), min_p in itertools.product(FILTERS, (0.0, 1e-3)):
        args = arguments(x, heat, top_k, top_p, min_p)
        poison_memory(jax.eval_shape(LIMITS, *args))
        got, again, alone = LIMITS(*args), LIMITS(*args), LIMITS(*(a[3:4] for a in args))
        ends = [bounds(row, heat, top_k, top_p, min_p) for row in x]
        got = np.asarray(got)
        off = sum(not least - 1e-5 <= g <= most + 1e-5 for g, (most, least) in zip(got, ends, strict=True))
        same = bool((got == np.asarray(again)).all()) and bool(got[3] == np.asarray(alone)[0])
        case = {"kind": kind, "v": columns, "heat": heat, "k": top_k, "p": top_p, "min_p": min_p}
        record(rows, what="check limits", ok=off == 0 and same, off=off, same_bits=same, **case)


def check_draws(rows, rng, columns):
    """Compare draws with the reference: the noise differs by up to 7e-6, so few draws may differ."""
    x = jnp.asarray(logits("flat", rng, 256, columns))
    row = np.arange(256)
    keys = jnp.asarray(rng.integers(2**32, size=(256, 3), dtype=np.uint32))
    settings = (
        np.where(row % 4 == 0, 0.0, 0.8).astype(np.float32),
        keys,
        np.where(row % 3 == 0, 1e-3, 0.0).astype(np.float32),
        np.where(row % 5 == 0, 0, 1 + 20 * row).astype(np.int32),
        np.where(row % 7 == 0, 1.0, 0.9).astype(np.float32),
    )
    got, want = (np.asarray(jax.jit(f)(x, *settings)) for f in (draw_filtered, reference.draw_filtered))
    off = int((got != want).sum())
    record(rows, what="check draws", ok=off <= 1, off=off, v=columns)


def checks(rows, share):
    rng = np.random.default_rng(0)
    cases = [functools.partial(check_draws, rows, rng, v) for v in VOCABULARIES]
    kinds = (("flat", 0.8), ("peaked", 1.0), ("flat", 0.05), ("ties", 1.0), ("even", 1.0), ("few", 1.0))
    cases += [functools.partial(check_limits, rows, rng, kind, 128_256, heat) for kind, heat in kinds]
    cases += [functools.partial(check_limits, rows, rng, "flat", 151_936, 0.8)]
    for case in cases[share[0] :: share[1]]:
        case()


@functools.cache
def programs():
    """Return the forms of the search, by name."""

    def xla(x, peak, heat, floor, k, p, wanted):
        total = jnp.exp((x - peak[:, None]) / heat[:, None]).sum(-1)
        return limits.token_limits(x, peak, heat, total, floor, k, p, wanted)

    forms = {"kernel": token_limits, "XLA": xla, "reading": lambda x, *_: x.max(-1)}
    return {name: looped(lambda args, _, form=form: form(*args), ROUNDS) for name, form in forms.items()}


def time_limits(rows, seconds, count, columns, top_k, top_p, kind="flat"):
    args = arguments(logits(kind, np.random.default_rng(0), 8, columns), 0.8, top_k, top_p, 0.0)
    args = tuple(jnp.tile(a, (-(-count // 8),) + (1,) * (a.ndim - 1))[:count] for a in args)
    ways = {name: functools.partial(run, [args], [None]) for name, run in programs().items()}
    for name, t in interleaved(ways, calls=ROUNDS, seconds=seconds).items():
        case = {"r": count, "v": columns, "k": top_k, "p": top_p, "kind": kind}
        record(rows, what=f"time {name}", tbs=args[0].size * 4 / t.us / 1e6, **case, **dataclasses.asdict(t))


def times(rows, share, seconds):
    most, kinds = VOCABULARIES[0], ("peaked", "ties")
    cases = [
        functools.partial(time_limits, rows, seconds, n, most, top_k, 0.9)
        for n in ROWS
        for top_k in (0, 5000)
    ]
    cases += [functools.partial(time_limits, rows, seconds, 256, most, 50, 0.9, kind) for kind in kinds]
    cases += [functools.partial(time_limits, rows, seconds, 256, VOCABULARIES[1], 0, 0.9)]
    for case in cases[share[0] :: share[1]]:
        case()


if __name__ == "__main__":
    script.main(__doc__, {"check": lambda rows, share, _: checks(rows, share), "time": times})

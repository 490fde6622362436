"""Check the kernel for both products of a mixture's experts against float32 on a GPU, and time it.

    python -m pallas_kernels.gemm.expert_mlp.gpu_check [--seconds 0.3] [--only NAMES] [--json FILE]

The operands are those of Qwen3-30B-A3B. `check` and `time` have experts in e4m3. `check` compares both forms
with the reference implementation, and 30 runs bit by bit, because a worker that does not wait for its rows
would read other numbers. `time` times a sort and both products, with two kernels and a quantization between
them, with the two kernels of this form, and in one kernel, with stages of 256, 384 and 512 columns. Each call
chooses other experts, so that the L2 does not hold their weights.

`check_few` and `time_few` have experts in bfloat16, and 1 to 8 tokens in a step of 8 rows. They compare and
time the sort, both products and the weighted sum: with two grouped products ("before"), with the sort and one
kernel ("sorted"), and with one kernel without a sort ("unsorted").
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gemm.expert_mlp import reference
from pallas_kernels.gemm.expert_mlp.api import expert_mlp
from pallas_kernels.gemm.expert_mlp.few_tokens import few_expert_mlp
from pallas_kernels.gemm.grouped import api
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.grouped.swapped import list_groups
from pallas_kernels.gemm.sorted_rows.api import sort_rows
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved, looped
from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.pointwise.quantize.api import quantize_rows
from pallas_kernels.pointwise.quantize.reference import quantize_rows as quantize_weight
from pallas_kernels.quantized import Quantized

EXPERTS, CHOSEN, D, F = 128, 8, 2048, 768
GATES = {"activation": "silu", "gate_block": 32}
TOKENS = (64, 1)
CALLS = 16  # of one program, each with other tokens


@functools.cache
def weights() -> tuple[Quantized, Quantized]:
    """Return both weights of the experts."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def drawn(key, n, k):
        keys = jax.random.split(key, EXPERTS)
        return jax.lax.map(lambda key: quantize_weight(jax.random.normal(key, (n, k)) * k**-0.5), keys)

    return drawn(jax.random.key(0), 2 * F, D), drawn(jax.random.key(1), D, F)


def tokens_of(rng, tokens: int, zipf: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """Return tokens and their experts."""
    x = jax.random.normal(jax.random.key(rng.integers(2**31)), (tokens, D)).astype(jnp.bfloat16)
    return x, jnp.asarray(draw_routing(rng, tokens, EXPERTS, CHOSEN, zipf))


def before(x, picked, up, down):
    """Return the rows of each pair by two products and a quantization."""
    groups, rows = sort_rows(x, picked, EXPERTS, quantize=True)
    a = api.grouped_gemm(rows, up, groups, **GATES)
    return api.grouped_gemm(quantize_rows(a), down, groups), groups


def now(x, picked, up, down, **form):
    """Return the rows of each pair by the kernel."""
    groups, rows = sort_rows(x, picked, EXPERTS, quantize=True)
    assert isinstance(rows, Quantized)
    return expert_mlp(rows, up, down, groups, **form, **GATES), groups


WAYS = {
    "before": before,
    "two kernels": functools.partial(now, split=True),
    "one kernel": now,
    "384 columns": functools.partial(now, depth=384),
    "512 columns": functools.partial(now, depth=512),
}


def calls(way, given, up, down) -> list[jax.Array]:
    """Return the rows of all given tokens. The calls are one traced function, so that it is lowered once."""
    one = jax.jit(lambda *args: way(*args)[0])
    return [one(x, picked, up, down) for x, picked in given]


def checks(rows) -> None:
    rng = np.random.default_rng(time.time_ns())
    for tokens, zipf in ((1, 0.0), (64, 0.0), (64, 1.2)):
        x, picked = tokens_of(rng, tokens, zipf)

        @jax.jit
        def exact(x, picked, up, down):
            groups, rows = sort_rows(x, picked, EXPERTS, quantize=True)
            assert isinstance(rows, Quantized)
            return reference.expert_mlp(rows, up, down, groups, **GATES)[groups.places]

        want = np.asarray(exact(x, picked, *weights()), np.float32)
        for split in (True, False):

            @jax.jit
            def run(x, picked, up, down, split=split):
                y, groups = now(x, picked, up, down, split=split)
                return y[groups.places]

            given = x, picked, *weights()
            poison_memory(jax.eval_shape(run, *given))
            got = np.asarray(run(*given), np.float32)
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            same = all(np.array_equal(got, np.asarray(run(*given), np.float32)) for _ in range(30))
            about = {"t": tokens, "zipf": zipf, "kernels": 1 + split, "error": error, "same_bits": same}
            record(rows, what="check expert_mlp", ok=error < 0.01 and same, **about)


def timings(rows, seconds: float) -> None:
    rng = np.random.default_rng(0)
    for tokens in TOKENS:
        given = [tokens_of(rng, tokens) for _ in range(CALLS)]
        touched = np.mean([len(np.unique(np.asarray(picked))) for _, picked in given])

        ways = {
            name: functools.partial(jax.jit(functools.partial(calls, way)), given, *weights())
            for name, way in WAYS.items()
        }
        timed = interleaved(ways, calls=CALLS, seconds=seconds)
        for name, t in timed.items():
            rate = touched * 3 * D * F / t.us / 1e6
            about = {"t": tokens, "touched": float(touched), "tb_per_s": rate}
            record(rows, what=name, speedup=timed["before"].us / t.us, **about, **dataclasses.asdict(t))


@functools.cache
def plain_weights() -> tuple[jax.Array, jax.Array]:
    """Return both weights of the experts in bfloat16."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def drawn(key, n, k):
        one = lambda key: (jax.random.normal(key, (n, k)) * k**-0.5).astype(jnp.bfloat16)
        return jax.lax.map(one, jax.random.split(key, EXPERTS))

    return drawn(jax.random.key(0), 2 * F, D), drawn(jax.random.key(1), D, F)


def _sum(y, places):
    """Return the mean of each token's rows. Padding gets zeros."""
    shares = jnp.full(places.shape, 1 / CHOSEN, jnp.float32)
    return WeightedRows(y, places, shares, partial=True).total()


def few_before(x, picked, used, up, down):
    """Return the sums of the experts' outputs by a sort and two products."""
    groups, rows = sort_rows(x, picked, EXPERTS, used=used)
    y = api.grouped_gemm(api.grouped_gemm(rows, up, groups, **GATES), down, groups)
    return _sum(y, groups.places)


def few_sorted(x, picked, used, up, down, **form):
    """Return the sums of the experts' outputs by a sort and the kernel."""
    groups, rows = sort_rows(x, picked, EXPERTS, used=used)
    return _sum(expert_mlp(rows, up, down, groups, **form, **GATES), groups.places)


def few_unsorted(x, picked, used, up, down, **form):
    """Return the sums of the experts' outputs by the kernel that reads unsorted rows."""
    return _sum(*few_expert_mlp(x, picked, up, down, used=used, **form, **GATES))


def few_exact(x, picked, used, up, down):
    """Return the sums of the experts' outputs by XLA, in float32."""
    groups = list_groups(picked, EXPERTS, 8, used=used)
    rows = x.astype(jnp.float32)[groups.pairs // CHOSEN]
    up, down = up.astype(jnp.float32), down.astype(jnp.float32)
    y = reference.expert_mlp(rows, up, down, groups, **GATES)
    return _sum(y, groups.places)


FEW_WAYS = {
    "before": few_before,
    "sorted": few_sorted,
    "unsorted": few_unsorted,
    "unsorted, two kernels": functools.partial(few_unsorted, split=True),
    "unsorted, 64 columns": functools.partial(few_unsorted, depth=64),
    "unsorted, 256 columns": functools.partial(few_unsorted, depth=256),
}


def checks_of_few(rows) -> None:
    rng = np.random.default_rng(time.time_ns())
    exact = jax.jit(few_exact)
    runs = {
        name: jax.jit(FEW_WAYS[name]) for name in ("unsorted", "sorted", "unsorted, two kernels", "before")
    }
    for tokens, zipf in ((1, 0.0), (2, 0.0), (4, 1.2), (8, 0.0), (8, 1.2)):
        given = *tokens_of(rng, 8, zipf), jnp.int32(tokens), *plain_weights()
        want = np.asarray(exact(*given), np.float32)[:tokens]
        for name, run in runs.items():
            poison_memory(jax.eval_shape(run, *given))
            got = np.asarray(run(*given), np.float32)
            error = float(np.linalg.norm(got[:tokens] - want) / np.linalg.norm(want))
            same = all(np.array_equal(got, np.asarray(run(*given), np.float32)) for _ in range(30))
            about = {"t": tokens, "zipf": zipf, "error": error, "same_bits": same}
            record(rows, what=f"check {name}", ok=error < 0.01 and same, **about)


def timings_of_few(rows, seconds: float) -> None:
    rng, number = np.random.default_rng(0), 8
    for tokens in (1, 8, 4):
        drawn = [tokens_of(rng, 8) for _ in range(number)]
        given = [(x, picked, jnp.int32(tokens)) for x, picked in drawn]
        touched = np.mean([len(np.unique(np.asarray(picked)[:tokens])) for _, picked in drawn])
        ways = {
            name: functools.partial(
                looped(jax.jit(lambda xs, ws, way=way: way(*xs, *ws)), 16), given, [plain_weights()] * number
            )
            for name, way in FEW_WAYS.items()
            if tokens == 1 or "columns" not in name
        }
        timed = interleaved(ways, calls=16 * number, seconds=seconds)
        for name, t in timed.items():
            rate = touched * 3 * D * F * 2 / t.us / 1e6
            about = {"t": tokens, "touched": float(touched), "tb_per_s": rate}
            record(rows, what=name, speedup=timed["before"].us / t.us, **about, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, *_: checks(rows),
            "time": lambda rows, _, seconds: timings(rows, seconds),
            "check_few": lambda rows, *_: checks_of_few(rows),
            "time_few": lambda rows, _, seconds: timings_of_few(rows, seconds),
        },
    )

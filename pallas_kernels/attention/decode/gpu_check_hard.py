"""Hard cases of decode attention on a GPU: scores beyond the unified max value, far pages, long work lists,
CUDA graphs.

  python -m pallas_kernels.attention.decode.gpu_check_hard [--only adversarial,graphs,far,lists] [--json FILE]
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.decode import reference
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.gpu_check import TOLERANCE, cached, exact
from pallas_kernels.attention.decode.work_list import decode_work
from pallas_kernels.attention.tiles import decode_tile
from pallas_kernels.hopper.limits import SMS
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import PAGE, error, page_tables, poison, poison_memory, random_pages
from pallas_kernels.measure.script import record

N, K, H = 32, 8, 128
DTYPES = (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)
TINY = -1e37  # queries of this value turn the scores of all nonzero keys into -inf
SCORES = {  # scores of a row's keys, for queries of ones, or of TINY for scores of -inf
    "either side of 1e4": lambda rng, length: rng.choice([-1e4, 1e4], length),
    "far below": lambda rng, length: rng.normal(size=length) - 300,
    "far above": lambda rng, length: rng.normal(size=length) + 300,
    "a huge value in the last page": lambda rng, length: np.where(
        np.arange(length) == length - 1, 5e3, rng.normal(size=length)
    ),
    "a rise from page to page": lambda rng, length: (
        np.arange(length) // PAGE * 40.0 + rng.normal(size=length)
    ),
    "all -inf": lambda rng, length: np.full(length, float(H)),
}


def adversarial(rows, rng):
    """Check every kind of scores in the rows of one batch, with empty rows between them."""
    lengths = rng.integers(1, 1500, 42) * (rng.random(42) > 0.1)
    table, pages = page_tables(rng, lengths)
    keys = np.zeros((pages, K, PAGE, H), np.float32)
    for row, length in enumerate(lengths):
        scores = list(SCORES.values())[row % len(SCORES)](rng, length)
        for page in range(-(-int(length) // PAGE)):
            part = scores[page * PAGE : (page + 1) * PAGE]
            keys[table[row, page], :, : len(part)] = part[:, None] / H
    v = poison(random_pages(jax.random.key(1), pages, K, H), table, lengths)
    tiny = np.arange(len(lengths)) % len(SCORES) == list(SCORES).index("all -inf")
    q = jnp.ones((len(lengths), N, H), jnp.bfloat16).at[tiny].set(TINY)
    table, lengths = jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
    for dtype in DTYPES:
        unit = 20.0 if dtype == jnp.float8_e4m3fn else 1.0  # 5e3 / H would be near e4m3's maximum
        k, values, scales = cached(rng, jnp.asarray(keys / unit, jnp.bfloat16), v, dtype)
        if dtype == jnp.float8_e4m3fn:
            scales["k_scale"] = jnp.full((K,), unit)
        for unified_max in (None, (0.0, 8.0), (300.0, 20.0), (0.0, 1e4)):
            how = None if unified_max is None else jnp.asarray(unified_max, jnp.float32)
            run = jax.jit(functools.partial(decode_attention, scale=1.0, unified_max=how))
            poison_memory(q)
            got = run(q, k, values, table, lengths, **scales)
            want = exact(reference.decode_attention, q, k, values, table, lengths, scale=1.0, **scales)
            worst = worst_kind(got, want)
            empty = float(jnp.abs(jnp.where((lengths == 0)[:, None, None], got, 0)).max())
            ok = worst < TOLERANCE and empty == 0
            record(
                rows,
                what="adversarial",
                ok=ok,
                error=worst,
                empty=empty,
                cache=jnp.dtype(dtype).name,
                unified_max=unified_max,
            )


def worst_kind(got, want) -> float:
    """Return the largest error over the kinds, and NaN if any kind has NaN, which Python's `max` could
    ignore."""
    return float(np.max([error(got[i :: len(SCORES)], want[i :: len(SCORES)]) for i in range(len(SCORES))]))


def long_lists(rows, rng, count=1024, length=41_000):
    """Check a work list of more than 2**22 (page, head) pairs.

    The rows share the pages of e4m3 sequences, and must match a batch of only these e4m3 sequences.
    """
    table, pages = page_tables(rng, [length] * 8)
    table = jnp.asarray(np.tile(table, (count // 8, 1)))
    lengths = jnp.full((count,), length, jnp.int32)
    q = jnp.asarray(np.tile(rng.normal(size=(8, N, H)), (count // 8, 1, 1)), jnp.bfloat16)
    for dtype in DTYPES:
        k, v = (random_pages(jax.random.key(i), pages, K, H) for i in range(2))
        k, v, scales = cached(rng, k, v, dtype)
        run = jax.jit(functools.partial(decode_attention, scale=H**-0.5))
        poison_memory(q)
        got = run(q, k, v, table, lengths, **scales).reshape(-1, 8, N, H)
        want = exact(reference.decode_attention, q[:8], k, v, table[:8], lengths[:8], scale=H**-0.5, **scales)
        worst = float(np.max([error(part, want) for part in got]))
        pairs = count * -(-length // PAGE) * K
        record(
            rows,
            what="long lists",
            ok=worst < TOLERANCE and pairs > 2**22,
            error=worst,
            pairs=pairs,
            cache=jnp.dtype(dtype).name,
        )


def far_offsets(rows, rng):
    """Check that pages beyond 2**31 elements give the same bits as the same pages in a small cache."""
    lengths = rng.integers(1, 900, 37)
    table, used = page_tables(rng, lengths)
    first = 2**31 // (K * PAGE * H)
    known = np.arange(table.shape[1]) * PAGE < lengths[:, None]
    far, near = np.where(known, table + first, 0), np.where(known, table, 0)
    for dtype in DTYPES:
        size = 20.0 if dtype == jnp.int8 else 1.0
        make = jax.jit(lambda x: (x * size).astype(dtype))  # noqa: B023
        pages = [make(random_pages(jax.random.key(i), first + used, K, H)) for i in range(2)]
        scales = {}
        if dtype != jnp.bfloat16:
            pages[1] = pages[1].reshape(first + used, K, H, PAGE)
        if dtype == jnp.int8:
            drawn = jax.random.uniform(
                jax.random.key(2), (2, first + used, K, PAGE), minval=0.03, maxval=0.07
            )
            scales = dict(zip(("k_scale", "v_scale"), drawn, strict=True))
        q = jnp.asarray(rng.normal(size=(37, N, H)), jnp.bfloat16)
        run = jax.jit(functools.partial(decode_attention, scale=H**-0.5))
        poison_memory(q)
        got = run(q, *pages, jnp.asarray(far), jnp.asarray(lengths, jnp.int32), **scales)
        small = {name: x[first:] for name, x in scales.items()}
        want = run(
            q, *(x[first:] for x in pages), jnp.asarray(near), jnp.asarray(lengths, jnp.int32), **small
        )
        record(
            rows,
            what="far offsets",
            ok=bool((got == want).all()),
            elements=pages[0].size,
            cache=jnp.dtype(dtype).name,
        )


def graphs(rows, rng, steps=1000, layers=8):
    """Check that steps of growing lengths give the same bits with CUDA graphs and without."""
    lengths = rng.integers(1, 900, 32)
    table, pages = page_tables(rng, lengths + steps)
    table = jnp.asarray(np.clip(table, 0, pages - 1))
    q = jnp.asarray(rng.normal(size=(32, N, H)), jnp.bfloat16)
    for dtype in DTYPES:
        k, v = (random_pages(jax.random.key(i), pages, K, H) for i in range(2))
        k, v, scales = cached(rng, k, v, dtype)
        layer = jax.jit(functools.partial(decode_attention, scale=H**-0.5, **scales))

        def step(q, k, v, table, lengths):
            work = decode_work(lengths, K, SMS * decode_tile(H, N // K, k.dtype.itemsize).workers)
            for _ in range(layers):
                q = q * jnp.bfloat16(0.5) + layer(q, k, v, table, lengths, work=work) * jnp.bfloat16(3)  # noqa: B023
            return q, lengths + 1

        lowered = jax.jit(step).lower(q, k, v, table, jnp.asarray(lengths, jnp.int32))
        ends = []
        for options in (None, {"xla_gpu_enable_command_buffer": ""}):
            run, state, seen = (
                lowered.compile(compiler_options=options),
                (q, jnp.asarray(lengths, jnp.int32)),
                [],
            )
            for i in range(steps):
                state = run(state[0], k, v, table, state[1])
                seen += [state[0]] if i % 50 == 0 else []
            ends.append([*seen, state[0]])
        same = all(bool((a == b).all()) for a, b in zip(*ends, strict=True))
        record(rows, what="graphs", ok=same, steps=steps, layers=layers, cache=jnp.dtype(dtype).name)


if __name__ == "__main__":
    rng = np.random.default_rng()
    parts = {"adversarial": adversarial, "graphs": graphs, "far": far_offsets, "lists": long_lists}
    script.main(
        __doc__,
        {name: lambda rows, *_, part=part: part(rows, rng) for name, part in parts.items()},
    )

"""Check chunk attention against its float32 reference on a GPU, and time it next to cuDNN's attention.

  python -m pallas_kernels.attention.chunk.gpu_check [--seconds 0.6] [--only check,time] [--share 0/4]
      [--json FILE]

Prints one line per case. The errors are ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs.
The rates count the products under the causal mask.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.chunk import reference
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.chunk.work_list import chunk_work
from pallas_kernels.attention.decode.gpu_check import exact, queries
from pallas_kernels.attention.tiles import chunk_tile
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory, quantized, random_pages
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import sustained

TOLERANCE = {
    "bfloat16": 6e-3,
    "float8_e4m3fn": 4e-2,
    "int8": 6e-3,
}  # precision of queries, weights and outputs; the reference reads the same cache
HEADS = (32, 8, 128)  # Llama-3.1-8B: query heads, KV heads, head width


def caches(rng, table, pages, ends, kv, h, dtype, spare=0, silent=False):
    """Return the kernel's keys, values and scales, and the reference's keys and values.

    Positions without a token hold NaN. `spare` unused pages precede the sequences' pages.

    silent: an e4m3 cache with a key scale of 0 for its first head, so that all tokens of this head get equal
    weights.
    """
    k, v = (
        poison(random_pages(jax.random.key(int(rng.integers(2**31))), pages, kv, h), table, ends)
        for _ in range(2)
    )
    scales = {}
    plain = k, v
    if dtype == "int8":
        (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
        plain = tuple(x.astype(jnp.float32) * scale[..., None] for x, scale in ((k, k_scale), (v, v_scale)))
        v, scales = jnp.swapaxes(v, 2, 3), {"k_scale": k_scale, "v_scale": v_scale}
    elif dtype != "bfloat16":
        scales = {
            name: jnp.asarray(rng.uniform(0.02, 0.05, kv), jnp.float32) for name in ("k_scale", "v_scale")
        }
        wide = [scale[:, None, None] for scale in scales.values()]
        k, v = ((x.astype(jnp.float32) / scale).astype(dtype) for x, scale in zip((k, v), wide, strict=True))
        if silent:
            scales["k_scale"] = scales["k_scale"].at[0].set(0.0)
            wide[0] = scales["k_scale"][:, None, None]
        plain = tuple(x.astype(jnp.float32) * scale for x, scale in zip((k, v), wide, strict=True))
        v = jnp.swapaxes(v, 2, 3)
    if spare:
        k, v = (jnp.concatenate([jnp.zeros((spare, *x.shape[1:]), x.dtype), x]) for x in (k, v))
        if dtype == "int8":
            scales = {
                name: jnp.concatenate([jnp.zeros((spare, *x.shape[1:])), x]) for name, x in scales.items()
            }
    return k, v, scales, plain


def check(
    rows,
    rng,
    chunks,
    tokens,
    heads=HEADS,
    dtype="bfloat16",
    size=1.0,
    spare=0,
    unified_max=None,
    sms=None,
    scale=None,
    least=False,
    silent=False,
    **settings,
):
    """Run one case with queries of standard deviation `size`.

    The case checks that two runs give the same bits, and that rows outside every chunk are zero.

    silent: as in `caches`. least: all scores are -inf, so that the reference has zeros everywhere.
    """
    (n, kv, h), ends = heads, [int(c[3] + c[1]) for c in chunks]
    table, pages = page_tables(rng, ends)
    k, v, scales, plain = caches(rng, table, pages, ends, kv, h, dtype, spare, silent)
    q = jnp.asarray(rng.normal(size=(tokens, n, h)) * size, jnp.bfloat16)
    if least:
        k, q, plain = jnp.abs(k), jnp.full_like(q, -5e37), (jnp.abs(plain[0]), plain[1])
    outside = np.ones(tokens, bool)
    for first, length, *_ in chunks:
        outside[first : first + length] = False
    if unified_max is not None:
        scales["unified_max"] = jnp.asarray(unified_max, jnp.float32)
    settings |= {"scale": h**-0.5 if scale is None else scale}
    run = jax.jit(functools.partial(chunk_attention, sms=sms, **settings))
    far = jnp.asarray(np.where((table >= 0) & (table < pages), table + spare, table))
    chunks = jnp.asarray(chunks, jnp.int32)
    poison_memory(q)
    got = run(q, k, v, far, chunks, **scales)
    err = error(got, exact(reference.chunk_attention, q, *plain, jnp.asarray(table), chunks, **settings))
    same = bool((got == run(q, k, v, far, chunks, **scales)).all())
    ok = err < TOLERANCE[dtype] and same and not np.asarray(got, np.float32)[outside].any()
    facts = {
        "c": len(chunks),
        "t": tokens,
        "heads": heads,
        "dtype": dtype,
        "size": size,
        "unified_max": unified_max,
        "sms": sms,
        "spare": spare,
        "least": least,
        "silent": silent,
    }
    record(rows, what="check chunk", ok=ok, error=err, same_bits=same, **facts, **settings)


def random_chunks(rng, tokens, count, longest):
    """Return `count` chunks with gaps between them in q, at random offsets, with shuffled page-table rows.

    One of the chunks is empty.
    """
    cuts = np.sort(rng.choice(tokens + 1, 2 * count, replace=False))
    chunks = [
        [int(a), int(b - a), 0, int(rng.integers(0, longest))]
        for a, b in zip(cuts[::2], cuts[1::2], strict=True)
    ]
    chunks[-1][1] = 0
    for row, c in zip(rng.permutation(count), chunks, strict=True):
        c[2] = int(row)
    return sorted(chunks, key=lambda c: c[2])  # page_tables assigns row i to sequence i


def checks(rows, share):
    """Run every n-th case from case i, for share (i, n), so that several processes can divide the cases."""
    rng = np.random.default_rng(time.time_ns())
    case, some = functools.partial(check, rows, rng), functools.partial(random_chunks, rng)
    heads, e4m3, int8 = (8, 2, 128), {"dtype": "float8_e4m3fn"}, {"dtype": "int8"}
    shapes = [
        HEADS,
        (8, 8, 64),
        (16, 1, 128),
        (14, 2, 64),
        (9, 3, 64),
        (8, 4, 256),
        (20, 4, 128),
        (24, 2, 256),
    ]
    cases = [
        functools.partial(case, some(700, 5, 900), 700, heads, size=size)
        for heads, size in zip(shapes, [1, 4] * 4, strict=True)
    ]
    cases += [
        functools.partial(case, some(700, 5, 900), 700, heads, **e4m3)
        for heads in (HEADS, (14, 2, 64), (8, 4, 256))
    ]
    cases += [
        functools.partial(case, some(700, 5, 900), 700, heads, **int8)
        for heads in (HEADS, (14, 2, 64), (9, 3, 64))
    ]
    for form in ({}, e4m3, int8):
        cases += [
            functools.partial(case, some(1500, 9, 3000), 1500, heads, window=200, **form),
            functools.partial(case, some(1500, 9, 3000), 1500, heads, window=70, **form),
            functools.partial(
                case,
                some(500, 4, 900),
                500,
                (8, 4, 64 if form == int8 else 256),
                window=100,
                soft_cap=50.0,
                **form,
            ),
            functools.partial(case, some(500, 4, 900), 500, heads, soft_cap=20.0, **form),
            *(
                functools.partial(case, some(500, 4, 900), 500, heads, scale=scale, **form)
                for scale in (0.05, 0.0, -0.05)
            ),
            functools.partial(case, some(500, 4, 900), 500, heads, scale=1.0, least=True, **form),
            # All visible keys of a tile are in the second page of its last block, which the sequence fills
            # partly.
            functools.partial(
                case, [[0, 8, 0, 90], [8, 1, 1, 100], [16, 8, 2, 346]], 24, heads, window=16, **form
            ),
            functools.partial(case, [[0, 2048, 0, 0]], 2048, heads, **form),
            functools.partial(case, [[5, 640, 0, 5000]], 700, heads, sms=28, **form),
            functools.partial(
                case, [[5, 640, 0, 5000]], 700, heads, spare=2**17, **form
            ),  # offsets beyond 2^31 elements
        ]
    cases += [
        functools.partial(case, [[3, 1, 0, 0]], 8, heads),
        functools.partial(case, some(1500, 9, 3000), 1500, heads, size=4, unified_max=(0.0, 60.0)),
        # A row's first block must not influence the other rows: every tile starts with fresh state.
        functools.partial(case, [[5, 640, 0, 5000]], 700, heads, size=300),
        functools.partial(case, some(1500, 9, 3000), 1500, heads, size=300, unified_max=(0.0, 60.0)),
        *(
            functools.partial(case, some(1500, 9, 3000), 1500, heads, unified_max=(phi, 60.0), **int8)
            for phi in (0.0, 500.0)
        ),
        functools.partial(case, some(1500, 9, 3000), 1500, heads, unified_max=(500.0, 60.0)),
        functools.partial(case, some(1500, 9, 3000), 1500, heads, scale=-0.05, unified_max=(0.0, 60.0)),
        *(
            functools.partial(case, some(500, 4, 900), 500, heads, silent=True, unified_max=phi, **e4m3)
            for phi in (None, (0.0, 60.0))
        ),
        functools.partial(
            case, some(500, 4, 900), 500, heads, scale=1.0, least=True, unified_max=(0.0, 60.0)
        ),
    ]
    for run in cases[share[0] :: share[1]]:
        run()


def timed(rows, seconds, name, chunks, tokens=2048, calls=8, **settings):
    (n, kv, h), rng = HEADS, np.random.default_rng(len(name))
    ends = [c[3] + c[1] for c in chunks]
    table, pages = page_tables(rng, ends)
    flop = 4.0 * sum(c[1] * c[3] + c[1] * (c[1] + 1) // 2 for c in chunks) * n * h
    for dtype in ("bfloat16", "float8_e4m3fn"):
        tile, cache = chunk_tile(h, jnp.dtype(dtype).itemsize), []
        for i in range(2):
            k, v = (random_pages(jax.random.key(2 * i + j), pages, kv, h).astype(dtype) for j in range(2))
            cache.append((k, v if dtype == "bfloat16" else jnp.swapaxes(v, 2, 3)))
        layer = jax.jit(
            functools.partial(chunk_attention, scale=h**-0.5, tile=tile, **settings)
        )  # one lowering serves all layers

        def run(qs, cache, table, chunks, tile=tile, layer=layer):
            work = chunk_work(chunks, tokens, tile)
            return [layer(q, *cache[i % 2], table, chunks, work=work) for i, q in enumerate(qs)]

        inputs = queries(calls, tokens, n, h), cache, jnp.asarray(table), jnp.asarray(chunks, jnp.int32)
        t = sustained(jax.jit(run), *inputs, calls=calls, seconds=seconds)
        record(rows, what="chunk", case=name, dtype=dtype, tflops=flop / t["us"] / 1e6, **t, **settings)


def timed_cudnn(rows, seconds, name, batch, tq, tk, causal, calls=8):
    n, kv, h = HEADS
    keys = jax.random.split(jax.random.key(0), calls + 2)
    k, v = (jax.random.normal(key, (batch, tk, kv, h), jnp.bfloat16) for key in keys[:2])
    qs = [jax.random.normal(key, (batch, tq, n, h), jnp.bfloat16) for key in keys[2:]]
    run = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    flop = 4.0 * batch * (tq * (tq + 1) // 2 if causal else tq * tk) * n * h
    t = sustained(
        jax.jit(lambda qs, k, v: [run(q, k, v) for q in qs]), qs, k, v, calls=calls, seconds=seconds
    )
    record(rows, what="chunk rival", case=name, rival="cudnn", tflops=flop / t["us"] / 1e6, **t)


def timings(rows, seconds):
    for context, calls in (
        (0, 32),
        (2048, 12),
        (8192, 4),
        (32768, 2),
    ):  # programs last 2 ms, so that the host does not limit the measured time
        timed(rows, seconds, f"2048 over {context}", [[0, 2048, 0, context]], calls=calls)
    timed(rows, seconds, "8 x 256 over 0", [[256 * i, 256, i, 0] for i in range(8)], calls=64)
    timed_cudnn(rows, seconds, "causal 2048", 1, 2048, 2048, True, calls=32)
    timed_cudnn(rows, seconds, "causal 8 x 256", 8, 256, 256, True, calls=64)
    timed_cudnn(rows, seconds, "causal 16384", 1, 16384, 16384, True, calls=1)
    timed_cudnn(rows, seconds, "2048 x 32768 unmasked", 1, 2048, 32768, False, calls=2)


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, share, _: checks(rows, share),
            "time": lambda rows, _, seconds: timings(rows, seconds),
        },
    )

"""Check decode attention against its float32 reference on a GPU, and time it next to XLA's and JAX's.

  python -m pallas_kernels.attention.decode.gpu_check [--seconds 0.6] [--only check,int8,decode] [--json FILE]

Prints one line per case. The errors are ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs.
The rates count the keys and values read.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.decode import reference
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.work_list import decode_work
from pallas_kernels.attention.tiles import DecodeTile, decode_tile
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import (
    PAGE,
    error,
    page_tables,
    poison,
    poison_memory,
    quantized,
    random_pages,
)
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import sustained

TOLERANCE = 6e-3  # bfloat16 operands and weights compared with float32


def exact(function, q, k, v, *rest, **kw):
    """Return the reference result in float32, with 0 in place of NaN at unwritten positions.

    The reference masks weights, and 0 · NaN is NaN in its product as well.
    """
    known = lambda x: jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)
    kw |= {name: known(kw[name]) for name in ("k_scale", "v_scale") if name in kw}
    with jax.default_matmul_precision("highest"):
        return jax.jit(functools.partial(function, **kw))(q.astype(jnp.float32), known(k), known(v), *rest)


def cached(rng, k, v, dtype):
    """Return (k, v, scales) of a cache of `dtype`.

    An 8-bit cache has transposed values, and scales per head (e4m3) or per token (int8). In e4m3 the last of
    several KV heads has a key scale of 0, so all its tokens get equal weights.
    """
    if dtype == jnp.bfloat16:
        return k, v, {}
    if dtype == jnp.int8:
        (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
        return k, v.swapaxes(2, 3), {"k_scale": k_scale, "v_scale": v_scale}
    scales = {
        name: jnp.asarray(rng.uniform(0.5, 1.5, k.shape[1]), jnp.float32) for name in ("k_scale", "v_scale")
    }
    if k.shape[1] > 1:
        scales["k_scale"] = scales["k_scale"].at[-1].set(0.0)
    return k.astype(dtype), v.astype(dtype).swapaxes(2, 3), scales


def check_decode(rows, rng, lengths, n, kv, h, dtype=jnp.bfloat16, unified_max=None, **kw):
    sms, own = (
        kw.pop("sms", 132),
        {name: kw.pop(name) for name in ("cuts", "one_fence", "tile") if name in kw},
    )
    table, pages = page_tables(rng, lengths)
    k, v = (
        poison(random_pages(jax.random.key(rng.integers(2**31)), pages, kv, h), table, lengths)
        for _ in range(2)
    )
    k, v, scales = cached(rng, k, v, dtype)
    b, more = len(lengths), int(rng.choice([0, 43]))  # unused rows of q after the sequences' rows
    q = jnp.asarray(rng.normal(size=(b + more, n, h)) * rng.choice([1, 4]), jnp.bfloat16)
    into = jnp.asarray(rng.normal(size=q.shape), jnp.bfloat16) if more else None
    nobody = np.append(np.asarray(lengths) == 0, np.ones(more, bool))
    table, lengths = jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
    how = {"sms": sms, "unified_max": None if unified_max is None else jnp.asarray(unified_max), **own}
    run = jax.jit(functools.partial(decode_attention, scale=h**-0.5, **how, **kw))
    poison_memory(q)
    got = run(q, k, v, table, lengths, into=into, **scales)
    want = exact(reference.decode_attention, q, k, v, table, lengths, scale=h**-0.5, **scales, **kw)
    err = error(got[~nobody], want[~nobody])
    same = bool((got == run(q, k, v, table, lengths, into=into, **scales)).all())
    kept = bool((got[nobody] == (jnp.zeros_like(q) if into is None else into)[nobody]).all())
    about = {
        "b": b,
        "n": n,
        "kv": kv,
        "h": h,
        "cache": jnp.dtype(dtype).name,
        "sms": sms,
        "unified_max": unified_max,
        "into": more > 0,
        **{name: str(value) for name, value in own.items()},
        **kw,
    }
    record(
        rows,
        what="check decode",
        ok=err < TOLERANCE and same and kept,
        error=err,
        same_bits=same,
        kept=kept,
        **about,
    )


def checks(rows, share, dtypes):
    """Run all correctness cases of these caches.

    share (i, n): run every n-th case from case i, so that several processes can divide the cases.
    """
    rng = np.random.default_rng(time.time_ns())
    decode = functools.partial(check_decode, rows, rng)

    def ragged(b, top):
        return rng.integers(1, top, b) * (rng.random(b) > 0.1)

    shapes = [
        (32, 8, 128),
        (8, 8, 64),
        (16, 1, 128),
        (14, 2, 64),
        (9, 3, 64),
        (8, 4, 256),
        (20, 4, 128),
        (24, 2, 256),
    ]
    cases = []
    for dtype in dtypes:
        for unified_max in (None, (0.0, 8.0)):
            cases += [
                functools.partial(decode, ragged(37, 900), *shape, dtype=dtype, unified_max=unified_max)
                for shape in shapes
            ]
        cases += [
            functools.partial(decode, ragged(200, 3000), 32, 8, 128, dtype, window=300),
            functools.partial(decode, ragged(9, 900), 8, 4, 256, dtype, window=64, soft_cap=50.0),
            functools.partial(decode, [1], 32, 8, 128, dtype),
            functools.partial(decode, [0, 0, 65, 0], 32, 8, 128, dtype, sms=20),
            functools.partial(decode, [20000, *[200] * 40], 32, 8, 128, dtype),
            # Pairs split into dozens of parts, which are added up in groups.
            functools.partial(decode, [0, 131_072], 32, 8, 128, dtype, unified_max=(0.0, 8.0)),
            functools.partial(decode, [60_000, 3, 50_000], 14, 1, 64, dtype),
            functools.partial(decode, [40_000], 20, 2, 256, dtype, sms=100),
            functools.partial(decode, ragged(256, 2000), 32, 8, 128, dtype, sms=28),
        ]
    for case in cases[share[0] :: share[1]]:
        case()


def queries(layers, rows, n, h):
    """Return different queries for each layer, because XLA would run equal calls once and copy the result."""
    return [jax.random.normal(jax.random.key(i), (rows, n, h), jnp.bfloat16) for i in range(layers)]


def time_decode(
    rows, seconds, name, lengths, n=32, kv=8, h=128, caches=3, layers=32, variants=None, rivals=()
):
    rng = np.random.default_rng(len(name))
    table, pages = page_tables(rng, lengths)
    cache = [
        tuple(random_pages(jax.random.key(2 * i + j), pages, kv, h) for j in range(2)) for i in range(caches)
    ]
    qs = queries(layers, len(lengths), n, h)
    table_d, lengths_d = jnp.asarray(table), jnp.asarray(lengths, jnp.int32)
    read = float(sum(lengths)) * kv * h * 4
    for sms, tile in variants or [(132, decode_tile(h, n // kv))]:
        layer = jax.jit(
            functools.partial(decode_attention, scale=h**-0.5, sms=sms, tile=tile)
        )  # one lowering serves all layers

        def run(qs, cache, table, lengths, sms=sms, tile=tile, layer=layer):
            work = decode_work(lengths, kv, sms * tile.workers)
            return [layer(q, *cache[i % caches], table, lengths, work=work) for i, q in enumerate(qs)]

        t = sustained(jax.jit(run), qs, cache, table_d, lengths_d, calls=layers, seconds=seconds)
        record(
            rows,
            what="decode",
            case=name,
            sms=sms,
            tile=f"{tile.workers}x{tile.blocks}",
            tbs=read / t["us"] / 1e6,
            **t,
        )
    for rival in rivals:
        try:
            fn = rival(table, lengths, h)
            t = sustained(fn, qs, cache, calls=len(qs), seconds=seconds)
            record(rows, what="decode rival", case=name, rival=rival.__name__, tbs=read / t["us"] / 1e6, **t)
        except Exception as e:
            record(rows, what="decode rival", case=name, rival=rival.__name__, failed=repr(e)[:300])


def cudnn_paged(_, lengths, h):
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    b = len(lengths)
    width = -(-int(max(lengths)) // PAGE)  # the kernel requires exactly B x width pages
    pages = jnp.asarray(np.random.default_rng(0).permutation(b * width).reshape(b, 1, width, 1), jnp.int32)
    kv_len, q_len = jnp.asarray(lengths, jnp.int32), jnp.ones((b,), jnp.int32)
    own = {}

    def one(q, k, v):
        return paged_attention(
            q[:, :, None],
            k,
            v,
            q_len,
            kv_len,
            pages,
            pages,
            scale=h**-0.5,
            mask_type=MaskType.PADDING,
            qkv_layout="BNTH",
        )

    def run(qs, cache):
        return [one(q, *cache[i % len(cache)]) for i, q in enumerate(qs)]

    jitted = jax.jit(run)

    def call(qs, cache):
        if not own:
            kv = cache[0][0].shape[1]
            own["cache"] = [
                tuple(random_pages(jax.random.key(2 * i + j), b * width, kv, h) for j in range(2))
                for i in range(len(cache))
            ]
        return jitted(qs, own["cache"])

    return call


def jax_paged(table, lengths, h):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    b = len(lengths)
    width = -(-int(max(lengths)) // PAGE)
    width = -(-width // 16) * 16
    pages = np.zeros((b, width), np.int32)
    use = min(width, table.shape[1])
    pages[:, :use] = np.where(np.arange(use) * PAGE < np.asarray(lengths)[:, None], table[:, :use], 0)
    pages, kv_len = jnp.asarray(pages), jnp.asarray(lengths, jnp.int32)

    one = jax.jit(
        functools.partial(paged_attention, pages_per_compute_block=2, k_splits=16 if b < 8 else 2)
    )  # lowered once

    def run(qs, cache):
        return [one(q, *cache[i % len(cache)], pages, kv_len) for i, q in enumerate(qs)]

    jitted = jax.jit(run)
    turned = {}

    def call(qs, cache):  # JAX's kernel has pages [K, P, S, H]
        if "cache" not in turned:
            turned["cache"] = [tuple(jnp.swapaxes(x, 0, 1) for x in pair) for pair in cache]
        return jitted(qs, turned["cache"])

    return call


def decodes(rows, seconds):
    rng = np.random.default_rng(7)
    ragged = lambda b, mean: np.clip(rng.exponential(mean, b) * 0.5 + mean * 0.5, 1, 4 * mean).astype(int)
    tiles = [
        (132, DecodeTile(2, 6)),
        (132, DecodeTile(1, 12)),
        (28, DecodeTile(2, 6)),
        (24, DecodeTile(2, 6)),
    ]
    time_decode(
        rows, seconds, "256 x 1024 ragged", ragged(256, 1024), rivals=(cudnn_paged, jax_paged), variants=tiles
    )
    time_decode(
        rows, seconds, "256 x 4096 ragged", ragged(256, 4096), caches=2, layers=8, rivals=(cudnn_paged,)
    )
    time_decode(rows, seconds, "1 x 131072", [131072], caches=6, rivals=(cudnn_paged,))
    time_decode(rows, seconds, "131072 + 200 x 512", [131072, *[512] * 200], caches=4)
    time_decode(rows, seconds, "1 x 1024", [1024], caches=32)
    time_decode(
        rows,
        seconds,
        "64 x 1100",
        [1100] * 64,
        caches=8,
        variants=[(132, DecodeTile(2, 6)), (132, DecodeTile(1, 12))],
    )


if __name__ == "__main__":
    parts: dict[str, script.Part] = {
        "check": lambda rows, share, _: checks(rows, share, (jnp.bfloat16, jnp.float8_e4m3fn)),
        "int8": lambda rows, share, _: checks(rows, share, (jnp.int8,)),
        "decode": lambda rows, _, seconds: decodes(rows, seconds),
    }
    script.main(__doc__, parts)

"""Check the memory-bound kernels against their references on a GPU, and time them next to XLA's fusions and
a copy.

  python -m pallas_kernels.pointwise.gpu_check [--seconds 0.6] [--only check,time] [--share 0/6] [--json FILE]

Prints one line per case. Errors are ‖kernel − reference‖ / ‖reference‖ with a float32 reference, on fresh
random inputs. Slots are scattered, and some are outside the cache. Rates count the bytes that must move.
Times are of one layer in a program of many layers, with rotating buffers. `check_by_64` checks norms of rows
of an odd multiple of 64 columns. The norm that adds the rows of a
mixture's experts has a script of its own, `pallas_kernels.pointwise.norm.gpu_check_rows`.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import poison_memory
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved
from pallas_kernels.pointwise.draw import reference as draw_reference
from pallas_kernels.pointwise.draw.api import draw
from pallas_kernels.pointwise.norm import reference as norm_reference
from pallas_kernels.pointwise.norm.api import add_norm
from pallas_kernels.pointwise.quantize import reference as quantize_reference
from pallas_kernels.pointwise.quantize.api import quantize_rows
from pallas_kernels.pointwise.rope_append import reference as rope_reference
from pallas_kernels.pointwise.rope_append.api import rope_append
from pallas_kernels.pointwise.top_k import reference as top_k_reference
from pallas_kernels.pointwise.top_k.api import top_k
from pallas_kernels.quantized import Quantized

TOLERANCE = {
    "bfloat16": 4e-3,
    "float8_e4m3fn": 4e-2,
    "int8": 1e-2,
}  # one rounding of each number, or two if the reference rounds in between
PAGE = 64
LAYERS = 32


def error(got, want) -> float:
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def normal(rng, *shape, dtype=jnp.bfloat16):
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32).astype(dtype))(
        jax.random.key(rng.integers(2**31))
    )


def check_norm(rows, rng, tokens, width, adds, centres, quantizes, sms=None):
    x, y, weight, bias = (
        normal(rng, tokens, width),
        normal(rng, tokens, width),
        normal(rng, width),
        normal(rng, width),
    )
    args = (x, y if adds else None, weight, bias if centres else None)
    how = {"eps": 1e-5, "offset": 0.0 if centres else 1.0, "quantize": quantizes}
    other = {"other": normal(rng, tokens, width)} if adds > 1 else {}
    run = jax.jit(functools.partial(add_norm, **how, sms=sms))
    poison_memory(jax.eval_shape(run, *args, **other))
    total, h = run(*args, **other)
    exact_args, exact_other = jax.tree.map(lambda v: v.astype(jnp.float32), (args, other))
    _, want = jax.jit(functools.partial(norm_reference.add_norm, **(how | {"quantize": False})))(
        *exact_args, **exact_other
    )
    err, kind = (
        error(quantize_reference.dequantize(h) if quantizes else h, want),
        "float8_e4m3fn" if quantizes else "bfloat16",
    )
    summed, _ = jax.jit(functools.partial(norm_reference.add_norm, **how))(
        *args, **other
    )  # rounded at the same points as the kernel: the same bits
    ok = bool((total == summed).all()) and err < TOLERANCE[kind]
    record(
        rows,
        what="check add_norm",
        ok=ok,
        error=err,
        t=tokens,
        d=width,
        adds=adds,
        centres=centres,
        quantizes=quantizes,
        sms=sms,
    )


def check_quantize(rows, rng, tokens, width):
    x = normal(rng, tokens, width) * jnp.asarray(10.0 ** rng.integers(-6, 6, (tokens, 1)), jnp.bfloat16)
    others = (-x, jnp.int32(tokens // 2))  # the first half of the rows from another array
    run = jax.jit(quantize_rows)
    poison_memory(jax.eval_shape(run, x, *others))
    got = run(x, *others)
    want = jax.jit(quantize_reference.quantize_rows)(x.astype(jnp.float32), -x.astype(jnp.float32), others[1])
    steps = np.abs(
        np.asarray(got.values).view(np.int8).astype(int) - np.asarray(want.values).view(np.int8).astype(int)
    )
    ok = (
        bool((got.scale == want.scale).all()) and steps.max() <= 1 and (steps > 0).mean() < 0.01
    )  # 1 / scale rounds once more
    record(rows, what="check quantize_rows", ok=ok, off=float((steps > 0).mean()), t=tokens, d=width)


def check_top_k(rows, rng, tokens, experts, chosen, softmax):
    """Check scores of both signs, equal ones among them, and a row of NaN."""
    drawn = rng.integers(-experts, experts, (tokens, experts)) / 8
    scores = jnp.asarray(drawn, jnp.float32).at[-1].set(jnp.nan)
    run = jax.jit(functools.partial(top_k, chosen=chosen, softmax=softmax))
    poison_memory(jax.eval_shape(run, scores))
    values, columns = run(scores)
    want, places = jax.jit(functools.partial(top_k_reference.top_k, chosen=chosen, softmax=softmax))(scores)
    last = np.asarray(columns[-1])
    err = error(values[:-1], want[:-1])
    ok = bool((columns[:-1] == places[:-1]).all()) and err < 1e-6
    ok &= len({*last.tolist()}) == chosen and bool(((last >= 0) & (last < experts)).all())
    record(rows, what="check top_k", ok=ok, err=err, t=tokens, experts=experts, softmax=softmax)


def random_cache(rng, dtype, pages, kv, h):
    k = jnp.asarray(rng.integers(-20, 20, (pages, kv, PAGE, h))).astype(dtype)
    if dtype == jnp.bfloat16:
        return k, -k
    if dtype == jnp.int8:
        scale = jnp.ones((pages, kv, PAGE))
        return Quantized(k, scale), Quantized(k.transpose(0, 1, 3, 2), scale)
    return k, k.transpose(0, 1, 3, 2)


def check_rope(rows, rng, tokens, kv, group, h, dtype, normed=False, sms=None, together=None, turned=True):
    pages = tokens // 20 + 2
    fused, cache = normal(rng, tokens, kv * (group + 2) * h), random_cache(rng, dtype, pages, kv, h)
    positions = jnp.asarray(rng.integers(0, 100_000, tokens), jnp.int32)
    slots = (
        jnp.asarray(rng.permutation(pages * PAGE)[:tokens], jnp.int32)
        .at[tokens // 3]
        .set(-1)
        .at[tokens // 2]
        .set(pages * PAGE)
    )
    how = {
        "head_dim": h,
        "inv_freq": jnp.asarray(5e5 ** -(np.arange(0, h, 2) / h), jnp.float32) if turned else None,
    }
    if normed:
        how |= {"q_norm": normal(rng, h), "k_norm": normal(rng, h)}
    if dtype == jnp.float8_e4m3fn:
        how |= {
            name: jnp.asarray(rng.uniform(0.005, 0.1, kv), jnp.float32) for name in ("k_scale", "v_scale")
        }
    want = jax.jit(functools.partial(rope_reference.rope_append, **how))(
        fused.astype(jnp.float32), *cache, positions, slots
    )
    kernel = functools.partial(rope_append, sms=sms, together=together, **how)
    poison_memory(jax.eval_shape(kernel, fused, *cache, positions, slots))
    got = jax.jit(kernel)(fused, *cache, positions, slots)
    again = jax.jit(kernel, donate_argnums=(1, 2))(fused, *jax.tree.map(jnp.copy, cache), positions, slots)
    same = all(
        bool((a == b).all()) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True)
    )
    errors = [error(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    ok = same and errors[0] < TOLERANCE["bfloat16"] and np.max(errors[1:]) < TOLERANCE[jnp.dtype(dtype).name]
    name = jnp.dtype(dtype).name
    record(
        rows,
        what="check rope_append",
        ok=ok,
        error=float(np.max(errors)),
        same_bits=same,
        t=tokens,
        kv=kv,
        g=group,
        h=h,
        cache=name,
        norms=normed,
        turned=turned,
        sms=sms,
        together=together,
    )


def draw_inputs(rng, count, columns, limited):
    """Return logits, temperatures, keys and perhaps limits. Every fourth row is greedy."""
    x = normal(rng, count, columns, dtype=jnp.float32) * 2
    temperature = jnp.where(jnp.arange(count) % 4 == 0, 0.0, 0.8)
    keys = jnp.asarray(rng.integers(2**32, size=(count, 3), dtype=np.uint32))
    limit = jnp.where(jnp.arange(count) % 3 == 0, jnp.inf, 1.0)
    return (x, temperature, keys, limit) if limited else (x, temperature, keys)


def check_draw(rows, rng, count, columns, limited):
    """Check the drawn tokens.

    The noise of the kernel differs by up to 7e-6, so a few of a million draws may differ.
    """
    args = draw_inputs(rng, count, columns, limited)
    poison_memory(jax.eval_shape(draw, *args))
    got, want = (jax.jit(f)(*args) for f in (draw, draw_reference.draw))
    off = int((got != want).sum())
    record(rows, what="check draw", ok=off <= 1, off=off, r=count, v=columns, limited=limited)


def last_rows(x: jax.Array, count: int) -> jax.Array:
    return x[x.shape[0] - count :]


def check_far_rows(rows, rng, kernel, tokens=2**19 + 8, width=4096, last=64):
    """Check that the last rows of arrays of more than 2**31 elements give
    the same bits as in small arrays.
    """
    x = normal(rng, 1025, width)[jnp.arange(tokens) % 1025]
    args = (x, x) if kernel is add_norm else (x,)
    run = jax.jit(
        functools.partial(add_norm, weight=normal(rng, width), eps=1e-5) if kernel is add_norm else kernel
    )
    poison_memory(jax.eval_shape(run, *args))
    got = jax.tree.map(lambda a: last_rows(a, last), run(*args))
    want = run(*(last_rows(a, last) for a in args))
    same = all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    record(rows, what=f"check {kernel.__name__}, far offsets", ok=same, same_bits=same, elements=x.size)


def check_far_pages(rows, rng, dtype, tokens=100, kv=8, group=4, h=128):
    """Check that cache pages beyond 2**31 elements get the same bits as pages of a small cache."""
    pages = tokens // 20 + 2
    first = 2**31 // (kv * PAGE * h)
    fused, positions = (
        normal(rng, tokens, kv * (group + 2) * h),
        jnp.asarray(rng.integers(0, 100_000, tokens), jnp.int32),
    )
    slots = jnp.asarray(rng.permutation(pages * PAGE)[:tokens], jnp.int32)
    how = {"head_dim": h, "inv_freq": jnp.asarray(5e5 ** -(np.arange(0, h, 2) / h), jnp.float32)}
    run = jax.jit(functools.partial(rope_append, **how), donate_argnums=(1, 2))

    def empty(count):
        return jax.tree.map(
            lambda page: jnp.zeros((count, *page.shape[1:]), page.dtype), random_cache(rng, dtype, 1, kv, h)
        )

    q, *far = run(fused, *empty(first + pages), positions, slots + first * PAGE)
    want_q, *near = run(fused, *empty(pages), positions, slots)
    ends = jax.tree.map(lambda a: last_rows(a, pages), far)
    pairs = zip(jax.tree.leaves((q, ends)), jax.tree.leaves((want_q, near)), strict=True)
    same = all(bool((a == b).all()) for a, b in pairs)
    size = max(leaf.size for leaf in jax.tree.leaves(far))
    record(
        rows,
        what="check rope_append, far offsets",
        ok=same,
        same_bits=same,
        elements=size,
        cache=jnp.dtype(dtype).name,
    )


def checks_by_64(rows):
    """Check norms of rows whose width is an odd multiple of 64."""
    rng = np.random.default_rng(time.time_ns())
    for case in (
        (1, 2880, 1, False, False),
        (64, 2880, 1, False, False),
        (2048, 2880, 0, False, True),
        (300, 2880, 2, True, True),
        (77, 192, 1, True, False),
    ):
        check_norm(rows, rng, *case)


def checks(rows, share=(0, 1)):
    """Run all cases, or every n-th case from case i for share (i, n)."""
    rng = np.random.default_rng(time.time_ns())
    norms = (
        (300, 4096, 1, False, False),
        (7, 8192, 1, False, True),
        (2048, 8192, 2, False, True),
        (300, 3584, 0, True, False),
        (300, 4096, 1, True, True),
        (64, 896, 2, False, False),
        (2048, 4096, 1, False, False, 20),
    )
    cases = [functools.partial(check_norm, rows, rng, *case) for case in norms]
    cases += [
        functools.partial(check_quantize, rows, rng, *case)
        for case in ((300, 4096), (2048, 8192), (7, 384), (1, 16384))
    ]
    routers = (
        (2048, 128, 8, True),
        (64, 128, 8, True),
        (1, 32, 4, True),
        (300, 256, 8, False),
        (77, 160, 6, False),
    )
    cases += [functools.partial(check_top_k, rows, rng, *case) for case in routers]
    cases += [functools.partial(check_far_rows, rows, rng, kernel) for kernel in (add_norm, quantize_rows)]
    cases += [
        functools.partial(check_far_pages, rows, rng, dtype)
        for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)
    ]
    shapes = (
        (300, 8, 4, 128),
        (64, 4, 2, 256),
        (77, 2, 7, 64),
        (1, 8, 8, 128),
        (33, 3, 5, 64),
        (100, 1, 5, 64),
        (8, 8, 4, 128),
        (2048, 8, 4, 128),
    )
    for i, shape in enumerate(shapes):
        for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)[
            : 2 if shape[1] % 2 else 3
        ]:  # int8: an even number of KV heads
            for together in (None, 1, 32) if dtype != jnp.bfloat16 else (None,):
                how = {"normed": i % 2 == 1, "sms": 28 if i % 3 == 2 else None, "together": together}
                cases.append(functools.partial(check_rope, rows, rng, *shape, dtype, **how))
    for dtype in (
        jnp.bfloat16,
        jnp.float8_e4m3fn,
        jnp.int8,
    ):  # models with position embeddings instead of RoPE
        cases.append(functools.partial(check_rope, rows, rng, 300, 32, 1, 64, dtype, turned=False))
    cases += [
        functools.partial(check_draw, rows, rng, *case)
        for case in ((1024, 128256, False), (1024, 128256, True), (1, 128256, False), (33, 49152, True))
    ]
    for case in cases[share[0] :: share[1]]:
        case()


def timed(rows, seconds, ways, calls, moved, **case):
    for name, t in interleaved(ways, calls=calls, seconds=seconds).items():
        record(rows, what=name, tbs=moved / t.us / 1e6, **case, **dataclasses.asdict(t))


def time_norm(rows, seconds, tokens, width=4096, quantizes=False):
    """Time a chain of norms: each layer depends on the previous layer, as in a step."""
    rng, rounds = np.random.default_rng(tokens), LAYERS if tokens > 256 else 4 * LAYERS
    x, ys, ws = (
        normal(rng, tokens, width),
        [normal(rng, tokens, width) for _ in range(LAYERS)],
        [normal(rng, width) for _ in range(LAYERS)],
    )

    def chain(norm):
        def run(x, ys, ws):
            for i in range(rounds):
                x, h = norm(x, ys[i % LAYERS], ws[i % LAYERS], eps=1e-5, quantize=quantizes)
                x, h = jax.lax.optimization_barrier((x, h))
            return x, h

        program = jax.jit(run)
        return lambda: program(x, ys, ws)

    ways = {
        "add_norm": chain(jax.jit(add_norm, static_argnames=("eps", "quantize"))),
        "add_norm xla": chain(norm_reference.add_norm),
    }
    timed(
        rows, seconds, ways, rounds, (7 if quantizes else 8) * tokens * width, t=tokens, quantizes=quantizes
    )


def time_quantize(rows, seconds, tokens, width=4096):
    rng = np.random.default_rng(tokens)
    xs = [normal(rng, tokens, width) for _ in range(LAYERS)]

    def all_of(quantize):
        one = jax.jit(quantize)
        program = jax.jit(lambda xs: [one(x) for x in xs])
        return lambda: program(xs)

    ways = {
        "quantize_rows": all_of(quantize_rows),
        "quantize_rows xla": all_of(quantize_reference.quantize_rows),
    }
    timed(rows, seconds, ways, LAYERS, 3 * tokens * width, t=tokens)


def time_rope(rows, seconds, tokens, decodes, dtype, kv=8, group=4, h=128):
    """Time decodes, each in a separate page, followed by a chunk."""
    rng, rounds = np.random.default_rng(tokens), LAYERS if tokens > 256 else 4 * LAYERS
    fused = [normal(rng, tokens, kv * (group + 2) * h) for _ in range(LAYERS)]
    positions = jnp.asarray(rng.integers(0, 100_000, tokens), jnp.int32)
    pages = decodes + -(-(tokens - decodes) // PAGE)
    token, page = np.arange(tokens), rng.permutation(pages)
    order = np.where(token < decodes, token, decodes + (token - decodes) // PAGE)
    place = np.where(token < decodes, rng.integers(0, PAGE, tokens), (token - decodes) % PAGE)
    slots = jnp.asarray(page[order] * PAGE + place, jnp.int32)
    how = {"head_dim": h, "inv_freq": jnp.asarray(5e5 ** -(np.arange(0, h, 2) / h), jnp.float32)}

    def chain(rope):
        def run(caches, fused, positions, slots):
            caches, some = list(caches), []
            for i in range(rounds):
                out = rope(fused[i % LAYERS], *caches[i % LAYERS], positions, slots, **how)
                q, *caches[i % LAYERS] = jax.lax.optimization_barrier(out)
                some.append(q[0, 0, 0])
            return caches, sum(some)

        program = jax.jit(run, donate_argnums=(0,))
        made = random_cache(rng, dtype, pages, kv, h)
        kept = [[jax.tree.map(jnp.copy, made) for _ in range(LAYERS)]]

        def step():
            kept[0], some = program(kept[0], fused, positions, slots)
            return some

        return step

    def ours(together):
        kernel = jax.jit(functools.partial(rope_append, together=together, **how))
        return chain(lambda *args, **_: kernel(*args))

    size = jnp.dtype(dtype).itemsize
    ways = {"rope_append": ours(None)} | ({"rope_append, token by token": ours(1)} if size == 1 else {})
    ways["rope_append xla"] = chain(rope_reference.rope_append)
    moved = tokens * kv * h * (2 * (group + 2) + 2 * group + 2 * size)
    timed(rows, seconds, ways, rounds, moved, t=tokens, decodes=decodes, cache=jnp.dtype(dtype).name)


def time_copy(rows, seconds, tokens, width=6144):
    rng = np.random.default_rng(0)
    xs = [normal(rng, tokens, width) for _ in range(LAYERS)]
    program = jax.jit(lambda xs: [-x for x in xs])
    timed(rows, seconds, {"copy": lambda: program(xs)}, LAYERS, 4 * tokens * width, t=tokens)


def time_draw(rows, seconds, count, columns=128256):
    for limited in (False, True):
        args = draw_inputs(np.random.default_rng(0), count, columns, limited)
        ways = {
            f"draw{how}": functools.partial(jax.jit(f), *args)
            for how, f in (("", draw), (" xla", draw_reference.draw))
        }
        timed(rows, seconds, ways, 1, args[0].size * 4, r=count, limited=limited)


def times(rows, seconds):
    time_copy(rows, seconds, 2048)
    for tokens in (2048, 256, 8):
        for quantizes in (False, True):
            time_norm(rows, seconds, tokens, quantizes=quantizes)
        time_quantize(rows, seconds, tokens)
        for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
            time_rope(rows, seconds, tokens, tokens // 3 if tokens > 256 else tokens, dtype)
    for count in (1024, 64, 1):
        time_draw(rows, seconds, count)


if __name__ == "__main__":
    script.main(
        __doc__,
        {
            "check": lambda rows, share, _: checks(rows, share),
            "check_by_64": lambda rows, *_: checks_by_64(rows),
            "time": lambda rows, _, seconds: times(rows, seconds),
        },
    )

"""Check and time decode attention with pieces of one pair each, and with fewer fences, on a GPU.

    python -m pallas_kernels.attention.decode.gpu_check_cuts [--only check,time_4,time_8] [--json FILE]

The checks hold the kernel against its float32 reference. The times compare these forms with the kernel that
has equal pieces and all fences, with 4 or 8 KV heads. A line has all forms of a case: the median of five
windows in microseconds, half the spread of the windows in percent, and the time over that of the kernel as it
is. `check_narrow` and `narrow` are for 64 requests of gpt-oss-20b: heads of 64 columns, with and without a
window, in tiles of w workers, b blocks and p pages. An asterisk marks pieces of several whole pairs. A time
has about two small kernels of the loop besides the call, the same in all forms.
"""

import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.decode.api import decode_attention, list_decode_work
from pallas_kernels.attention.decode.gpu_check import check_decode
from pallas_kernels.attention.decode.work_list import EQUAL_PIECES, PairCuts, decode_work
from pallas_kernels.attention.tiles import DecodeTile, decode_tile
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import PAGE, random_pages
from pallas_kernels.measure.script import L2_BYTES
from pallas_kernels.measure.timing import interleaved

N, H = 32, 128  # query heads, head width
DTYPES = (jnp.float8_e4m3fn, jnp.bfloat16)
CUTS = PairCuts(least=3, whole=32)
BATCHES = [(requests, 1100) for requests in (1, 64, 8, 256)] + [(64, 8000)]
WAYS = {
    "as it is": (EQUAL_PIECES, False),
    "cuts": (CUTS, False),
    "fences": (EQUAL_PIECES, True),
    "both": (CUTS, True),
}
# Of heads of 64 columns in bfloat16; the first is `decode_tile`'s.
TILES = (
    decode_tile(64, 8),
    DecodeTile(3, 8, 2),
    DecodeTile(3, 8, 1),
    DecodeTile(4, 6, 1),
    DecodeTile(4, 6, 2),
)
LEASTS = {f"both, least {least}": (PairCuts(least, 32), True) for least in (2, 6)}


def checks(rows, share, _) -> None:
    """Check batches whose pairs are whole, cut into small pieces, or cut evenly."""
    rng = np.random.default_rng(11)
    batches = [
        [1100],
        [1100] * 8,
        [1100] * 64,
        [900, 0, 20, 1500, 64],
        [3000] * 5,
        [1100] * 100,
        [20_000, 65],
    ]
    cases = [
        functools.partial(check_decode, rows, rng, lengths, N, kv, H, dtype, cuts=CUTS, one_fence=True)
        for dtype in DTYPES
        for kv, chosen in ((4, batches), (8, batches[::3]))
        for lengths in chosen
    ]
    for case in cases[share[0] :: share[1]]:
        case()


def _ways(kv: int, requests: int):
    """Return the forms of a case by name, as (cuts, one_fence)."""
    if kv == 8 or requests not in (1, 64):
        return {name: WAYS[name] for name in ("as it is", "both")}
    return WAYS | LEASTS if requests == 1 else WAYS


def _inputs(requests: int, length: int, kv: int, dtype, calls: int, h: int = H):
    """Return the pages, a page table for each call, the lengths, and the number of turns.

    Turn i adds i * calls * requests * width to the tables. A call then reads pages that are not in the L2.
    """
    width = -(-length // PAGE)
    call_bytes = 2 * requests * width * kv * PAGE * h * jnp.dtype(dtype).itemsize
    turns = max(1, -(-3 * L2_BYTES // (calls * call_bytes)))
    held = calls * requests * width
    order = np.random.default_rng(held).permutation(held).reshape(calls, requests, width).astype(np.int32)
    cast = jax.jit(lambda x: x.astype(dtype))
    k, v = (cast(random_pages(jax.random.key(i), turns * held, kv, h)) for i in range(2))
    if dtype != jnp.bfloat16:
        v = v.reshape(-1, kv, h, PAGE)  # values have contiguous keys; random numbers need no transpose
    return k, v, [jnp.asarray(table) for table in order], jnp.full(requests, length, jnp.int32), turns


def _program(layer, rounds: int, turns: int):
    """Return a program that calls the layer for each table `rounds` times, in a loop on the device.

    Small kernels of the loop move the page tables to other pages.
    """

    def run(qs, tables, k, v, lengths, work, scales):
        def body(i, _):
            moved = [table + i % turns * sum(t.size for t in tables) for table in tables]
            # Without the barrier, XLA takes calls with equal tables out of the loop.
            pairs = zip(lax.optimization_barrier((qs, i))[0], moved, strict=True)
            return [layer(q, k, v, table, lengths, work=work, **scales) for q, table in pairs]

        return lax.fori_loop(0, rounds, body, [jnp.zeros_like(q) for q in qs])

    return jax.jit(run)


def times(rows, share, seconds, kv: int) -> None:
    """Time each case in all forms, in turn. share: of the dtypes."""
    for dtype, (requests, length) in itertools.product(DTYPES[share[0] :: share[1]], BATCHES):
        calls = 4 if requests == 1 else 2  # each is compiled
        k, v, tables, lengths, turns = _inputs(requests, length, kv, dtype, calls)
        qs = [jax.random.normal(jax.random.key(i), (requests, N, H), jnp.bfloat16) for i in range(calls)]
        itemsize = jnp.dtype(dtype).itemsize
        bound_s = max(8e-6, requests * length * kv * H * 2 * itemsize / 4.5e12)
        rounds = max(1, round(4e-3 / calls / bound_s))
        scales = {} if itemsize == 2 else dict.fromkeys(("k_scale", "v_scale"), jnp.ones(kv))
        lowered, inputs, most_pages = {}, {}, {}
        for name, (cuts, one_fence) in _ways(kv, requests).items():
            listing = functools.partial(
                list_decode_work, kv_heads=kv, group=N // kv, head_dim=H, itemsize=itemsize, cuts=cuts
            )
            work = jax.jit(listing)(lengths)
            most_pages[name] = int(work.pieces[:, 3].max())
            attend = jax.jit(  # one lowering serves all calls
                functools.partial(decode_attention, scale=H**-0.5, cuts=cuts, one_fence=one_fence)
            )
            inputs[name] = qs, tables, k, v, lengths, work, scales
            lowered[name] = _program(attend, rounds, turns).lower(*inputs[name])
        with ThreadPoolExecutor() as pool:
            compiled = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
        runs = {name: functools.partial(program, *inputs[name]) for name, program in compiled.items()}
        timings = interleaved(runs, calls=rounds * calls, seconds=seconds, rounds=5)
        before = timings["as it is"].us
        about = {"kv": kv, "cache": jnp.dtype(dtype).name, "requests": requests, "keys": length}
        for name, t in timings.items():
            rows.append({"what": "time", **about, "form": name, "most_pages": most_pages[name]})
            rows[-1] |= {"of_before": t.us / before, **dataclasses.asdict(t)}
        cells = [f"{n} {t.us:.1f} ±{50 * t.spread:.1f}% {t.us / before:.3f}" for n, t in timings.items()]
        print("TABLE", *about.values(), "|", " | ".join(cells), flush=True)


def check_narrow(rows, share, _) -> None:
    rng = np.random.default_rng(12)
    for tile in TILES[share[0] :: share[1]]:
        for window, lengths in ((None, [1100] * 64), (128, [1100] * 64), (128, [900, 0, 20, 1500, 64] * 9)):
            own = {"tile": tile, "cuts": PairCuts(3, 32, 4), "one_fence": True}
            check_decode(rows, rng, lengths, 64, 8, 64, window=window, **own)


def narrow(rows, share, seconds) -> None:
    """Time the tiles in a layer with a window and in one without. share: of the layers."""
    n, kv, h, requests, length = 64, 8, 64, 64, 1100
    k, v, tables, lengths, turns = _inputs(requests, length, kv, jnp.bfloat16, 1, h)
    q = jax.random.normal(jax.random.key(0), (requests, n, h), jnp.bfloat16)
    sinks = jax.random.normal(jax.random.key(1), (n,), jnp.bfloat16)
    for window in (None, 128)[share[0] :: share[1]]:
        pages = -(-length // PAGE) - (0 if window is None else (length - window) // PAGE)
        bound_us = requests * kv * pages * PAGE * h * 4 / 4.5e6
        rounds = max(1, round(4e3 / max(8.0, bound_us)))
        lowered, inputs = {}, {}
        for tile, short in itertools.product(TILES, (0, 4)[: 1 if window is None else 2]):
            cuts = PairCuts(3, 32, short)
            work = jax.jit(decode_work, static_argnums=(1, 2, 3), static_argnames="cuts")(
                lengths, kv, 132 * tile.workers, window, cuts=cuts
            )
            attend = functools.partial(
                decode_attention, scale=h**-0.5, window=window, tile=tile, cuts=cuts, sink_logits=sinks
            )
            name = f"w{tile.workers} b{tile.blocks} p{tile.pages}" + "*" * (short > 0)
            inputs[name] = [q], tables, k, v, lengths, work, {}
            lowered[name] = _program(jax.jit(attend), rounds, turns).lower(*inputs[name])
        with ThreadPoolExecutor() as pool:
            compiled = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
        runs = {name: functools.partial(program, *inputs[name]) for name, program in compiled.items()}
        timings = interleaved(runs, calls=rounds, seconds=seconds, rounds=5)
        for name, t in timings.items():
            about = {"what": "narrow", "window": window, "tile": name, "of_stream": bound_us / t.us}
            rows.append(about | dataclasses.asdict(t))
        cells = [f"{a} {t.us:.1f} ±{50 * t.spread:.1f}% {bound_us / t.us:.2f}" for a, t in timings.items()]
        print("TABLE narrow", window, f"bound {bound_us:.1f} |", " | ".join(cells), flush=True)


if __name__ == "__main__":
    timed = {f"time_{kv}": functools.partial(times, kv=kv) for kv in (4, 8)}
    script.main(__doc__, {"check": checks, **timed, "check_narrow": check_narrow, "narrow": narrow})

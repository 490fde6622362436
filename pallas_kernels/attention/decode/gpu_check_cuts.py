"""Check and time decode attention with pieces of one pair each, and with fewer fences, on a GPU.

    python -m pallas_kernels.attention.decode.gpu_check_cuts [--only check,time] [--share 0/2] [--json FILE]

The checks hold the kernel against its float32 reference. The times compare these forms with the kernel that
has equal pieces and all fences. `times` prints a line with all forms of a case: the median of five windows in
microseconds, the spread of the windows in percent, and the time beside that of the kernel as it is.
"""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.decode.api import decode_attention, list_decode_work
from pallas_kernels.attention.decode.gpu_check import check_decode
from pallas_kernels.attention.decode.work_list import EQUAL_PIECES, PairCuts
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import PAGE, random_pages
from pallas_kernels.measure.script import L2_BYTES
from pallas_kernels.measure.timing import interleaved, looped

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
OF_FEW = {f"both, least {least}": (PairCuts(least, 32), True) for least in (2, 4, 6)}  # of one request


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


def _inputs(requests: int, length: int, kv: int, dtype):
    """Return the pages, a page table for each call, and the lengths.

    Calls read different pages, so that the pages of a call are not in the L2 when it begins.
    """
    width = -(-length // PAGE)
    call_bytes = 2 * requests * width * kv * PAGE * H * jnp.dtype(dtype).itemsize
    calls = int(np.clip(3 * L2_BYTES // call_bytes, 4, 64))
    sets = calls if call_bytes < L2_BYTES else 2
    pages = sets * requests * width
    order = np.random.default_rng(pages).permutation(pages).reshape(sets, requests, width).astype(np.int32)
    cast = jax.jit(lambda x: x.astype(dtype))
    k, v = (cast(random_pages(jax.random.key(i), pages, kv, H)) for i in range(2))
    if dtype != jnp.bfloat16:
        v = v.reshape(pages, kv, H, PAGE)  # values have contiguous keys; random numbers need no transpose
    tables = [jnp.asarray(order[i % sets]) for i in range(calls)]
    return k, v, tables, jnp.full(requests, length, jnp.int32)


def times(rows, share, seconds) -> None:
    """Time each case in all forms, in turn."""
    cases = [(kv, dtype, batch) for kv in (4, 8) for dtype in DTYPES for batch in BATCHES]
    for kv, dtype, (requests, length) in cases[share[0] * len(cases) // share[1] :][: len(cases) // share[1]]:
        k, v, tables, lengths = _inputs(requests, length, kv, dtype)
        qs = [
            jax.random.normal(jax.random.key(i), (requests, N, H), jnp.bfloat16) for i in range(len(tables))
        ]
        bound_s = max(8e-6, requests * length * kv * H * 2 * jnp.dtype(dtype).itemsize / 4.5e12)
        rounds = max(1, round(4e-3 / len(tables) / bound_s))
        scales = {} if dtype == jnp.bfloat16 else dict.fromkeys(("k_scale", "v_scale"), jnp.ones(kv))
        lowered, lists, inputs = {}, {}, {}
        for name, (cuts, one_fence) in (WAYS | (OF_FEW if requests == 1 else {})).items():
            shape = {"kv_heads": kv, "group": N // kv, "head_dim": H, "itemsize": jnp.dtype(dtype).itemsize}
            lists[name] = jax.jit(functools.partial(list_decode_work, cuts=cuts, **shape))(lengths)
            layer = jax.jit(  # one lowering serves all calls
                functools.partial(decode_attention, scale=H**-0.5, cuts=cuts, one_fence=one_fence)
            )

            def one(q, w, layer=layer):
                *arrays, work, scales = w
                return layer(q, *arrays, work=work, **scales)

            inputs[name] = qs, [(k, v, table, lengths, lists[name], scales) for table in tables]
            lowered[name] = looped(one, rounds).lower(*inputs[name])
        with ThreadPoolExecutor() as pool:
            compiled = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
        runs = {name: functools.partial(program, *inputs[name]) for name, program in compiled.items()}
        timings = interleaved(runs, calls=rounds * len(tables), seconds=seconds, rounds=5)
        before = timings["as it is"].us
        about = {"kv": kv, "cache": jnp.dtype(dtype).name, "requests": requests, "keys": length}
        for name, t in timings.items():
            ends = np.asarray(lists[name].pieces)[:, 3]
            rows.append({"what": "time", **about, "form": name, "most_pages": int(ends.max())})
            rows[-1] |= {"of_before": t.us / before, **dataclasses.asdict(t)}
        cells = [f"{n} {t.us:.1f} ±{50 * t.spread:.1f}% {t.us / before:.3f}" for n, t in timings.items()]
        print("TABLE", *about.values(), "|", " | ".join(cells), flush=True)


if __name__ == "__main__":
    script.main(__doc__, {"check": checks, "time": times})

"""Check attention with a sink for each query head against its float32 reference on a GPU, and time it.

    python -m pallas_kernels.attention.gpu_check_sinks [--only check,time] [--seconds 0.6] [--json FILE]
    python -m pallas_kernels.attention.gpu_check_sinks --toy --only check

Prints one line per case: the error ‖kernel − reference‖ / ‖reference‖ on fresh random ragged inputs, and the
time of a call with and without sinks, in the same run. With --toy the kernels run on small inputs on
the CPU, in the Mosaic interpreter.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.chunk import reference as chunk_reference
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.attention.decode.api import decode_attention
from pallas_kernels.attention.decode.gpu_check import TOLERANCE, exact
from pallas_kernels.measure import script
from pallas_kernels.measure.inputs import error, page_tables, poison, poison_memory, random_pages
from pallas_kernels.measure.script import record
from pallas_kernels.measure.timing import interleaved

HEADS = (64, 8, 64)  # gpt-oss: query heads, KV heads, head width
WINDOWS = (None, 128)
TOY_HEADS = (4, 2, 64)
TOY = {"interpret": plgpu.InterpretGPUParams(), "sms": 2}
KERNELS = {
    "decode": (decode_attention, decode_reference.decode_attention),
    "chunk": (chunk_attention, chunk_reference.chunk_attention),
}
CALLS = 32  # calls of a timed program, with queries of their own


def inputs(rng, what: str, work: np.ndarray, heads: tuple[int, int, int]):
    """Return (q, k pages, v pages, page table, lengths or chunks), and the rows of q without work.

    work: int [B], the keys of each row of a decode step; or [C, 2], tokens and position of each chunk.
    """
    n, kv, h = heads
    ends = work if what == "decode" else work.sum(1)
    table, pages = page_tables(rng, ends)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))))
    k, v = (poison(random_pages(key, pages, kv, h), table, ends) for key in keys)
    if what == "decode":
        tokens, listed, idle = len(work), work, np.asarray(work) == 0
    else:
        firsts = np.cumsum(work[:, 0]) - work[:, 0]
        listed = np.stack([firsts, work[:, 0], np.arange(len(work)), work[:, 1]], axis=1)
        tokens, idle = int(work[:, 0].sum()), np.zeros(int(work[:, 0].sum()), bool)
    q = jnp.asarray(rng.normal(size=(tokens, n, h)) * rng.choice([1, 4]), jnp.bfloat16)
    return (q, k, v, jnp.asarray(table), jnp.asarray(listed, jnp.int32)), idle


def check(rows, rng, what: str, work: np.ndarray, heads, window, unified_max=None, **how) -> None:
    """Run one case twice, and its reference. how: more settings of the kernel."""
    given, idle = inputs(rng, what, work, heads)
    logits = rng.normal(size=heads[0]) * 4
    logits[:2] = -1e30, 300.0  # a sink without weight, and one with all weight
    settings = {
        "scale": heads[2] ** -0.5,
        "window": window,
        "sink_logits": jnp.asarray(logits, jnp.bfloat16),
    }
    if unified_max is not None:
        how["unified_max"] = jnp.asarray(unified_max)
    kernel, plain = KERNELS[what]
    run = jax.jit(functools.partial(kernel, **settings, **how))
    poison_memory(given[0])
    got = run(*given)
    same = bool((got == run(*given)).all())
    err = error(got[~idle], exact(plain, *given, **settings)[~idle])
    about = {"b": len(work), "heads": heads, "window": window, "unified_max": unified_max}
    record(rows, what=f"check {what}", ok=err < TOLERANCE and same, error=err, same_bits=same, **about)


def checks(toy: bool) -> script.Part:
    """Return the part that checks both kernels, on a GPU or in the interpreter."""

    def part(rows, share, _):
        rng = np.random.default_rng(time.time_ns())
        if toy:
            cases = [("decode", np.array([0, 65, 200]), TOY_HEADS, 70, None, TOY)]
            cases += [("chunk", np.array([[9, 130], [3, 0]]), TOY_HEADS, None, None, TOY)]
        else:
            ragged = lambda b, top: rng.integers(1, top, b) * (rng.random(b) > 0.1)
            works = [
                ("decode", ragged(256, 2000)),
                ("decode", ragged(9, 900)),
                ("decode", np.array([60_000])),
            ]
            works += [("chunk", np.stack([rng.integers(1, 500, 4), rng.integers(0, 4000, 4)], axis=1))]
            cases = [
                (what, work, heads, window, unified_max, {})
                for what, work in works
                for heads in (HEADS, (14, 2, 128), (8, 4, 256))
                for window in WINDOWS
                for unified_max in (None, (0.0, 8.0))
            ]
        for what, work, heads, window, unified_max, how in cases[share[0] :: share[1]]:
            check(rows, rng, what, work, heads, window, unified_max, **how)

    return part


def times(rows, _, seconds) -> None:
    """Time both kernels at gpt-oss's heads, with and without sinks."""
    rng = np.random.default_rng(3)
    works = {f"{b} x 1100": ("decode", np.full(b, 1100)) for b in (1, 64, 256)}
    works["2048 tokens"] = ("chunk", np.array([[1024, 0], [1024, 0]]))
    for name, (what, work) in works.items():
        (q, *rest), _ = inputs(rng, what, work, HEADS)
        qs = [q + i for i in range(CALLS)]
        for window in WINDOWS:
            settings = {"scale": HEADS[2] ** -0.5, "window": window}
            logits = jnp.zeros(HEADS[0], jnp.bfloat16)
            ways = {"without": {}, "with": {"sink_logits": logits}}

            def program(more, what=what, settings=settings, qs=qs, rest=rest):
                one = functools.partial(KERNELS[what][0], **settings, **more)
                run = jax.jit(lambda qs, *rest: [one(q, *rest) for q in qs])
                return functools.partial(run, qs, *rest)

            programs = {way: program(more) for way, more in ways.items()}
            for way, t in interleaved(programs, calls=CALLS, seconds=seconds).items():
                record(rows, what=what, case=name, window=window, sinks=way, **dataclasses.asdict(t))


if __name__ == "__main__":
    script.main(__doc__, {"check": checks(False), "time": times}, toy={"check": checks(True)})

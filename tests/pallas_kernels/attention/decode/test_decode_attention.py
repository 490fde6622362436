"""Decode attention: the work list, the kernel in the interpreter against its reference, and the H200 code."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import compute_on
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_cases import PAGE, error, paged, queries

from pallas_kernels.attention.decode import reference
from pallas_kernels.attention.decode.api import decode_attention, list_decode_work
from pallas_kernels.attention.decode.work_list import PairCuts, decode_work
from pallas_kernels.attention.tiles import DecodeTile, decode_tile
from pallas_kernels.hopper.limits import SMEM_BYTES
from pallas_kernels.measure.inputs import quantized

E4M3, INT8 = jnp.float8_e4m3fn, jnp.int8
INTERPRET = plgpu.InterpretGPUParams()


def test_short_pairs_stay_whole():
    """64 requests of gpt-oss-20b in a layer with a window: one or two pairs of three pages a worker."""
    cut = jax.jit(decode_work, static_argnums=(1, 2, 3), static_argnames="cuts")
    even, short = (cut(jnp.full(64, 1100), 8, 264, 128, cuts=PairCuts(short=most)) for most in (2, 3))
    assert even.chains.any() and not short.chains.any()
    assert even.pieces[:, 3].max() == short.pieces[:, 3].max() == 6


@settings(max_examples=25)
@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(1, 900), st.just(20_000)), min_size=9, max_size=9),
    shape=st.sampled_from(
        [(1, 1, None), (8, 4, 300), (2, 56, 1), (8, 264, None), (2, 264, 900), (1, 12, 300)]
    ),
    cuts=st.sampled_from(
        [PairCuts(), PairCuts(3, 16), PairCuts(least=2), PairCuts(whole=999), PairCuts(short=9)]
    ),
)
def test_the_pieces_are_the_batchs_pages_cut_evenly_or_by_pair(lengths, shape, cuts):
    kv_heads, workers, window = shape
    cut = jax.jit(decode_work, static_argnums=(1, 2, 3), static_argnames="cuts")
    work = cut(jnp.asarray(lengths, jnp.int32), kv_heads, workers, window, cuts=cuts)
    work = jax.tree.map(np.asarray, work)
    line = []  # every (row, head, page) that must be read, in the kernel's order
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window) // PAGE
        pages = -(-length // PAGE) - first if length else 0
        assert work.rows[row].tolist()[:3] == [first, pages, length]
        line += [(row, head, page) for head in range(kv_heads) for page in range(pages)]

    assert not work.arrived.any()
    counts = work.pieces[:, 3]
    of_rows = work.rows[:, 1]
    few = cuts.least > 0 and kv_heads * (-(-of_rows // cuts.least)).sum() <= workers
    whole = of_rows.max() <= min(cuts.whole, 2 * len(line) / workers)
    whole = whole and kv_heads * (of_rows > 0).sum() <= workers
    if few or whole:
        assert (work.pieces[:, 2] + counts <= of_rows[work.pieces[:, 0]]).all()  # pages of one pair
        assert counts.max() <= (cuts.least if few else cuts.whole)
        assert few or not work.chains.any()
    elif counts.max() - counts.min() > 1:  # several whole pairs
        assert of_rows.max() <= cuts.short and not work.chains.any()
        assert of_rows.max() * workers <= len(line) and counts.max() <= len(line) // workers + 2
    walked, parts = [], {}
    for worker in range(workers):
        row, head, page, left = work.pieces[worker].tolist()
        while left:
            pages, following = work.rows[row][1], work.rows[row][3]
            here = min(pages - page, left)
            walked += [(row, head, page + i) for i in range(here)]
            if here < pages:
                parts.setdefault((row, head), []).append((worker, page))
            head, page, left = head + 1, 0, left - here
            if head == kv_heads:
                row, head = following, 0
    assert walked == line
    # The parts of a cut pair belong to consecutive workers. The last worker gets the number of earlier parts;
    # the others get the last worker.
    chains = np.zeros(workers, int)
    for pieces in parts.values():
        first, last = pieces[0][0], pieces[-1][0]
        assert [worker for worker, _ in pieces] == list(range(first, last + 1))
        chains[last] = last - first
        assert (work.enders[first:last] == last).all()
    assert work.chains.tolist() == chains.tolist()
    for (row, _, _, _), start in zip(work.pieces, work.starts, strict=True):
        assert start.tolist() == [*work.rows[row], work.rows[min(work.rows[row][3], len(lengths) - 1)][0]]


def run(q, cache, table, lengths, **settings):
    """Return the kernel in the interpreter and its reference in float32, from one program each, which saves
    time.


    """
    k, v, scales = cache
    arrays = scales | {name: settings.pop(name) for name in ("into", "unified_max") if name in settings}
    settings = {"scale": q.shape[-1] ** -0.5, **settings}
    how = {"sms": 3}
    how |= {name: settings.pop(name) for name in ("tile", "sms", "work", "cuts") if name in settings}
    kernel = jax.jit(functools.partial(decode_attention, interpret=INTERPRET, **how, **settings))
    got = kernel(q, k, v, table, lengths, **arrays)
    arrays |= {"into": arrays["into"].astype(jnp.float32)} if "into" in arrays else {}
    # Unwritten positions are 0 for the reference implementation, which masks weights: there 0 · NaN is NaN.
    known = lambda x: np.where(np.isnan(x), np.zeros_like(x), x)
    k, v, arrays = jax.tree.map(lambda x: known(np.asarray(x)), (k, v, arrays))
    plain = jax.jit(functools.partial(reference.decode_attention, **settings))
    return got, plain(q.astype(jnp.float32), k, v, table, lengths, **arrays)


def cached(k, v, dtype):
    """Return pages of a cache of `dtype` and scales by head or token, with NaN at unwritten positions."""
    if dtype == jnp.bfloat16:
        return k, v, {}
    if dtype == INT8:
        (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
        return k, v.swapaxes(2, 3), {"k_scale": k_scale, "v_scale": v_scale}
    heads = k.shape[1]
    scales = {"k_scale": jnp.linspace(0.5, 1.5, heads), "v_scale": jnp.linspace(2.0, 1.0, heads)}
    return k.astype(dtype), v.astype(dtype).swapaxes(2, 3), scales


def into(rows, heads, width):
    return {"into": queries(9, rows, heads, width)}


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "width", "tile", "dtype", "extra"),
    [
        (
            [70, 0, 5],
            6,
            2,
            64,
            DecodeTile(2, 4),
            jnp.bfloat16,
            into(5, 6, 64),
        ),  # a group of 3, a row to skip, pages cut between workers
        (
            [200, 5, 130, 0],
            16,
            2,
            64,
            DecodeTile(1, 6),
            jnp.bfloat16,
            {"window": 100, "soft_cap": 20.0, "scale": 0.3},
        ),
        ([70, 0, 5, 270], 8, 2, 64, DecodeTile(3, 4, pages=1), jnp.bfloat16, {"window": 200}),
        (
            [300],
            16,
            1,
            128,
            DecodeTile(2, 5),
            jnp.bfloat16,
            {},
        ),  # more workers than pages: each page is a part
        ([1000], 4, 1, 256, DecodeTile(1, 4), jnp.bfloat16, {"sms": 16}),  # parts that are added up by groups
        ([70, 0, 5], 6, 2, 64, DecodeTile(3, 4, pages=1), E4M3, {}),  # workers that share a copying warpgroup
        (
            [200, 5, 130, 0],
            16,
            2,
            64,
            DecodeTile(1, 6),
            E4M3,
            {"window": 100, "soft_cap": 20.0, "scale": 0.3},
        ),
        ([300], 16, 1, 128, DecodeTile(2, 5), E4M3, into(3, 16, 128)),
        (
            [70, 0, 200],
            4,
            2,
            128,
            DecodeTile(3, 5, pages=1),
            INT8,
            {"window": 100, "soft_cap": 20.0, "scale": 0.2},
        ),
        # Windows that lie in a row's last page, and scales that turn the order of scores round or make them
        # all the same.
        (
            [200, 5, 120],
            4,
            2,
            64,
            DecodeTile(2, 4),
            jnp.bfloat16,
            {"window": 7, "scale": -0.1, "unified_max": jnp.asarray([0.0, 8.0])},
        ),
        ([200, 5, 120], 4, 2, 64, DecodeTile(2, 4), E4M3, {"window": 70, "scale": 0.0}),
        ([70, 0, 130], 8, 2, 512, DecodeTile(1, 3, pages=1), jnp.bfloat16, {"sms": 2}),  # Gemma 4's widest
        # The heads of Gemma 4 E2B, whose scores have no scale. Here they reach 100 and -100.
        ([130, 700], 8, 1, 256, decode_tile(256, 8), jnp.bfloat16, {"window": 512, "scale": 1.0}),
        ([70, 200], 8, 1, 512, decode_tile(512, 8), jnp.bfloat16, {"scale": 1.0}),
        # Pieces of one pair each: of two pages, then whole pairs.
        ([300, 0, 70], 6, 2, 64, DecodeTile(2, 4), jnp.bfloat16, {"sms": 5, "cuts": PairCuts(2)}),
        ([300, 0, 200], 8, 2, 64, DecodeTile(3, 4, pages=1), E4M3, {"sms": 2, "cuts": PairCuts(0, 8)}),
        ([300, 0, 200], 8, 2, 64, DecodeTile(2, 4), jnp.bfloat16, {"sms": 1, "cuts": PairCuts(short=5)}),
    ],
)
def test_decode_attention_equals_its_reference(lengths, heads, kv_heads, width, tile, dtype, extra):
    """q has two rows more than sequences. Rows without keys keep the values of `into`, or are 0."""
    seen = [length - extra["window"] for length in lengths] if "window" in extra else None
    k, v, table = paged(0, lengths, kv_heads, width, seen)
    q, lengths = queries(0, len(lengths) + 2, heads, width), jnp.asarray(lengths, jnp.int32)
    got, want = run(q, cached(k, v, dtype), table, lengths, tile=tile, **extra)
    assert error(got, want) < 6e-3
    nobody = np.append(np.asarray(lengths) == 0, [True, True])
    assert not np.asarray(got - extra.get("into", 0), np.float32)[nobody].any()


TINY = -2e37  # queries of this value give a score of -inf for every nonzero key
SCORES = (  # the scores of a row's keys for queries of ones; the queries of the first three rows are TINY
    lambda rng, length: np.full(length, 64.0),  # all -inf, in a pair that is cut
    lambda rng, length: np.where(
        np.arange(length) < 2 * PAGE, 64.0, 0.0
    ),  # all -inf in the first part of a pair that is cut
    lambda rng, length: np.full(length, 64.0),  # all -inf, in one piece
    lambda rng, length: rng.choice([-1e4, 1e4], length),
    lambda rng, length: rng.normal(size=length) - 300,  # all far below phi
    lambda rng, length: np.zeros(length),  # a row of no keys
    lambda rng, length: rng.normal(size=length) + 300,  # all far above
    lambda rng, length: np.where(
        np.arange(length) == length - 1, 5e3, rng.normal(size=length)
    ),  # one huge value in the last page
    lambda rng, length: (
        np.arange(length) // PAGE * 40.0 + rng.normal(size=length)
    ),  # a rise from page to page
)


@pytest.mark.filterwarnings("ignore:.* encountered in matmul")
@pytest.mark.parametrize(
    ("unified_max", "dtype"),
    [
        (None, jnp.bfloat16),
        ((0.0, 8.0), jnp.bfloat16),
        ((310.0, 30.0), jnp.bfloat16),
        (None, E4M3),
        ((0.0, 8.0), E4M3),
        ((0.0, 8.0), INT8),
    ],
)
def test_rows_outside_the_unified_max_value_equal_the_reference(unified_max, dtype):
    lengths, heads, kv_heads, width = [300, 200, 5, 130, 70, 0, 70, 130, 190], 4, 1, 64
    k, v, table = paged(1, lengths, kv_heads, width)
    rng, keys = np.random.default_rng(2), np.asarray(k, np.float32).copy()
    for row, (length, scores) in enumerate(zip(lengths, SCORES, strict=True)):
        for key, score in enumerate(scores(rng, length)):
            keys[table[row, key // PAGE], :, key % PAGE] = score / width
    cache = cached(jnp.asarray(keys / 20 if dtype == E4M3 else keys, jnp.bfloat16), v, dtype)
    if dtype == E4M3:
        cache[2]["k_scale"] = jnp.full((kv_heads,), 20.0)
    q = jnp.ones((len(lengths), heads, width), jnp.bfloat16).at[:3].set(TINY)
    how = {
        "unified_max": None if unified_max is None else jnp.asarray(unified_max),
        "tile": DecodeTile(1, 4),
        "sms": 6,
    }
    got, want = run(q, cache, table, jnp.asarray(lengths, jnp.int32), scale=1.0, **how)
    for row in range(len(lengths)):
        assert (
            error(got[row], want[row]) < 6e-3
            if want[row].any()
            else not np.asarray(got[row], np.float32).any()
        )


@pytest.mark.parametrize("sms", [28, 132])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
@pytest.mark.parametrize("group", [1, 5, 8, 16])
def test_a_tile_has_pages_enough_for_a_round(itemsize, width, group, sms):
    tile = decode_tile(width, group, itemsize, sms)
    assert tile.value_pages >= tile.pages
    assert tile.workers * tile.blocks * 64 * width * itemsize < SMEM_BYTES
    of_int8 = decode_tile(width, group, 1, sms, int8=True)  # one list of work serves both caches of 8 bits
    assert itemsize == 2 or (of_int8.workers, of_int8.pages) == (tile.workers, tile.pages)
    assert (
        of_int8.value_pages >= of_int8.pages
        and of_int8.workers * of_int8.blocks * (64 * width + 256) < SMEM_BYTES
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": (2, 8, 96)}, "head width 96"),
        ({"q": (2, 34, 64)}, "34 query heads over 2"),
        ({"q": (2, 18, 512), "pages": (9, 2, 64, 512)}, "bfloat16 and up to 8"),
        ({"q": (2, 7, 64)}, "7 query heads over 2"),
        ({"pages": (9, 2, 16, 64)}, "pages"),
        ({"dtype": jnp.float32}, "bfloat16"),
        ({"dtype": E4M3, "q": (2, 8, 64)}, "bfloat16 queries"),
        ({"k_scale": jnp.ones(2)}, "k_scale"),
        ({"int8": True, "k_scale": jnp.ones(2)}, r"k_scale \(2,\): .* \[9, 2, 64\] for int8"),
        ({"int8": True, "k_scale": jnp.ones((9, 2, 64))}, "v_scale None"),
        ({"unified_max": jnp.ones(3)}, "unified_max"),
        ({"q": (1, 8, 64)}, "2 lengths for q"),
        ({"into": jnp.zeros((2, 8, 64))}, "into float32"),
        ({"table": (1, 4)}, r"page_table \[1, 4\] for 2 lengths: accepted is \[2, MP\]"),
        ({"table": (2,)}, r"page_table \[2\] for 2 lengths"),
        ({"sms": 0}, "sms=0: accepted are 1 to 132"),
        ({"sms": -1}, "sms=-1: accepted are 1 to 132"),
        ({"sms": 133}, "sms=133: accepted are 1 to 132"),
    ],
)
def test_decode_attention_names_unsupported_arguments(change, said):
    dtype = change.get("dtype", jnp.bfloat16)
    q = jnp.zeros(change.get("q", (2, 8, 64)), dtype)
    pages = jnp.zeros(change.get("pages", (9, 2, 64, 64)), INT8 if "int8" in change else dtype)
    table = jnp.zeros(change.get("table", (2, 4)), jnp.int32)
    extra = {name: x for name, x in change.items() if name in ("k_scale", "unified_max", "into", "sms")}
    attend = functools.partial(decode_attention, scale=1.0, **extra)
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(attend, q, pages, pages, table, jnp.ones(2, jnp.int32))


@pytest.mark.parametrize(("batch", "workers"), [(256, 528), (512, 264), (3, 528)])
def test_work_of_rows_that_share_their_pages_is_cut_evenly_past_int32(batch, workers):
    """256 requests with one prompt of 131,072 tokens have 2**22 (page, head) pairs; times 528 workers this
    overflows int32.


    """
    work = decode_work(jnp.full(batch, 131_072, jnp.int32), 8, workers)
    pieces = np.asarray(work.pieces)[:, 3]
    assert pieces.sum() == batch * 2048 * 8 and pieces.max() - pieces.min() <= 1
    line = (np.asarray(work.pieces)[:, 0] * 8 + np.asarray(work.pieces)[:, 1]) * 2048 + np.asarray(
        work.pieces
    )[:, 2]
    assert (line == np.arange(workers, dtype=np.int64) * batch * 2048 * 8 // workers).all()


def test_work_is_listed_for_sms_of_a_gpu():
    with pytest.raises(ValueError, match="sms=0: accepted are 1 to 132"):
        list_decode_work(jnp.ones(2, jnp.int32), kv_heads=2, group=4, head_dim=64, itemsize=2, sms=0)


def test_an_e4m3_cache_has_transposed_values():
    q, pages = jnp.zeros((2, 8, 128), jnp.bfloat16), jnp.zeros((9, 2, 64, 128), E4M3)
    with pytest.raises(ValueError, match=r"\[P, K, H, 64\]"):
        decode_attention(q, pages, pages, jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32), scale=1.0)


def shapes(batch, heads, kv_heads, width, pages=4096, dtype=jnp.bfloat16):
    k = jax.ShapeDtypeStruct((pages, kv_heads, PAGE, width), dtype)
    v = k if dtype == jnp.bfloat16 else jax.ShapeDtypeStruct((pages, kv_heads, width, PAGE), dtype)
    q = jax.ShapeDtypeStruct((batch, heads, width), jnp.bfloat16)
    scales = [jax.ShapeDtypeStruct(k.shape[:3], jnp.float32)] * 2 if dtype == INT8 else []
    return (
        q,
        k,
        v,
        jax.ShapeDtypeStruct((batch, 64), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        *scales,
    )


FORMS = [
    (
        32,
        2,
        256,
        jnp.bfloat16,
        {"window": 4096, "soft_cap": 50.0},
    ),  # two workers, as heads of 128 have with half of this output
    (32, 8, 128, E4M3, {}),  # Llama 8B's: four workers, so the fewest registers
    (16, 2, 512, jnp.bfloat16, {}),  # Gemma 4's widest
    (64, 8, 128, E4M3, {"unified_max": jnp.ones(2)}),  # three workers
    (32, 8, 128, INT8, {"unified_max": jnp.ones(2)}),
    (
        32,
        2,
        256,
        E4M3,
        {},
        # Groups of 9 to 16 heads have 32 columns of 256. One worker has all the registers that a thread can
        # have.
    ),
]
OF_32_COLUMNS = (
    "12",
    "8",
)  # bytes that a thread of the last one stores and loads, outside its loop over pages


def dumped(folder, end):
    """Return each kernel's file for every `end`, in one order."""
    return [path.read_text(errors="replace") for path in sorted(folder.glob(f"decode_attention*{end}"))]


def spills(log):
    """Return (bytes stored, bytes loaded) by spills of a kernel, from ptxas."""
    return set(re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log))


@pytest.mark.slow
def test_for_the_h200_it_uses_its_units_and_spills_nothing(tmp_path, monkeypatch):
    """One program holds all variants. Only the variant with 32 columns of width 256 spills, by a known
    number of bytes.


    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def step(inputs):
        scaled = lambda *x, **how: decode_attention(*x[:5], k_scale=x[5], v_scale=x[6], **how)
        kernels = [scaled if len(x) == 7 else decode_attention for x in inputs]
        return [
            kernel(*x, scale=form[2] ** -0.5, **form[4])
            for kernel, x, form in zip(kernels, inputs, FORMS, strict=True)
        ]

    # 2**18 pages of 8 heads are 2**34 elements: offsets past 2**31 go through TMA's coordinates.
    inputs = [shapes(256, *form[:3], pages=2**18, dtype=form[3]) for form in FORMS]
    compiled = compile_for_h200(step, *abstract(h200_mesh(), (inputs,)))
    assert compiled.machine_code
    assert not any(compiled.copies(x.shape) for arrays in inputs for x in arrays[1:3])
    logs, texts = dumped(tmp_path, ".ptxas"), dumped(tmp_path, ".ptx")
    wide = ["m64n32k32" in ptx for ptx in texts]
    assert sum(wide) == 1
    assert [spills(log) for log in logs] == [{OF_32_COLUMNS if most else ("0", "0")} for most in wide]
    assert all("wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx for ptx in texts)
    assert sorted("e4m3.e4m3" in ptx for ptx in texts) == sorted(form[3] == E4M3 for form in FORMS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, E4M3])
def test_pieces_of_one_pair_spill_nothing_on_the_h200(tmp_path, monkeypatch, dtype):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    inputs = shapes(8, 32, 4, 128, dtype=dtype)
    step = functools.partial(decode_attention, scale=1.0, cuts=PairCuts(3, 32), one_fence=True)
    assert compile_for_h200(step, *abstract(h200_mesh(), inputs)).machine_code
    assert [spills(log) for log in dumped(tmp_path, ".ptxas")] == [{("0", "0")}]
    assert [ptx.count("fence.acq_rel.gpu") for ptx in dumped(tmp_path, ".ptx")] == [1]


def test_it_fits_a_stream_region(tmp_path, monkeypatch):
    """With few SMs and three workers, nothing spills either."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def step(q, k, v, table, lengths):
        work = list_decode_work(lengths, kv_heads=8, group=4, head_dim=128, itemsize=2, sms=28)
        attend = functools.partial(decode_attention, scale=1.0, sms=28, work=work)
        region = compute_on.compute_on(
            lambda *args: attend(*args),
            compute_type="gpu_stream:1",
            out_memory_spaces=jax.memory.Space.Device,
        )
        return region(q, k, v, table, lengths)

    compiled = compile_for_h200(step, *abstract(h200_mesh(), shapes(64, 32, 8, 128)))
    on_stream = [
        thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[1]"
    ]
    assert on_stream == ["kCustomCall"]  # only the kernel, which joins cut pairs
    assert [spills(log) for log in dumped(tmp_path, ".ptxas")] == [{("0", "0")}]

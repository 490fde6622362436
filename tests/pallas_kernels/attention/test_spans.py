"""Attention with a span for each KV head: the references' laws, the work
lists, and the kernels interpreted.
"""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_cases import PAGE, WILD, error, paged, queries

from pallas_kernels.attention.chunk import reference as chunk_reference
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.chunk.work_list import block_of, chunk_work
from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.attention.decode.api import decode_attention, list_decode_work
from pallas_kernels.attention.decode.work_list import decode_work, page_of, stacked_work
from pallas_kernels.attention.tiles import ChunkTile, DecodeTile
from pallas_kernels.measure.inputs import quantized

INTERPRET = plgpu.InterpretGPUParams()
E4M3, INT8 = jnp.float8_e4m3fn, jnp.int8
LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 700)), min_size=5, max_size=5)
SPANS = st.lists(st.one_of(st.just(1), st.integers(1, 300), st.just(10_000)), min_size=10, max_size=10)
SINKS = st.sampled_from([4, 100])  # static: each more is compiled


def sparse(seed, ends, first, spans, sinks, kv_heads, width):
    """Return `paged` pages and tables [K, R, MP] of pages of one head, with NaN wherever a head sees no key.

    ends: keys of each row. first: the keys of each row's first query, itself included.
    """
    k, v, table = paged(seed, ends, kv_heads, width)
    spans = np.broadcast_to(spans, (len(ends), kv_heads))
    tables = np.asarray(table)[None].astype(np.int64) * kv_heads + np.arange(kv_heads)[:, None, None]
    tables = np.where(np.asarray(table) == WILD, WILD, tables).astype(np.int32)
    k, v = (np.asarray(x, np.float32).reshape(-1, 1, PAGE, width) for x in (k, v))
    for row, keys in enumerate(first):
        for head in range(kv_heads):
            for page in range(-(-sinks // PAGE), max(keys - spans[row, head], 0) // PAGE):
                k[tables[head, row, page]] = v[tables[head, row, page]] = np.nan
                tables[head, row, page] = WILD
    return *(jnp.asarray(x, jnp.bfloat16) for x in (k, v)), jnp.asarray(tables)


def known(x):
    """Return numbers with 0 for NaN, because the reference masks weights and 0 · NaN is NaN."""
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), x)


def masked(q, k, v, seen, scale):
    """Return plain attention of q [K, G, H] over keys and values [K, S, H] with a mask [K, S]."""
    scores = np.where(seen[:, None], np.einsum("kgh,ksh->kgs", q, k) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgs,ksh->kgh", weights / weights.sum(-1, keepdims=True), v)


decode = jax.jit(
    functools.partial(decode_reference.decode_attention, scale=0.1), static_argnames=("window", "sinks")
)
chunk = jax.jit(
    functools.partial(chunk_reference.chunk_attention, scale=0.1), static_argnames=("window", "sinks")
)


def batch(lengths, width=8):
    """Return float32 queries [B, 4, H], pages of two heads, their table, and the lengths."""
    k, v, table = paged(5, lengths, 2, width)
    q = queries(5, len(lengths), 4, width).astype(jnp.float32)
    k, v = (known(x).astype(jnp.float32) for x in (k, v))
    return q, k, v, table, jnp.asarray(lengths, jnp.int32)


@settings(max_examples=6, deadline=None)
@given(lengths=LENGTHS, sinks=st.sampled_from([0, 100]), more=st.integers(0, 900))
def test_spans_of_at_least_the_length_are_dense_bit_for_bit(lengths, sinks, more):
    q, k, v, table, sized = batch([*lengths, 700])
    spans = jnp.stack([sized, sized + more], axis=1)
    dense = decode(q, k, v, table, sized)
    np.testing.assert_array_equal(decode(q, k, v, table, sized, spans=spans, sinks=sinks), dense)
    np.testing.assert_array_equal(decode(q, k, v, table, sized, spans=jnp.asarray([700, 9999])), dense)
    chunks = jnp.asarray([(0, 3, 5, 697), (4, 2, 5, 10)], jnp.int32)
    dense = chunk(q, k, v, table, chunks)
    assert dense.any()
    spans = jnp.asarray([700 + more, 700])
    np.testing.assert_array_equal(chunk(q, k, v, table, chunks, spans=spans, sinks=sinks), dense)


@settings(max_examples=6, deadline=None)
@given(lengths=LENGTHS, drawn=SPANS, sinks=SINKS)
def test_a_head_sees_its_sinks_and_its_span(lengths, drawn, sinks):
    lengths, spans = [*lengths, 700], np.asarray([*drawn, 3, 70]).reshape(6, 2)
    q, k, v, table, sized = batch(lengths)
    got = np.asarray(decode(q, k, v, table, sized, spans=jnp.asarray(spans), sinks=sinks))
    # NumPy takes parts of arrays: JAX would compile a program for each shape.
    queries_of, keys_of, values_of, pages_of = map(np.asarray, (q, k, v, table))
    for row, length in enumerate(lengths):
        if not length:
            assert not got[row].any()
            continue
        ids = pages_of[row, : -(-length // PAGE)]
        keys, values = (x[ids].swapaxes(0, 1).reshape(2, -1, 8)[:, :length] for x in (keys_of, values_of))
        at = np.arange(length)
        seen = np.stack([(at >= length - span) | (at < sinks) for span in spans[row]])
        want = masked(queries_of[row].reshape(2, 2, 8), keys, values, seen, 0.1)
        np.testing.assert_allclose(got[row].reshape(2, 2, 8), want, rtol=2e-5, atol=2e-6)
    # A chunk of one token sees what a decode row sees.
    chunks = [(row, int(length > 0), row, max(length - 1, 0)) for row, length in enumerate(lengths)]
    same = chunk(q, k, v, table, jnp.asarray(chunks, jnp.int32), spans=jnp.asarray(spans), sinks=sinks)
    np.testing.assert_allclose(same, got, rtol=2e-5, atol=2e-6)


def test_one_window_is_the_span_of_all_heads():
    q, k, v, table, sized = batch([700, 5, 0, 320])
    spans = jnp.full((2,), 100, jnp.int32)
    windowed = decode(q, k, v, table, sized, window=100)
    np.testing.assert_array_equal(decode(q, k, v, table, sized, spans=spans), windowed)
    chunks = jnp.asarray([(0, 4, 3, 316)], jnp.int32)
    windowed = chunk(q, k, v, table, chunks, window=100)
    np.testing.assert_array_equal(chunk(q, k, v, table, chunks, spans=spans), windowed)


cut_decodes = jax.jit(decode_work, static_argnums=(1, 2, 3, 5))
stack_decodes = jax.jit(stacked_work, static_argnums=(1, 2, 4))
cut_chunks = jax.jit(chunk_work, static_argnums=(1, 2, 3, 5))


@settings(max_examples=12, deadline=None)
@given(lengths=LENGTHS, drawn=SPANS, sinks=SINKS, workers=st.sampled_from([4, 264]))
def test_the_pieces_are_the_seen_pages_of_every_head_cut_evenly(lengths, drawn, sinks, workers):
    spans = np.asarray(drawn).reshape(5, 2)
    listed = cut_decodes(jnp.asarray(lengths, jnp.int32), 2, workers, None, jnp.asarray(spans), sinks)
    work = jax.tree.map(np.asarray, listed)
    line = []
    for entry in range(10):
        length, at = lengths[entry // 2], np.arange(lengths[entry // 2])
        seen = (at >= length - spans[entry // 2, entry % 2]) | (at < sinks)
        skipped, pages, of_row, _, since = work.rows[entry].tolist()
        assert (of_row, since) == (length, max(length - spans[entry // 2, entry % 2], 0))
        found = np.asarray(page_of(np.arange(pages), skipped, sinks)).tolist()
        assert found == sorted(set((at[seen] // PAGE).tolist()))
        line += [(entry, place) for place in range(pages)]
    counts = work.pieces[:, 3]
    assert counts.max() - counts.min() <= 1 and not work.arrived.any()
    walked, parts = [], {}
    for worker in range(workers):
        entry, head, place, left = work.pieces[worker].tolist()
        assert head == 0 or left == 0
        assert work.starts[worker, :5].tolist() == work.rows[entry].tolist()
        assert work.starts[worker, 5] == work.rows[min(work.rows[entry, 3], 9), 0]
        while left:
            here = min(work.rows[entry, 1] - place, left)
            walked += [(entry, place + i) for i in range(here)]
            if here < work.rows[entry, 1]:
                parts.setdefault(entry, []).append(worker)
            left, place, entry = left - here, 0, work.rows[entry, 3]
    assert walked == line
    chains = np.zeros(workers, int)
    for first, *_, last in parts.values():
        chains[last] = last - first
        assert (work.enders[first:last] == last).all()
    assert work.chains.tolist() == chains.tolist()


@settings(max_examples=6, deadline=None)
@given(lengths=LENGTHS, drawn=st.lists(SPANS, min_size=3, max_size=3), sinks=SINKS)
def test_a_stack_holds_the_list_of_each_choice_of_spans(lengths, drawn, sinks):
    sized, spans, workers = jnp.asarray(lengths, jnp.int32), jnp.asarray(drawn).reshape(3, 5, 2), 6
    stack = jax.tree.map(np.asarray, stack_decodes(sized, 2, workers, spans, sinks))
    for i, own in enumerate(np.asarray(spans)):
        wanted = cut_decodes(sized, 2, workers, None, own, sinks)
        for one, of_all in zip(jax.tree.leaves(wanted), jax.tree.leaves(stack), strict=True):
            np.testing.assert_array_equal(of_all[i, : len(one)], one)
            assert not of_all[i, len(one) :].any()
    # XLA hands a list to the kernel without a copy only at a multiple of 128 bytes.
    assert all(x[0].nbytes % 128 == 0 for x in (stack.pieces, stack.starts, stack.chains, stack.arrived))


@settings(max_examples=12, deadline=None)
@given(
    drawn=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 900)), min_size=5, max_size=5),
    span_of=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 1024)), min_size=2, max_size=2),
    sinks=SINKS,
)
def test_tiles_of_every_head_hold_the_blocks_that_it_sees_longest_first(drawn, span_of, sinks):
    """Spans grow with the position, by up to a key a token."""
    tile = ChunkTile(keys=128, stages=2)
    firsts = np.cumsum([0, *(tokens for tokens, _ in drawn)])
    listed = zip(firsts, drawn, strict=False)
    chunks = [(int(first), tokens, i, at) for i, (first, (tokens, at)) in enumerate(listed)]
    spans = np.ones((2048, 2), np.int32)
    for first, tokens, _, at in chunks:
        position = np.arange(at, at + tokens)[:, None]
        spans[first : first + tokens] = [a for a, _ in span_of] + position * [b for _, b in span_of] // 1024
    work = cut_chunks(jnp.asarray(chunks, jnp.int32), 2048, tile, None, jnp.asarray(spans), sinks)
    tiles = np.asarray(work.tiles)[: int(work.count[0])].tolist()
    costs = [end - begin for _, _, _, _, _, begin, end, *_ in tiles]
    assert costs == sorted(costs, reverse=True)
    done = []
    for first, begin, end, _, position, block, block_end, skipped, since, settled, head in tiles:
        rows = np.arange(begin, end)
        firsts_seen = np.maximum(position + rows + 1 - spans[first + rows, head], 0)
        assert (since, settled) == (firsts_seen.min(), firsts_seen.max())
        at = np.arange(position + end)
        seen = (at >= since) | (at < sinks)
        found = np.asarray(block_of(np.arange(block, block_end), skipped, sinks, tile.keys)).tolist()
        assert found == sorted(set((at[seen] // tile.keys).tolist()))
        done += [(head, token) for token in range(first + begin, first + end)]
    assert sorted(done) == [(head, token) for head in range(2) for token in range(int(firsts[-1]))]


def of_cache(k, v, dtype):
    """Return pages of one head each in a cache of `dtype`, and its scales."""
    if dtype == jnp.bfloat16:
        return k, v, {}
    if dtype == INT8:
        (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
        return k, v.swapaxes(2, 3), {"k_scale": k_scale, "v_scale": v_scale}
    scales = {"k_scale": jnp.asarray([0.5, 1.5]), "v_scale": jnp.asarray([2.0, 0.7])}
    return k.astype(dtype), v.astype(dtype).swapaxes(2, 3), scales


def both(kernel, plain, q, cache, table, extra, spans, sinks, **how):
    """Return the interpreted kernel's result and the reference's in float32."""
    (k, v, scales), spans = cache, jnp.asarray(spans, jnp.int32)
    given = functools.partial(kernel, scale=0.1, sinks=sinks, interpret=INTERPRET, **how)
    got = jax.jit(given)(q, k, v, table, extra, spans=spans, **scales)
    scales = {name: jnp.nan_to_num(x) for name, x in scales.items()}
    return got, plain(
        q.astype(jnp.float32), known(k), known(v), table, extra, spans=spans, sinks=sinks, **scales
    )


@pytest.mark.parametrize(
    ("lengths", "spans", "sinks", "tile", "dtype"),
    [
        # An empty row, a span of 1, one longer than its row, and sinks in a page of their own.
        ([330, 0, 5, 200], [[1, 140], [9, 9], [1, 700], [64, 65]], 4, DecodeTile(2, 4), jnp.bfloat16),
        # Spans in the second half of a page that is not full, which must not stand in for the first half.
        ([370, 0, 50, 248], [[10, 140], [1, 1], [9, 3], [70, 3]], 0, DecodeTile(2, 4), jnp.bfloat16),
        ([330, 70], [30, 300], 70, DecodeTile(1, 6), jnp.bfloat16),  # sinks of two pages, over a window
        ([200, 130], [3, 90], 0, DecodeTile(2, 4), jnp.bfloat16),
        ([330, 5], [1, 140], 40, DecodeTile(3, 4, pages=1), E4M3),
        ([330, 5], [1, 140], 4, DecodeTile(3, 5, pages=1), INT8),
    ],
)
def test_decode_attention_reads_only_what_its_heads_see(lengths, spans, sinks, tile, dtype):
    width = 128 if dtype == INT8 else 64
    k, v, tables = sparse(3, lengths, lengths, spans, sinks, 2, width)
    q, sized = queries(3, len(lengths) + 1, 6, width), jnp.asarray(lengths, jnp.int32)
    got, want = both(
        decode_attention, decode, q, of_cache(k, v, dtype), tables, sized, spans, sinks, sms=2, tile=tile
    )
    assert error(got, want) < 6e-3
    assert not np.asarray(got, np.float32)[np.append(np.asarray(lengths) == 0, True)].any()


def test_heads_share_pages_and_a_table():
    """The decodes' work list is one of a stack, as all layers' lists are in the engine."""
    k, v, table = paged(4, [330, 70], 2, 64)
    q, sized = queries(4, 2, 2, 64), jnp.asarray([330, 70], jnp.int32)
    choices = jnp.asarray([[[9, 9], [9, 9]], [[30, 200], [30, 200]]], jnp.int32)
    settings = {"group": 1, "head_dim": 64, "itemsize": 2, "sms": 1, "sinks": 4}
    listed = jax.jit(lambda lengths, spans: list_decode_work(lengths, kv_heads=2, spans=spans, **settings))
    second = jax.jit(lambda stack: jax.tree.map(lambda x: x[1], stack))(listed(sized, choices))
    got, want = both(decode_attention, decode, q, (k, v, {}), table, sized, [30, 200], 4, sms=1, work=second)
    assert error(got, want) < 6e-3
    chunks = jnp.asarray([(0, 2, 0, 328)], jnp.int32)
    got, want = both(chunk_attention, chunk, q, (k, v, {}), table, chunks, [30, 200], 4, sms=2)
    assert error(got, want) < 6e-3


@pytest.mark.parametrize(
    ("chunks", "spans", "sinks", "dtype"),
    [
        ([(3, 20, 0, 310), (24, 2, 1, 5)], None, 4, jnp.bfloat16),  # spans of each token
        ([(0, 8, 0, 322)], [10, 300], 0, jnp.bfloat16),
        # The window is in a block's second page, and the sinks are in a block's first page.
        ([(0, 8, 0, 450)], [10, 64], 64, jnp.bfloat16),
        ([(0, 8, 0, 322)], [10, 300], 130, E4M3),
        ([(0, 8, 0, 450)], [10, 64], 64, INT8),
    ],
)
def test_chunk_attention_reads_only_what_its_heads_see(chunks, spans, sinks, dtype):
    ends, first = [c[1] + c[3] for c in chunks], [c[3] + 1 for c in chunks]
    if spans is None:
        spans = np.stack([np.arange(32) // 2 + 1, np.arange(32) + 140], axis=1)
        spans[24:] = [700, 3]
        freed = [[1, 140], [700, 3]]
    else:
        freed = np.asarray([spans] * len(chunks))
    k, v, tables = sparse(3, ends, first, freed, sinks, 2, 64)
    q = queries(3, 32, 2, 64)
    chunks = jnp.asarray(chunks, jnp.int32)
    got, want = both(chunk_attention, chunk, q, of_cache(k, v, dtype), tables, chunks, spans, sinks, sms=2)
    assert error(got, want) < (4e-2 if dtype == E4M3 else 6e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spans": jnp.ones(3, jnp.int32)}, r"spans int32\[3\]: accepted are integers \[2\] or \[2, 2\]"),
        ({"spans": jnp.ones(2)}, r"spans float32\[2\]"),
        ({"window": 5}, "window=5 beside spans: accepted is None"),
        ({"sinks": -1}, "sinks=-1: accepted are 0 and above"),
        ({"sinks": 4, "spans": None}, "sinks=4 without spans"),
        ({"table": (3, 2, 4)}, "8 query heads over 6"),
    ],
)
@pytest.mark.parametrize(("kernel", "extra"), [(decode_attention, (2,)), (chunk_attention, (1, 4))])
def test_unsupported_spans_are_named(kernel, extra, change, said):
    q, pages = jnp.zeros((2, 8, 64), jnp.bfloat16), jnp.zeros((9, 2, PAGE, 64), jnp.bfloat16)
    settings = {"spans": jnp.ones(2, jnp.int32), **change}
    table = jnp.zeros(settings.pop("table", (2, 4)), jnp.int32)
    with pytest.raises(ValueError, match=said):
        kernel(q, pages, pages, table, jnp.ones(extra, jnp.int32), scale=1.0, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, E4M3, INT8])
@pytest.mark.parametrize("held", [8, 1])
def test_for_the_h200_nothing_spills(dtype, held, tmp_path, monkeypatch):
    """Llama 8B's heads with 256 rows of up to 32k keys; pages of all heads, or of one head."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    shape = jax.ShapeDtypeStruct
    k = shape((2**17, held, PAGE, 128), dtype)
    v = k if dtype == jnp.bfloat16 else shape((2**17, held, 128, PAGE), dtype)
    scales = [shape(k.shape[:3], jnp.float32)] * 2 if dtype == INT8 else []
    tables = shape((256, 512) if held == 8 else (8, 256, 512), jnp.int32)
    q, lengths, chunks = (
        shape((256, 32, 128), jnp.bfloat16),
        shape((256,), jnp.int32),
        shape((4, 4), jnp.int32),
    )

    def step(q, k, v, table, lengths, chunks, spans, *scales):
        settings = {"spans": spans, "sinks": 64, **dict(zip(("k_scale", "v_scale"), scales, strict=False))}
        return (
            decode_attention(q, k, v, table, lengths, scale=0.1, **settings),
            chunk_attention(q, k, v, table, chunks, scale=0.1, **settings),
        )

    inputs = (q, k, v, tables, lengths, chunks, shape((256, 8), jnp.int32), *scales)
    compiled = compile_for_h200(step, *abstract(h200_mesh(), inputs))
    assert compiled.machine_code
    assert not any(compiled.copies(x.shape) for x in inputs[1:3])
    spilled = {
        name: [
            int(n)
            for log in tmp_path.glob(f"{name}*.ptxas")
            for n in re.findall(r"(\d+) bytes spill stores", log.read_text(errors="replace"))
        ]
        for name in ("decode_attention", "chunk_attention")
    }
    assert spilled["decode_attention"] and max(spilled["decode_attention"]) == 0
    assert spilled["chunk_attention"] and max(spilled["chunk_attention"]) <= 512


@pytest.mark.slow
@pytest.mark.parametrize("share", ["0/3", "1/3", "2/3"], ids=["bfloat16", "float8", "int8"])
@pytest.mark.parametrize("part", ["decode", "chunk"])
def test_the_check_for_a_gpu_passes_in_the_interpreter(part, share):
    """A process of its own, because the interpreter needs more threads than the tests have."""
    command = ["-m", "pallas_kernels.attention.gpu_check_spans", "--toy", "--only", part, "--share", share]
    ended = subprocess.run([sys.executable, *command], cwd=paths.ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok=True") == 4

"""Chunk attention: the tile list, the kernel in the interpreter against its reference, and the H200 code."""

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
from paged_cases import PAGE, error, exact, paged, queries

from pallas_kernels.attention.chunk import reference
from pallas_kernels.attention.chunk.api import chunk_attention
from pallas_kernels.attention.chunk.work_list import chunk_work
from pallas_kernels.attention.tiles import ChunkTile, chunk_tile
from pallas_kernels.measure.inputs import quantized

INTERPRET = plgpu.InterpretGPUParams()
INT8_SCALES = {"k_scale": jnp.ones((9, 2, 64)), "v_scale": jnp.ones((9, 2, 64))}
IN_SECOND_PAGES = [(0, 8, 0, 90), (8, 1, 1, 100), (16, 8, 2, 346)]  # chunks, with windows up to 20


@settings(max_examples=20)
@given(
    gaps=st.lists(
        st.tuples(
            st.integers(0, 20), st.one_of(st.integers(0, 5), st.integers(6, 500)), st.integers(0, 3000)
        ),
        min_size=1,
        max_size=6,
    ),
    window=st.sampled_from([None, 1, 100]),
)
def test_every_token_is_in_one_tile_that_reads_the_keys_it_sees(gaps, window):
    tile = ChunkTile(keys=128, stages=2)
    chunks, at = [], 0
    for gap, tokens, position in gaps:
        chunks.append((at + gap, tokens, len(chunks), position))
        at += gap + tokens
    padded = chunks + [(0, 0, 0, 0)] * (6 - len(chunks))
    work = jax.jit(chunk_work, static_argnums=(1, 2, 3))(jnp.asarray(padded, jnp.int32), 4096, tile, window)
    count = int(work.count[0])
    tiles = np.asarray(work.tiles)[:count].tolist()

    costs = [end - begin for *_, begin, end in tiles]
    assert costs == sorted(costs, reverse=True)
    done = []
    for first, begin, end, row, position, block, block_end in tiles:
        assert first % 8 == 0 and 0 <= begin < end <= tile.rows
        chunk_first, tokens, _, chunk_position = chunks[row]
        for r in (begin, end - 1):
            assert 0 <= first + r - chunk_first < tokens
            assert position + r == chunk_position + first + r - chunk_first
        done += range(first + begin, first + end)
        seen = 0 if window is None else max(0, position + begin - window + 1)
        assert block * tile.keys <= seen < (block + 1) * tile.keys
        assert (block_end - 1) * tile.keys < position + end <= block_end * tile.keys
    covered = [token for first, tokens, *_ in chunks for token in range(first, first + tokens)]
    assert sorted(done) == covered
    runs = np.asarray(work.gaps)[: int(work.count[1])].tolist()
    assert all(rows > 0 for _, rows in runs)
    gaps = [row for first, rows in runs for row in range(first, first + rows)]
    assert sorted(gaps + covered) == list(range(4096))


@pytest.mark.parametrize(
    ("chunks", "tokens", "heads", "kv_heads", "width", "extra"),
    [
        # Chunks with a gap between them and rows of none around, an empty one, a start that is no multiple of
        # 8, one in mid-page.
        ([(3, 70, 0, 0), (73, 0, 1, 0), (80, 5, 2, 77)], 90, 2, 1, 64, {}),
        # A window that begins in the second page of a block of keys.
        ([(0, 140, 0, 262), (150, 9, 1, 60)], 160, 1, 1, 64, {"window": 70, "soft_cap": 20.0, "scale": 0.3}),
        ([(5, 90, 0, 70)], 100, 1, 1, 256, {}),
        # The visible keys of a tile lie in the second page of its last block. The sequence fills a part of
        # this block.
        (IN_SECOND_PAGES, 24, 1, 1, 64, {"window": 16}),
        ([(0, 8, 0, 90)], 8, 1, 1, 64, {"scale": -0.1}),
        ([(0, 8, 0, 90)], 8, 1, 1, 64, {"scale": 0.0, "unified_max": jnp.asarray([1.0, 20.0])}),
        ([(5, 70, 0, 70), (80, 9, 1, 0)], 96, 2, 1, 512, {}),
        ([(0, 9, 0, 150)], 24, 1, 1, 512, {"window": 70, "soft_cap": 20.0, "scale": -0.1}),
        # The heads of Gemma 4 E2B, whose scores have no scale. Here they reach 100 and -100.
        ([(0, 40, 0, 500)], 40, 2, 1, 256, {"window": 512, "scale": 1.0}),
        ([(3, 70, 0, 70)], 80, 2, 1, 512, {"scale": 1.0}),
    ],
)
def test_chunk_attention_equals_its_reference(chunks, tokens, heads, kv_heads, width, extra):
    seen = [chunk[3] - extra["window"] + 1 for chunk in chunks] if "window" in extra else None
    k, v, table = paged(0, [chunk[1] + chunk[3] for chunk in chunks], kv_heads, width, seen)
    q = queries(0, tokens, heads, width)
    got, want = both(q, k, v, table, chunks, extra)
    assert error(got, want) < 6e-3
    in_chunk = np.zeros(tokens, bool)
    for first, length, *_ in chunks:
        in_chunk[first : first + length] = True
    assert not np.asarray(got, np.float32)[~in_chunk].any()


def both(q, k, v, table, chunks, extra):
    """Return the kernel's result in the interpreter and the reference's in float32, from one program each,
    which saves time.


    """
    chunks, arrays = (
        jnp.asarray(chunks, jnp.int32),
        {name: extra[name] for name in ("k_scale", "v_scale", "unified_max") if name in extra},
    )
    settings = {"scale": q.shape[2] ** -0.5, "sms": 2} | {
        name: value for name, value in extra.items() if name not in arrays
    }
    kernel = jax.jit(functools.partial(chunk_attention, interpret=INTERPRET, **settings))
    got = kernel(q, k, v, table, chunks, **arrays)
    plain = v if v.dtype.itemsize == 2 else jnp.swapaxes(v, 2, 3)
    arrays |= {name: np.nan_to_num(arrays[name]) for name in ("k_scale", "v_scale") if name in arrays}
    twin = jax.jit(functools.partial(reference.chunk_attention, **settings))
    return got, exact(twin, q, k, plain, table, chunks, **arrays)


@pytest.mark.parametrize(
    ("chunks", "extra"),
    [
        ([(3, 70, 0, 5), (80, 8, 1, 192)], {}),
        ([(3, 70, 0, 5), (80, 8, 1, 192)], {"soft_cap": 5.0}),
        (IN_SECOND_PAGES, {"window": 20, "scale": -0.1}),
        ([(0, 8, 0, 90)], {"scale": 0.0}),
    ],
)
def test_an_e4m3_cache_is_multiplied_as_e4m3(chunks, extra):
    k, v, table = paged(1, [chunk[1] + chunk[3] for chunk in chunks], 2, 128)
    k, v = k.astype(jnp.float8_e4m3fn), jnp.swapaxes(v, 2, 3).astype(jnp.float8_e4m3fn)
    scales = {"k_scale": jnp.asarray([0.5, 1.5]), "v_scale": jnp.asarray([2.0, 0.1])}
    got, want = both(queries(1, 90, 2, 128), k, v, table, chunks, {"scale": 0.05, **extra, **scales})
    assert error(got, want) < 4e-2  # queries and weights are rounded to 8 bits: 2.6 % each, at random


@pytest.mark.parametrize("extra", [{"scale": 0.1, "soft_cap": 50.0}, {"scale": -0.1}])
def test_small_weights_of_8_bits_have_their_share(extra):
    """One key's score is 6 above 299 others. The others' weights, together above half of its weight, must
    not round to 0.


    """
    k, v, table = paged(3, [300], 1, 64)
    one, sign = (table[0, 1], slice(None), 5), np.sign(extra["scale"])
    k, v = ((x * size).at[one].set(-1.0) for x, size in ((k, 0.02), (v, 0.1)))
    k, v = (-sign * k).astype(jnp.float8_e4m3fn), jnp.swapaxes(v + 1, 2, 3).astype(jnp.float8_e4m3fn)
    q = (queries(0, 8, 1, 64) * 0.05 + 1).astype(jnp.bfloat16)
    got, want = both(q, k, v, table, [(0, 8, 0, 292)], extra)
    assert error(got, want) < 4e-2


def test_a_cache_of_int8_is_multiplied_as_bfloat16():
    k, v, table = paged(1, [75, 330], 1, 64)
    (k, k_scale), (v, v_scale) = quantized(k), quantized(v)
    chunks = [(3, 70, 0, 5), (80, 8, 1, 322)]
    extra = {"k_scale": k_scale, "v_scale": v_scale, "soft_cap": 20.0, "scale": 0.2}
    got, want = both(queries(1, 90, 2, 64), k, jnp.swapaxes(v, 2, 3), table, chunks, extra)
    assert error(got, want) < 6e-3


@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_scores_that_a_scale_of_8_bits_makes_0_weigh_the_same(soft_cap):
    """Test a head with zero keys and scale, and a zero query with a scale outside float32's normal range."""
    k, v, table = paged(4, [80], 2, 64)
    k, v = k.astype(jnp.float8_e4m3fn), jnp.swapaxes(v, 2, 3).astype(jnp.float8_e4m3fn)
    q = queries(4, 24, 2, 64).at[7].set(0)
    extra = {"scale": 0.05, "soft_cap": soft_cap, "k_scale": jnp.asarray([0.0, 1e-6])}
    got, want = both(q, k, v, table, [(0, 20, 0, 60)], extra)
    assert error(got, want) < 4e-2


def scores_of(kind, k, table):
    """Return keys with scores outside a unified max value, for queries of ones."""
    row = np.asarray(table)[0]
    k = np.asarray(k, np.float32) * 0.01
    if kind == "above":  # one huge value in the last page
        k[row[2], 0, 3] = 200.0
    elif kind == "below":
        k -= 100.0
    elif kind == "both":  # +-1e4
        k[row[0], 0], k[row[1], 0] = 1250.0, -1250.0
    return jnp.asarray(k, jnp.bfloat16)


@pytest.mark.parametrize(
    ("kind", "marks", "int8", "sms"),
    [
        ("within", 256, False, 2),
        ("above", 1, False, 2),
        (
            "above",
            1,
            False,
            3,
            # Four tiles of two heads. Two CTAs have no tile in their last round, and the mark there is the
            # first round's.
        ),
        ("below", 256, False, 2),
        ("both", 256, False, 2),
        ("both", 256, True, 2),
    ],
)
def test_rows_outside_the_unified_max_value_fall_back(kind, marks, int8, sms, monkeypatch):
    # With one mark for all rounds, more work is repeated.
    monkeypatch.setattr("pallas_kernels.attention.chunk.api.MARKS", marks)
    monkeypatch.setattr("pallas_kernels.attention.chunk.items.MARKS", marks)
    monkeypatch.setattr("pallas_kernels.attention.chunk.rows.MARKS", marks)
    k, v, table = paged(2, [150, 20], 1, 64)
    q = queries(2, 48, sms - 1, 64) * 0.1 + 1
    chunks = [
        (0, 20, 0, 130),
        (24, 20, 1, 0),
        (0, 0, 0, 0),
    ]  # a place in the list of tiles stays free, and has no blocks
    extra, k = {"unified_max": jnp.asarray([0.0, 20.0]), "sms": sms}, scores_of(kind, k, table)
    if int8:
        (k, extra["k_scale"]), (v, extra["v_scale"]) = quantized(k), quantized(v)
        v = jnp.swapaxes(v, 2, 3)
    got, want = both(q.astype(jnp.bfloat16), k, v, table, chunks, extra)
    assert error(got, want) < 6e-3


@pytest.mark.filterwarnings("ignore:.* encountered in matmul")
@pytest.mark.parametrize(
    ("dtype", "unified_max"), [(jnp.bfloat16, False), (jnp.int8, True), (jnp.float8_e4m3fn, False)]
)
def test_rows_whose_scores_are_all_minus_infinity_become_0(dtype, unified_max):
    """The second of two heads has keys, or a scale, at the end of float32's range."""
    k, v, table = paged(3, [80], 2, 64)
    eight, heads = dtype == jnp.float8_e4m3fn, jnp.arange(2)[:, None, None]
    k = jnp.where(heads == 1, jnp.where(jnp.isnan(k), k, -1.0 if eight else -3e38), k).astype(
        dtype if eight else k.dtype
    )
    extra = {"scale": 0.05} | ({"unified_max": jnp.asarray([0.0, 20.0])} if unified_max else {})
    if eight:
        v, extra["k_scale"] = jnp.swapaxes(v, 2, 3).astype(dtype), jnp.asarray([1.0, 3e38])
    if dtype == jnp.int8:
        (k, extra["k_scale"]), (v, extra["v_scale"]) = quantized(k), quantized(v)
        v = jnp.swapaxes(v, 2, 3)
    got, want = both(jnp.abs(queries(3, 24, 2, 64)), k, v, table, [(0, 20, 0, 60)], extra)
    assert error(got, want) < (4e-2 if eight else 6e-3)
    assert not want[:, 1].any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": (8, 8, 96)}, "head width 96"),
        ({"q": (8, 7, 64)}, "7 query heads over 2"),
        ({"pages": (9, 2, 16, 64)}, "pages"),
        ({"dtype": jnp.float32}, "keys and values both bfloat16"),
        ({"k_scale": jnp.ones(2)}, "k_scale"),
        ({"dtype": jnp.int8, "k_scale": jnp.ones((9, 2, 64))}, "v_scale None"),
        (
            {"dtype": jnp.int8, "q": (8, 8, 256), "pages": (9, 2, 64, 256), **INT8_SCALES},
            "head width 256 of a cache of int8: accepted are 64 or 128",
        ),
        (
            {"dtype": jnp.int8, "q": (8, 8, 512), "pages": (9, 2, 64, 512), **INT8_SCALES},
            "head width 512 of a cache of int8",
        ),
        ({"unified_max": jnp.ones(3)}, r"unified_max \[3\]: accepted is \[2\]"),
        ({"unified_max": jnp.ones(1)}, r"unified_max \[1\]: accepted is \[2\]"),
        ({"chunks": (1, 3)}, r"chunks \[1, 3\]: .* \[C, 4\]"),
        ({"chunks": (4,)}, r"chunks \[4\]"),
        ({"table": (4,)}, r"page_table \[4\], .*: accepted are \[R, MP\]"),
        ({"sms": 0}, "sms=0: accepted are 1 to 132"),
        ({"sms": -1}, "sms=-1: accepted are 1 to 132"),
    ],
)
def test_chunk_attention_names_unsupported_arguments(change, said):
    k = jnp.zeros(change.get("pages", (9, 2, 64, 64)), change.get("dtype", jnp.bfloat16))
    v = k.swapaxes(2, 3) if k.dtype == jnp.int8 else k
    q = jnp.zeros(change.get("q", (8, 8, 64)), jnp.bfloat16)
    table, chunks = (
        jnp.zeros(change.get(name, shape), jnp.int32)
        for name, shape in (("table", (2, 4)), ("chunks", (1, 4)))
    )
    extra = {name: x for name, x in change.items() if name in ("k_scale", "v_scale", "unified_max", "sms")}
    with pytest.raises(ValueError, match=said):
        chunk_attention(q, k, v, table, chunks, scale=1.0, **extra)


def shapes(tokens, heads, kv_heads, width, pages=4096, dtype=jnp.bfloat16):
    keys = jax.ShapeDtypeStruct((pages, kv_heads, PAGE, width), dtype)
    values = keys if dtype == jnp.bfloat16 else jax.ShapeDtypeStruct((pages, kv_heads, width, PAGE), dtype)
    q = jax.ShapeDtypeStruct((tokens, heads, width), jnp.bfloat16)
    scales = [jax.ShapeDtypeStruct(keys.shape[:3], jnp.float32)] * 2 if dtype == jnp.int8 else []
    return (
        q,
        keys,
        values,
        jax.ShapeDtypeStruct((256, 64), jnp.int32),
        jax.ShapeDtypeStruct((16, 4), jnp.int32),
        *scales,
    )


def compiled_with(fn, inputs, folder, monkeypatch):
    """Compile `fn` for an H200, and check the reports of ptxas and the PTX."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(folder))
    compiled = compile_for_h200(fn, *abstract(h200_mesh(), inputs))
    assert compiled.machine_code
    assert not any(compiled.copies(x.shape) for x in inputs[:3])
    logs, ptx = (
        "".join(p.read_text(errors="replace") for p in folder.glob(f"chunk_attention*{end}"))
        for end in (".ptxas", ".ptx")
    )
    assert "wgmma" not in logs  # ptxas reports products that wait for each other
    # Values for the end of an item lie in local memory during its loops. One read for an item has no
    # measurable cost.
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", logs)) <= 512
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    # The warpgroups' registers equal those of the CTA. A larger request would wait forever.
    registers = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    assert sorted(registers) == [40, 232] and 40 + 2 * 232 == 3 * 168
    return compiled


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "extra"),
    [
        (8, 4, 256, jnp.bfloat16, {"window": 4096, "soft_cap": 30.0}),
        (32, 8, 128, jnp.float8_e4m3fn, {}),
        (32, 8, 128, jnp.int8, {"unified_max": jnp.ones(2)}),
    ],
)
def test_for_the_h200_it_uses_its_units(heads, kv_heads, width, dtype, extra, tmp_path, monkeypatch):
    def fn(q, k, v, table, chunks, k_scale=None, v_scale=None):
        return chunk_attention(
            q, k, v, table, chunks, scale=width**-0.5, k_scale=k_scale, v_scale=v_scale, **extra
        )

    compiled_with(fn, shapes(2048, heads, kv_heads, width, pages=2**18, dtype=dtype), tmp_path, monkeypatch)


def test_heads_of_512_columns_spill_nothing_on_the_h200(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    inputs = shapes(2048, 16, 2, 512, pages=2**17)
    compiled = compile_for_h200(functools.partial(chunk_attention, scale=1.0), *abstract(h200_mesh(), inputs))
    assert compiled.machine_code
    assert not any(compiled.copies(x.shape) for x in inputs[:3])
    logs = [path.read_text(errors="replace") for path in tmp_path.glob("wide_chunk*.ptxas")]
    spilled = [re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log) for log in logs]
    assert [set(found) for found in spilled] == [{("0", "0")}]


@pytest.mark.slow
def test_it_fits_a_stream_region(tmp_path, monkeypatch):
    def step(q, k, v, table, chunks):
        work = chunk_work(chunks, q.shape[0], chunk_tile(q.shape[2]))
        attend = functools.partial(chunk_attention, scale=1.0, sms=28, work=work)
        region = compute_on.compute_on(
            lambda *args: attend(*args),
            compute_type="gpu_stream:1",
            out_memory_spaces=jax.memory.Space.Device,
        )
        return region(q, k, v, table, chunks)

    compiled = compiled_with(step, shapes(512, 32, 8, 128, pages=2**18), tmp_path, monkeypatch)
    on_stream = [
        thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[1]"
    ]
    assert on_stream == ["kCustomCall"]  # only the kernel: no zeros before it, no copy

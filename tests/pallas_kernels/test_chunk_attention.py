"""Chunk attention: the tile list's laws, the kernel in Mosaic's interpreter beside its twin, and what ptxas makes of it for an H200."""

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

from pallas_kernels import reference
from pallas_kernels.chunk_attention import chunk_attention, chunk_work
from pallas_kernels.tiles import ChunkTile, chunk_tile

INTERPRET = plgpu.InterpretGPUParams()


@settings(max_examples=40)
@given(
    gaps=st.lists(
        st.tuples(st.integers(0, 20), st.one_of(st.integers(0, 5), st.integers(6, 500)), st.integers(0, 3000)), min_size=1, max_size=6
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
    assert sorted(done) == [token for first, tokens, *_ in chunks for token in range(first, first + tokens)]


@pytest.mark.parametrize(
    ("chunks", "tokens", "heads", "kv_heads", "width", "extra"),
    [
        # Chunks with a gap between them and rows of none around, an empty one, a start that is no multiple of 8, one in mid-page.
        ([(3, 70, 0, 0), (73, 0, 1, 0), (80, 5, 2, 77)], 90, 2, 1, 64, {}),
        ([(0, 140, 0, 100), (150, 9, 1, 60)], 160, 1, 1, 64, {"window": 70, "soft_cap": 20.0}),
        ([(5, 90, 0, 70)], 100, 1, 1, 256, {}),
    ],
)
def test_the_kernel_is_its_twin(chunks, tokens, heads, kv_heads, width, extra):
    k, v, table = paged(0, [chunk[1] + chunk[3] for chunk in chunks], kv_heads, width)
    q, in_chunk = queries(0, tokens, heads, width), np.zeros(tokens, bool)
    for first, length, *_ in chunks:
        in_chunk[first : first + length] = True
    chunks = jnp.asarray(chunks, jnp.int32)
    got = chunk_attention(q, k, v, table, chunks, scale=width**-0.5, sms=2, interpret=INTERPRET, **extra)
    assert error(got, exact(reference.chunk_attention, q, k, v, table, chunks, scale=width**-0.5, **extra)) < 6e-3
    assert not np.asarray(got, np.float32)[~in_chunk].any()


def shapes(tokens, heads, kv_heads, width, pages=4096):
    cache = jax.ShapeDtypeStruct((pages, kv_heads, PAGE, width), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((tokens, heads, width), jnp.bfloat16)
    return q, cache, cache, jax.ShapeDtypeStruct((256, 64), jnp.int32), jax.ShapeDtypeStruct((16, 4), jnp.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "extra", "spilled"),
    [(32, 8, 128, {"sms": 28}, 16), (14, 2, 64, {"soft_cap": 30.0, "window": 4096}, 0), (8, 4, 256, {}, 128)],
)
def test_for_the_h200_it_uses_its_units_and_hardly_spills(heads, kv_heads, width, extra, spilled, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    fn = functools.partial(chunk_attention, scale=width**-0.5, **extra)
    compiled = compile_for_h200(fn, *abstract(h200_mesh(), shapes(2048, heads, kv_heads, width, pages=2**18)))
    assert compiled.machine_code
    assert not compiled.copies((2**18, kv_heads, PAGE, width)) and not compiled.copies((2048, heads, width))
    logs, ptx = ("".join(p.read_text(errors="replace") for p in tmp_path.glob(f"chunk_attention*{end}")) for end in (".ptxas", ".ptx"))
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", logs)) <= spilled
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    # The warpgroups' registers are exactly what the CTA was given: an increase beyond it waits for ever.
    registers = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    assert sorted(registers) == [24, 240] and 24 + 2 * 240 == 3 * 168


def test_it_fits_a_stream_region():
    def step(q, k, v, table, chunks):
        work = chunk_work(chunks, q.shape[0], chunk_tile(q.shape[2]))
        attend = functools.partial(chunk_attention, scale=1.0, sms=28, work=work)
        region = compute_on.compute_on(lambda *args: attend(*args), compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)
        return region(q, k, v, table, chunks)

    compiled = compile_for_h200(step, *abstract(h200_mesh(), shapes(512, 32, 8, 128)))
    on_stream = [thunk.kind for thunk in compiled.thunks if thunk.depth and thunk.stream == "computation_stream[1]"]
    assert on_stream == ["kCustomKernel", "kCustomCall"]  # the zeros that are written over, and the kernel: no copy

"""Latent chunk attention with keys and values by head: windows, the kernel in the interpreter against its
reference and against the absorbed form, and the H200 code.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_cases import PAGE, error, paged, queries

from pallas_kernels.attention.latent import reference
from pallas_kernels.attention.latent.up_chunks import up_chunk_attention

RANK, ROTARY, PLAIN, TOKENS, HEADS = 128, 64, 128, 200, 8
SCALE = (PLAIN + ROTARY) ** -0.5


def inputs(chunks):
    """Return (pages, page table, the matrices of keys and of values). Unwritten positions hold NaN."""
    ends = [max((n + at for _, n, row, at in chunks if row == own and n), default=0) for own in range(3)]
    both_pages, _, table = paged(0, ends, 1, RANK + ROTARY)
    rng = np.random.default_rng(5)
    ups = [jnp.asarray(x * RANK**-0.5, jnp.bfloat16) for x in rng.normal(size=(2, HEADS, PLAIN, RANK))]
    return (both_pages[..., RANK:], both_pages[..., :RANK]), table, ups


@functools.cache
def both(pairs: int):
    """Return the kernel in the interpreter and its reference, compiled once for the tests."""
    interpret = plgpu.InterpretGPUParams()
    how = {"sms": 2, "pairs": pairs, "interpret": interpret}
    kernel = functools.partial(up_chunk_attention, scale=SCALE, **how)
    return jax.jit(kernel), jax.jit(functools.partial(reference.up_chunk_attention, scale=SCALE))


@pytest.mark.parametrize(
    ("chunks", "pairs"),
    [
        # Several chunks in a window, a border of a page, a chunk of nothing, tokens of no chunk.
        ([(3, 130, 1, 62), (0, 0, 2, 0), (140, 7, 0, 3)], 3),
        # Windows that begin inside a chunk and inside its tiles, and hold the end of one chunk and the
        # context of the next one.
        ([(0, 129, 0, 250), (129, 5, 1, 0), (150, 50, 2, 127)], 2),
        ([(7, 190, 0, 64), (0, 0, 1, 0), (0, 0, 1, 0)], 1),
    ],
)
def test_up_chunk_attention_equals_its_reference(chunks, pairs):
    pages, table, ups = inputs(chunks)
    q = queries(0, TOKENS, HEADS, PLAIN + ROTARY)
    kernel, plain = both(pairs)
    got = np.asarray(kernel(q, *pages, *ups, table, jnp.asarray(chunks)), np.float32)
    known = [jnp.asarray(np.nan_to_num(np.asarray(x, np.float32))) for x in pages]
    wide = [x.astype(jnp.float32) for x in ups]
    want = plain(q.astype(jnp.float32), *known, *wide, table, jnp.asarray(chunks))
    assert error(got, np.asarray(want)) < 8e-3
    inside = {first + i for first, n, _, _ in chunks for i in range(n)}
    assert not got[[token for token in range(TOKENS) if token not in inside]].any()


def test_for_the_h200_it_spills_nothing_and_its_memory_is_that_of_a_window(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    array, n = jax.ShapeDtypeStruct, 16
    pages = [array((2**18, 1, PAGE, width), jnp.bfloat16) for width in (64, 512)]
    ups = [array((n, PLAIN, 512), jnp.bfloat16)] * 2
    counts = [array(shape, jnp.int32) for shape in ((128, 2048), (8, 4))]
    given = array((2048, n, 192), jnp.bfloat16), *pages, *ups, *counts
    attend = functools.partial(up_chunk_attention, scale=1.0)
    compiled = compile_for_h200(attend, *abstract(h200_mesh(), given))
    assert compiled.machine_code
    whole = 2048 * PAGE * n * 2 * PLAIN * 2  # keys and values of all pages of a sequence, by head
    assert compiled.memory.temp_size_in_bytes < whole / 8
    logs = [path.read_text(errors="replace") for path in tmp_path.glob("latent_window*.ptxas")]
    spilled = [re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log) for log in logs]
    assert [set(found) for found in spilled] == [{("0", "0")}]


def unsupported(change):
    q, pages, ups, table = (8, 8, 192), (3, 1, PAGE, 128), (8, 128, 128), (2, 2)
    shapes = {"q": q, "rope": (*pages[:3], 64), "latent": pages, "key_up": ups, "value_up": ups} | change
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes.values()]
    return *arrays, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (table, (2, 4)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": (8, 8, 128)}, "192 columns"),
        ({"latent": (3, 1, 32, 128)}, "pages"),
        ({"key_up": (8, 64, 128)}, "key_up"),
    ],
)
def test_up_chunk_attention_names_unsupported_arguments(change, said):
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(functools.partial(up_chunk_attention, scale=1.0), *unsupported(change))

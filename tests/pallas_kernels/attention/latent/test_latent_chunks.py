"""Latent chunk attention: the rows of its work list, the kernel in the interpreter against its reference,
and the H200 code.
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
from pallas_kernels.attention.latent.api import chunk_attention, list_chunk_work
from pallas_kernels.attention.latent.work_list import chunk_rows

RANK, ROTARY, TOKENS = 128, 64, 9
SCALE = (RANK + ROTARY) ** -0.5


@pytest.mark.parametrize("together", [1, 2, 4])
def test_every_token_of_a_chunk_is_in_one_row(together):
    """The last token of a row sees the row's keys."""
    chunks = [(1, 3, 2, 70), (0, 0, 5, 9), (6, 2, 1, 0)]
    lengths, tokens = jax.jit(chunk_rows, static_argnums=(1, 2))(jnp.asarray(chunks), TOKENS, together)
    found = {}
    for length, *row in zip(lengths, tokens.table_rows, tokens.firsts, tokens.counts, strict=True):
        table_row, first, count = map(int, row)
        assert count <= together and (length > 0) == (count > 0)
        for token in range(first, first + count):
            assert token not in found
            found[token] = (table_row, int(length) - (first + count - 1 - token))
    assert found == {
        first + i: (row, position + i + 1) for first, n, row, position in chunks for i in range(n)
    }


@functools.cache
def both(sms: int):
    """Return the kernel in the interpreter and its reference, compiled once for the tests."""
    kernel = functools.partial(chunk_attention, scale=SCALE, sms=sms, interpret=plgpu.InterpretGPUParams())
    return jax.jit(kernel), jax.jit(functools.partial(reference.chunk_attention, scale=SCALE))


@pytest.mark.parametrize(
    ("chunks", "heads", "sms"),
    [
        # Rows of the page table in another order, a border of a page, a chunk of nothing, tokens of no chunk.
        ([(1, 3, 1, 62), (5, 0, 0, 3), (6, 2, 0, 0)], 8, 2),
        ([(0, 9, 0, 120), (0, 0, 1, 0), (0, 0, 1, 0)], 8, 2),  # rows that are cut between workers
        ([(2, 2, 0, 63), (4, 1, 1, 130), (0, 0, 1, 0)], 128, 5),  # two tiles of heads
        ([(0, 6, 0, 189), (7, 2, 1, 0), (0, 0, 1, 0)], 24, 3),  # two tokens in a tile, and rows of none
    ],
)
def test_chunk_attention_equals_its_reference(chunks, heads, sms):
    """Positions that no chunk has written hold NaN."""
    ends = [max((n + at for _, n, row, at in chunks if row == own and n), default=0) for own in range(2)]
    both_pages, _, table = paged(0, ends, 1, RANK + ROTARY)
    pages, q = (both_pages[..., RANK:], both_pages[..., :RANK]), queries(0, TOKENS, heads, RANK + ROTARY)
    kernel, plain = both(sms)
    got = np.asarray(kernel(q, *pages, table, jnp.asarray(chunks)), np.float32)
    known = [jnp.asarray(np.nan_to_num(np.asarray(x, np.float32))) for x in pages]
    assert error(got, np.asarray(plain(q.astype(jnp.float32), *known, table, jnp.asarray(chunks)))) < 6e-3
    inside = {first + i for first, n, _, _ in chunks for i in range(n)}
    assert not got[[token for token in range(TOKENS) if token not in inside]].any()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"chunks": (2, 3)}, r"chunks \[2, 3\]"), ({"heads": 12}, "12 query heads"), ({"work": 3}, "3 workers")],
)
def test_chunk_attention_names_unsupported_arguments(change, said):
    q = jnp.zeros((4, change.get("heads", 8), RANK + ROTARY), jnp.bfloat16)
    pages = [jnp.zeros((3, 1, PAGE, width), jnp.bfloat16) for width in (ROTARY, RANK)]
    table, chunks = jnp.zeros((2, 2), jnp.int32), jnp.zeros(change.get("chunks", (2, 4)), jnp.int32)

    def attend():
        work = list_chunk_work(chunks, 4, heads=8, sms=3) if "work" in change else None
        return chunk_attention(q, *pages, table, chunks, scale=1.0, sms=2, work=work)

    with pytest.raises(ValueError, match=said):
        jax.eval_shape(attend)


@pytest.mark.parametrize("heads", [pytest.param(128, marks=pytest.mark.slow), 16])
def test_for_the_h200_it_spills_nothing_and_copies_no_pages(heads, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    array = jax.ShapeDtypeStruct
    pages = [array((2**18, 1, PAGE, width), jnp.bfloat16) for width in (64, 512)]
    counts = [array(shape, jnp.int32) for shape in ((128, 2048), (8, 4))]
    q = array((2048, heads, 576), jnp.bfloat16)
    attend = functools.partial(chunk_attention, scale=1.0)
    compiled = compile_for_h200(attend, *abstract(h200_mesh(), (q, *pages, *counts)))
    assert compiled.machine_code
    assert not any(compiled.copies(x.shape) for x in (q, *pages))
    logs = [path.read_text(errors="replace") for path in tmp_path.glob("latent_chunk*.ptxas")]
    spilled = [re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log) for log in logs]
    assert [set(found) for found in spilled] == [{("0", "0")}]

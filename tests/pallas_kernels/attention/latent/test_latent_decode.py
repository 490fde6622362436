"""Latent decode attention: the work list, the kernel in the interpreter against
its reference, and the H200 code.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from paged_cases import PAGE, error, paged, queries

from pallas_kernels.attention.latent import reference
from pallas_kernels.attention.latent.api import decode_attention, list_decode_work
from pallas_kernels.attention.latent.work_list import latent_work

RANK, ROTARY = 128, 64
SCALE = (RANK + ROTARY) ** -0.5


@settings(max_examples=20)
@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(1, 900), st.just(20_000)), min_size=9, max_size=9),
    workers=st.sampled_from([1, 2, 66, 132]),
)
def test_the_pieces_are_the_batchs_pages_cut_evenly(lengths, workers):
    cut = jax.jit(latent_work, static_argnums=1)
    work = jax.tree.map(np.asarray, cut(jnp.asarray(lengths, jnp.int32), workers))
    line = [(row, page) for row, length in enumerate(lengths) for page in range(-(-length // PAGE))]
    counts = work.pieces[:, 2]
    assert counts.max() - counts.min() <= 1
    walked, holders = [], {}
    for worker, (row, page, left, length, following, *_) in enumerate(work.pieces.tolist()):
        while left:
            here = min(-(-length // PAGE) - page, left)
            walked += [(row, page + i) for i in range(here)]
            holders.setdefault(row, []).append(worker)
            row, page, left = following, 0, left - here
            length, following, *tokens = work.rows[min(row, len(lengths) - 1)].tolist()
            assert tokens == [min(row, len(lengths) - 1)] * 2 + [1]
    assert walked == line
    for row in range(len(lengths)):
        first, count = work.parts[row].tolist()
        assert holders.get(row, []) == list(range(first, first + count))


def cache(seed: int, lengths, rank: int = RANK):
    """Return (rotary pages, latent pages, page table), with NaN at unwritten positions."""
    both, _, table = paged(seed, lengths, 1, rank + ROTARY)
    return both[..., rank:], both[..., :rank], table


@functools.cache  # equal shapes of several tests are compiled once
def kernel(scale: float, sms: int):
    return jax.jit(
        functools.partial(decode_attention, scale=scale, sms=sms, interpret=plgpu.InterpretGPUParams())
    )


@functools.cache
def plain(scale: float):
    return jax.jit(functools.partial(reference.decode_attention, scale=scale))


def run(q, pages, table, lengths, *, sms: int, scale: float = SCALE, into=None):
    """Return the kernel in the interpreter, and its reference in float32."""
    lengths = jnp.asarray(lengths, jnp.int32)
    got = kernel(scale, sms)(q, *pages, table, lengths, into=into)
    known = [jnp.asarray(np.nan_to_num(np.asarray(x, np.float32))) for x in pages]
    into = None if into is None else into.astype(jnp.float32)
    return got, np.asarray(plain(scale)(q.astype(jnp.float32), *known, table, lengths, into=into))


@pytest.mark.parametrize(
    ("lengths", "heads", "sms", "scale", "has_into"),
    [
        ([70, 0, 1], 8, 2, SCALE, False),  # a row that is cut, an empty slot, one key
        ([64, 65, 0, 128], 16, 3, SCALE, True),  # borders of pages
        ([130, 63], 128, 5, SCALE, False),  # two tiles of heads, and an SM that stays idle
        ([300], 64, 6, -0.3, False),  # a part for each page
        ([3], 8, 1, 0.0, False),  # equal weights
    ],
)
def test_decode_attention_equals_its_reference(lengths, heads, sms, scale, has_into):
    """q has a row more than sequences. Rows without keys keep the values of `into`, or are 0."""
    *pages, table = cache(0, lengths)
    rows = len(lengths) + 1
    q, into = queries(0, rows, heads, RANK + ROTARY), queries(9, rows, heads, RANK) if has_into else None
    got, want = run(q, pages, table, lengths, sms=sms, scale=scale, into=into)
    assert error(got, want) < 6e-3
    nobody = np.append(np.asarray(lengths) == 0, True)
    assert not np.asarray(got - (0 if into is None else into), np.float32)[nobody].any()


def test_a_row_has_the_same_output_in_any_batch():
    lengths = [70, 130]
    *pages, table = cache(1, lengths)
    q = queries(1, 2, 8, RANK + ROTARY)
    together, _ = run(q, pages, table, lengths, sms=2)
    alone, _ = run(q[1:], pages, table[1:], lengths[1:], sms=1)
    assert error(together[1:], np.asarray(alone, np.float32)) < 6e-3


@pytest.mark.filterwarnings("ignore:.* encountered in matmul")
@pytest.mark.parametrize("rise", [40.0, -40.0])
def test_scores_that_rise_or_fall_from_page_to_page(rise):
    """The maximum moves at each page, or only at the first one."""
    length = 4 * PAGE
    *_, table = cache(2, [length])
    rng = np.random.default_rng(2)
    pages = [np.zeros((6, 1, PAGE, width), np.float32) for width in (ROTARY, RANK)]
    pages[1][...] = rng.normal(size=pages[1].shape)
    for page in range(4):
        pages[0][table[0, page]] = (page * rise + rng.normal(size=(1, PAGE, 1))) / ROTARY
    q = np.concatenate([np.zeros((1, 8, RANK)), np.ones((1, 8, ROTARY))], axis=-1)
    given = [jnp.asarray(x, jnp.bfloat16) for x in pages]
    got, want = run(jnp.asarray(q, jnp.bfloat16), given, table, [length], sms=1, scale=1.0)
    assert error(got, want) < 6e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": (2, 8, 576)}, "queries of 576"),
        ({"q": (2, 12, 192)}, "12 query heads"),
        ({"q": (2, 96, 192)}, "96 query heads"),
        ({"q": (1, 8, 192)}, "2 lengths for q"),
        ({"rope": (9, 1, 64, 32)}, "pages"),
        ({"dtype": jnp.float32}, "dtypes float32"),
        ({"into": jnp.zeros((2, 8, 192), jnp.bfloat16)}, "into bfloat16"),
        ({"table": (1, 4)}, r"page_table \[1, 4\] for 2 lengths"),
        ({"q": (2, 128, 192), "sms": 1}, "sms=1 for 128 heads"),
    ],
)
def test_decode_attention_names_unsupported_arguments(change, said):
    dtype = change.get("dtype", jnp.bfloat16)
    q = jnp.zeros(change.get("q", (2, 8, RANK + ROTARY)), dtype)
    rope = jnp.zeros(change.get("rope", (9, 1, PAGE, ROTARY)), dtype)
    table, extra = jnp.zeros(change.get("table", (2, 4)), jnp.int32), {"sms": 2}
    extra |= {name: change[name] for name in ("into", "sms") if name in change}
    with pytest.raises(ValueError, match=said):
        decode_attention(
            q, rope, jnp.zeros((9, 1, PAGE, RANK), dtype), table, jnp.ones(2, jnp.int32), scale=1.0, **extra
        )


def test_a_list_for_other_sms_is_refused():
    arrays = cache(3, [5, 5])
    work = list_decode_work(jnp.full(2, 5), heads=8, sms=3)
    with pytest.raises(ValueError, match=r"3 workers: accepted are 2"):
        q = queries(0, 2, 8, RANK + ROTARY)
        decode_attention(q, *arrays, jnp.full(2, 5), scale=1.0, sms=2, work=work)


@pytest.mark.slow
def test_for_the_h200_it_uses_its_units_and_spills_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def shapes(heads):
        array = jax.ShapeDtypeStruct
        pages = [array((2**18, 1, PAGE, width), jnp.bfloat16) for width in (64, 512)]
        counts = [array(shape, jnp.int32) for shape in ((128, 128), (128,))]
        return array((128, heads, 576), jnp.bfloat16), *pages, *counts

    inputs = [shapes(heads) for heads in (128, 16)]
    attend = lambda given: [decode_attention(*x, scale=1.0) for x in given]
    compiled = compile_for_h200(attend, *abstract(h200_mesh(), (inputs,)))
    assert compiled.machine_code
    assert not any(compiled.copies(x.shape) for arrays in inputs for x in arrays[:3])
    assert not any(compiled.copies((128 * heads, 512)) for heads in (128, 16))
    for path in tmp_path.glob("*.ptxas"):
        spilled = re.findall(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads", path.read_text(errors="replace")
        )
        assert set(spilled) == {("0", "0")}, path.name
    texts = [path.read_text(errors="replace") for path in tmp_path.glob("latent_decode*.ptx")]
    assert len(texts) == 2 and all("wgmma.mma_async" in x and "cp.async.bulk.tensor" in x for x in texts)

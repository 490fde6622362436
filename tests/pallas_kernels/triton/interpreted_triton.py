"""The Triton kernels against their references in Triton's interpreter, in a separate process of
`test_triton.py`.


"""

import functools

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import pytest
import triton_host
from paged_cases import error, exact, paged, queries

from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.gemm.grouped import reference as grouped_reference
from pallas_kernels.gemm.grouped.groups import HeldExperts
from pallas_kernels.gemm.grouped.int4_format import quantize_experts
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.gemm.int4.reference import nearest_levels, nearest_to_zero_point
from pallas_kernels.pointwise.quantize.reference import quantize_rows
from pallas_kernels.triton import grouped_gemm
from pallas_kernels.triton.decode_attention import decode_attention
from pallas_kernels.triton.flat_gemm import Tile, flat_gemm


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(jax_triton, "triton_call", triton_host.triton_call)


def floats(*arguments):
    """Return `paged` in float32, because Triton's interpreter does not multiply bfloat16."""
    k, v, table = paged(*arguments)
    return k.astype(jnp.float32), v.astype(jnp.float32), table


def reference_program(**settings):
    """Return one program of the reference, which saves time."""
    return jax.jit(functools.partial(decode_reference.decode_attention, **settings))


@pytest.mark.parametrize(
    ("lengths", "shape", "settings"),
    [
        ([70, 0, 1, 200, 64], (8, 2, 16), {}),
        ([300, 3, 130], (9, 3, 64), {"window": 70}),
        ([90, 257], (4, 4, 16), {"soft_cap": 5.0}),
        ([90, 3], (4, 4, 16), {"window": 7, "scale": -0.1}),
        ([70, 3], (2, 1, 16), {"scale": 0.0}),
        ([0, 0], (2, 1, 16), {}),
    ],
)
def test_triton_decode_attention_equals_its_reference(lengths, shape, settings):
    n, kv, h = shape
    k, v, table = floats(len(lengths), lengths, kv, h)
    q, lengths = queries(1, len(lengths), n, h).astype(jnp.float32), jnp.asarray(lengths, jnp.int32)
    settings = {"scale": h**-0.5, **settings}
    got = decode_attention(q, k, v, table, lengths, sms=2, **settings)
    want = exact(reference_program(**settings), q, k, v, table, lengths)
    assert error(got, want) < 1e-5 if want.any() else not np.asarray(got).any()


@pytest.mark.filterwarnings("ignore:overflow encountered in matmul")
def test_rows_whose_scores_are_all_minus_infinity_are_0():
    """Test a row in one piece, a row in two programs, and a row with finite scores in one part only."""
    lengths = [5, 200, 200, 70]
    k, v, table = floats(3, lengths, 1, 16)
    k = jnp.where(jnp.isnan(k), k, 1.0).at[table[2, 3]].multiply(0.0)
    q, lengths = jnp.ones((4, 2, 16)).at[:3].set(-1e38), jnp.asarray(lengths, jnp.int32)
    got = decode_attention(q, k, v, table, lengths, scale=1.0, sms=1)
    want = exact(reference_program(scale=1.0), q, k, v, table, lengths)
    assert not want[:2].any()
    assert want[2:].any(axis=(1, 2)).all()
    assert error(got, want) < 1e-5


def test_a_long_row_is_shared_by_many_programs_and_the_parts_add_up_to_the_same_bits():
    lengths = [900, 40, 300]
    k, v, table = floats(2, lengths, 1, 16)
    q, lengths = queries(3, 3, 4, 16).astype(jnp.float32), jnp.asarray(lengths, jnp.int32)
    run = functools.partial(decode_attention, q, k, v, table, lengths, scale=0.25)
    want = exact(reference_program(scale=0.25), q, k, v, table, lengths)
    assert error(run(sms=5), want) < 1e-5
    assert (run(sms=5) == run(sms=5)).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [(1, 70, 100, None), (5, 64, 512, Tile(32, 64, 3)), (33, 40, 256, Tile(32, 128, 2))],
)
def test_triton_flat_gemm_equals_its_reference(m, n, k, tile, dtype):
    rng = np.random.default_rng(m)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((m, k), (n, k)))
    got = flat_gemm(x, w, sms=4, tile=tile)
    assert got.dtype == dtype
    assert error(got, np.asarray(x, np.float32) @ np.asarray(w, np.float32).T) < (
        1e-3 if dtype == jnp.float16 else 1e-6
    )


def test_the_triton_epilogue_equals_the_reference():
    rng = np.random.default_rng(0)
    x, w, bias, residual = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 64), (64, 64), (64,), (3, 32))
    )
    behind = {"residual": residual, "activation": "silu", "gate_block": 16}
    assert (
        error(flat_gemm(x, w, bias, sms=2, **behind), np.asarray(gemm_reference.gemm(x, w, bias, **behind)))
        < 1e-6
    )


UNEVEN = draw_routing(np.random.default_rng(0), 37, 5, 2, zipf=1.5)
GATES = {"activation": "silu", "gate_block": 24}


@pytest.mark.parametrize(
    ("routing", "rows", "k", "dtype", "epilogue"),
    [
        (UNEVEN, 16, 100, jnp.float32, GATES),
        (UNEVEN, 32, 64, jnp.float16, {}),
        (UNEVEN, 64, 128, jnp.float32, {"activation": "gelu_tanh", "gate_block": 48}),
        (UNEVEN, 16, 128, jnp.float32, {"activation": "silu"}),
        (np.where(UNEVEN < 3, UNEVEN, 4), 16, 100, jnp.float32, {}),  # expert 3 has no row
        (np.full((40, 1), 3), 16, 100, jnp.float32, GATES),  # one expert has all rows
        (np.full((130, 1), 4), 128, 70, jnp.float32, {}),
    ],
)
def test_triton_grouped_gemm_equals_its_reference(routing, rows, k, dtype, epilogue):
    """The weights of experts without rows are NaN, and so are the rows after the last group."""
    rng, routing = np.random.default_rng(rows), jnp.asarray(routing, jnp.int32)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((routing.shape[0], k), (5, 96, k)))
    groups = grouped_gemm.list_groups(routing, 5, rows=rows)
    used, sorted_rows = routing.size, x[groups.pairs // routing.shape[1]].at[routing.size :].set(jnp.nan)
    poisoned = w.at[np.setdiff1d(np.arange(5), routing)].set(jnp.nan)
    got = np.asarray(grouped_gemm.grouped_gemm(sorted_rows, poisoned, groups, **epilogue))
    want = np.asarray(grouped_reference.grouped_gemm(sorted_rows, w, groups, **epilogue))
    assert got.dtype == dtype
    assert error(got[:used], want[:used]) < (2e-3 if dtype == jnp.float16 else 1e-6)
    assert np.isnan(got[used:]).all()  # not written


def test_triton_grouped_gemm_multiplies_e4m3_exactly():
    rng, routing = np.random.default_rng(3), jnp.asarray(UNEVEN)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((37, 112), (5, 96, 112)))
    x, w = quantize_rows(x), quantize_rows(w * 10.0 ** rng.integers(-3, 4, (5, 96, 1)))
    groups, rows = grouped_gemm.sort_rows(
        x.values.astype(jnp.float32) * x.scale[:, None], routing, 5, quantize=True
    )
    got = grouped_gemm.grouped_gemm(rows, w, groups, **GATES)
    want = grouped_reference.grouped_gemm(rows, w, groups, **GATES)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.asarray(y[: UNEVEN.size], np.float32) for y in (got, want)), rtol=2**-7)


@pytest.mark.parametrize(
    ("group", "nearest", "dtype"),
    [
        (64, nearest_levels, jnp.float32),
        (128, nearest_to_zero_point, jnp.float32),
        (64, nearest_levels, jnp.float16),
    ],
)
def test_triton_grouped_gemm_multiplies_int4(group, nearest, dtype):
    rng, routing = np.random.default_rng(group), jnp.asarray(UNEVEN)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((37, 256), (5, 96, 256)))
    w = quantize_experts(w + jnp.asarray(rng.normal(size=(5, 96, 1)), dtype), group, nearest)
    groups, rows = grouped_gemm.sort_rows(x, routing, 5)
    got = grouped_gemm.grouped_gemm(rows, w, groups, **GATES)
    want = grouped_reference.grouped_gemm(rows.astype(jnp.float32), w, groups, **GATES)
    assert got.dtype == dtype
    got, want = (np.asarray(y[: UNEVEN.size], np.float32) for y in (got, want))
    assert error(got, want) < (1e-3 if dtype == jnp.float16 else 1e-5)


def test_triton_grouped_gemm_leaves_the_experts_of_other_devices_out():
    """Device 1 holds experts 3 and 4. Padding and the pairs of the other experts have no rows."""
    rng, routing = np.random.default_rng(1), jnp.asarray(UNEVEN)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((37, 64), (2, 48, 64)))
    held, tokens = HeldExperts(jnp.int32(3), 2), 20
    groups, rows = grouped_gemm.sort_rows(x, routing, 5, held=held, used=jnp.int32(tokens))
    got = np.asarray(grouped_gemm.grouped_gemm(rows, w, groups))
    written = 0
    for (token, choice), expert in np.ndenumerate(UNEVEN):
        place = int(groups.places[token, choice])
        if token < tokens and expert >= 3:
            assert error(got[place], np.asarray(w[expert - 3] @ x[token])) < 1e-5
            written += 1
        else:
            assert place >= len(got)
    assert written and np.isnan(got).any(axis=1).sum() == len(got) - written
    nothing, rows = grouped_gemm.sort_rows(x, routing, 5, held=held, used=jnp.int32(0))
    assert np.isnan(np.asarray(grouped_gemm.grouped_gemm(rows, w, nothing))).all()

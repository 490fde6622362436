"""8-bit numbers in the reference implementations: GEMM, norms, and caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.chunk import reference as chunk_reference
from pallas_kernels.attention.decode import reference as decode_reference
from pallas_kernels.attention.reference import read_pages
from pallas_kernels.gemm import reference as gemm_reference
from pallas_kernels.pointwise.norm import reference as norm_reference
from pallas_kernels.pointwise.quantize import reference as quantize_reference
from pallas_kernels.pointwise.rope_append import reference as rope_reference
from pallas_kernels.quantized import Quantized

E4M3 = jnp.float8_e4m3fn
HALF_STEP = 2.0**-4  # half a step of e4m3's 3 mantissa bits, by rounding to nearest


@settings(max_examples=20, deadline=None)
@given(
    columns=st.sampled_from([96, 300]),
    power=st.integers(-14, 30),
    spread=st.integers(0, 6),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("quantize", [quantize_reference.quantize_rows, quantize_reference.quantize_blocks])
def test_a_number_comes_back_to_a_sixteenth_or_to_the_smallest_step(quantize, columns, power, spread, seed):
    """Rows differ in size by powers of ten; one row is zero."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(3, columns)) * 10.0 ** (power - rng.integers(0, spread + 1, (3, columns)))).astype(
        np.float32
    )
    x[0] = 0
    found = quantize(jnp.asarray(x))
    assert found.values.dtype == E4M3 and found.scale.dtype == jnp.float32
    assert np.isfinite(np.asarray(found.values, np.float32)).all() and (np.asarray(found.scale) > 0).all()
    scale = np.asarray(found.scale)
    scale = np.repeat(scale, 128, axis=1)[:, : x.shape[1]] if scale.ndim == 2 else scale[:, None]
    error = np.abs(np.asarray(quantize_reference.dequantize(found)) - x)
    assert (error <= np.maximum(np.abs(x) * HALF_STEP * 1.0001, scale * 2.0**-10)).all()
    if quantize is quantize_reference.quantize_rows and np.abs(x).max() > 1e-10:
        assert (np.abs(np.asarray(found.values, np.float32)).max(1)[np.abs(x).max(1) > 1e-10] == 448).all()


def test_what_is_too_large_saturates():
    found = np.asarray(
        quantize_reference.to_e4m3(jnp.array([1e9, -1e9, 449.0, 0.0, np.inf]), jnp.ones(())), np.float32
    )
    assert found.tolist() == [448, -448, 448, 0, 448]


def operands(seed=0, m=3, n=6, k=256):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(m, k)), jnp.float32), jnp.asarray(
        rng.normal(size=(n, k)) / k**0.5, jnp.float32
    )


def one_scale(x):
    scale = jnp.abs(x).max() / 448
    return Quantized(quantize_reference.to_e4m3(x, scale), scale)


@pytest.mark.parametrize(
    "of_w", [quantize_reference.quantize_rows, quantize_reference.quantize_blocks, one_scale, None]
)
@pytest.mark.parametrize(
    "of_x", [quantize_reference.quantize_rows, quantize_reference.quantize_blocks, one_scale, None]
)
def test_a_product_of_scaled_numbers_is_that_of_the_numbers(of_x, of_w):
    extra = {"activation": "silu", "gate_block": 1, "out_dtype": jnp.float32}

    @jax.jit  # one program in place of one for each operation
    def products(x, w, bias, residual):
        qx, qw = (q if make is None else make(q) for q, make in ((x, of_x), (w, of_w)))
        plain_x, plain_w = (
            q if make is None else quantize_reference.dequantize(made)
            for q, make, made in ((x, of_x, qx), (w, of_w, qw))
        )
        return tuple(
            gemm_reference.gemm(a, b, bias, residual=residual, **extra)
            for a, b in ((qx, qw), (plain_x, plain_w))
        )

    got, want = products(*operands(), np.arange(6, dtype=np.float32), np.ones((3, 3), np.float32))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_dtypes_of_results():
    x, w = operands()
    qx, qw = quantize_reference.quantize_rows(x), quantize_reference.quantize_rows(w)
    assert gemm_reference.gemm(qx, qw).dtype == jnp.bfloat16
    assert gemm_reference.gemm(x, qw).dtype == jnp.float32
    assert (
        gemm_reference.gemm(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), out_dtype=jnp.float32).dtype
        == jnp.float32
    )
    found = gemm_reference.gemm(x, w, quantize=True)
    assert found.values.dtype == E4M3 and found.scale.shape == (3, 1)
    np.testing.assert_array_equal(
        found.values, quantize_reference.quantize_blocks(gemm_reference.gemm(x, w)).values
    )


@pytest.mark.parametrize("bias", [None, jnp.ones(96)])
def test_a_norm_quantised_is_the_norm_quantised(bias):
    rng = np.random.default_rng(1)
    x, y = (jnp.asarray(rng.normal(size=(5, 96)), jnp.float32) for _ in "xy")
    weight, settings = (
        jnp.asarray(rng.normal(size=96), jnp.float32),
        {"eps": 1e-5, "offset": 0.0 if bias is not None else 1.0},
    )
    total, h = norm_reference.add_norm(x, y, weight, bias, **settings)
    np.testing.assert_array_equal(total, x + y)
    again, q = norm_reference.add_norm(x, y, weight, bias, **settings, quantize=True)
    np.testing.assert_array_equal(again, total)
    want = quantize_reference.quantize_rows(h)
    np.testing.assert_array_equal(q.values, want.values)
    np.testing.assert_array_equal(q.scale, want.scale)
    np.testing.assert_array_equal(norm_reference.add_norm(total, None, weight, bias, **settings)[1], h)


P, K, S, H, GROUP = 3, 2, 4, 8, 2


def cache(kv):
    """Return pages of noise in the form of the dtype."""
    rng = np.random.default_rng(5)
    shapes = (P, K, S, H), (P, K, S, H) if jnp.dtype(kv).itemsize > 1 else (P, K, H, S)
    k, v = (jnp.asarray(rng.normal(size=shape) * 3).astype(kv) for shape in shapes)
    if kv != jnp.int8:
        return k, v
    scale = jnp.asarray(rng.uniform(0.1, 1, (P, K, S)), jnp.float32)
    return Quantized(k, scale), Quantized(v, scale)


def numbers(pages, scale, values):
    """Return the cache as float32 [P, K, S, H]."""
    stored, scale = (pages.values, pages.scale) if isinstance(pages, Quantized) else (pages, scale)
    return np.asarray(read_pages(stored, scale, jnp.arange(P)[:, None], values=values))


@pytest.mark.parametrize("kv", [jnp.float32, E4M3, jnp.int8], ids=str)
def test_what_is_appended_is_read_back(kv):
    rng = np.random.default_rng(6)
    t = 5
    fused = jnp.asarray(rng.normal(size=(t, K * (GROUP + 2) * H)), jnp.float32)
    k_pages, v_pages = cache(kv)
    scales = {"k_scale": jnp.array([0.5, 0.01]), "v_scale": jnp.array([0.02, 0.25])} if kv == E4M3 else {}
    places = np.array([9, 0, P * S, 3, -1])  # the third and the last are no place
    settings = {"head_dim": H, "inv_freq": jnp.ones(H // 2)}
    q, *written = rope_reference.rope_append(
        fused, k_pages, v_pages, jnp.arange(t), jnp.asarray(places), **settings, **scales
    )
    split = np.asarray(fused).reshape(t, K, GROUP + 2, H)
    wanted = (
        np.asarray(rope_reference.rope(split[:, :, -2], jnp.arange(t), jnp.ones(H // 2))),
        split[:, :, -1],
    )
    np.testing.assert_array_equal(
        q, rope_reference.rope(split[:, :, :-2].reshape(t, -1, H), jnp.arange(t), jnp.ones(H // 2))
    )
    for before, after, want, name in zip(
        (k_pages, v_pages), written, wanted, ("k_scale", "v_scale"), strict=True
    ):
        old, new = (numbers(pages, scales.get(name), name == "v_scale") for pages in (before, after))
        untouched = np.ones((P, S), bool)
        for token, place in enumerate(places):
            if not 0 <= place < P * S:
                continue
            untouched[place // S, place % S] = False
            got, largest = new[place // S, :, place % S], np.abs(want[token]).max(-1, keepdims=True)
            if kv == E4M3:
                scale = np.asarray(scales[name])[:, None]
                clipped = np.clip(want[token], -448 * scale, 448 * scale)
                assert (
                    np.abs(got - clipped) <= np.maximum(np.abs(clipped) * HALF_STEP * 1.001, scale * 2.0**-10)
                ).all()
            else:
                np.testing.assert_allclose(
                    got, want[token], atol=largest.max() / 254 * 1.001 if kv == jnp.int8 else 0
                )
        np.testing.assert_array_equal(
            new.transpose(0, 2, 1, 3)[untouched], old.transpose(0, 2, 1, 3)[untouched]
        )


@pytest.mark.parametrize("kv", [E4M3, jnp.int8], ids=str)
def test_attention_over_8_bits_is_that_over_their_numbers(kv):
    rng = np.random.default_rng(7)
    q, table = jnp.asarray(rng.normal(size=(2, K * GROUP, H)), jnp.float32), jnp.array([[2, 0, 1], [1, 2, 0]])
    k_pages, v_pages = cache(kv)
    scales = {"k_scale": jnp.array([0.5, 0.1]), "v_scale": jnp.array([0.2, 0.25])}
    wide = [
        jnp.asarray(numbers(pages, scales[name], name == "v_scale"))
        for pages, name in ((k_pages, "k_scale"), (v_pages, "v_scale"))
    ]
    stored = (k_pages, v_pages)
    if isinstance(k_pages, Quantized) and isinstance(v_pages, Quantized):
        stored, scales = (
            (k_pages.values, v_pages.values),
            {"k_scale": k_pages.scale, "v_scale": v_pages.scale},
        )
    lengths, chunks = jnp.array([9, 5]), jnp.array([[0, 2, 1, 6]])
    for attention, rows in (
        (decode_reference.decode_attention, lengths),
        (chunk_reference.chunk_attention, chunks),
    ):
        got = attention(q, *stored, table, rows, scale=0.3, window=7, **scales)
        np.testing.assert_allclose(
            got, attention(q, *wide, table, rows, scale=0.3, window=7), rtol=1e-5, atol=1e-5
        )

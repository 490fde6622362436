"""4-bit KV: the error of a number, and the numbers without an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.kv.int4 import dequantize_kv, kv_bytes, kv_group, kv_shape, quantize_kv
from pallas_kernels.gemm.int4.reference import quantize_int4

WIDTHS = (8, 40, 64, 80, 128)
there = jax.jit(quantize_kv)
back = jax.jit(dequantize_kv, static_argnums=1)
drawn = given(
    width=st.sampled_from(WIDTHS),
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([1e-3, 1.0, 300.0]),
    shift=st.sampled_from([-20.0, 0.0, 3.0]),
)


def keys(width: int, seed: int, size: float, shift: float) -> np.ndarray:
    """Return [P, K, S, H] around `shift`, with a scale of its own for each token."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 1, 3, width)) * rng.lognormal(size=(2, 1, 3, 1)) + shift
    return (x * size).astype(np.float32)


def spread(of_groups, group: int) -> np.ndarray:
    return np.repeat(np.asarray(of_groups, np.float32), group, axis=-1)


@settings(max_examples=60, deadline=None)
@drawn
def test_the_error_is_half_a_level_and_the_rounding_of_scale_and_zero(width, seed, size, shift):
    x = keys(width, seed, size, shift)
    packed, group = there(x), kv_group(width)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), packed) == jax.tree.map(
        lambda a: (a.shape, a.dtype), kv_shape(x.shape)
    )
    grouped = x.reshape(*x.shape[:-1], -1, group)
    low, high = grouped.min(-1), grouped.max(-1)
    half_ulp = 2.0**-8  # bfloat16 keeps 8 bits: what it rounds is off by half of the last
    rounding = half_ulp * (np.abs(low) + (high - low) + half_ulp * np.abs(low))
    error = np.abs(np.asarray(back(packed, jnp.float32)) - x)
    assert (error <= 1.00001 * (spread(packed.scale, group) / 2 + spread(rounding, group))).all()
    assert (
        spread(packed.scale, group)
        <= 1.01 * spread((high - low + half_ulp * np.abs(low)) / 15, group) + 1e-29
    ).all()


@settings(max_examples=40, deadline=None)
@drawn
def test_quantized_values_are_packed_to_the_same_bits_again(width, seed, size, shift):
    """For groups with a minimum that bfloat16 rounds by less than half a level, so that a value lies on level
    0.
    """
    first = there(keys(width, seed, size, shift))
    again, group = there(back(first, jnp.float32)), kv_group(width)
    on_zero = np.asarray(
        back(first, jnp.float32).reshape(*first.scale.shape, group).min(-1) == first.zero.astype(jnp.float32)
    )
    assert on_zero.any() or shift
    for was, now in zip(first[1:], again[1:], strict=True):
        np.testing.assert_array_equal(
            np.asarray(now, np.float32)[on_zero], np.asarray(was, np.float32)[on_zero]
        )
    was, now = (
        np.asarray(back(kv, jnp.float32)).reshape(*first.scale.shape, group)[on_zero] for kv in (first, again)
    )
    np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize("width", WIDTHS)
def test_equal_numbers_have_no_error(width):
    constants = jnp.asarray([0.0, 1.0, -3.140625, 2.0**-100, 3e38], jnp.bfloat16)
    x = jnp.broadcast_to(constants[:, None], (5, width))
    assert (back(there(x), jnp.bfloat16) == x).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_sixteen_levels_are_sixteen_different_numbers_in_their_places(width):
    """Levels at the distance of a bfloat16 scale have no error, so no two columns can be exchanged."""
    rng, group = np.random.default_rng(0), kv_group(width)
    levels = rng.integers(0, 16, (64, width // group, group))
    levels[..., 0], levels[..., 1] = 0, 15
    x = (levels * 0.25 - 2).astype(np.float32).reshape(64, width)
    np.testing.assert_array_equal(back(there(x), jnp.float32), x)


def test_groups_of_64_are_those_of_weights():
    x = jnp.asarray(keys(128, 0, 1.0, 0.0).reshape(-1, 128))
    for kv, weight in zip(quantize_kv(x), quantize_int4(x), strict=True):
        np.testing.assert_array_equal(np.asarray(kv, np.float32), np.asarray(weight, np.float32))


def test_groups_divide_a_head_evenly():
    assert [kv_group(h) for h in (8, 64, 80, 96, 128, 256)] == [8, 64, 40, 48, 64, 64]
    assert [kv_bytes(h) for h in (8, 64, 80, 128)] == [8, 36, 48, 72]
    for odd in (1, 65):
        with pytest.raises(ValueError, match=f"head_dim={odd}: accepted are even numbers"):
            quantize_kv(jnp.zeros((2, odd)))

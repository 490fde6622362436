"""Whole pages of a cache as strings of 32-bit words, and to their places."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

WORD = 4  # bytes


def scatter_pages(arrays: Sequence[jax.Array], ids: jax.Array, strings: jax.Array) -> list[jax.Array]:
    """The arrays [P, ...] with pages in the places `ids` [n] int32, all different; P and above are not there.

    strings: [n, W] uint32, of each page its words in one array after the other.
    """
    written, offset = [], 0
    for array in arrays:
        words = array_words(array)
        values = from_words(strings[:, offset : offset + words], (ids.shape[0], *array.shape[1:]), array.dtype)
        offset += words
        written.append(array.at[ids].set(values, mode="drop", unique_indices=True, wrap_negative_indices=False))
    return written


def array_words(array: Any) -> int:
    """Of a page of an array [P, ...], or of its shape."""
    return math.prod(array.shape[1:]) * array.dtype.itemsize // WORD


def words_of(array: jax.Array) -> jax.Array:
    """[n, ...] of any dtype as uint32 [n, words]."""
    flat = array.reshape(array.shape[0], -1)
    if array.dtype.itemsize < WORD:
        flat = flat.reshape(array.shape[0], -1, WORD // array.dtype.itemsize)
    return lax.bitcast_convert_type(flat, jnp.uint32)


def from_words(words: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """The inverse of `words_of`."""
    return lax.bitcast_convert_type(words, dtype).reshape(shape)

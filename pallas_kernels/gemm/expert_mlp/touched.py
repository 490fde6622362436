"""The experts that a few tokens choose, listed by each thread for itself in bits of integers.

A sort of the pairs is a kernel of its own, which takes as long as 10 MB of weights. The pairs of up to 8
tokens are so few that every thread can read them all.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

_BITS = 32  # experts of an integer


@dataclasses.dataclass(frozen=True)
class FewTokens:
    """The sizes of a routing: tokens, experts of a token, and experts of the model.

    padded: the number of tokens that are used is data.
    """

    tokens: int
    chosen: int
    experts: int
    padded: bool

    @property
    def most(self) -> int:
        """Return the upper bound of the experts that the tokens choose."""
        return min(self.tokens * self.chosen, self.experts)


@dataclasses.dataclass(frozen=True)
class Touched:
    """A set of experts. Bit i of integer j is 1 if expert 32 j + i is in the set."""

    words: tuple[jax.Array, ...]

    def count(self) -> jax.Array:
        """Return the number of experts."""
        return functools.reduce(jnp.add, map(_ones, self.words))

    def before(self, expert) -> jax.Array:
        """Return the number of the set's experts before an expert."""
        word, below = lax.div(expert, jnp.int32(_BITS)), _low(lax.rem(expert, jnp.int32(_BITS)))
        found = jnp.int32(0)
        for i, bits in enumerate(self.words):
            found += jnp.where(word > i, _ones(bits), jnp.where(word == i, _ones(bits & below), 0))
        return found

    def expert(self, at) -> jax.Array:
        """Return expert number `at` of the set, from 0."""
        found, bits, rest = jnp.int32(0), self.words[0], at
        for i, word in enumerate(self.words[:-1]):
            past = rest >= _ones(word)  # a later integer has the expert
            here = past & (found == i * _BITS)
            rest = jnp.where(here, rest - _ones(word), rest)
            bits = jnp.where(here, self.words[i + 1], bits)
            found = jnp.where(here, jnp.int32((i + 1) * _BITS), found)
        for width in (16, 8, 4, 2, 1):
            lower = _ones(bits & ((1 << width) - 1))
            past = rest >= lower
            rest = jnp.where(past, rest - lower, rest)
            bits = jnp.where(past, lax.shift_right_logical(bits, jnp.int32(width)), bits)
            found += jnp.where(past, width, 0)
        return found


def touched(form: FewTokens, experts_ref, used) -> Touched:
    """Return the experts of the first `used` tokens.

    experts_ref: [T, e] int32.
    """

    def add(token, words):
        is_used = token < used
        for expert in [experts_ref[token, choice] for choice in range(form.chosen)]:
            word = lax.div(expert, jnp.int32(_BITS))
            bit = lax.shift_left(jnp.int32(1), lax.rem(expert, jnp.int32(_BITS)))
            words = [bits | jnp.where(is_used & (word == i), bit, 0) for i, bits in enumerate(words)]
        return words

    # The experts of the first token are read before the number of tokens is known.
    first = add(jnp.int32(0), [jnp.int32(0)] * -(-form.experts // _BITS))
    return Touched(tuple(lax.fori_loop(1, used, add, first)))


def _low(count) -> jax.Array:
    """Return an integer with 1 in its `count` lowest bits, 0 to 31 of them."""
    return lax.shift_left(jnp.int32(1), count) - 1


def _ones(bits) -> jax.Array:
    """Return the number of bits that are 1."""
    bits = bits - (lax.shift_right_logical(bits, jnp.int32(1)) & 0x55555555)
    bits = (bits & 0x33333333) + (lax.shift_right_logical(bits, jnp.int32(2)) & 0x33333333)
    bits = (bits + lax.shift_right_logical(bits, jnp.int32(4))) & 0x0F0F0F0F
    return lax.shift_right_logical(bits * 0x01010101, jnp.int32(24))

"""A program to time, and random arrays to give it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding


@dataclasses.dataclass(frozen=True)
class Program:
    """A function (given, kept) -> kept that makes `calls` calls; `given` and `kept` are of shapes, drawn by
    `draw`.

    sharding: of all arrays, where the program runs on several devices.
    """

    function: Callable[[Any, Any], Any]
    given: Any
    kept: Any
    calls: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sharding: NamedSharding | None = None

    def compile(self) -> Any:
        """For the device that is here, or the devices."""
        donated = () if self.kept is None else (1,)
        return jax.jit(self.function, donate_argnums=donated).lower(*self.structs).compile(dict(self.options))

    def drawn(self, experts: int) -> tuple[Any, Any]:
        """Random arrays to give it, and to be kept."""
        pair = draw(self.given, experts), draw(self.kept, experts, seed=1)
        return pair if self.sharding is None else jax.device_put(pair, self.sharding)

    @property
    def structs(self) -> tuple[Any, Any]:
        """Both arguments' shapes, where they are."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), (self.given, self.kept)
        )


def draw(tree: Any, experts: int = 1, seed: int = 0) -> Any:
    """Random arrays of the shapes in a tree, about normal; arrays that are there stay. Integers are experts'
    numbers.
    """
    leaves, form = jax.tree.flatten(tree)
    seeds = np.random.SeedSequence(seed).generate_state(max(1, len(leaves)))
    return jax.tree.unflatten(
        form,
        [
            x if isinstance(x, jax.Array) else _draw(seeds[i], x.shape, x.dtype, experts)
            for i, x in enumerate(leaves)
        ],
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(seed: jax.Array, shape: tuple[int, ...], dtype: Any, experts: int) -> jax.Array:
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + seed
    for factor in (
        0x85EBCA6B,
        0xC2B2AE35,
    ):  # a hash: unlike jax.random it compiles in no time, and needs no room
        x = (x ^ (x >> 16)) * np.uint32(factor)
    x = x ^ (x >> 16)
    if jnp.issubdtype(dtype, jnp.integer):
        return (x % experts).astype(dtype)
    drawn = (
        sum((((x >> shift) & 255).astype(jnp.float32) for shift in (0, 8, 16, 24)), jnp.float32(0)) - 510
    ) / 148
    return (1 + drawn / 16 if len(shape) <= 1 else drawn).astype(dtype)  # norms and scales are near 1

"""The heads of a layer by page group, for layers with attention spans (FlashDecoding++Next §III, MoA).

The heads of one page group have their own pages, and so their own call of each op on pages. A
KV head takes its query heads along. Arrays are cut by KV heads before a call and put together
in the model's order after it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxflow.config import SPAN_UNITS, Layer, Span


def take_heads(
    x: Shaped[Array, "..."], heads: Sequence[int], kv_heads: int, axis: int
) -> Shaped[Array, "..."]:
    """Return the entries of some KV heads along an axis, which holds an equal
    block for each of `kv_heads` heads.
    """
    if len(heads) == kv_heads:
        return x
    blocks = x.reshape(*x.shape[:axis], kv_heads, x.shape[axis] // kv_heads, *x.shape[axis + 1 :])
    taken = jnp.take(blocks, np.array(heads), axis=axis)
    return taken.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def join_heads(layer: Layer, parts: Sequence[Float[Array, "t _ H"]]) -> Float[Array, "t N H"]:
    """Return the query heads of all page groups of a layer, in the model's order.

    parts: the query heads of each group, in the order of `layer.group_heads`.
    """
    if len(parts) == 1:
        return parts[0]
    order = np.argsort([head for heads in layer.group_heads.values() for head in heads])
    t, _, h = parts[0].shape
    by_head = [
        part.reshape(t, len(heads), -1, h)
        for part, heads in zip(parts, layer.group_heads.values(), strict=True)
    ]
    return jnp.take(jnp.concatenate(by_head, axis=1), order, axis=1).reshape(t, -1, h)


def windows_at(layer: Layer, heads: Sequence[int], positions: Int[Array, " t"]) -> Int[Array, "t k"]:
    """Return the number of last keys that queries at these positions see, for each of some KV heads."""
    return windows_of(spans_of(layer, heads), positions)


def windows_of(spans: Sequence[Span], positions: Int[Array, " t"]) -> Int[Array, "t k"]:
    """Return the number of last keys that queries at these positions see with each span."""
    alpha = jnp.array([span.alpha for span in spans], jnp.int32)
    beta = jnp.array([span.beta for span in spans], jnp.int32)
    return alpha - (-beta * (positions[:, None] + 1)) // SPAN_UNITS


def spans_of(layer: Layer, heads: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of some KV heads of a layer."""
    assert layer.spans is not None, "a layer with attention spans"
    return tuple(layer.spans[head] for head in heads)


@functools.cache
def group_spans(layers: tuple[Layer, ...]) -> dict[int, tuple[tuple[Span, ...], ...]]:
    """Return the distinct spans of a page group's heads in a layer, over all layers
    and groups, by number of heads.
    """
    groups = [spans_of(layer, heads) for layer in layers for heads in layer.group_heads.values()]
    return {
        count: tuple(dict.fromkeys(spans for spans in groups if len(spans) == count))
        for count in sorted({len(spans) for spans in groups})
    }


def sinks_of(layer: Layer) -> int:
    """Return the sink tokens of a layer with attention spans."""
    assert layer.spans, "a layer with attention spans"
    return layer.spans[0].sinks


def call_once_traced(kernel: Callable[..., Any], *arrays: Any, **settings: Any) -> Any:
    """Return kernel(*arrays, **settings), traced once for all groups and layers
    with equal shapes and settings.

    A Mosaic kernel that is traced again differs in the names of its values, and is compiled again. A model of
    32 layers with four groups would compile the same attention kernel 128 times.
    """
    moving = {name: value for name, value in settings.items() if not _is_static(value)}
    static = tuple((name, value) for name, value in settings.items() if name not in moving)
    return _traced(kernel, static)(*arrays, **moving)


@functools.cache
def _traced(kernel: Callable[..., Any], settings: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return the kernel with these settings as one function, which JAX traces once for equal shapes."""
    return jax.jit(functools.partial(kernel, **dict(settings)))


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))

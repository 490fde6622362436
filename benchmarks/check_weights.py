"""The weights of a check that compares tokens: dummy weights with smaller rounding errors, and broken layers.

80 layers of independent random weights in e4m3 add so much rounding noise that the noise hides a layer
without attention. In a trained model a feature fills many columns, and a product averages their errors.
`repeated` gives dummy weights this property. The columns of the residual stream, of the values and of the MLP
form groups of `copies`. A group holds one number at different scales, so that its copies round differently.
The next product adds the copies, so the noise falls by about `copies`^0.5, and a broken layer's error does
not.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxflow.config import ModelConfig
from jaxflow.engine.executor import Executor
from jaxflow.model.weights import kv_head_copies
from jaxflow.parallel.mesh import TP, over_shards
from pallas_kernels.quantized import Quantized

QUIET = 0.05  # scale of the head's rows that are not loud
REPEATED = ("qkv", "out_proj", "up_gate", "down")


def scaled(array: jax.Array, scale: np.ndarray | float) -> jax.Array:
    """Return the array with its rows scaled, where it lies."""
    by = np.asarray(scale, np.float32).reshape(-1, 1)
    grow = jax.jit(lambda a: (a * by).astype(a.dtype), out_shardings=array.sharding)
    return grow(array)


def embed_scale(load_format: str, num_layers: int) -> float:
    """Return the scale of the embeddings: of dummy weights (2 · layers)^0.5, else 1."""
    return (2 * num_layers) ** 0.5 if load_format == "dummy" else 1.0


def large_embed_scale(load_format: str, config: ModelConfig) -> float:
    """Return the scale that gives dummy embeddings a size of 2, where a layer adds 0.6 to 1; else 1.

    With smaller ones the first layers replace the stream, and their rounding noise grows through the others.
    """
    return 2 * config.hidden_size**0.5 / config.embedding_scale if load_format == "dummy" else 1.0


def loud_rows(rows: int, loud: int) -> np.ndarray:
    """Return the scale of each of a head's `rows`: 1 for `loud` of them, evenly spaced, else `QUIET`."""
    scale = np.full(rows, QUIET, np.float32)
    scale[np.arange(loud) * rows // loud] = 1.0
    return scale


def heads(weights: Any, loud: Sequence[int]) -> Iterator[tuple[str, dict]]:
    """Yield the head as drawn, then with fewer and fewer loud rows, each with its name."""
    table = weights.get("lm_head", weights["embed"])
    norms = {name: weights[name] for name in ("final_norm", "final_norm_bias") if name in weights}
    yield "as drawn", norms | {"lm_head": table, "embed": table}
    for number in loud:
        own = scaled(table, loud_rows(table.shape[0], number))
        yield f"{number} loud rows", norms | {"lm_head": own, "embed": own}


# ---- numbers in several columns


def most_copies(config: ModelConfig, wanted: int) -> int:
    """Return the largest divisor of `wanted` copies that fit the model; 1 if it is no plain dense model."""
    plain = all(not (layer.experts or layer.shares_kv or layer.spans) for layer in config.layers)
    if config.latent is not None or len(config.head_shapes) > 1 or not plain:
        return 1
    return math.gcd(wanted, config.hidden_size, config.head_dim, config.gate_block)


def gains(copies: int) -> np.ndarray:
    """Return the scale of each copy of a number, [copies] float32: from 2^-0.5 to 2^0.5."""
    return np.exp2((np.arange(copies) + 0.5) / copies - 0.5).astype(np.float32)


def first_of_group(size: int, copies: int) -> np.ndarray:
    """Return for each of `size` indices the first one of its group, [size] int."""
    return np.arange(size) // copies * copies


def repeat_matrix(
    weight: jax.Array | Quantized, copies: int, before: int = 1, head: tuple[int, int] | None = None
) -> jax.Array | Quantized:
    """Return a matrix [rows, columns] whose groups of rows and of columns have one number each.

    A group of rows scales by `gains`. All rows scale by copies^-0.5, because the inputs of a group add up.
    before: the copies that the weight has already.
    head: of `qkv`, the heads of a key/value head and their width. Its last head, the value, has groups of
      rows, and the others have none, because rotary embeddings turn their numbers apart.
    """
    values, scale = weight if isinstance(weight, Quantized) else (weight, None)
    every, shared = np.arange(values.shape[0]), (before / copies) ** 0.5
    grouped = np.full(len(every), True) if head is None else every // head[1] % head[0] == head[0] - 1
    taken = np.where(grouped, first_of_group(len(every), copies), every)
    gain = np.resize(gains(copies), len(every)) / gains(before)[0]
    factor = shared * np.where(grouped, gain, 1.0).astype(np.float32)
    columns = first_of_group(values.shape[1], copies)
    values = in_bytes(lambda a: a[taken][:, columns])(values)
    if scale is None:
        return (values * factor[:, None]).astype(values.dtype)
    return Quantized(values, scale[taken] * factor)


def in_bytes(move: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return `move`, which moves numbers or makes them 0, so that it takes e4m3 as bytes.

    Every device gathers and sends bytes, but not every one e4m3.
    """

    def run(array: jax.Array) -> jax.Array:
        if array.dtype.itemsize > 1:
            return move(array)
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(array, jnp.uint8)), array.dtype)

    return run


def repeated(executor: Executor, weights: Any, copies: int, before: int = 1) -> Any:
    """Return the weights with each number of the layers in `copies` columns, in the memory of the given ones.

    The embeddings stay. weights: those of the executor's model. before: see `repeat_matrix`.
    """
    programs, config = executor.programs, executor.programs.context.config
    kv_heads = config.num_kv_heads * kv_head_copies(config, programs.mesh.shape[TP])
    head = config.num_heads // kv_heads + 2, config.head_dim

    def layer(matrices: dict[str, Any]) -> dict[str, Any]:
        return {
            name: repeat_matrix(weight, copies, before, head if name == "qkv" else None)
            for name, weight in matrices.items()
        }

    specs = {name: programs.weight_specs["layers"][0][name] for name in REPEATED}
    run = jax.jit(over_shards(layer, programs.mesh, (specs,), specs), donate_argnums=0)
    layers = [one | run({name: one[name] for name in REPEATED}) for one in weights["layers"]]
    return weights | {"layers": layers}


def repeated_embeddings(table: jax.Array, copies: int, scale: float) -> jax.Array:
    """Return scaled embeddings [V, D] with each number in `copies` columns."""
    gain = np.resize(gains(copies), table.shape[1]) * np.float32(scale)
    columns = first_of_group(table.shape[1], copies)
    run = jax.jit(lambda a: (a[:, columns] * gain).astype(a.dtype), out_shardings=table.sharding)
    return run(table)


# ---- broken layers

Break = Callable[[Executor], None]  # changes the cache after each step


def with_matrix(weights: Any, layer: int, name: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Return the weights with another array in a layer: `change` of the values of a matrix or a norm."""
    layers, old = list(weights["layers"]), weights["layers"][layer][name]
    values = old.values if isinstance(old, Quantized) else old
    new = jax.jit(in_bytes(change), out_shardings=values.sharding)(values)
    layers[layer] = layers[layer] | {name: Quantized(new, old.scale) if isinstance(old, Quantized) else new}
    return weights | {"layers": layers}


def first_columns(matrix: jax.Array, parts: int) -> jax.Array:
    """Return the matrix with zeros but for the first of so many parts of its columns."""
    kept = np.arange(matrix.shape[1]) < matrix.shape[1] // parts
    return jnp.where(kept, matrix, jnp.zeros_like(matrix))


def swapped_halves(matrix: jax.Array) -> jax.Array:
    """Return the matrix with the halves of its columns swapped."""
    return jnp.roll(matrix, matrix.shape[1] // 2, axis=1)


def swap_pages(executor: Executor, layer: int) -> None:
    """Move each page of a layer's cache by one, so that sequences read rows of others."""
    cache = executor.programs.context.config.cache_of(layer)
    mine = {id(pages) for pages in jax.tree.leaves(executor.kv[cache])}
    executor.fill_kv(lambda _, pages: _moved(pages.sharding)(pages) if id(pages) in mine else pages)


@functools.cache
def _moved(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    move = in_bytes(lambda pages: jnp.roll(pages, 1, axis=0))
    return jax.jit(move, out_shardings=sharding, donate_argnums=0)


def broken(weights: Any, layer: int, devices: int) -> Mapping[str, tuple[Any, Break | None]]:
    """Return ways to break a layer, by name: the weights, and what happens to the cache after each step.

    devices: a missing sum leaves the part of one of them; of one device, half.
    """
    one = functools.partial(first_columns, parts=max(2, devices))
    return {
        f"without the attention of layer {layer}": (
            with_matrix(weights, layer, "attn_norm", jnp.zeros_like),
            None,
        ),
        f"without the sum of layer {layer}'s attention": (with_matrix(weights, layer, "out_proj", one), None),
        f"without the sum of layer {layer}'s MLP": (with_matrix(weights, layer, "down", one), None),
        f"halves of layer {layer}'s heads swapped": (
            with_matrix(weights, layer, "out_proj", swapped_halves),
            None,
        ),
        f"pages of layer {layer} moved by one": (weights, functools.partial(swap_pages, layer=layer)),
    }

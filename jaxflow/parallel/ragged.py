"""Rows that each device sends to each other device, in pieces of any size, inside `shard_map`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedPieces:
    """The rows that one device sends and gets: k pieces for each of n devices, and k pieces from each.

    starts: [j, p], the first row of piece p for device j, among the device's own rows.
    sizes: [j, p], the rows of the piece; 0 for no piece.
    places: [j, p], the place of its first row in what device j gets.
    received: [i, p], the rows of piece p from device i.
    """

    starts: Int[Array, "n k"]
    sizes: Int[Array, "n k"]
    places: Int[Array, "n k"]
    received: Int[Array, "n k"]


def send(rows: Float[Array, "M D"], pieces: RaggedPieces, axis: str, *, length: int) -> Float[Array, "R D"]:
    """Return the rows that the devices send to this one, as the platform sends them best.

    Rows of the result that no piece fills are undefined.

    length: the rows of the result.
    """
    ragged, gathered = (
        functools.partial(way, axis=axis, length=length) for way in (send_ragged, send_gathered)
    )
    return lax.platform_dependent(rows, pieces, cuda=ragged, default=gathered)


def send_ragged(
    rows: Float[Array, "M D"], pieces: RaggedPieces, axis: str, *, length: int
) -> Float[Array, "R D"]:
    """Return the result of `send` by `lax.ragged_all_to_all`, which sends the pieces only.

    XLA:CPU has none.
    """
    received = lax.empty((length, rows.shape[1]), rows.dtype)
    starts, sizes, places, sizes_of_received = (
        one.reshape(-1) for one in (pieces.starts, pieces.sizes, pieces.places, pieces.received)
    )
    return lax.ragged_all_to_all(rows, received, starts, sizes, places, sizes_of_received, axis_name=axis)


def send_gathered(
    rows: Float[Array, "M D"], pieces: RaggedPieces, axis: str, *, length: int
) -> Float[Array, "R D"]:
    """Return the result of `send` by an all-gather of all rows, with 0 in rows that no piece fills."""
    devices, of_device = pieces.starts.shape
    starts, sizes, places = (one.reshape(-1) for one in (pieces.starts, pieces.sizes, pieces.places))
    row = jnp.arange(rows.shape[0])
    inside = (starts[None, :] <= row[:, None]) & (row[:, None] < (starts + sizes)[None, :])
    piece = jnp.argmax(inside, axis=1)
    receiver = jnp.where(inside.any(axis=1), piece // of_device, devices)
    place = places[piece] + row - starts[piece]
    rows, receiver, place = (lax.all_gather(one, axis, tiled=True) for one in (rows, receiver, place))
    place = jnp.where(receiver == lax.axis_index(axis), place, length)
    return jnp.zeros((length, rows.shape[1]), rows.dtype).at[place].set(rows, mode="drop")

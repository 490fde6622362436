"""Rows that go from each device to each other device in pieces of any size, inside `shard_map`.

`sizes[i, j]` is the number of rows that device i sends to device j. All devices have the same sizes. The rows of
a device are ordered by their receiver, and the received rows by their sender. Sending with `sizes.T` brings rows
back to where they came from.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def send(
    rows: Float[Array, "M D"], sizes: Int[Array, "n n"], axis: str, *, length: int, piece: int
) -> Float[Array, "R D"]:
    """Return the rows that the other devices send to this one, as the platform sends them best.

    Arguments: see `send_rows`. A GPU sends the rows only, other platforms send padded pieces.
    """
    sends = (
        functools.partial(way, axis=axis, length=length, piece=piece) for way in (send_rows, send_padded_rows)
    )
    ragged, padded = sends
    return lax.platform_dependent(rows, sizes, cuda=ragged, default=padded)


def send_rows(
    rows: Float[Array, "M D"], sizes: Int[Array, "n n"], axis: str, *, length: int, piece: int
) -> Float[Array, "R D"]:
    """Return the rows that the other devices send to this one, by `lax.ragged_all_to_all`. XLA:CPU has none.

    Args:
      length: the rows of the result, at least those that a device can receive. The rows after the received ones
        are 0.
      piece: the most rows from one device to another; only `send_padded_rows` needs it.
    """
    del piece
    me = lax.axis_index(axis)
    before = jnp.cumsum(sizes, axis=0) - sizes  # [i, j]: where the rows of device i begin on device j
    own = sizes[me]
    received = jnp.zeros((length, rows.shape[1]), rows.dtype)
    starts = jnp.cumsum(own) - own
    return lax.ragged_all_to_all(rows, received, starts, own, before[me], sizes[:, me], axis_name=axis)


def send_padded_rows(
    rows: Float[Array, "M D"], sizes: Int[Array, "n n"], axis: str, *, length: int, piece: int
) -> Float[Array, "R D"]:
    """Return the result of `send_rows` by an all-to-all of pieces that are padded to `piece` rows each."""
    me, devices = lax.axis_index(axis), sizes.shape[0]
    inside = jnp.arange(piece)
    own, theirs = sizes[me], sizes[:, me]
    starts = jnp.cumsum(own) - own
    padded = jnp.take(rows, (starts[:, None] + inside).reshape(-1), axis=0, mode="clip")
    padded = lax.all_to_all(padded.reshape(devices, piece, -1), axis, split_axis=0, concat_axis=0)
    places = jnp.where(inside < theirs[:, None], (jnp.cumsum(theirs) - theirs)[:, None] + inside, length)
    received = jnp.zeros((length, rows.shape[1]), rows.dtype)
    return received.at[places.reshape(-1)].set(padded.reshape(-1, rows.shape[1]), mode="drop")

"""The exchange of tokens between data-parallel ranks, whose devices hold some of a layer's experts each.

A device sorts the rows of its tokens by expert, sends each row to the device that holds the row's expert, and gets
the expert's output back. Device i of n holds the i-th E / n experts whole.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxflow.model.op_registry import Context, op_scope
from jaxflow.model.routing import Routing, weighted_sum
from jaxflow.parallel.ragged import send
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts, list_groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReceivedRows:
    """The rows that the devices sent to this one.

    rows: by sender, then by expert; the last ones of the array are unused.
    routing: the expert of each row, with weight 1; no expert of any device for an unused row.
    sizes: the rows that each device sends to each device.
    """

    rows: Float[Array, "R D"]
    routing: Routing
    sizes: Int[Array, "n n"]


def list_sent(c: Context, experts: Int[Array, "t e"], is_token: Bool[Array, " t"] | None) -> Groups:
    """Return the pairs of this device's tokens, sorted by expert. Pairs of padding are not sent.

    is_token: False for padding; None without padding.
    """
    number = c.config.num_experts
    if is_token is None:
        return list_groups(experts, number)
    experts = jnp.where(is_token[:, None], experts, number)
    return list_groups(experts, number, held=HeldExperts(jnp.int32(0), number))


def send_to_experts(c: Context, h: Float[Array, "t D"], routing: Routing) -> ReceivedRows:
    """Send the rows of this device's tokens to the devices of their experts, and return what this device gets.

    routing: `groups` are those of `list_sent`.
    """
    assert c.expert_axis is not None and routing.groups is not None
    sent, (tokens, chosen) = routing.groups, routing.experts.shape
    devices, piece = lax.axis_size(c.expert_axis), _piece(c, tokens, chosen)
    held = c.config.num_experts // devices
    with op_scope("expert_dispatch_all_to_all"):
        counts = lax.all_gather(sent.sizes, c.expert_axis)  # [n, E]: the rows of each device for each expert
        sizes = counts.reshape(devices, devices, held).sum(2)
        rows = send(h[sent.pairs // chosen], sizes, c.expert_axis, length=devices * piece, piece=piece)
    first = lax.axis_index(c.expert_axis) * held
    experts = _of_received(lax.dynamic_slice_in_dim(counts, first, held, axis=1), len(rows))
    experts = jnp.where(experts < held, first + experts, c.config.num_experts)
    return ReceivedRows(rows, Routing(experts[:, None], jnp.ones((len(rows), 1), jnp.float32)), sizes)


def send_back(
    c: Context, y: Float[Array, "R D"], sizes: Int[Array, "n n"], routing: Routing
) -> Float[Array, "t D"]:
    """Send the experts' outputs back, and return the weighted sum of those of each of this device's tokens.

    The sum is complete, not a partial sum.

    y: the outputs for `ReceivedRows.rows`, in their order. sizes, routing: of `send_to_experts`.
    """
    assert c.expert_axis is not None and routing.groups is not None
    tokens, chosen = routing.experts.shape
    with op_scope("expert_combine_all_to_all"):
        piece = _piece(c, tokens, chosen)
        back = send(y, sizes.T, c.expert_axis, length=tokens * chosen, piece=piece)
        return weighted_sum(back, routing.groups, routing.weights)


def _piece(c: Context, tokens: int, chosen: int) -> int:
    """Return the most rows from one device to another: the experts of a token are all different."""
    return tokens * min(chosen, c.config.num_experts // lax.axis_size(c.expert_axis))


def _of_received(counts: Int[Array, "n held"], length: int) -> Int[Array, " R"]:
    """Return which of this device's experts each received row is for, and `held` beyond the received rows.

    counts: the rows of each sender for each of these experts, in the order in which they arrive.
    """
    ends = jnp.cumsum(counts.reshape(-1))
    piece = jnp.sum((ends[None, :] <= jnp.arange(length)[:, None]).astype(jnp.int32), axis=1)
    return jnp.where(piece < counts.size, piece % counts.shape[1], counts.shape[1])

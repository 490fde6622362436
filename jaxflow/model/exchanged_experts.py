"""The exchange of tokens between data-parallel ranks, whose devices hold some of a layer's experts each.

A device sorts the rows of its tokens by expert, and sends the rows of each expert to the expert's device. The
rows arrive where the grouped products read them: by expert, then by sender. The outputs go back in the same
pieces. Device i of n holds the i-th E / n experts whole. Where experts have copies, E counts slots, and an
expert is the slot that the copy of a token's expert lies in.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxflow.model.op_registry import Context
from jaxflow.model.routing import Routing, weighted_sum
from jaxflow.parallel.ragged import RaggedPieces, send
from pallas_kernels.gemm.grouped.groups import Groups, HeldExperts, list_groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReceivedRows:
    """The rows that the devices sent to this one, in the order of `groups`. Unused rows are undefined.

    back: the pieces that bring the rows of a product back to their senders.
    """

    rows: Float[Array, "M D"]
    groups: Groups
    back: RaggedPieces


def list_sent(experts: Int[Array, "t e"], number: int, is_token: Bool[Array, " t"] | None) -> Groups:
    """Return the pairs of this device's tokens, sorted by expert. Pairs of padding are not sent.

    number: of all experts. is_token: False for padding; None without padding.
    """
    if is_token is None:
        return list_groups(experts, number)
    experts = jnp.where(is_token[:, None], experts, number)
    return list_groups(experts, number, held=HeldExperts(jnp.int32(0), number))


def send_to_experts(c: Context, h: Float[Array, "t D"], routing: Routing) -> ReceivedRows:
    """Send the rows of this device's tokens to the devices of their experts,
    and return what this device gets.

    routing: `groups` are those of `list_sent`.
    """
    assert c.rank_axis is not None and routing.groups is not None
    sent, (tokens, chosen) = routing.groups, routing.experts.shape
    counts = lax.all_gather(sent.sizes, c.rank_axis)  # [n, E]: the rows of each device for each expert
    groups = _list_received(c, counts, tokens, chosen)
    there, back = pieces_of(counts, groups.align, lax.axis_index(c.rank_axis))
    rows = send(h[sent.pairs // chosen], there, c.rank_axis, length=groups.pairs.shape[0])
    return ReceivedRows(rows, groups, back)


def send_back(c: Context, outputs: ReceivedRows, routing: Routing) -> Float[Array, "t D"]:
    """Send the experts' outputs back, and return the weighted sum of those of each of this device's tokens.

    The sum is complete, not a partial sum.

    outputs: those of the rows that `send_to_experts` returned. routing: of `send_to_experts`.
    """
    assert c.rank_axis is not None and routing.groups is not None
    rows = send(outputs.rows, outputs.back, c.rank_axis, length=routing.groups.pairs.shape[0])
    return weighted_sum(rows, routing.groups, routing.weights)


def _list_received(c: Context, counts: Int[Array, "n E"], tokens: int, chosen: int) -> Groups:
    """Return the groups of the rows that this device gets, with room for all that the devices could send."""
    devices, number = counts.shape
    held = number // devices
    first = lax.axis_index(c.rank_axis) * held
    own = lax.dynamic_slice_in_dim(counts.sum(0), first, held)
    most = devices * tokens * min(chosen, held)  # the experts of a token are all different
    expert = jnp.sum((jnp.cumsum(own)[None, :] <= jnp.arange(most)[:, None]).astype(jnp.int32), axis=1)
    experts = jnp.where(expert < held, first + expert, number)  # beyond the rows: no expert of any device
    return c.kernels.list_groups(experts[:, None], number, held=HeldExperts(first, held))


def pieces_of(
    counts: Int[Array, "n E"], align: int, device: Int[Array, ""] | int
) -> tuple[RaggedPieces, RaggedPieces]:
    """Return the pieces of a device on the way to the experts, and on the way back.

    counts: the rows of each device for each expert, which the device has sorted by expert.
    align: the rows at whose multiples experts start among the rows that their device gets.
    """
    devices, number = counts.shape
    sizes = counts.reshape(devices, devices, number // devices)  # [sender, device of the expert, its expert]
    starts = (jnp.cumsum(counts, axis=1) - counts).reshape(sizes.shape)
    aligned = (sizes.sum(0) + align - 1) // align * align
    places = (jnp.cumsum(aligned, axis=1) - aligned)[None] + jnp.cumsum(sizes, axis=0) - sizes
    there = RaggedPieces(starts[device], sizes[device], places[device], sizes[:, device])
    return there, RaggedPieces(places[:, device], sizes[:, device], starts[:, device], sizes[device])

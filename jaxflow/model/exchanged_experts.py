"""The experts of a layer on devices that each have tokens of their own, as with data-parallel attention.

A device sorts the rows of its tokens by expert, sends each row to the device that holds the row's expert, and gets
the expert's output back. Device i of n holds the i-th E / n experts whole.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxflow.model import ops
from jaxflow.model.op_registry import Context, Site, Weights, op_scope
from jaxflow.model.routing import Routing, weighted_sum
from jaxflow.parallel.ragged import send_rows
from pallas_kernels.gemm.grouped import groups as expert_groups


def exchanged_experts(
    c: Context, w: Weights, h: Float[Array, "t D"], routing: Routing, send: Callable = send_rows
) -> Float[Array, "t D"]:
    """Return the weighted sum of the experts' outputs for this device's tokens; complete, not a partial sum.

    Args:
      c: `expert_axis` is the mesh axis of the devices.
      w: the layer's weights, of the device's own experts.
      send: `jaxflow.parallel.ragged.send_rows`, or `send_padded_rows`.
    """
    assert c.expert_axis is not None, "experts on one device"
    (tokens, chosen), devices = routing.experts.shape, lax.axis_size(c.expert_axis)
    held = c.config.num_experts // devices
    own = expert_groups.list_groups(routing.experts, c.config.num_experts)
    piece = tokens * min(chosen, held)  # a token has different experts
    with op_scope("expert_dispatch_all_to_all"):
        counts = lax.all_gather(own.sizes, c.expert_axis)  # [n, E]: the rows of each device for each expert
        sizes = counts.reshape(devices, devices, held).sum(2)
        rows = send(h[own.pairs // chosen], sizes, c.expert_axis, length=devices * piece, piece=piece)
    first = lax.axis_index(c.expert_axis) * held
    own_counts = lax.dynamic_slice_in_dim(counts, first, held, axis=1)
    experts = _of_received(own_counts, len(rows))
    experts = jnp.where(experts < held, first + experts, c.config.num_experts)  # no expert of any device
    one = Routing(experts[:, None], jnp.ones((len(rows), 1), jnp.float32))
    site = Site(c, w)
    y = ops.expert_down(site, ops.expert_up_gate(site, rows, one), one)
    with op_scope("expert_combine_all_to_all"):
        back = send(y, sizes.T, c.expert_axis, length=tokens * chosen, piece=piece)
        return weighted_sum(back, own, routing.weights)


def _of_received(counts: Int[Array, "n held"], length: int) -> Int[Array, " R"]:
    """Return which of this device's experts each received row is for, and `held` beyond the received rows.

    counts: the rows of each sender for each of these experts, in the order in which they arrive.
    """
    ends = jnp.cumsum(counts.reshape(-1))
    piece = jnp.sum((ends[None, :] <= jnp.arange(length)[:, None]).astype(jnp.int32), axis=1)
    return jnp.where(piece < counts.size, piece % counts.shape[1], counts.shape[1])

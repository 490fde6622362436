"""Rows that devices send to each other in pieces of any size, against the pieces themselves."""

import functools

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxflow.parallel.mesh import TP, make_mesh
from jaxflow.parallel.ragged import send, send_padded_rows, send_rows

DEVICES, LENGTH, PIECE, WIDTH = 4, 24, 6, 3


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Return what `lax.ragged_all_to_all` promises, from everybody's arguments. It asserts the received sizes."""
    me, gather = lax.axis_index(axis_name), functools.partial(lax.all_gather, axis_name=axis_name)
    operands, starts, sizes, places = (
        gather(a) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])
    for sender in range(sizes.shape[0]):
        inside = row - places[sender, me]
        here = (inside >= 0) & (inside < recv_sizes[sender]) & (recv_sizes[sender] == sizes[sender, me])
        found = jnp.take(operands[sender], starts[sender, me] + inside, axis=0, mode="clip")
        output = jnp.where(here[:, None], found, output)
    return output


SIZES = {
    "any": np.random.default_rng(0).integers(0, PIECE + 1, (DEVICES, DEVICES)),
    "one receiver": np.eye(1, DEVICES, 2, dtype=int).repeat(DEVICES, 0) * PIECE,
    "one sender": np.eye(DEVICES, dtype=int)[:, :1] * np.array([[0, 3, 1, 6]]),
    "none": np.zeros((DEVICES, DEVICES), int),
}


@pytest.mark.parametrize("way", [send, send_rows, send_padded_rows])
@pytest.mark.parametrize("name", SIZES)
def test_every_piece_arrives_in_the_order_of_its_sender_and_comes_back(name, way, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)  # XLA:CPU has none
    sizes = SIZES[name]
    rows = np.random.default_rng(1).normal(size=(DEVICES, LENGTH, WIDTH)).astype(np.float32)

    def run(rows):
        there = way(rows, jnp.asarray(sizes), TP, length=LENGTH, piece=PIECE)
        return there, way(there, jnp.asarray(sizes).T, TP, length=LENGTH, piece=PIECE)

    spec = PartitionSpec(TP)
    mapped = jax.shard_map(run, mesh=make_mesh(DEVICES), in_specs=spec, out_specs=spec, check_vma=False)
    there, back = (
        np.asarray(a).reshape(rows.shape) for a in jax.jit(mapped)(jnp.asarray(rows.reshape(-1, WIDTH)))
    )
    pieces = [np.split(rows[i], np.cumsum(sizes[i]))[:DEVICES] for i in range(DEVICES)]
    for j in range(DEVICES):
        wanted = np.concatenate([pieces[i][j] for i in range(DEVICES)])
        np.testing.assert_array_equal(there[j, : len(wanted)], wanted)
        assert not there[j, len(wanted) :].any()
        sent = sizes[j].sum()
        np.testing.assert_array_equal(back[j, :sent], rows[j, :sent])
        assert not back[j, sent:].any()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 16])
@pytest.mark.parametrize(("way", "kind"), [(send, "kRaggedAllToAll"), (send_padded_rows, "kAllToAll")])
def test_rows_are_on_their_way_while_other_work_runs(way, kind, devices):
    """Two halves of a step on H200s. XLA runs an exchange beside other work where it expects a gain."""
    mesh, piece = h200.h200_mesh((devices,), hosts=devices // 8), 256

    def run(halves, sizes, w):
        def sent(rows, sizes):
            return way(rows, sizes, TP, length=devices * piece, piece=piece)

        return jnp.stack([sent(sent(rows, sizes) @ w, sizes.T) for rows in halves])

    spec = PartitionSpec(None, TP)
    specs = (spec, PartitionSpec(), PartitionSpec())
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False))
    shapes = (
        jax.ShapeDtypeStruct((2, devices * devices * piece, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((devices, devices), jnp.int32),
        jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16),
    )
    found = h200.compile_for_h200(step, *h200.abstract(mesh, shapes, specs))
    there = [thunk for thunk in found.thunks if thunk.kind == kind]
    assert len(there) == 4  # there and back, of two halves
    beside = [thunk for thunk in there if thunk.depth]
    assert beside and all(thunk.stream.startswith("communication_stream") for thunk in beside)

"""Rows that devices send to each other in pieces of any size, against the pieces themselves."""

import functools

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxflow.model.exchanged_experts import pieces_of
from jaxflow.parallel.mesh import TP, make_mesh
from jaxflow.parallel.ragged import send, send_gathered, send_ragged

DEVICES, HELD, MOST, WIDTH = 4, 2, 6, 3
EXPERTS = DEVICES * HELD


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Return what `lax.ragged_all_to_all` promises, from everybody's arguments.

    It asserts the received sizes.
    """
    me, gather = lax.axis_index(axis_name), functools.partial(lax.all_gather, axis_name=axis_name)
    each = len(send_sizes) // lax.axis_size(axis_name)
    operands, starts, sizes, places = (
        gather(a) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    row = jnp.arange(output.shape[0])
    for sender in range(sizes.shape[0]):
        for number in range(each):
            piece = me * each + number
            inside = row - places[sender, piece]
            here = (inside >= 0) & (inside < recv_sizes[sender * each + number])
            here &= recv_sizes[sender * each + number] == sizes[sender, piece]
            found = jnp.take(operands[sender], starts[sender, piece] + inside, axis=0, mode="clip")
            output = jnp.where(here[:, None], found, output)
    return output


COUNTS = {  # the rows of each device for each expert
    "any": np.random.default_rng(0).integers(0, MOST + 1, (DEVICES, EXPERTS)),
    "one expert": np.eye(1, EXPERTS, 5, dtype=int).repeat(DEVICES, 0) * MOST,
    "one sender": np.eye(DEVICES, dtype=int)[:, :1] * np.array([[0, 3, 1, 6, 0, 0, 2, 5]]),
    "none": np.zeros((DEVICES, EXPERTS), int),
}


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("way", [send, send_ragged, send_gathered])
@pytest.mark.parametrize("name", COUNTS)
def test_pieces_arrive_by_expert_and_by_sender_and_come_back(name, way, align, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)  # XLA:CPU has none
    counts, length = COUNTS[name], DEVICES * HELD * MOST + (align - 1) * HELD
    sent = EXPERTS * MOST
    rows = np.random.default_rng(1).normal(size=(DEVICES, sent, WIDTH)).astype(np.float32)

    def run(rows):
        there, back = pieces_of(jnp.asarray(counts), align, lax.axis_index(TP))
        received = way(rows, there, TP, length=length)
        return received, way(received, back, TP, length=sent)

    spec = PartitionSpec(TP)
    mapped = jax.shard_map(run, mesh=make_mesh(DEVICES), in_specs=spec, out_specs=spec, check_vma=False)
    there, back = (
        np.asarray(a).reshape(DEVICES, -1, WIDTH)
        for a in jax.jit(mapped)(jnp.asarray(rows.reshape(-1, WIDTH)))
    )
    pieces = [np.split(rows[i], np.cumsum(counts[i]))[:EXPERTS] for i in range(DEVICES)]
    for j in range(DEVICES):
        place = 0
        for expert in range(j * HELD, (j + 1) * HELD):
            wanted = np.concatenate([pieces[i][expert] for i in range(DEVICES)])
            np.testing.assert_array_equal(there[j, place : place + len(wanted)], wanted)
            place += -(-len(wanted) // align) * align
        np.testing.assert_array_equal(back[j, : counts[j].sum()], rows[j, : counts[j].sum()])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 16])
def test_rows_are_on_their_way_while_other_work_runs(devices):
    """Two halves of a step on H200s. XLA runs an exchange beside other work where it expects a gain."""
    mesh, piece = h200.h200_mesh((devices,), hosts=devices // 8), 256

    def run(halves, counts, w):
        def sent(rows, counts):
            there, back = pieces_of(counts, 8, lax.axis_index(TP))
            received = send(rows, there, TP, length=2 * len(rows))
            return send(received @ w, back, TP, length=len(rows))

        return jnp.stack([sent(rows, counts) for rows in halves])

    spec = PartitionSpec(None, TP)
    specs = (spec, PartitionSpec(), PartitionSpec())
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False))
    shapes = (
        jax.ShapeDtypeStruct((2, devices * devices * piece, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((devices, 4 * devices), jnp.int32),
        jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16),
    )
    found = h200.compile_for_h200(step, *h200.abstract(mesh, shapes, specs))
    there = [thunk for thunk in found.thunks if thunk.kind == "kRaggedAllToAll"]
    assert len(there) == 4  # there and back, of two halves
    beside = [thunk for thunk in there if thunk.depth]
    assert beside and all(thunk.stream.startswith("communication_stream") for thunk in beside)

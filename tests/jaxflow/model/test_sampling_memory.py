"""The samplers as compiled for an H200 at a real vocabulary: how many arrays
of the logits' size they make.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from h200 import abstract, compile_for_h200, h200_mesh

from jaxflow.model import sampling, slot_params
from pallas_kernels.pointwise.sample import api, reference

ROWS, SLOTS, VOCAB = 128, 256, 128256
# Who compiles every fusion once more, to see whether its tiles can be compiled, takes a quarter of the time:
# arrays are the same.
ONCE = {"xla_gpu_experimental_enable_fusion_autotuner": False}


def arguments(rows=ROWS, **slots):
    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    position = shape(rows, dtype=jnp.int32)
    plain = (shape(rows, VOCAB), shape(rows), shape(rows, 2, dtype=jnp.uint32), position)
    asked = shape(rows, dtype=jnp.bool_)
    return abstract(h200_mesh(), (*plain, position, *slots.values(), asked) if slots else plain)


def test_plain_makes_no_array_of_the_logits_size_and_reads_the_logits_once():
    """In XLA's program, the noise is hashed inside the pass that finds the maximum."""
    found = compile_for_h200(sampling.plain, *arguments(), options=ONCE)
    assert found.memory.temp_size_in_bytes < 0.01 * ROWS * VOCAB * 4
    entry = found.hlo[found.hlo.index("\nENTRY") :]
    assert len(re.findall(r"^.* fusion\(.*%logits[.\d]*[,)].*$", entry, re.M)) == 1


def test_log_probabilities_are_computed_in_a_branch_of_a_cuda_graph():
    """A branch outside a graph would wait on the host for the device."""
    params, counts = jax.eval_shape(lambda: slot_params.empty_slots(8, VOCAB))
    full = functools.partial(sampling.full, draw_filtered=api.draw_filtered)
    found = compile_for_h200(full, *arguments(8, params=params, counts=counts), options=ONCE)
    (branch,) = (thunk for thunk in found.graph_thunks if thunk.kind == "kConditional")
    assert branch.depth > 0
    assert {thunk.depth > 0 for thunk in found.thunks if thunk.name.startswith("sort")} == {True}


@pytest.mark.parametrize(("draw_filtered", "arrays"), [(api.draw_filtered, 1), (reference.draw_filtered, 2)])
def test_full_makes_few_and_counts_in_place(draw_filtered, arrays):
    """The program holds the adjusted logits, the rows of the counts, and the weights of the reference search.

    It makes no copy of all counts.
    """
    params, counts = jax.eval_shape(lambda: slot_params.empty_slots(SLOTS, VOCAB))
    full = functools.partial(sampling.full, draw_filtered=draw_filtered)
    found = compile_for_h200(
        full, *arguments(params=params, counts=counts), donate_argnums=(6,), options=ONCE
    )
    assert found.memory.temp_size_in_bytes < (arrays + 0.7) * ROWS * VOCAB * 4
    assert found.memory.alias_size_in_bytes == SLOTS * VOCAB * 2
    assert found.copies((SLOTS, VOCAB)) == 0


def test_of_many_rows_it_makes_as_few_as_of_a_block():
    rows = 4 * sampling.ROWS
    params, counts = jax.eval_shape(lambda: slot_params.empty_slots(rows, VOCAB))
    full = functools.partial(sampling.full_by_rows, draw_filtered=api.draw_filtered)
    found = compile_for_h200(
        full, *arguments(rows, params=params, counts=counts), donate_argnums=(6,), options=ONCE
    )
    assert (
        found.memory.temp_size_in_bytes < 2.7 * sampling.ROWS * VOCAB * 4
    )  # a block's logits are cut out of all
    assert found.memory.alias_size_in_bytes == rows * VOCAB * 2
    assert found.copies((rows, VOCAB)) == 0


def test_a_large_device_takes_more_rows_at_once_and_no_more_than_its_part():
    assert [sampling.rows_at_once(gib << 30, 128256) for gib in (0, 24, 80, 120, 141)] == [
        128,
        128,
        512,
        1024,
        1024,
    ]
    for gib in (24, 80, 141, 288):
        rows = sampling.rows_at_once(gib << 30, 151936)
        assert rows == sampling.ROWS or rows * 151936 * sampling.ROW_BYTES <= (gib << 30) / 80

"""The samplers as compiled for an H200 at a real vocabulary: how many arrays of the logits' size they make."""

import jax
import jax.numpy as jnp
from h200 import abstract, compile_for_h200, h200_mesh

from jaxflow.model import sampling, slot_params

ROWS, SLOTS, VOCAB = 128, 256, 128256


def arguments(**slots):
    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    position = shape(ROWS, dtype=jnp.int32)
    plain = (shape(ROWS, VOCAB), shape(ROWS), shape(ROWS, 2, dtype=jnp.uint32), position)
    return abstract(h200_mesh(), (*plain, position, *slots.values()) if slots else plain)


def test_plain_makes_no_array_of_the_logits_size():
    found = compile_for_h200(sampling.plain, *arguments())
    assert found.memory.temp_size_in_bytes < 0.05 * ROWS * VOCAB * 4


def test_full_makes_two_and_counts_in_place():
    """The adjusted logits and their masses; nothing that is made anew in a pass of a search; no copy of the counts."""
    params, counts = jax.eval_shape(lambda: slot_params.empty_slots(SLOTS, VOCAB))
    found = compile_for_h200(sampling.full, *arguments(params=params, counts=counts), donate_argnums=(6,))
    assert found.memory.temp_size_in_bytes < 2.2 * ROWS * VOCAB * 4
    assert found.memory.alias_size_in_bytes == SLOTS * VOCAB * 2
    assert found.copies((SLOTS, VOCAB)) == 0

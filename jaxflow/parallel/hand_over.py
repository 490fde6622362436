"""The hand-over of an array from one pipeline stage to the next.

Stages of one process hand over by `device_put`. Between the meshes of two processes `device_put` waits for ever
in JAX 0.11; there `jax.experimental.transfer` works (`tests/jaxflow/parallel/test_hand_over.py`).
"""

import jax
from jax.sharding import NamedSharding


def hand_over(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array on the devices of another stage of this process.

    The copy goes from device to device. The call returns at once, also if the array is not computed yet.
    """
    return jax.device_put(array, sharding)

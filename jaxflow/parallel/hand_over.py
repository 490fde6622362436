"""The hand-over of an array from one pipeline stage to the next.

Stages of one process hand over by `device_put`. Between the meshes of two processes `device_put` waits for
ever in JAX 0.11; there `jax.experimental.transfer` works (`tests/jaxflow/parallel/test_hand_over.py`).
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxflow.parallel.mesh import is_here
from jaxflow.parallel.processes import Processes


def hand_over(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the array on the devices of another stage of this process.

    The copy goes from device to device. The call returns at once, also if the array is not computed yet.
    """
    return jax.device_put(array, sharding)


class ProcessHandOver:
    """Hand-overs between stages that may lie in different processes. Each stage lies in one process.

    All processes make all hand-overs in the same order, also those between two others, because a
    hand-over's number is its name.

    Args:
      host: the address at which the other processes reach this one.
    """

    def __init__(self, processes: Processes, host: str):
        # Not above: the module needs a part of jaxlib that engines of one process do not load.
        from jax.experimental import transfer

        self._processes, self._count = processes, 0
        self._connections: dict[int, Any] = {}
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, address, [address])
        processes.publish(f"transfer/{processes.rank}", self._server.address())

    def hand_over(
        self, array: jax.Array | None, sender: Mesh, like: jax.ShapeDtypeStruct
    ) -> jax.Array | None:
        """Return the array on the devices of the receiving stage; None if the stage lies in another process.

        The call returns at once, also if the array is not computed yet.

        Args:
          array: None if the sending stage lies in another process.
          sender: the devices of the sending stage.
          like: the shape, the dtype and the sharding of the result.
        """
        self._count += 1
        sharding = like.sharding
        assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
        if array is not None and is_here(sharding.mesh):
            return hand_over(array, sharding)
        if array is not None:
            self._server.await_pull(self._count, [array])
            return None
        if not is_here(sharding.mesh):
            return None
        (found,) = self._connection(sender.devices.flat[0].process_index).pull(self._count, [like])
        return found

    def _connection(self, rank: int) -> Any:
        if rank not in self._connections:
            self._connections[rank] = self._server.connect(self._processes.read(f"transfer/{rank}"))
        return self._connections[rank]

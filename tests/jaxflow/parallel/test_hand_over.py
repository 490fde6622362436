"""The hand-over of an array between pipeline stages, inside a process and between two processes."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxflow.parallel.hand_over import hand_over
from jaxflow.parallel.mesh import stage_meshes

TWO_PROCESSES = """
import os, sys
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2")
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
server = transfer.start_transfer_server(jax.local_devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("tp",)), PartitionSpec("tp"))
whole = np.arange(32, dtype=np.float32).reshape(4, 8)
if len(sys.argv) == 1:
    print(server.address(), flush=True)
    for step in range(3):
        server.await_pull(step, [jax.device_put(whole + step, sharding)])
    sys.stdin.readline()
else:
    connection = server.connect(sys.argv[1])
    like = [jax.ShapeDtypeStruct(whole.shape, jnp.float32, sharding=sharding)]
    for step in range(3):
        (found,) = connection.pull(step, like)
        np.testing.assert_array_equal(found, whole + step)
"""


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("tp")])
def test_inside_a_process(spec):
    """The array may be in the making. It arrives on the devices of the other stage only."""
    first, second = stage_meshes(2, 2)
    x = jax.jit(lambda x: x @ x)(jax.device_put(jnp.ones((64, 64)), NamedSharding(first, spec)))
    found = hand_over(x, NamedSharding(second, spec))
    assert found.sharding.device_set == set(second.devices.flat)
    np.testing.assert_array_equal(found, 64.0)


@pytest.mark.slow
def test_between_two_processes():
    """`jax.experimental.transfer` moves arrays between the meshes of two processes.

    `device_put` between such meshes waits for ever in JAX 0.11.
    """
    run = [sys.executable, "-c", TWO_PROCESSES]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin and sender.stdout
        subprocess.run([*run, sender.stdout.readline().strip()], check=True, timeout=120)
        sender.communicate("\n", timeout=60)
    assert sender.returncode == 0

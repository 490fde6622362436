"""Settings of JAX before its first use."""

import os
import subprocess
import sys

import paths

PROGRAM = """
import jax
from jaxflow.parallel import mesh
from jaxflow.config import EngineConfig
from jaxflow.engine.start import prepare_process
mesh.NVIDIA_DEVICES = ()
prepare_process(EngineConfig(model="toy"))
print(jax.devices()[0].platform)
"""


def test_without_a_gpu_the_cuda_plugin_logs_nothing():
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=paths.ROOT, env=environ, capture_output=True, text=True
    )
    assert done.stdout == "cpu\n"
    assert done.stderr == ""

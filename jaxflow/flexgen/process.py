"""What must stand before JAX starts: how much of the device's memory this process may take, and how much of
the host's it may pin.
"""

import contextlib
import math
import os

from jaxflow.config import EngineConfig
from jaxflow.engine.start import prepare_process
from jaxflow.flexgen.config import GIGA, OffloadConfig
from jaxflow.kv.tiers.host_machine import host_memory_bytes


def prepare(offload: OffloadConfig, config: EngineConfig) -> None:
    """Settings that must stand before JAX's first use. On a GPU the memory limits become those of XLA's own
    allocators.
    """
    total = device_memory_bytes()
    if offload.gpu_memory_limit is not None and total is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = (
            f"{min(1.0, offload.gpu_memory_limit * GIGA / total):.4f}"
        )
    limit = offload.host_memory_limit * GIGA if offload.host_memory_limit is not None else host_memory_bytes()
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(host_pool_gib(limit)))
    prepare_process(config)


def host_pool_gib(limit: float) -> int:
    """What XLA's pool of pinned memory may take, for a limit in bytes: it ends at 64 GB unless it is told,
    and its own unit is GiB.
    """
    return max(1, math.ceil(limit / 2**30))


def device_memory_bytes() -> int | None:
    """Of the first NVIDIA GPU that this process may see; None where there is none."""
    with contextlib.suppress(Exception):  # no driver, no GPU
        import pynvml

        from pallas_kernels.nvml import first_visible

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(first_visible()).total)
        finally:
            pynvml.nvmlShutdown()
    return None

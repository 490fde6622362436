"""The mapping from JAX's GPUs to NVML's.

NVML numbers all GPUs of a machine. JAX numbers only the GPUs that CUDA_VISIBLE_DEVICES names.
"""

import os
from typing import Any

import pynvml

# The GPUs of all processes of an engine on this host, named as in CUDA_VISIBLE_DEVICES.
ENGINE_GPUS = "JAXFLOW_ENGINE_GPUS"


def visible() -> list[str]:
    """Return the numbers or UUIDs in CUDA_VISIBLE_DEVICES, in JAX's order, or [] if the variable is not
    set.
    """
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def handle(name: str) -> Any:
    """Return NVML's handle of a GPU by its number or UUID. NVML must be open. Raises: pynvml.NVMLError."""
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)


def visible_handles(count: int | None = None) -> list[Any]:
    """Return NVML's handles of JAX's first `count` GPUs, or of all visible GPUs for None.

    NVML must be open. Raises: pynvml.NVMLError.
    """
    names = visible() or [str(i) for i in range(pynvml.nvmlDeviceGetCount() if count is None else count)]
    return [handle(name) for name in names[:count]]


def engine_handles(count: int | None = None) -> list[Any]:
    """Return NVML's handles of the engine's first `count` GPUs: those of `ENGINE_GPUS`, or the visible ones.

    NVML must be open. Raises: pynvml.NVMLError.
    """
    names = [name for name in os.environ.get(ENGINE_GPUS, "").split(",") if name]
    return [handle(name) for name in names[:count]] if names else visible_handles(count)


def first_visible() -> Any:
    """Return NVML's handle of JAX's first GPU. NVML must be open. Raises: pynvml.NVMLError."""
    return visible_handles(1)[0]

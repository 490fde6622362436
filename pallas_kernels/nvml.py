"""Which NVIDIA GPU NVML is to be asked about: it numbers all of a machine, JAX those that
CUDA_VISIBLE_DEVICES leaves.
"""

import os
from typing import Any

import pynvml


def visible() -> list[str]:
    """The GPUs of CUDA_VISIBLE_DEVICES, numbers or UUIDs, in JAX's order; empty where it says nothing."""
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]


def handle(name: str) -> Any:
    """NVML's handle of a GPU, by its number or its UUID. NVML is open. Raises: pynvml.NVMLError."""
    return (
        pynvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdigit()
        else pynvml.nvmlDeviceGetHandleByUUID(name)
    )


def first_visible() -> Any:
    """NVML's handle of JAX's first GPU. NVML is open. Raises: pynvml.NVMLError."""
    return handle(next(iter(visible()), "0"))

"""What every op of a step is told, and the forms of what it works on."""

import dataclasses
from typing import Any

from jaxflow.config import Layer, ModelConfig
from pallas_kernels.kernel_set import KernelSet

Weights = dict[str, Any]
KV = tuple[Any, Any]  # keys and values of a layer, in one of the forms of `jaxflow.kv.device_cache`


@dataclasses.dataclass(frozen=True)
class Context:
    """What is fixed for a compiled step. `axis` is the tensor-parallel mesh axis inside `shard_map`, or None.

    sms: how many SMs products, attention, norms and quantising may occupy, where a plan shares the device
    between ops; None: all. copies: of two or four devices, whether sums are sent by the copy engines
    (`jaxflow.parallel.peer_reduce`).
    """

    config: ModelConfig
    kernels: KernelSet
    axis: str | None = None
    sms: int | None = None
    copies: bool = False

    def group(self, layer: Layer) -> int:
        """The layer's row on the page table's group axis."""
        return self.config.windows.index(layer.window)

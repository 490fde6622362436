"""What every op of a step is told, and the forms of what it works on."""

import dataclasses
from typing import Any, Literal

from jaxflow.config import Layer, ModelConfig
from pallas_kernels.kernel_set import KernelSet

Weights = dict[str, Any]
KV = tuple[Any, Any]  # keys and values of a layer, in one of the forms of `jaxflow.memory.kv_cache`


@dataclasses.dataclass(frozen=True)
class Context:
    """What is fixed for a compiled step. `axis` is the tensor-parallel mesh axis inside `shard_map`, or None.

    sms: how many SMs products and attention may occupy, where a plan shares the device between ops; None: all.
    copies: what of sums over devices is sent by the copy engines (`jaxflow.model.exchange`): of two devices a part whole, scattered the
    rows that every other device owns, or nothing.
    """

    config: ModelConfig
    kernels: KernelSet
    axis: str | None = None
    sms: int | None = None
    copies: Literal["whole", "rows"] | None = None

    def group(self, layer: Layer) -> int:
        """The layer's row on the page table's group axis."""
        return self.config.windows.index(layer.window)

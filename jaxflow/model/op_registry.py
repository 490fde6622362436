"""The signature that all ops share, and the registry of ops by name.

The decorator `op` registers a function under the op's name in `jaxflow.model.graph`. The result is called as
`op(site, *inputs)`, with the inputs in the graph's order, and returns the outputs in the graph's order.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxflow.config import Layer, ModelConfig, Window
from jaxflow.model.batch import Batch
from pallas_kernels.kernel_set import KernelSet

Weights = dict[str, Any]
KV = tuple[Any, Any]  # keys and values of a layer, in one of the forms of `jaxflow.kv.device_cache`


@dataclasses.dataclass(frozen=True)
class Context:
    """The constants of a compiled step.

    axis: the tensor-parallel mesh axis inside `shard_map`; None on one device.
    expert_axis: the mesh axis over which experts are spread whole; None: every device has a share of each
      expert. Another axis than `axis` is that of data-parallel ranks, which have tokens of their own. Two
      axes are that of the ranks and `axis`.
    windows: the window of each layer group of the page table; None for the windows of `config`. A pipeline
      stage's `config` may lack windows that the page table has.
    sms: the SMs that a GEMM, attention, norm or quantization kernel may occupy; None for all.
    copies: whether the copy engines carry the sums over two or four devices.
    whole: whether all ops have the step's tokens in one range, so that an op may leave work to its reader.
    """

    config: ModelConfig
    kernels: KernelSet
    axis: str | None = None
    sms: int | None = None
    copies: bool = False
    whole: bool = False
    windows: tuple[Window, ...] | None = None
    expert_axis: str | tuple[str, str] | None = None

    @property
    def rank_axis(self) -> str | None:
        """Return the mesh axis of data-parallel ranks; None for one rank."""
        if not self.exchanges_tokens or self.expert_axis is None:
            return None
        return self.expert_axis if isinstance(self.expert_axis, str) else self.expert_axis[0]

    @property
    def exchanges_tokens(self) -> bool:
        """Return True if tokens go to the devices of their experts and back."""
        return self.expert_axis is not None and self.expert_axis != self.axis

    def group(self, layer: Layer) -> int:
        """Return the index on the page table's group axis of a layer without attention spans."""
        return (self.windows or self.config.windows).index(layer.window)


@dataclasses.dataclass(frozen=True)
class Site:
    """The place in a step where an op runs. An op's function names the fields that it needs.

    w: the weights of the layer, or of the model for ops outside the layers.
    layer, batch: needed by attention and by the append to the cache.
    start, stop: the token range that the op covers.
    work: the work list of an attention kernel, from `jaxflow.model.ops.attention_work`.
    nano_op: the id of a plan's nano-op, for the profiler.
    """

    c: Context
    w: Weights
    layer: Layer | None = None
    batch: Batch | None = None
    start: int = 0
    stop: int = 0
    work: Any = None
    nano_op: str | None = None


_STATIC = ("c", "layer", "start", "stop")
_LEADING = ("c", "layer", "w", "batch", "start", "stop")


@dataclasses.dataclass(frozen=True, eq=False)
class OpFunction:
    """An op as a function of a site and of its inputs.

    The wrapped function's first parameters are fields of `Site`; a parameter `work` comes last.
    """

    name: str
    function: Callable[..., Any]

    def __call__(self, site: Site, *inputs: Any) -> Any:
        """Run the op in its named scope."""
        return self._call(self.function, site, inputs)

    def jitted(self, site: Site, *inputs: Any) -> Any:
        """Run the op as a nested jit, so that layers of equal shapes share one trace and one lowering."""
        return self._call(self._jitted, site, inputs)

    def _call(self, function: Callable[..., Any], site: Site, inputs: tuple[Any, ...]) -> Any:
        with op_scope(self.name, site.nano_op):
            leading = (getattr(site, field) for field in self._fields)
            return function(*leading, *inputs, **({"work": site.work} if self._takes_work else {}))

    @functools.cached_property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    @functools.cached_property
    def _fields(self) -> tuple[str, ...]:
        return tuple(name for name in self._parameters if name in _LEADING)

    @functools.cached_property
    def _takes_work(self) -> bool:
        return "work" in self._parameters

    @functools.cached_property
    def _jitted(self) -> Callable[..., Any]:
        return jax.jit(self.function, static_argnames=[name for name in self._fields if name in _STATIC])


OPS: dict[str, OpFunction] = {}


def op(name: str) -> Callable[[Callable[..., Any]], OpFunction]:
    """Return a decorator that registers a function as the op of this name."""

    def register(function: Callable[..., Any]) -> OpFunction:
        assert name not in OPS, f"op {name!r} is registered twice"
        OPS[name] = OpFunction(name, function)
        return OPS[name]

    return register


@contextlib.contextmanager
def op_scope(name: str, nano_op: str | None = None) -> Iterator[None]:
    """Name the operations of the block for the profiler: the op, then the nano-op of a plan."""
    with jax.named_scope(name), jax.named_scope(nano_op) if nano_op else contextlib.nullcontext():
        yield

"""A step as several programs: its beginning, each of its layers, and its end.

XLA compiles every layer of a program anew. On a CPU the step of a model with 30 equal layers takes 12 s to
compile and 2 s to read from the cache of compiled programs. Here equal layers share one program, so a step
takes the time of one layer. Each layer costs a call from the host, which runs while the layer before runs.
A GPU runs such steps with `enforce_eager`. The beginning also makes the work lists of the attention kernels,
which all layers of a window share.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered, Wrapped
from jaxtyping import Array, Float

from jaxflow.config import Layer
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.program_memory import Need
from jaxflow.engine.programs import REPLICATED, Programs
from jaxflow.kv.device_cache import cache_spec
from jaxflow.model import ops
from jaxflow.model.batch import Batch
from jaxflow.model.op_registry import KV, Site, op_scope
from jaxflow.model.transformer import Routed, forward_layer, layer_inputs, sampled_hidden
from jaxflow.parallel.collectives import added
from jaxflow.parallel.mesh import over_shards

BEGIN_DONATES, LAYER_DONATES = (1,), (1,)  # the page table, and the layer's cache


@dataclasses.dataclass(frozen=True)
class LayeredStep:
    """The compiled programs of a step. A call has the arguments and the results of `Programs.step`.

    layers: the program of each layer; equal layers have the same one.
    window_of: the index of each layer's work lists.
    cache_of: the index of each layer's cache.
    """

    begin: Callable
    layers: Sequence[Callable]
    window_of: Sequence[int]
    cache_of: Sequence[int]
    end: Callable

    def __call__(
        self, weights: dict, kv: list[KV], page_table: Any, source: Any, buffer: Any, *counts: Any
    ) -> tuple:
        """Enqueue the programs. kv and page_table are donated."""
        outer, kv, routed = outside_layers(weights), list(kv), []
        page_table, batch, work, rows, x, y, inputs = self.begin(outer, page_table, source, buffer)
        for i, (layer, w) in enumerate(zip(self.layers, weights["layers"], strict=True)):
            cache, own = self.cache_of[i], inputs[i] if inputs else None
            x, y, kv[cache], experts = layer(w, kv[cache], x, y, batch, work[self.window_of[i]], own)
            routed += experts
        hidden, x, counts = self.end(outer, x, y, batch, counts, routed)
        return hidden, x, rows, kv, page_table, *counts

    def need(self) -> Need:
        """Return the memory of a step. The results of two layers exist at once, beside the beginning's."""
        begin, end = Need.of(self.begin), Need.of(self.end)
        layers = [Need.of(layer) for layer in {id(layer): layer for layer in self.layers}.values()]
        between = begin.results + 2 * max(layer.results for layer in layers)
        largest = max(one.temporary for one in (begin, *layers, end))
        return Need(between + largest, end.results)


@dataclasses.dataclass(frozen=True)
class Begun:
    """A lowered program whose compilation has begun on a thread."""

    lowered: Lowered
    compiled: Future

    @property
    def out_info(self) -> Any:
        """The shapes of the results, see `jax.stages.Lowered`."""
        return self.lowered.out_info


@dataclasses.dataclass(frozen=True)
class LoweredStep:
    """The lowered programs of a step. The compilation of a `Begun` one has begun.

    layers: each distinct layer. kind_of: the index in `layers` of each layer of the model.
    window_of, cache_of: see `LayeredStep`.
    """

    begin: Lowered | Begun
    layers: tuple[Lowered | Begun, ...]
    kind_of: tuple[int, ...]
    window_of: tuple[int, ...]
    cache_of: tuple[int, ...]
    end: Lowered | Begun

    @property
    def programs(self) -> tuple[Lowered | Begun, ...]:
        """The distinct programs of a step."""
        return self.begin, *self.layers, self.end

    def compile(self, compile_one: Callable[[Lowered], Callable]) -> LayeredStep:
        """Return the step, with each program compiled by `compile_one`, unless that has begun."""

        def compiled(one: Lowered | Begun) -> Callable:
            return one.compiled.result() if isinstance(one, Begun) else compile_one(one)

        layers = [compiled(layer) for layer in self.layers]
        every = tuple(layers[kind] for kind in self.kind_of)
        begin, end = compiled(self.begin), compiled(self.end)
        return LayeredStep(begin, every, self.window_of, self.cache_of, end)


def lower_layers(
    programs: Programs,
    layout: StepLayout,
    lower: Callable[..., Lowered | Begun],
    weights: dict,
    kv: Any,
    page_table: Any,
    source: Any,
    buffer: Any,
    *counts: Any,
) -> LoweredStep:
    """Return the lowered programs of a step.

    Args:
      lower: called with a program's name, its jitted function, its `donate_argnums` and its arguments.
      weights, kv, page_table, source, buffer, counts: the arguments of `Programs.step`, or
        their shapes, dtypes and shardings.
    """
    outer = outside_layers(weights)
    windows = [layer.window for layer in programs.context.config.layers]
    distinct = list(dict.fromkeys(windows))
    listed = {
        windows.index(window): jax.tree.map(_of_shard, kv[windows.index(window)]) for window in distinct
    }
    begun = lower("begin", _begin(programs, layout, listed), BEGIN_DONATES, outer, page_table, source, buffer)
    replicated = jax.sharding.NamedSharding(programs.mesh, REPLICATED)

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated), tree)

    _, batch, work, _, x, y, inputs = everywhere(begun.out_info)
    config = programs.context.config
    caches = tuple(map(config.cache_of, range(config.num_layers)))
    kinds: dict[Any, int] = {}
    layers = []
    kind_of = []
    routed = []
    for index, layer in enumerate(config.layers):
        w, cache = weights["layers"][index], kv[caches[index]]
        leaves, tree = jax.tree.flatten((w, cache))
        kind = layer, tree, tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        if kind not in kinds:
            kinds[kind], own = len(layers), work[distinct.index(layer.window)]
            fn = _layer(programs, layer, programs.weight_specs["layers"][index])
            read = inputs[index] if inputs else None
            layers.append(lower(f"layer {layer}", fn, LAYER_DONATES, w, cache, x, y, batch, own, read))
        kind_of.append(kinds[kind])
        routed += everywhere(layers[kinds[kind]].out_info[3])
    ended = lower("end", _end(programs), (), outer, x, y, batch, counts, routed)
    lists = tuple(map(distinct.index, windows))
    return LoweredStep(begun, tuple(layers), tuple(kind_of), lists, caches, ended)


def outside_layers(weights: dict) -> dict:
    """Return the weights outside the layers."""
    return {name: value for name, value in weights.items() if name != "layers"}


def _of_shard(a: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array's part on one device."""
    return jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype)


def _begin(programs: Programs, layout: StepLayout, listed: Mapping[int, KV]) -> Wrapped:
    """(outer, page_table, source, buffer) -> (page_table, batch, work, rows, x, y, inputs).

    work: the work lists of the attention kernels, for each distinct window. y, which layers add, is 0.
    inputs: the embeddings of each layer, if the model has them.
    listed: the first layer of each window, with the shapes of its cache on one device.
    """

    c = programs.context

    def run(outer, page_table, source, buffer):
        page_table, batch, rows = programs.inputs(layout, page_table, source, buffer)
        x = batch.hidden
        if x is None:
            x = ops.embed(Site(c, outer), batch.token_ids, batch.positions)
        work = [
            {
                name: ops.attention_work(c, c.config.layers[layer], batch, 0, batch.num_tokens, name, cache)
                for name in ("chunk_attention", "decode_attention")
            }
            for layer, cache in listed.items()
        ]
        inputs, y = layer_inputs(Site(c, outer), batch, x), jnp.zeros_like(x)
        return page_table, dataclasses.replace(batch, hidden=None), work, rows, x, y, inputs

    specs = outside_layers(programs.weight_specs), REPLICATED, REPLICATED, REPLICATED
    return jax.jit(over_shards(run, programs.mesh, specs, (REPLICATED,) * 7), donate_argnums=BEGIN_DONATES)


def _layer(programs: Programs, layer: Layer, weight_specs: Any) -> Wrapped:
    """(w, kv, x, y, batch, work, layer_input) -> (x, y, kv, [the experts of a mixture])."""

    def run(w, kv, x, y, batch, work, layer_input):
        site = Site(programs.context, w, layer, batch, 0, batch.num_tokens)
        routed: Routed = []
        x, y, kv = forward_layer(site, x, y, kv, routed, work, layer_input)
        return x, added(y), kv, routed

    cache = (cache_spec(programs.mesh),) * 2
    specs = weight_specs, cache, *(REPLICATED,) * 5
    out = REPLICATED, REPLICATED, cache, REPLICATED
    return jax.jit(over_shards(run, programs.mesh, specs, out), donate_argnums=LAYER_DONATES)


def _end(programs: Programs) -> Wrapped:
    """(outer, x, y, batch, counts, routed) -> (hidden, x, counts)."""

    def run(
        outer: dict,
        x: Float[Array, "T D"],
        y: Float[Array, "T D"],
        batch: Batch,
        counts: tuple[Array, ...],
        routed: Routed,
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        with op_scope("final_norm"):
            x = x + y
        hidden = sampled_hidden(Site(programs.context, outer), x, batch)
        return hidden, x, programs.counted(counts, routed if counts else None, batch)

    specs = outside_layers(programs.weight_specs), *(REPLICATED,) * 5
    return jax.jit(over_shards(run, programs.mesh, specs, (REPLICATED,) * 3))

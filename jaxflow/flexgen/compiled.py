"""Compiled programs of a geometry, compiled before anything is loaded, to account for their memory."""

import concurrent.futures
import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxflow.config import Layer
from jaxflow.flexgen.geometry import (
    REPLICATED,
    SHARDED,
    Geometry,
    PlacedWeights,
    device_sharding,
    halves,
    spec_of,
)
from jaxflow.flexgen.programs import Programs
from jaxflow.model.slot_params import empty_slots
from jaxflow.parallel.mesh import axis_of, over_shards, sharded

_compiled = 0  # backend compilations of this process
_programs: dict[tuple[bytes, Any], Any] = {}


def _count_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compiled
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


def compilations() -> int:
    """Return the number of backend compilations of this process."""
    return _compiled


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Compiled functions of `Programs`, by layer, or by phase: True for prompts and False for decodes.

    Attributes:
      vocabulary: V', with padding.
      working_bytes: device memory of the largest program beyond its inputs.
    """

    embed: dict[bool, Callable]
    prefill: dict[Layer, Callable]
    decode: dict[Layer, Callable]
    before: dict[Layer, Callable]
    after: dict[Layer, Callable]
    hidden: dict[bool, Callable]
    sample: Callable
    sample_full: Callable
    vocabulary: int
    working_bytes: int


def attends_on_host(g: Geometry) -> bool:
    """Return True if decodes attend on the host to a split of their KV."""
    return g.policy.host_attention and any(part.tier != "device" for part in g.kv_parts)


def compile_programs(
    programs: Programs, placed: PlacedWeights, on_progress: Callable[[str], object]
) -> Compiled:
    """Compile all programs of a run. `on_progress`: called with the name of each program when it is
    submitted.
    """
    # Lowering holds Python's lock, so it runs on this thread. XLA compiles concurrently on the pool.
    with concurrent.futures.ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        begun = _begin(programs, placed, pool, on_progress)
        fields = {name: _finished(value) for name, value in begun.items()}
    working = [
        _working_bytes(one)
        for value in fields.values()
        for one in (value.values() if isinstance(value, dict) else [value])
    ]
    return Compiled(**fields, vocabulary=_vocabulary(placed), working_bytes=max(working))


def _begin(
    programs: Programs,
    placed: PlacedWeights,
    pool: concurrent.futures.Executor,
    on_progress: Callable[[str], object],
) -> dict[str, Any]:
    """Return the programs of `Compiled` as futures, or dicts of futures."""
    g, b = programs.geometry, programs.geometry.batch

    def build(
        name: str, function: Callable, made: Any, *arguments: Any, donate: tuple[int, ...] = ()
    ) -> concurrent.futures.Future:
        """Submit a program. `made`: the partition of its results."""
        on_progress(name)
        jitted, arguments = _over_devices(function, g.mesh, arguments, made, donate)
        return pool.submit(_compile, jitted.lower(*arguments), g.mesh)

    def vector(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def pieces(tokens: int) -> tuple:
        return tuple(g.activation(part.rows, tokens) for part in g.activation_parts)

    def by_phase(make: Callable[[bool], Any]) -> dict[bool, Any]:
        return {prompt: make(prompt) for prompt in (True, False)}

    away = [part for part in g.kv_parts if part.tier != "device"]
    home = next((g.kv_pages(part.rows) for part in g.kv_parts if part.tier == "device"), ())
    loaded = tuple(g.kv_pages(part.rows) for part in away)
    kinds = dict(zip(g.config.layers, placed.layers, strict=True))
    tokens = {True: g.prompt, False: 1}
    embed = by_phase(
        lambda p: build(
            "embed", programs.embed, SHARDED, placed.ends, vector(b * tokens[p]), vector(b * tokens[p])
        )
    )
    prefill = {
        layer: build(
            "prefill",
            programs.prefill(layer),
            (SHARDED, SHARDED, SHARDED),
            w,
            pieces(g.prompt),
            home,
            vector(b),
            donate=(2,),
        )
        for layer, w in kinds.items()
    }
    decode, before, after = {}, {}, {}
    live = vector(b, dtype=jnp.bool_)
    for layer, w in kinds.items():
        if attends_on_host(g):
            first, second = ({key: w[key] for key in keys} for keys in halves(w))
            made = (REPLICATED, SHARDED, SHARDED, SHARDED, SHARDED)
            before[layer] = build(
                "before", programs.before(layer), made, first, pieces(1), home, vector(b), live, donate=(2,)
            )
            stream = vector(b, g.config.hidden_size, dtype=g.dtype)
            own = tuple(g.heads(part.rows) for part in g.kv_parts if part.tier == "device")
            others = tuple(g.heads(part.rows) for part in away)
            after[layer] = build("after", programs.after(layer), SHARDED, second, stream, own, others)
        else:
            donate = (2, 3) if g.policy.kv_bits == 16 else (2,)
            made = (SHARDED, SHARDED, SHARDED, SHARDED)
            decode[layer] = build(
                "decode",
                programs.decode(layer),
                made,
                w,
                pieces(1),
                home,
                loaded,
                vector(b),
                live,
                donate=donate,
            )
    slots = jax.eval_shape(lambda: empty_slots(b, _vocabulary(placed)))
    rows = (vector(b, dtype=jnp.float32), vector(b, 2, dtype=jnp.uint32), vector(b))
    states = jax.ShapeDtypeStruct((b, g.config.hidden_size), g.dtype)
    return {
        "embed": embed,
        "prefill": prefill,
        "decode": decode,
        "before": before,
        "after": after,
        "hidden": by_phase(
            lambda p: build("hidden", programs.hidden, REPLICATED, placed.ends, pieces(tokens[p]), vector(b))
        ),
        "sample": build("sample", programs.sample, REPLICATED, placed.ends, states, *rows),
        "sample_full": build(
            "sample_full",
            programs.sample_full,
            REPLICATED,
            placed.ends,
            states,
            *rows,
            vector(b),
            *slots,
            donate=(7,),
        ),
    }


def _finished(value: Any) -> Any:
    return {key: one.result() for key, one in value.items()} if isinstance(value, dict) else value.result()


def _working_bytes(compiled: Any) -> int:
    """Return the memory of a program beyond its inputs: temporary space and new outputs."""
    found = compiled.memory_analysis()
    return (
        0
        if found is None
        else found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )


def _vocabulary(placed: PlacedWeights) -> int:
    """Return V', with padding."""
    return placed.ends.get("lm_head", placed.ends["embed"]).shape[0]


def _over_devices(
    function: Callable, mesh: Mesh, arguments: tuple, made: Any, donate: tuple[int, ...]
) -> tuple[Any, tuple]:
    """Return the jitted function over the mesh, and its arguments' shapes with shardings."""

    def placed(a: Any) -> Any:
        sharding = getattr(a, "sharding", None) or device_sharding(mesh)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    arguments = jax.tree.map(placed, arguments)
    if axis_of(mesh) is None:
        return jax.jit(function, donate_argnums=donate), arguments
    run = over_shards(function, mesh, jax.tree.map(spec_of, arguments), made)
    lie = jax.tree.map(lambda spec: sharded(mesh, spec), made)
    return jax.jit(run, donate_argnums=donate, out_shardings=lie), arguments


def _compile(lowered: Any, mesh: Mesh) -> Any:
    """Compile a new program. The runs of a sweep share most programs."""
    # the program text does not show unused arguments
    text = f"{lowered.args_info}\n{lowered.as_text()}"
    key = hashlib.sha256(text.encode()).digest(), mesh
    if key not in _programs:
        _programs[key] = lowered.compile()
    return _programs[key]

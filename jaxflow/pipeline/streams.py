"""XLA's streams, barriers and flags, which no other module names.

XLA orders nothing that data does not order. It merges GEMMs that share a weight, and copies a buffer that is
written while it may still be read. `together` gives XLA the order of a plan as data. `region` puts operations
on a stream of their own, without effect where there is one stream (CPU). Neither changes a result.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.extend import core

# XLA flags for the launch of a step's kernels.
# xla: XLA's default. A slice that is fused into its reader, one in every layer, breaks the step's CUDA graph.
# whole: one CUDA graph for the step. The graph is a chain, with side streams or without.
# concurrent: one CUDA graph with data dependences only.
# streams: no graph. Kernels are launched one by one, those of side streams on their own streams.
GRAPHS: dict[str, dict[str, Any]] = {
    "xla": {},
    "whole": {"xla_gpu_enable_dynamic_slice_fusion": False},
    "concurrent": {
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    },
    "streams": {"xla_gpu_enable_dynamic_slice_fusion": False, "xla_gpu_enable_command_buffer": ""},
}


# An exchange between devices of one process is a copy by the copy engines, instead of an NCCL kernel.
COPIES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


# XLA's own kernel of an all-reduce keeps at least 4 MB for each all-reduce of a program, as long as the
# program lives. This memory lies outside the part of the device that the engine plans with. A model of 80
# layers needs 0.64 GB a program for small sums and 2.6 GB for sums of 4 MB. NCCL makes sums of more than
# these bytes. `bench collectives` times both.
MOST_SUM_BYTES = 128 * 1024
NCCL_SUMS = {"xla_gpu_experimental_use_collective_kernels": ""}


def xla_options(graphs: str, *, side_streams: bool, collectives: bool, sum_bytes: int = 0) -> dict[str, Any]:
    """Return the XLA flags of a GPU step, for `compile(compiler_options=...)`.

    By default XLA turns small collectives into kernels on the compute streams, and its collective scheduler
    issues the side streams late.

    Args:
      graphs: a name in `GRAPHS`.
      side_streams: whether the plan has side streams.
      collectives: whether sums over devices run at the same time as other nano-batches' GEMMs.
      sum_bytes: bytes of one sum over devices; 0 without such sums.
    """
    options = dict(GRAPHS[graphs])
    if collectives or sum_bytes > MOST_SUM_BYTES:
        options |= NCCL_SUMS
    if collectives and side_streams:
        options["xla_gpu_enable_latency_hiding_scheduler"] = False
    return options


def together[T](values: list[T]) -> list[T]:
    """Return the values unchanged. Every later use of one value comes after all values exist."""
    return lax.optimization_barrier(values)


def zero_behind(values: list[jax.Array]) -> jax.Array:
    """Return 0 (int32), computed from all the values.

    XLA issues a region as soon as it has issued the makers of the region's inputs, and chooses itself which
    inputs to make first. An op that reads this zero is issued after every region that reads only the values.
    The op waits for the values and not for the region.
    """
    bits = [_first_bits(value) & 1 for value in values if value.size]
    return (functools.reduce(jax.numpy.bitwise_or, bits) >> 1).astype(jax.numpy.int32)


def behind(values: list[jax.Array], small: Any) -> Any:
    """Return `small`, a tree of arrays, unchanged. Reads of its first array come after all the values exist.

    This replaces `together` in a graph whose kernels wait for data only, where barriers have no effect. It
    costs a kernel of the size of the first array.
    """
    leaves, tree = jax.tree.flatten(small)
    if not leaves or not values:
        return small
    kind = f"uint{8 * leaves[0].dtype.itemsize}"
    bits = lax.bitcast_convert_type(leaves[0], kind) | zero_behind(values).astype(kind)
    return jax.tree.unflatten(tree, [lax.bitcast_convert_type(bits, leaves[0].dtype), *leaves[1:]])


def _first_bits(value: jax.Array) -> jax.Array:
    """Return the first element's bits (uint32). Only the order of the read matters, not the value."""
    first = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    width = 8 * value.dtype.itemsize
    return lax.bitcast_convert_type(first, f"uint{width}").astype(jax.numpy.uint32)


def region(stream: int, work: Callable[[], jax.Array]) -> jax.Array:
    """Run `work()` on stream 1 or higher, concurrently with the main stream and other streams.

    `work` returns one array: XLA would turn each of several outputs into a separate region, and wait for the
    first at once. Nested jits are inlined, because XLA has no stream for them. XLA refuses loops, collectives
    and `jax.new_ref` in a region.
    """
    place = functools.partial(
        compute_on, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device
    )
    return place(lambda: inlined(work))()  # pyright: ignore[reportCallIssue]


def inlined(work: Callable[[], jax.Array]) -> jax.Array:
    """Run `work()` with the body of each nested jit in place of the jit."""
    traced = jax.make_jaxpr(work)()
    (out,) = _evaluate(traced.jaxpr, traced.consts, ())
    return out


def _evaluate(jaxpr: core.Jaxpr, consts: Any, arguments: Any) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name = str(equation.source_info.name_stack)  # the op's scope, for profiles
        with jax.named_scope(name) if name else contextlib.nullcontext():
            if equation.primitive.name in ("jit", "pjit"):
                body = equation.params["jaxpr"]
                outputs = _evaluate(body.jaxpr, body.consts, inputs)
            else:
                outputs = equation.primitive.bind(
                    *inputs, **equation.primitive.get_bind_params(equation.params)
                )
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

"""The only place that knows XLA's streams and barriers.

XLA orders nothing that data does not order, merges products that share a weight, and copies a buffer that is
written while it may still be read. `together` gives it the order of a plan as data; `region` puts work on a
stream of its own, which changes nothing where there is one stream (CPU). Neither changes numbers.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.extend import core

# How a step's kernels reach the GPU, by name, as XLA flags.
# xla: as XLA does of itself. A slice fused into the kernel that reads it, one in every layer, breaks the
# step's CUDA graph. whole: one graph for the step. concurrent: one graph, whose kernels wait for data alone;
# in the others it is a chain, side streams or not. streams: no graph; kernels are launched one by one, those
# of side streams on their own.
GRAPHS: dict[str, dict[str, Any]] = {
    "xla": {},
    "whole": {"xla_gpu_enable_dynamic_slice_fusion": False},
    "concurrent": {
        "xla_gpu_enable_dynamic_slice_fusion": False,
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    },
    "streams": {"xla_gpu_enable_dynamic_slice_fusion": False, "xla_gpu_enable_command_buffer": ""},
}


# An exchange between devices of one process is a copy into the other's memory: the copy engines', where
# NCCL's would be a kernel.
COPIES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


def xla_options(graphs: str, *, side_streams: bool, collectives: bool) -> dict[str, Any]:
    """XLA flags that a GPU step needs, for `compile(compiler_options=...)`.

    By default XLA makes small collectives kernels of the computing streams and, scheduling collectives,
    issues the side streams late.

    Args:
      graphs: a name in `GRAPHS`.
      side_streams: a plan has some. collectives: nano-batches have, whose sums run beside others' products.
    """
    options = dict(GRAPHS[graphs])
    if collectives:
        options["xla_gpu_experimental_use_collective_kernels"] = ""
    if collectives and side_streams:
        options["xla_gpu_enable_latency_hiding_scheduler"] = False
    return options


def together[T](values: list[T]) -> list[T]:
    """The values unchanged, but what uses one of them comes after all of them are there."""
    return lax.optimization_barrier(values)


def zero_behind(values: list[jax.Array]) -> jax.Array:
    """0, int32, which is known once all the values are there.

    XLA issues a region as soon as it has issued what makes its inputs, but chooses itself which inputs to
    make first. What needs this number is issued behind every region that reads nothing but the values; it
    waits for them, not for the region.
    """
    bits = [_first_bits(value) & 1 for value in values if value.size]
    return (functools.reduce(jax.numpy.bitwise_or, bits) >> 1).astype(jax.numpy.int32)


def behind(values: list[jax.Array], small: Any) -> Any:
    """`small`, a tree of arrays, unchanged, but what reads its first one comes after all the values are
    there.

    Where `together` is forgotten: a graph whose kernels wait for data alone knows no barriers. It costs a
    kernel of that array's size.
    """
    leaves, tree = jax.tree.flatten(small)
    if not leaves or not values:
        return small
    kind = f"uint{8 * leaves[0].dtype.itemsize}"
    bits = lax.bitcast_convert_type(leaves[0], kind) | zero_behind(values).astype(kind)
    return jax.tree.unflatten(tree, [lax.bitcast_convert_type(bits, leaves[0].dtype), *leaves[1:]])


def _first_bits(value: jax.Array) -> jax.Array:
    """The first element's bits, uint32: of what is read here only XLA's order matters."""
    first = lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    width = 8 * value.dtype.itemsize
    return lax.bitcast_convert_type(first, f"uint{width}").astype(jax.numpy.uint32)


def region(stream: int, work: Callable[[], jax.Array]) -> jax.Array:
    """`work()` on stream 1 or higher, beside what the main stream and other streams do.

    It returns one array: XLA turns each of several outputs into a region of its own, and waits for the first
    at once. Nested jits are dissolved, for which XLA has no stream; it refuses loops, collectives and
    `jax.new_ref` in a region.
    """
    place = functools.partial(
        compute_on, compute_type=f"gpu_stream:{stream}", out_memory_spaces=jax.memory.Space.Device
    )
    return place(lambda: dissolved(work))()  # pyright: ignore[reportCallIssue]


def dissolved(work: Callable[[], jax.Array]) -> jax.Array:
    """`work()` without the jits inside it: each becomes its body."""
    traced = jax.make_jaxpr(work)()
    (out,) = _evaluate(traced.jaxpr, traced.consts, ())
    return out


def _evaluate(jaxpr: core.Jaxpr, consts: Any, arguments: Any) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        name = str(equation.source_info.name_stack)  # the op's, for profiles
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

"""One array of the weights, not made yet: which tensors fill it, how it is cut over devices, in which numbers
it is kept.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxflow.parallel.mesh import TP, sharded
from pallas_kernels.gemm.int4.reference import quantize_int4
from pallas_kernels.pointwise.quantize.reference import quantize_rows
from pallas_kernels.quantized import GROUP, Int4, Quantized

Init = Literal["matrix", "norm", "zero", "one"]
QUANTIZED = ("qkv", "out_proj", "up_gate", "down")  # the matrices that `quantization` is about
_QUANTIZE = {"fp8": quantize_rows, "int4": quantize_int4}
TENSOR_PARALLEL_AXIS = {
    "embed": 0,
    "lm_head": 0,
    "qkv": 0,
    "qkv_bias": 0,
    "up_gate": 0,
    "up_gate_bias": 0,
    "out_proj": 1,
    "down": 1,
    "expert_up_gate": 1,
    "expert_down": 2,
    "k_scale": 0,
    "v_scale": 0,
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint, by its Hugging Face name, and the view of the fused leaf that its numbers
    fill.
    """

    name: str
    shape: tuple[int, ...]  # as the checkpoint has it
    block: tuple[int, ...]  # the same numbers, reshaped to broadcast over `view(leaf)`
    view: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the weights, not made yet."""

    key: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    init: Init  # what dummy weights have there
    rows: np.ndarray | None = (
        None  # of the same leaf made for one device: which row each row is; None: the same rows
    )
    quantization: str | None = None  # fp8 or int4: what stands in its place is `Quantized` or `Int4`
    filled: tuple[int, ...] | None = None  # the shape of what is not padding; behind it are zeros; None: all
    scale: "Leaf | None" = None  # fp8: of the scales of its rows, as a checkpoint of e4m3 has them

    @property
    def spec(self) -> PartitionSpec:
        return _spec(self.key)

    @property
    def specs(self) -> Any:
        """The `PartitionSpec` of each array of what stands in the leaf's place."""
        return _specs(self.key, self.quantization)

    def struct(self, dtype: Any) -> Any:
        """The shape and dtype of what stands in the leaf's place."""
        struct: Any = jax.ShapeDtypeStruct
        if self.quantization == "fp8":
            return Quantized(struct(self.shape, jnp.float8_e4m3fn), struct(self.shape[:1], jnp.float32))
        if self.quantization == "int4":
            n, k = self.shape
            factor = struct((n, k // GROUP), jnp.bfloat16)
            return Int4(struct((n, k // 2), jnp.uint8), factor, factor)
        return struct(self.shape, self.dtype(dtype))

    def dtype(self, model: Any) -> Any:
        """Of the array, where the model's is `model`: scales are float32."""
        return jnp.float32 if self.key.endswith("_scale") else model


def _spec(key: str) -> PartitionSpec:
    axis = TENSOR_PARALLEL_AXIS.get(key)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TP)


def _specs(key: str, quantization: str | None) -> Any:
    """Scales are cut with what they belong to: a row's where rows are, a group's wherever its matrix is."""
    spec: Any = _spec(key)
    if quantization == "fp8":
        return Quantized(spec, PartitionSpec(*spec[:1]))  # pyright: ignore[reportArgumentType]
    return Int4(spec, spec, spec) if quantization == "int4" else spec


def assemble(leaf: Leaf, read: Callable[[str], np.ndarray], dtype: Any) -> np.ndarray:
    """The array of one leaf in host memory, made of the tensors that `read` returns by name, each dropped
    before the next is read.
    """
    out = np.zeros(leaf.shape, dtype)
    for piece in leaf.pieces:
        piece.view(out)[...] = read(piece.name).reshape(piece.block)
    return out


def quantize_leaf(leaf: Leaf, array: jax.Array, mesh: Mesh | None) -> Quantized | Int4:
    """The wide array of a leaf in the leaf's own numbers, quantised on the devices that hold it."""
    assert leaf.quantization is not None
    return _quantize_placed(leaf.key, leaf.quantization, mesh)(array)


@functools.cache
def _quantize_placed(key: str, quantization: str, mesh: Mesh | None) -> Callable[[jax.Array], Any]:
    placed = (
        None if mesh is None else jax.tree.map(functools.partial(sharded, mesh), _specs(key, quantization))
    )
    return jax.jit(_QUANTIZE[quantization], out_shardings=placed)


def draw(seeds: jax.Array, leaf: Leaf, norm: float, dtype: Any) -> Any:
    """The leaf of dummy weights in a model of `dtype`. seeds: uint32 [2]; norm: what scales of norms are."""
    array = _drawn(seeds, leaf, norm).astype(leaf.dtype(dtype))
    return array if leaf.quantization is None else _QUANTIZE[leaf.quantization](array)


def _drawn(seeds: jax.Array, leaf: Leaf, norm: float) -> jax.Array:
    if leaf.init != "matrix":
        return jnp.full(leaf.shape, {"norm": norm, "zero": 0.0, "one": 1.0}[leaf.init])
    filled = leaf.filled or leaf.shape
    rows = (
        jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, 0)
        if leaf.rows is None
        else jnp.asarray(leaf.rows, jnp.uint32)[:, None]
    )
    index = rows
    for axis, size in enumerate(filled[1:], start=1):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    # A hash of each element's place: unlike jax.random it compiles in no time, and a shard needs nothing of
    # another.
    bits = _scramble(_scramble(index + seeds[0]) ^ seeds[1])
    total = sum(
        ((bits >> shift) & 255).astype(jnp.float32) for shift in (0, 8, 16, 24)
    )  # of 4 bytes: about normal
    drawn = (total - 510) * (filled[-1] * 4 * (256**2 - 1) / 12) ** -0.5
    for axis in (axis for axis, size in enumerate(filled) if size < leaf.shape[axis]):
        drawn = jnp.where(jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) < filled[axis], drawn, 0)
    return drawn


def _scramble(x: jax.Array) -> jax.Array:
    """A one-to-one map of 32 bits in which every bit of the input moves every bit of the output."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

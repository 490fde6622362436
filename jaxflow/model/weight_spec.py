"""One array of the weights before it is made: its tensors, its sharding and its quantization."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxflow.parallel.mesh import TP, sharded
from pallas_kernels.gemm.block_fp8_format import quantize_block_fp8
from pallas_kernels.gemm.grouped.int4_format import join_factors, quantize_experts
from pallas_kernels.gemm.grouped.mxfp4_blocks import to_blocks
from pallas_kernels.gemm.grouped.mxfp4_format import quantize_mxfp4
from pallas_kernels.gemm.int4.reference import nearest_levels, nearest_to_zero_point, pack, quantize_int4
from pallas_kernels.pointwise.quantize.reference import quantize_rows
from pallas_kernels.quantized import (
    BLOCK,
    BLOCK_ROWS,
    GROUP,
    MXFP4_GROUP,
    BlockFp8,
    ExpertInt4,
    Int4,
    Mxfp4,
    Mxfp4Blocks,
    Quantized,
)

Init = Literal["matrix", "norm", "zero", "one"]
QUANTIZED = ("qkv", "out_proj", "up_gate", "down")  # the matrices that fp8 and int4 affect
QUANTIZED_EXPERTS = ("expert_up_gate", "expert_down")  # the matrices of experts, which all formats affect
_ALL = (*QUANTIZED, *QUANTIZED_EXPERTS)
FP8_PER_BLOCK = "fp8_per_block"
INT4_ZERO_POINT = "int4_zero_point"  # int4 with zero points, as in checkpoints of AWQ and GPTQ
MXFP4_IN_BLOCKS = "mxfp4 in blocks"  # the format of an `mxfp4` leaf in the order of tensor cores
INT4 = ("int4", INT4_ZERO_POINT)
AFFECTED = {
    "fp8": _ALL,
    "int4": _ALL,
    INT4_ZERO_POINT: _ALL,
    "mxfp4": QUANTIZED_EXPERTS,
    FP8_PER_BLOCK: QUANTIZED_EXPERTS,
}
TENSOR_PARALLEL_AXIS = {
    "embed": 0,
    "layer_embed": 0,
    "lm_head": 0,
    "qkv": 0,
    "qkv_bias": 0,
    "up_gate": 0,
    "up_gate_bias": 0,
    "out_proj": 1,
    "down": 1,
    "expert_up_gate": 1,
    "expert_up_gate_bias": 1,
    "expert_down": 2,
    "shared_up_gate": 0,
    "shared_down": 1,
    "sink_logits": 0,
    "query_up": 0,
    "key_up": 0,
    "value_up": 0,
    "k_scale": 0,
    "v_scale": 0,
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of a checkpoint, by its Hugging Face name, and the view of the fused leaf that it fills."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    block: tuple[int, ...]  # the same numbers, reshaped to broadcast over `view(leaf)`
    view: Callable[[np.ndarray], np.ndarray]
    order: np.ndarray | None = None  # the rows of the tensor that the view holds, in order; None: all rows


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the weights, before it is made.

    Attributes:
      init: the values of dummy weights.
      norm: what a norm of dummy weights scales by.
      rows: the index of each row in the leaf of one device; None: the same rows.
      quantization: `fp8` makes a `Quantized` of the leaf, `int4` an `Int4` or for experts an `ExpertInt4`,
        `int4_zero_point` the same with zero points, `mxfp4` an `Mxfp4`, `fp8_per_block` a `BlockFp8`.
      gate_block: of a `BlockFp8`: gates and ups alternate in blocks of so many rows; None: no gates.
      filled: the shape without padding by zeros; None: no padding.
      scale: the scales of the rows or the blocks in an e4m3 checkpoint. Or the scales and the zero points of
        a checkpoint in 4 bits, by the names of the weights.
      whole_experts: the first axis counts experts, and each device holds some of them whole.
      in_blocks: `mxfp4` makes an `Mxfp4Blocks` instead.
      stored: the bytes and the scales of an `Mxfp4`, by the names of a checkpoint in MXFP4.
      over_ranks: the axes of these devices, of data-parallel ranks; None for one rank.
    """

    key: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    init: Init
    rows: np.ndarray | None = None
    quantization: str | None = None
    filled: tuple[int, ...] | None = None
    scale: "Leaf | None" = None
    whole_experts: bool = False
    in_blocks: bool = False
    stored: "tuple[Leaf, Leaf] | None" = None
    over_ranks: str | tuple[str, str] | None = None
    gate_block: int | None = None
    norm: float = 1.0

    @property
    def spec(self) -> PartitionSpec:
        """Return the `PartitionSpec` of the unquantized array."""
        if self.whole_experts and self.over_ranks:
            return PartitionSpec(self.over_ranks)
        axis = 0 if self.whole_experts else TENSOR_PARALLEL_AXIS.get(self.key)
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, TP)

    @property
    def specs(self) -> Any:
        """Return the `PartitionSpec` of each array that stands in the leaf's place."""
        return _specs(self.spec, self.format, len(self.shape))

    @property
    def format(self) -> str | None:
        """Return the name of the format of the arrays: `quantization`, or `MXFP4_IN_BLOCKS`."""
        return MXFP4_IN_BLOCKS if self.in_blocks else self.quantization

    def struct(self, dtype: Any) -> Any:
        """Return the shape and dtype of each array that stands in the leaf's place."""
        struct: Any = jax.ShapeDtypeStruct
        if self.quantization == "fp8":
            return Quantized(struct(self.shape, jnp.float8_e4m3fn), struct(self.shape[:-1], jnp.float32))
        if self.quantization == FP8_PER_BLOCK:
            *experts, n, k = self.shape
            scale = struct((*experts, n // BLOCK_ROWS, k // BLOCK), jnp.float32)
            return BlockFp8(struct(self.shape, jnp.float8_e4m3fn), scale)
        if self.quantization in INT4:
            *experts, n, k = self.shape
            packed, groups = struct((*experts, n, k // 2), jnp.uint8), k // GROUP
            zero = jnp.bfloat16 if self.quantization == "int4" else jnp.int16
            if experts:
                return ExpertInt4(packed, struct((*experts, groups, n, 2), zero))
            return Int4(packed, struct((n, groups), jnp.bfloat16), struct((n, groups), zero))
        if self.quantization == "mxfp4":
            *rows, k = self.shape
            packed = Mxfp4(*(struct((*rows, k // per), jnp.uint8) for per in (2, MXFP4_GROUP)))
            return jax.eval_shape(to_blocks, packed) if self.in_blocks else packed
        return struct(self.shape, self.dtype(dtype))

    def dtype(self, model: Any) -> Any:
        """Return the array's dtype in a model of dtype `model`: scales and the bias of scores are float32."""
        return jnp.float32 if self.key.endswith("_scale") or self.key == "score_bias" else model


def _specs(spec: Any, quantization: str | None, rank: int) -> Any:
    """Return the specs of a leaf's arrays, of `rank` axes.

    Scales are sharded with the rows or groups that they scale.
    """
    if quantization == "fp8":
        return Quantized(spec, PartitionSpec(*spec[: rank - 1]))  # pyright: ignore[reportArgumentType]
    if quantization == "mxfp4":
        return Mxfp4(spec, spec)
    if quantization == MXFP4_IN_BLOCKS:
        return Mxfp4Blocks(spec)
    if quantization == FP8_PER_BLOCK:
        return BlockFp8(spec, spec)
    if quantization in INT4 and rank == 3:
        experts, rows, columns = (*spec, *[None] * (rank - len(spec)))
        return ExpertInt4(spec, PartitionSpec(experts, columns, rows))  # pyright: ignore[reportArgumentType]
    return Int4(spec, spec, spec) if quantization in INT4 else spec


def _quantize(quantization: str, rank: int, gate_block: int | None) -> Callable[[jax.Array], Any]:
    """Return the function that makes the arrays of a format of a matrix, or
    of the matrices of all experts.
    """
    if quantization in INT4:
        nearest = nearest_levels if quantization == "int4" else nearest_to_zero_point
        return functools.partial(quantize_int4 if rank == 2 else quantize_experts, nearest=nearest)
    blocks = functools.partial(quantize_block_fp8, gate_block=gate_block)
    in_blocks = lambda array: to_blocks(quantize_mxfp4(array))
    mxfp4 = {"mxfp4": quantize_mxfp4, MXFP4_IN_BLOCKS: in_blocks}
    return ({"fp8": quantize_rows, FP8_PER_BLOCK: blocks} | mxfp4)[quantization]


def assemble(
    leaf: Leaf,
    read: Callable[[str], np.ndarray],
    dtype: Any,
    memory: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty,
) -> np.ndarray:
    """Return the array of one leaf in host memory, from the tensors that `read` returns by name.

    Each tensor is dropped before the next one is read. memory: returns an array of a shape and
    dtype, with any numbers.
    """
    out = memory(leaf.shape, dtype)
    if sum(piece.view(out).size for piece in leaf.pieces) < out.size:  # no number belongs to two pieces
        out[...] = 0
    for piece in leaf.pieces:
        piece.view(out)[...] = _block(piece, read)
    return out


def _block(piece: Piece, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """Return the numbers of a piece as they broadcast over its view."""
    tensor = read(piece.name)
    return (tensor if piece.order is None else tensor[piece.order]).reshape(piece.block)


def assemble_shard(
    leaf: Leaf, read: Callable[[str], np.ndarray], dtype: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """Return `assemble(leaf, read, dtype)[index]`, and touch only the parts of the tensors that lie in it.

    A tensor without a part in the shard is not read.

    index: one slice for each axis, of which at most one is cut: a shard.
    """
    cuts = [cut.indices(size)[:2] for cut, size in zip(index, leaf.shape, strict=True)]
    axis = next((a for a, cut in enumerate(cuts) if cut != (0, leaf.shape[a])), None)
    if axis is None:
        return assemble(leaf, read, dtype)
    out = np.zeros(leaf.shape, dtype)  # the system gives memory to the written pages only
    stride, begin = out.strides[axis], out.ctypes.data
    low, high = cuts[axis]

    def extent(view: np.ndarray) -> tuple[int, int, list[int]]:
        """Return the first and the last index of a view on the cut axis, and
        the view's axes that move there.
        """
        moving = [a for a, step in enumerate(view.strides) if stride <= step < stride * leaf.shape[axis]]
        first = (view.ctypes.data - begin) // stride % leaf.shape[axis]
        return first, first + sum((view.shape[a] - 1) * view.strides[a] // stride for a in moving), moving

    def fill(view: np.ndarray, block: np.ndarray) -> None:
        """Copy the part of a block that lies in the shard, by halves."""
        first, last, moving = extent(view)
        if last < low or first >= high:
            return
        if low <= first and last < high:
            view[...] = block
            return
        a = max((a for a in moving if view.shape[a] > 1), key=lambda a: view.strides[a])
        half = view.shape[a] // 2
        for part in (slice(None, half), slice(half, None)):
            where = (*[slice(None)] * a, part)
            fill(view[where], block if block.shape[a] == 1 else block[where])

    for piece in leaf.pieces:
        view = piece.view(out)
        first, last, _ = extent(view)
        if last >= low and first < high:
            fill(view, _block(piece, read))
    return out[index]


def shard_maker(
    leaf: Leaf,
    read: Callable[[str], np.ndarray],
    dtype: Any,
    read_experts: Callable[[str, range], np.ndarray] | None = None,
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """Return `assemble_shard` as a function of the index.

    Devices with the same shard share one array, so a host reads each part of a tensor once.
    read_experts: reads some experts of a tensor that holds all; None where `read`
      does no work for unused parts.
    """

    def make(index: tuple[slice, ...]) -> np.ndarray:
        if not leaf.whole_experts or read_experts is None:
            return assemble_shard(leaf, read, dtype, index)
        own = range(*index[0].indices(leaf.shape[0]))
        return assemble_shard(leaf, lambda name, some=read_experts: some(name, own), dtype, index)

    return functools.cache(make)


def quantize_leaf(
    leaf: Leaf, array: jax.Array, mesh: Mesh | None
) -> Quantized | Int4 | Mxfp4 | Mxfp4Blocks | ExpertInt4 | BlockFp8:
    """Return a leaf's unquantized array in quantized form, computed on the devices that hold it."""
    assert leaf.format is not None
    return _quantize_placed(leaf.spec, leaf.format, len(leaf.shape), leaf.gate_block, mesh)(array)


def pack_leaf(
    leaf: Leaf, codes: jax.Array, scale: jax.Array, zero_point: jax.Array, mesh: Mesh | None
) -> Int4 | ExpertInt4:
    """Return a leaf in 4 bits from the parts of a checkpoint, on the devices that hold them.

    codes: uint8, in the shape of the leaf, from 0 to 15. scale: bfloat16, zero_point: int16, one for each 64
    columns.
    """
    assert leaf.quantization == INT4_ZERO_POINT
    return _pack_placed(leaf.spec, len(leaf.shape), mesh)(codes, scale, zero_point)


def blocks_of_leaf(leaf: Leaf, experts: Mxfp4, mesh: Mesh | None) -> Mxfp4 | Mxfp4Blocks:
    """Return experts as the leaf has them, on the devices that hold them."""
    return _blocks_placed(leaf.spec, mesh)(experts) if leaf.in_blocks else experts


@functools.cache
def _blocks_placed(spec: PartitionSpec, mesh: Mesh | None) -> Callable[[Mxfp4], Mxfp4Blocks]:
    placed = None if mesh is None else Mxfp4Blocks(sharded(mesh, spec))  # pyright: ignore[reportArgumentType]
    return jax.jit(to_blocks, out_shardings=placed)


@functools.cache
def _pack_placed(spec: PartitionSpec, rank: int, mesh: Mesh | None) -> Callable[..., Any]:
    specs = _specs(spec, INT4_ZERO_POINT, rank)
    placed = None if mesh is None else jax.tree.map(functools.partial(sharded, mesh), specs)
    return jax.jit(_packed, out_shardings=placed)


def _packed(codes: jax.Array, scale: jax.Array, zero_point: jax.Array) -> Int4 | ExpertInt4:
    *rows, columns = codes.shape
    packed = pack(codes.reshape(*scale.shape, GROUP)).reshape(*rows, columns // 2)
    if len(rows) == 1:
        return Int4(packed, scale, zero_point)
    return ExpertInt4(packed, join_factors(scale, zero_point))


@functools.cache
def _quantize_placed(
    spec: PartitionSpec, quantization: str, rank: int, gate_block: int | None, mesh: Mesh | None
) -> Callable[[jax.Array], Any]:
    specs = _specs(spec, quantization, rank)
    placed = None if mesh is None else jax.tree.map(functools.partial(sharded, mesh), specs)
    return jax.jit(_quantize(quantization, rank, gate_block), out_shardings=placed)


def draw(seeds: jax.Array, leaf: Leaf, norm_offset: float, dtype: Any) -> Any:
    """Return the leaf of dummy weights in a model of `dtype`.

    seeds: uint32 [2]. norm_offset: what the model adds to the weights of its norms.
    """
    array = _drawn(seeds, leaf, norm_offset).astype(leaf.dtype(dtype))
    if leaf.format is None:
        return array
    return _quantize(leaf.format, len(leaf.shape), leaf.gate_block)(array)


def _drawn(seeds: jax.Array, leaf: Leaf, norm_offset: float) -> jax.Array:
    if leaf.init != "matrix":
        value = {"norm": leaf.norm - norm_offset, "zero": 0.0, "one": 1.0}[leaf.init]
        return jnp.full(leaf.shape, value)
    filled = leaf.filled or leaf.shape
    rows = (
        jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, 0)
        if leaf.rows is None
        else jnp.asarray(leaf.rows, jnp.uint32)[:, None]
    )
    index = rows
    for axis, size in enumerate(filled[1:], start=1):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    # A hash of each element's position: it compiles faster than jax.random, and shards need no communication.
    bits = _scramble(_scramble(index + seeds[0]) ^ seeds[1])
    # The sum of 4 bytes is nearly normal.
    total = sum(((bits >> shift) & 255).astype(jnp.float32) for shift in (0, 8, 16, 24))
    drawn = (total - 510) * (filled[-1] * 4 * (256**2 - 1) / 12) ** -0.5
    for axis in (axis for axis, size in enumerate(filled) if size < leaf.shape[axis]):
        drawn = jnp.where(jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) < filled[axis], drawn, 0)
    return drawn


def _scramble(x: jax.Array) -> jax.Array:
    """Return a one-to-one map of 32 bits where every input bit affects every output bit."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

"""The weights that `pallas_kernels.tune` measures: those of the models in tables/shapes.json, or as they are
named on its command line.

The file has, by model and tensor parallelism, each op's [K, N], with the block of its gates; and under a
dtype what is otherwise in it.
"""

import re
from collections.abc import Iterable

from pallas_kernels.gemm.api import activations_of
from pallas_kernels.gemm.model_shapes import known_shapes
from pallas_kernels.gemm.tuned_table import Shape
from pallas_kernels.quantized import BLOCK


def shapes_of(models: Iterable[str], weights: str) -> list[Shape]:
    """The distinct shapes of the named models of tables/shapes.json, of all if none is named. Raises:
    ValueError for an unknown name.
    """
    known = known_shapes(weights)
    names = list(models) or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--models {unknown[0]!r}: {', '.join(known)}")
    found = (
        Shape(n, k, weights, gates[0] if gates else 0, scales_into(weights, op == "down"))
        for name in names
        for op, (k, n, *gates) in known[name].items()
        if op != "logits"  # its result is float32, for which no rule is asked
    )
    return list(dict.fromkeys(found))


def scales_into(weights: str, blocks: bool) -> str:
    """How a model scales the input of such weights (`Shape.scales`); blocks: its producer sees a tile of a
    row only, as that of `down`.
    """
    return "" if activations_of(Shape(0, 0, weights)) == "bfloat16" else "blocks" if blocks else "rows"


def parse_shape(text: str, weights: str) -> Shape:
    """`4096x6144`, `4096x28672g64` or `14336x4096b`: K x N, the block of gates, a scale for every 128 columns
    of x. Raises: ValueError.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:g([1-9]\d*))?(b?)", text)
    if not found or (found[4] and not scales_into(weights, True)):
        raise ValueError(
            f"--shapes {text!r}: KxN, g with a block behind it where act(gate) · up follows, b in "
            f"e4m3 for scales of blocks"
        )
    if found[3] and int(found[2]) % (2 * int(found[3])):
        raise ValueError(f"--shapes {text!r}: N in whole pairs of blocks of {found[3]} gates and as many ups")
    if found[4] and int(found[1]) % BLOCK:
        raise ValueError(f"--shapes {text!r}: K in whole blocks of {BLOCK} columns, each with a scale")
    return Shape(
        int(found[2]), int(found[1]), weights, int(found[3] or 0), scales_into(weights, bool(found[4]))
    )


def format_shape(shape: Shape) -> str:
    """A shape as `parse_shape` reads it."""
    return (
        f"{shape.k}x{shape.n}"
        + (f"g{shape.gate_block}" if shape.gate_block else "")
        + "b" * (shape.scales == "blocks")
    )

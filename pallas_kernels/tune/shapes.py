"""The weights that `pallas_kernels.tune` measures: models of tables/shapes.json, or shapes of its command
line.
"""

import re
from collections.abc import Iterable

from pallas_kernels.gemm.api import activations_of
from pallas_kernels.gemm.model_shapes import known_shapes
from pallas_kernels.gemm.tuned_table import Shape
from pallas_kernels.quantized import BLOCK


def shapes_of(models: Iterable[str], weights: str) -> list[Shape]:
    """Return the distinct shapes of the named models of tables/shapes.json, or of all models for no name.

    Raises: ValueError for an unknown name.
    """
    known = known_shapes(weights)
    names = list(models) or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--models {unknown[0]!r}: accepted are {', '.join(known)}")
    found = (
        Shape(n, k, weights, gates[0] if gates else 0, scales_into(weights, op == "down"))
        for name in names
        for op, (k, n, *gates) in known[name].items()
        if op != "logits"  # the result is float32, which has no rule
    )
    return list(dict.fromkeys(found))


def scales_into(weights: str, blocks: bool) -> str:
    """Return the form of the scales of a weight's input (`Shape.scales`).

    blocks: the producer computes only a tile of a row, as for `down`.
    """
    return "" if activations_of(Shape(0, 0, weights)) == "bfloat16" else "blocks" if blocks else "rows"


def parse_shape(text: str, weights: str) -> Shape:
    """Return the shape of `4096x6144`, `4096x28672g64` or `14336x4096b`.

    The text is K x N, the block of gates, and b for one scale for every 128 columns of x. Raises: ValueError.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:g([1-9]\d*))?(b?)", text)
    if not found or (found[4] and not scales_into(weights, True)):
        raise ValueError(
            f"--shapes {text!r}: accepted is KxN, then g and a block for act(gate) · up, then b in e4m3 "
            "for scales of blocks"
        )
    if found[3] and int(found[2]) % (2 * int(found[3])):
        raise ValueError(
            f"--shapes {text!r}: accepted is N in full pairs of blocks of {found[3]} gates and ups"
        )
    if found[4] and int(found[1]) % BLOCK:
        raise ValueError(f"--shapes {text!r}: accepted is K in full blocks of {BLOCK} columns")
    return Shape(
        int(found[2]), int(found[1]), weights, int(found[3] or 0), scales_into(weights, bool(found[4]))
    )


def format_shape(shape: Shape) -> str:
    """Return a shape as `parse_shape` reads it."""
    return (
        f"{shape.k}x{shape.n}"
        + (f"g{shape.gate_block}" if shape.gate_block else "")
        + "b" * (shape.scales == "blocks")
    )

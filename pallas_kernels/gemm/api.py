"""The op `gemm` of a kernel set: one callable that picks a GEMM kernel by dtype and shape at tracing time.

`eligible_kernels` lists the kernels that support a product. The tuned table (`tuned_table`) names the
fastest of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cards import Card, card_of, default_card
from pallas_kernels.gemm import reference
from pallas_kernels.gemm.flat.tiles import FlatTile
from pallas_kernels.gemm.tuned_table import Choice, Shape, Table
from pallas_kernels.quantized import BlockFp8, Int4, Quantized

E4M3, E4M3_BLOCKS = "float8_e4m3fn", "float8_e4m3fn_blocks"  # `Shape.weights` of `Quantized` and `BlockFp8`
_WITH_PDL = ("flat", "fp8_flat")  # kernels with programmatic dependent launch
_ROWS = tuple(2**i for i in range(14))  # numbers of rows in a description of the choices


@dataclasses.dataclass(frozen=True)
class Product:
    """The properties of a product that decide which kernels support it.

    activations: dtype of x: bfloat16, float32, or float8_e4m3fn for quantized x. out_dtype: float8_e4m3fn
    for a quantized result. bounded: the product may not occupy all SMs. residual: the product adds a
    residual.
    """

    rows: int
    shape: Shape
    activations: str
    out_dtype: str = "bfloat16"
    bounded: bool = False
    residual: bool = False


def shape_of(w, gate_block: int | None = None, scales: str = "") -> Shape:
    """Return the shape of a weight [N, K]: plain, `Quantized`, `BlockFp8` or `Int4`. scales: the form of its
    input's scales (`scales_of`).
    """
    n, k = w.shape
    if isinstance(w, BlockFp8 | Int4):
        return Shape(n, k, E4M3_BLOCKS if isinstance(w, BlockFp8) else "int4", gate_block or 0, scales)
    weights = jnp.dtype((w.values if isinstance(w, Quantized) else w).dtype).name
    return Shape(n, k, weights, gate_block or 0, scales)


def scales_of(x) -> str:
    """Return the form of an input's scales, as in `Shape.scales`."""
    if not isinstance(x, Quantized):
        return ""
    return "blocks" if x.scale.ndim == 2 else "rows"


def product(
    x, w, *, gate_block: int | None, quantize: bool, out_dtype, sms: int | None, residual=None
) -> Product:
    """Return the product that the arguments of `gemm` describe."""
    activations = jnp.dtype((x.values if isinstance(x, Quantized) else x).dtype).name
    out = (
        "float8_e4m3fn"
        if quantize
        else jnp.dtype(out_dtype or ("bfloat16" if isinstance(x, Quantized) else activations)).name
    )
    return Product(
        x.shape[0],
        shape_of(w, gate_block, scales_of(x)),
        activations,
        out,
        sms is not None,
        residual is not None,
    )


def activations_of(shape: Shape) -> str:
    """Return the dtype of the activations that a bfloat16 model multiplies with a weight."""
    return "float8_e4m3fn" if shape.weights in (E4M3, E4M3_BLOCKS) else "bfloat16"


def product_of(shape: Shape, rows: int, out_dtype: str | None = None) -> Product:
    """Return the product of a weight in a bfloat16 model.

    out_dtype: dtype of the result; None: bfloat16, or float8_e4m3fn for e4m3 products with gates, whose
    result `down` reads.
    """
    activations = activations_of(shape)
    return Product(rows, shape, activations, out_dtype or (activations if shape.gate_block else "bfloat16"))


def eligible_kernels(p: Product, card: Card | None = None) -> tuple[str, ...]:
    """Return the kernels that support a product on Hopper, the likely fastest first.

    XLA supports every product, but always occupies all SMs. card: the constants of the device; None: the
    default card.
    """
    n, k, gates = p.shape.n, p.shape.k, p.shape.gate_block
    small, kind = p.rows <= 64 and gates in (0, 64), (p.activations, p.shape.weights)
    found: list[str] = []
    if kind in ((E4M3, E4M3), (E4M3, E4M3_BLOCKS)):
        columns = n // 2 if gates else n
        quantizes = p.out_dtype == E4M3 and columns % 128 == 0 and not p.residual
        widths = (0, 64) if p.shape.weights == E4M3_BLOCKS else (0, 16, 32, 64)
        if (quantizes or p.out_dtype == "bfloat16") and n % 128 == k % 128 == 0 and gates in widths:
            found += ["fp8_flat"] * small + ["fp8"]
    elif p.activations == "bfloat16" and p.out_dtype in ("bfloat16", "float32"):
        if small and n % (128 if gates else 8) == 0:
            found += ["int4"] * (p.shape.weights == "int4" and k % 512 == 0)
            found += ["flat"] * (p.shape.weights == "bfloat16" and k % 64 == 0)
        if p.shape.weights == "bfloat16":
            divides = n % (2 * gates or 64) == 0 and n % 64 == k % 64 == 0 and gates in (0, 16, 32, 64)
            ours = ["dense"] * divides + ["fma"] * (p.rows <= 4 and not p.bounded)
            if p.bounded and (found or ours):
                return tuple(found + ours)
            return (
                (*found, *ours, "xla")
                if divides and _gate_pays(p, card or default_card())
                else (*found, "xla", *ours)
            )
    return tuple(found) if p.bounded and found else (*found, "xla")


def _gate_pays(p: Product, card: Card) -> bool:
    """Return whether XLA's pass over memory for the gate takes longer than XLA's faster product saves."""
    first, last = card.gate_kernel_rows
    return p.shape.gate_block > 0 and first <= p.rows <= last


def kernels_by_rows(choose: Callable[[int], str], ends: Iterable[int] = ()) -> str:
    """Return the kernel for each number of rows as text, for example "flat, from 65 rows xla".

    Limits of kernels are powers of two. ends: other numbers of rows at which the choice may change.
    """
    steps, last, before = [], "", 0
    for rows in sorted({*_ROWS, *ends}):
        name = choose(rows)
        if name != last:
            steps.append(f"from {before + 1} rows {name}" if last else name)
        last, before = name, rows
    return ", ".join(steps)


@dataclasses.dataclass(frozen=True)
class HopperGemm:
    """The op `gemm` on Hopper: the table's kernel for the shape, or the first eligible kernel.

    pdl: start kernels of small batches before the previous kernel has ended.
    """

    table: Table
    pdl: bool = False

    def choose(self, p: Product) -> Choice:
        """Return the kernel of a product.

        The table covers results inside a layer, so float32 results (the output head) have no rule. A
        table's tile is tuned for all SMs: next to another kernel the free SMs may be fewer than the tile's
        cluster.
        """
        can = eligible_kernels(p, card_of(self.table.device))
        choice = None if p.out_dtype == "float32" else self.table.choose(p.shape, p.rows)
        if not choice or choice.kernel not in can:
            return Choice(p.rows, can[0])
        return dataclasses.replace(choice, tile=()) if p.bounded else choice

    def describe(self, p: Product) -> str:
        """Return the kernels of a weight by number of rows, for any number of rows of `p`."""
        # Not only powers of two: `tune --rows` accepts any number of rows.
        measured = {choice.rows for rule in self.table.rules for choice in rule.choices}
        return kernels_by_rows(lambda rows: self.choose(dataclasses.replace(p, rows=rows)).kernel, measured)

    def __call__(
        self,
        x: jax.Array | Quantized,
        w: jax.Array | Quantized | Int4 | BlockFp8,
        bias: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
        activation: str | None = None,
        gate_block: int | None = None,
        quantize: bool = False,
        out_dtype=None,
        sms: int | None = None,
    ) -> jax.Array | Quantized:
        p = product(
            x, w, gate_block=gate_block, quantize=quantize, out_dtype=out_dtype, sms=sms, residual=residual
        )
        settings: dict[str, Any] = {"residual": residual, "activation": activation, "gate_block": gate_block}
        settings |= {"quantize": True} if quantize else {}
        settings |= {"out_dtype": jnp.dtype(out_dtype)} if out_dtype is not None else {}
        settings |= {"sms": sms} if sms is not None else {}
        choice = self.choose(p)
        card = card_of(self.table.device)
        if bias is not None and choice.kernel == "xla" and p.rows <= card.flat_bias_max_rows:
            choice = Choice(p.rows, "flat") if "flat" in eligible_kernels(p, card) else choice
        settings |= {"pdl": True} if self.pdl and choice.kernel in _WITH_PDL else {}
        return kernel(choice)(x, w, bias, **settings)


@functools.cache
def kernel(choice: Choice) -> Callable:
    """Return the function of a choice, with its tile bound. Mosaic GPU is imported only here, because its
    import takes a second.

    Raises: ValueError for an unknown kernel name, for example from an old table.
    """
    if choice.kernel == "xla":
        return reference.gemm
    if choice.kernel == "fma":
        from pallas_kernels.gemm.flat.fma import fma_gemm

        return fma_gemm
    if choice.kernel == "flat":
        from pallas_kernels.gemm.flat.api import flat_gemm

        return _with_tile(flat_gemm, choice)
    if choice.kernel == "int4":
        from pallas_kernels.gemm.int4.api import int4_gemm

        return _with_tile(int4_gemm, choice)
    if choice.kernel == "dense":
        from pallas_kernels.gemm.dense.api import dense_gemm

        return dense_gemm
    if choice.kernel == "fp8":
        from pallas_kernels.gemm.fp8.api import fp8_gemm

        return fp8_gemm
    if choice.kernel == "fp8_flat":
        from pallas_kernels.gemm.fp8.flat import fp8_flat_gemm

        return fp8_flat_gemm
    raise ValueError(
        f"kernel={choice.kernel!r} in a tuned table: accepted are fma, flat, dense, fp8, fp8_flat, int4 or "
        "xla"
    )


def _with_tile(function: Callable, choice: Choice) -> Callable:
    """Bind the tile of a choice. It is made for the most rows of the choice; fewer rows leave part of the
    ring unused.
    """
    return functools.partial(function, tile=FlatTile(**dict(choice.tile))) if choice.tile else function

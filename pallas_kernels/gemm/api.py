"""The op `gemm` of a kernel set: one callable for every dense product, which picks a kernel by dtype and
shape when it is traced.

Which kernels take a product is a matter of their limits (`eligible_kernels`); which of those is fastest was measured
(`table`).
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
from pallas_kernels.quantized import Int4, Quantized

_WITH_PDL = ("flat", "fp8_flat")  # can begin before the kernel before them has ended
_ROWS = tuple(2**i for i in range(14))  # at which a choice is told


@dataclasses.dataclass(frozen=True)
class Product:
    """What decides which kernels take a product: its rows, its weight, and the form of its operands and
    result.
    """

    rows: int
    shape: Shape
    activations: str  # bfloat16, float32, or float8_e4m3fn where x is quantised
    out_dtype: str = "bfloat16"  # float8_e4m3fn: quantised behind the product
    bounded: bool = False  # it may not have the whole GPU
    residual: bool = False


def shape_of(w, gate_block: int | None = None, scales: str = "") -> Shape:
    """The shape of a weight [N, K]: plain, `Quantized` or `Int4`. scales: how its input is scaled
    (`scales_of`).
    """
    n, k = w.shape
    weights = (
        "int4" if isinstance(w, Int4) else jnp.dtype((w.values if isinstance(w, Quantized) else w).dtype).name
    )
    return Shape(n, k, weights, gate_block or 0, scales)


def scales_of(x) -> str:
    """How an input is scaled, as `Shape.scales` says it."""
    if not isinstance(x, Quantized):
        return ""
    return "blocks" if x.scale.ndim == 2 else "rows"


def product(
    x, w, *, gate_block: int | None, quantize: bool, out_dtype, sms: int | None, residual=None
) -> Product:
    """The product of `gemm`'s arguments."""
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
    """The dtype that a weight is multiplied with in a bfloat16 model."""
    return "float8_e4m3fn" if shape.weights == "float8_e4m3fn" else "bfloat16"


def product_of(shape: Shape, rows: int, out_dtype: str | None = None) -> Product:
    """The product that a bfloat16 model makes of a weight. out_dtype: of its result; None: behind gates of
    e4m3 quantised for `down`.
    """
    activations = activations_of(shape)
    return Product(rows, shape, activations, out_dtype or (activations if shape.gate_block else "bfloat16"))


def eligible_kernels(p: Product, card: Card | None = None) -> tuple[str, ...]:
    """The kernels that take a product on Hopper, the likely fastest first. XLA takes any, but always the
    whole GPU.
    """
    n, k, gates = p.shape.n, p.shape.k, p.shape.gate_block
    few, kind = p.rows <= 64 and gates in (0, 64), (p.activations, p.shape.weights)
    found: list[str] = []
    if kind == ("float8_e4m3fn", "float8_e4m3fn"):
        columns = n // 2 if gates else n
        quantizes = p.out_dtype == "float8_e4m3fn" and columns % 128 == 0 and not p.residual
        if (quantizes or p.out_dtype == "bfloat16") and n % 128 == k % 128 == 0 and gates in (0, 16, 32, 64):
            found += ["fp8_flat"] * few + ["fp8"]
    elif p.activations == "bfloat16" and p.out_dtype in ("bfloat16", "float32"):
        if few and n % (128 if gates else 8) == 0:
            found += ["int4"] * (p.shape.weights == "int4" and k % 512 == 0)
            found += ["flat"] * (p.shape.weights == "bfloat16" and k % 64 == 0)
        if p.shape.weights == "bfloat16":
            whole = n % (2 * gates or 64) == 0 and n % 64 == k % 64 == 0 and gates in (0, 16, 32, 64)
            ours = ["dense"] * whole + ["fma"] * (p.rows <= 4 and not p.bounded)
            if p.bounded and (found or ours):
                return tuple(found + ours)
            return (
                (*found, *ours, "xla")
                if whole and _gate_pays(p, card or default_card())
                else (*found, "xla", *ours)
            )  # bare, cuBLAS needs fewer joules a FLOP
    return tuple(found) if p.bounded and found else (*found, "xla")


def _gate_pays(p: Product, card: Card) -> bool:
    """Return whether XLA's pass over memory for the gate takes longer than XLA's faster product saves."""
    first, last = card.gate_kernel_rows
    return p.shape.gate_block > 0 and first <= p.rows <= last


def kernels_by_rows(choose: Callable[[int], str], ends: Iterable[int] = ()) -> str:
    """Which kernel runs from how many rows on, as `flat, from 65 rows xla`. Kernels' limits are powers of
    two; ends: other last rows.
    """
    told, last, before = [], "", 0
    for rows in sorted({*_ROWS, *ends}):
        name = choose(rows)
        if name != last:
            told.append(f"from {before + 1} rows {name}" if last else name)
        last, before = name, rows
    return ", ".join(told)


@dataclasses.dataclass(frozen=True)
class HopperGemm:
    """`reference.gemm` by the fastest kernel for the shape: a table's choice, or the first taker where the
    table has none.

    pdl: those that can begin before the kernel before them has ended.
    """

    table: Table
    pdl: bool = False

    def choose(self, p: Product) -> Choice:
        """The kernel of a product. The table's rules are of results that stay in a layer: none is of the
        head's, in float32.

        Their tiles are of a whole GPU: beside another kernel the SMs may be fewer than a tile's cluster.
        """
        can = eligible_kernels(p, card_of(self.table.device))
        choice = None if p.out_dtype == "float32" else self.table.choose(p.shape, p.rows)
        if not choice or choice.kernel not in can:
            return Choice(p.rows, can[0])
        return dataclasses.replace(choice, tile=()) if p.bounded else choice

    def describe(self, p: Product) -> str:
        """Which kernel a weight's products run on, by their rows, whatever those of `p`."""
        measured = {
            choice.rows for rule in self.table.rules for choice in rule.choices
        }  # not powers of two where `tune --rows` said so
        return kernels_by_rows(lambda rows: self.choose(dataclasses.replace(p, rows=rows)).kernel, measured)

    def __call__(
        self,
        x: jax.Array | Quantized,
        w: jax.Array | Quantized | Int4,
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
        settings |= {"pdl": True} if self.pdl and choice.kernel in _WITH_PDL else {}
        return kernel(choice)(x, w, bias, **settings)


@functools.cache
def kernel(choice: Choice) -> Callable:
    """The function of a choice, its tile bound. Mosaic GPU takes a second to import, and CPU has no use for
    it.

    Raises:
      ValueError: for a kernel that does not exist, as an old table may name.
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
        f"kernel={choice.kernel!r} of a tuned table: fma, flat, dense, fp8, fp8_flat, int4 or xla"
    )


def _with_tile(function: Callable, choice: Choice) -> Callable:
    """A kernel of few rows with a choice's tile, made for its most rows; fewer leave some of the ring unused."""
    return functools.partial(function, tile=FlatTile(**dict(choice.tile))) if choice.tile else function

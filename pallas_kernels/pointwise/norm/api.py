"""Residual add and norm in one pass over memory, for Hopper: RMSNorm or LayerNorm, in bfloat16 or quantized
to e4m3.

A row belongs to one warpgroup. It stays in registers between the sum, its statistics and the normed values,
so that x and y are read once and the sum and the norm are written once. A CTA is one warpgroup, and an SM
runs many: some wait for memory while others compute. A row whose width is not a multiple of 128 has two parts
(`pallas_kernels.hopper.row_parts`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.hopper.pdl import launch_next, wait_for_last
from pallas_kernels.hopper.row_parts import row_parts, takes_row
from pallas_kernels.pointwise.norm.weighted_rows import WeightedRows
from pallas_kernels.quantized import Quantized

_PER_SM = 12  # CTAs for each SM; the registers of a row limit how many run at once
_E4M3_MAX = 448.0
_SMALLEST = 1e-12  # a row of zeros needs a nonzero scale


def add_norm(
    x: jax.Array,
    y: jax.Array | WeightedRows | None,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    other: jax.Array | None = None,
    eps: float,
    offset: float = 0.0,
    quantize: bool = False,
    sms: int | None = None,
    pdl: bool = False,
    interpret=None,
) -> tuple[jax.Array, jax.Array | Quantized]:
    """Return (x + y, its norm), as `pallas_kernels.pointwise.norm.reference.add_norm` does.

    Args:
      x, y: [T, D] bfloat16, D a multiple of 128, or of 64 from 192 on; y None: nothing to add. Or y
        is a weighted sum of rows in bfloat16, without `other`. The kernel then reads these rows.
      other: like y, and added to y first, with rounding.
      weight, bias: [D] bfloat16 or float32. With a bias the norm is LayerNorm, without RMSNorm, which
        scales by offset + weight.
      quantize: return the norm as `Quantized`, e4m3 [T, D] with a scale [T] for each token.
      sms: the number of CTAs as a number of SMs, 1 to 132; default: all.
      pdl: start before the previous kernel has ended (`pallas_kernels.hopper.pdl`); weight and bias must be
        arguments of the program.
    Returns:
      The sum [T, D], and its norm.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    t, d = x.shape
    terms = y if isinstance(y, WeightedRows) else None
    rows = [v for v in (x, None if isinstance(y, WeightedRows) else y, other) if v is not None]
    if terms is not None:
        _check_terms(x, terms, other)
    elif (
        not takes_row(d)
        or x.dtype != jnp.bfloat16
        or any((v.shape, v.dtype) != (x.shape, x.dtype) for v in rows)
        or (y is None and len(rows) > 1)
    ):
        given = [f"{v.dtype}{list(v.shape)}" for v in rows]
        raise ValueError(
            f"x, y and other are {given}: accepted are equal arrays, bfloat16 [T, D], D a multiple of 128, "
            "or of 64 from 192 on; other only with y"
        )
    row = jax.ShapeDtypeStruct((t, d), x.dtype)
    normed = (
        [jax.ShapeDtypeStruct((t, d), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((t,), jnp.float32)]
        if quantize
        else [row]
    )
    ctas = min(t, sms_of(sms) * _PER_SM)
    total, *normed = plgpu.kernel(
        functools.partial(
            _rows,
            adds=len(rows) - 1,
            terms=0 if terms is None else terms.weights.shape[1],
            centres=bias is not None,
            quantizes=quantize,
            eps=eps,
            offset=offset,
            ctas=ctas,
            pdl=pdl,
        ),
        out_type=normed if y is None else [row, *normed],
        grid=(ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="add_norm",
        interpret=interpret,
    )(
        *rows,
        *([] if terms is None else [terms.rows, terms.places, terms.weights]),
        *(v for v in (weight, bias) if v is not None),
    )
    if y is None:
        total, normed = x, [total, *normed]
    return total, Quantized(*normed) if quantize else normed[0]


def _check_terms(x: jax.Array, terms: WeightedRows, other: jax.Array | None) -> None:
    """Refuse a weighted sum that the kernel does not take. Raises: ValueError."""
    shapes = terms.rows.shape[1], terms.places.shape, terms.weights.shape[0]
    kinds = [v.dtype for v in (x, terms.rows, terms.weights, terms.places)]
    wanted = [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.int32]
    if (
        other is not None
        or not takes_row(x.shape[1])
        or kinds != wanted
        or shapes != (x.shape[1], terms.weights.shape, x.shape[0])
    ):
        given = [f"{v.dtype}{list(v.shape)}" for v in (x, terms.rows, terms.weights, terms.places)]
        raise ValueError(
            f"x, rows, weights and places are {given}: accepted are bfloat16 [T, D] and [M, D], D a multiple "
            "of 128, or of 64 from 192 on, float32 [T, e] and int32 [T, e], without other"
        )


def _rows(*refs, adds, terms, centres, quantizes, eps, offset, ctas, pdl):
    """Process this CTA's rows, every `ctas`-th row."""
    launch_next(pdl)
    refs = iter(refs)
    x_ref, *added = (next(refs) for _ in range(1 + adds))
    of_terms = [next(refs) for _ in range(3)] if terms else []
    weight_ref, bias_ref = next(refs), next(refs) if centres else None
    sum_ref, h_ref = next(refs) if adds or terms else None, next(refs)
    scale_ref = next(refs) if quantizes else None
    t, d = x_ref.shape
    parts = row_parts(d)

    def read(ref):
        """Return the parts of a row in float32."""
        return [plgpu.load(ref.at[p.columns], layout=p.layout).astype(jnp.float32) for p in parts]

    def write(ref, row):
        for part, values in zip(parts, row, strict=True):
            ref.at[part.columns][...] = values

    def total_of(row):
        """Return the sum of a row's columns, each once."""
        first, *others = row
        total = jnp.sum(first)
        for part, values in zip(parts[1:], others, strict=True):
            column = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=part.layout)
            total = total + jnp.sum(jnp.where(column >= part.again, values, 0.0))
        return total

    def factors():
        return read(weight_ref), read(bias_ref) if bias_ref is not None else []

    known = factors() if pdl else None
    wait_for_last(pdl)

    def weighted(row):
        """Return the sum of a row's terms, rounded as the sum of an op of its own."""
        terms_ref, places_ref, shares_ref = of_terms
        number = terms_ref.shape[0]
        given = [(places_ref[row, term], shares_ref[row, term]) for term in range(terms)]
        # A term that adds nothing takes row 0, because a row that no token has may be NaN.
        places = [jnp.where(at < number, at, 0) for at, _ in given]
        shares = [jnp.where(at < number, share, 0.0) for at, share in given]
        rows = [[plgpu.load(terms_ref.at[at, p.columns], layout=p.layout) for p in parts] for at in places]

        def added(values):
            total = values[0].astype(jnp.float32) * shares[0]
            for share, value in zip(shares[1:], values[1:], strict=True):
                total = total + value.astype(jnp.float32) * share
            return total.astype(terms_ref.dtype).astype(jnp.float32)

        return [added(values) for values in zip(*rows, strict=True)]

    def norm(row):
        x = read(x_ref.at[row])
        weight, bias = known or factors()  # loaded before the wait for the statistics
        if sum_ref is not None:
            y, *others = [weighted(row)] if terms else [read(ref.at[row]) for ref in added]
            for other in others:
                y = [(a + b).astype(sum_ref.dtype).astype(jnp.float32) for a, b in zip(y, other, strict=True)]
            total = [(a + b).astype(sum_ref.dtype) for a, b in zip(x, y, strict=True)]
            write(sum_ref.at[row], total)
            x = [one.astype(jnp.float32) for one in total]
        if centres:
            mean = total_of(x) * (1.0 / d)
            x = [one - mean for one in x]
        inverse = lax.rsqrt(total_of([one * one for one in x]) * (1.0 / d) + eps)
        h = [
            one * inverse * (factor if centres or not offset else factor + offset)
            for one, factor in zip(x, weight, strict=True)
        ]
        if centres:
            h = [one + shift for one, shift in zip(h, bias, strict=True)]
        if scale_ref is not None:
            top = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(one)) for one in h])
            scale = jnp.maximum(top, _SMALLEST) * (1.0 / _E4M3_MAX)
            scale_ref[row] = scale
            h = [one * (1.0 / scale) for one in h]
        write(h_ref.at[row], [one.astype(h_ref.dtype) for one in h])

    pl.loop(lax.axis_index("cta"), t, step=ctas)(norm)

"""Checks, constants and masks of the attention kernels over paged keys and values."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.layouts import LOG2E

PAGE = 64  # tokens in a page
LONGEST = 2**30  # longer spans count as this one, so that sums with positions fit in int32
LOWEST = -1e30  # start of a running maximum: finite, because -inf minus a masked score's -inf is NaN
LEAST = 1e-30  # lower bound of a divisor: a row with only -inf scores gets the output 0 and not NaN
_MOST_OVER = 100.0  # an attention sink counts as at most so many powers of two above a row's maximum


def check_pages(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    kinds: tuple,
    groups: int = 1,
    widths: tuple = (64, 128, 256),
) -> None:
    """Check queries [_, N, H] and pages [P, K, 64, H] (8-bit values: [P, K, H, 64]) against the kernels'
    limits.

    kinds: accepted dtypes of the pages. groups: groups of heads with their own pages, which then hold K /
    groups heads. widths: accepted head widths. Raises: ValueError.
    """
    (_, n, h), (p, kv, s, width) = q.shape, k_pages.shape
    if h not in widths or width != h:
        accepted = ", ".join(map(str, widths))
        raise ValueError(f"head width {h} (pages: {width}): accepted are {accepted}, the same in both")
    dtypes = [x.dtype for x in (q, k_pages, v_pages)]
    if q.dtype != jnp.bfloat16 or k_pages.dtype != v_pages.dtype or k_pages.dtype not in kinds:
        names = " or both ".join(jnp.dtype(kind).name for kind in kinds)
        accepted = f"accepted are bfloat16 queries, and keys and values both {names}"
        raise ValueError(f"dtypes {', '.join(map(str, dtypes))}: {accepted}")
    transposed = k_pages.dtype != jnp.bfloat16
    if s != PAGE or v_pages.shape != ((p, kv, h, s) if transposed else (p, kv, s, h)):
        accepted = f"[P, K, {PAGE}, H] " + (f"and [P, K, H, {PAGE}]" if transposed else "for both")
        raise ValueError(f"pages {k_pages.shape} and {v_pages.shape}: accepted are {accepted}")
    kv *= groups
    if n % kv or not 1 <= n // kv <= 16:
        raise ValueError(f"{n} query heads over {kv} KV heads: accepted are 1 to 16 for each KV head")


def check_scales(
    k_pages: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None, groups: int = 1
) -> None:
    """Check the scales against the dtype of the cache, with `groups` as in `check_pages`.

    Raises: ValueError.
    """
    p, held, s, _ = k_pages.shape
    kv = held * groups
    accepted = {"bfloat16": (None,), "float8_e4m3fn": (None, (kv,)), "int8": ((p, held, s),)}[
        k_pages.dtype.name
    ]
    for name, x in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if (None if x is None else x.shape) not in accepted:
            raise ValueError(
                f"{name} {None if x is None else x.shape}: accepted are [{kv}] for a cache of float8_e4m3fn, "
                f"{[p, held, s]} for int8, and None for bfloat16"
            )


def check_spans(spans: jax.Array | None, sinks: int, window: int | None, rows: int, kv: int) -> None:
    """Check the spans [K] or [rows, K] and the number of sinks. Raises: ValueError."""
    if spans is None:
        if sinks:
            raise ValueError(f"sinks={sinks} without spans: accepted is 0")
        return
    if spans.shape not in ((kv,), (rows, kv)) or not jnp.issubdtype(spans.dtype, jnp.integer):
        accepted = f"integers [{kv}] or [{rows}, {kv}]"
        raise ValueError(f"spans {spans.dtype}{list(spans.shape)}: accepted are {accepted}")
    if window is not None:
        raise ValueError(f"window={window} beside spans: accepted is None")
    if sinks < 0:
        raise ValueError(f"sinks={sinks}: accepted are 0 and above")


def check_unified_max(unified_max: jax.Array | None) -> None:
    """Check the unified max value and its bound, [phi, bound]. Raises: ValueError."""
    if unified_max is not None and unified_max.shape != (2,):
        raise ValueError(f"unified_max {list(unified_max.shape)}: accepted is [2], phi and bound")


def flat(pages: jax.Array) -> jax.Array:
    """Return [P, K, S, H] as rows [P * K * S, H]; page p and head k start at row (p * K + k) * S."""
    return pages.reshape(-1, pages.shape[-1])


def check_sink_logits(sink_logits, heads: int, cache) -> None:
    """Raise ValueError for sink logits that are not [N], and for those beside a cache of 8 bits."""
    if sink_logits is None:
        return
    if sink_logits.shape != (heads,):
        raise ValueError(f"sink_logits {list(sink_logits.shape)}: accepted is [{heads}], one a query head")
    if cache.dtype != jnp.bfloat16:
        raise ValueError(f"sink_logits with a cache of {cache.dtype}: accepted is bfloat16")


def sink_term(logit, top):
    """Return the term of an attention sink in a sum of weights relative to `top`, both in powers of two.

    The exponent is bounded. A sink so far above all scores leaves an output of 0 in float32 either way.
    """
    return jnp.exp2(jnp.minimum(logit - top, _MOST_OVER))


def capped(score, scale: float, soft_cap: float | None):
    """Return (x, factor) with x * factor = log2(e) times the scaled, capped score. factor may be 0 or
    negative.

    tanh is computed from exp2, because the hardware's tanh has only 11 bits: an error of 0.02 for a cap of
    50.
    """
    if soft_cap is None:
        return score, scale * LOG2E
    return 1.0 - 2.0 / (jnp.exp2(score * (2.0 * LOG2E * scale / soft_cap)) + 1.0), soft_cap * LOG2E


def blank(values, keys, columns: int = 64) -> None:
    """Set rows `keys` and up of a page of values [64, H] in shared memory to zero.

    Unwritten memory may hold NaN, and 0 · NaN is NaN.
    """
    for column in range(0, values.shape[1], columns):
        part = values.at[:, pl.ds(column, columns)]
        value = plgpu.load(part, (), layout=plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(row < keys, value, jnp.zeros_like(value))


def blank_8(values, keys) -> None:
    """Set columns `keys` and up of a page of 8-bit values [H, 64] in shared memory to zero (see `blank`)."""
    layout = plgpu.Layout.WGMMA_8BIT
    for row in range(0, values.shape[0], 64):
        part = values.at[pl.ds(row, 64)]
        value = plgpu.load(part, layout=layout).astype(jnp.float32)
        column = plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=layout)
        part[...] = jnp.where(column < keys, value, jnp.zeros_like(value)).astype(part.dtype)

"""What the attention kernels over paged keys and values share: the form of the pages, and what they take."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.layouts import LOG2E

PAGE = 64  # tokens
LOWEST = (
    -1e30
)  # below any score: a running maximum starts here, so that a masked score (-inf) never meets another -inf
# below any sum of weights but that of a row all of whose scores are -inf: divided by this, its output is 0
# and not NaN
LEAST = 1e-30


def check_pages(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, kinds: tuple) -> None:
    """Raises ValueError for queries [_, N, H] and pages [P, K, 64, H] (values of 8 bits: [P, K, H, 64]) that
    a kernel does not take.

    kinds: the dtypes of pages that it takes.
    """
    (_, n, h), (p, kv, s, width) = q.shape, k_pages.shape
    if h not in (64, 128, 256) or width != h:
        raise ValueError(f"head width {h} (pages: {width}): 64, 128 or 256, the same in both")
    dtypes = [x.dtype for x in (q, k_pages, v_pages)]
    if q.dtype != jnp.bfloat16 or k_pages.dtype != v_pages.dtype or k_pages.dtype not in kinds:
        said = "queries bfloat16, keys and values both " + " or both ".join(
            jnp.dtype(kind).name for kind in kinds
        )
        raise ValueError(f"dtypes {', '.join(map(str, dtypes))}: {said}")
    turned = k_pages.dtype != jnp.bfloat16
    if s != PAGE or v_pages.shape != ((p, kv, h, s) if turned else (p, kv, s, h)):
        said = (
            f"[P, K, {PAGE}, H] and [P, K, H, {PAGE}]" if turned else f"[P, K, {PAGE}, H], the same for both"
        )
        raise ValueError(f"pages {k_pages.shape} and {v_pages.shape}: {said}")
    if n % kv or not 1 <= n // kv <= 16:
        raise ValueError(f"{n} query heads over {kv} KV heads: 1 to 16 a KV head")


def check_scales(k_pages: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None) -> None:
    """Raises ValueError for scales that a cache of this dtype does not have."""
    p, kv, s, _ = k_pages.shape
    wanted = {"bfloat16": (None,), "float8_e4m3fn": (None, (kv,)), "int8": ((p, kv, s),)}[k_pages.dtype.name]
    for name, x in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if (None if x is None else x.shape) not in wanted:
            said = (
                f"[{kv}], one a head, for a cache of float8_e4m3fn, {[p, kv, s]} for one of int8, and "
                f"None for one of bfloat16"
            )
            raise ValueError(f"{name} {None if x is None else x.shape}: {said}")


def check_unified(unified: jax.Array | None) -> None:
    """Raises ValueError for what is no unified maximum: φ and its bound."""
    if unified is not None and unified.shape != (2,):
        raise ValueError(f"unified {list(unified.shape)}: [2], phi and bound")


def flat(pages: jax.Array) -> jax.Array:
    """[P, K, S, H] as rows [P * K * S, H]: the rows of page p and head k begin at (p * K + k) * S."""
    return pages.reshape(-1, pages.shape[-1])


def capped(score, scale: float, soft_cap: float | None):
    """(x, factor) such that x * factor is log2(e) times the scaled, capped score. A factor may be 0 or
    negative, as the scale may.

    tanh is made of exp2: the hardware's own is good to 11 bits only, which a cap of 50 would turn into errors
    of 0.02.
    """
    if soft_cap is None:
        return score, scale * LOG2E
    return 1.0 - 2.0 / (jnp.exp2(score * (2.0 * LOG2E * scale / soft_cap)) + 1.0), soft_cap * LOG2E


def blank(values, keys, columns: int = 64) -> None:
    """Zeroes rows `keys` and up of a page of values [64, H] in shared memory: what nobody wrote may be NaN,
    and 0 · NaN is NaN.
    """
    for column in range(0, values.shape[1], columns):
        part = values.at[:, pl.ds(column, columns)]
        value = plgpu.load(part, (), layout=plgpu.Layout.WGMMA)
        row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA)
        part[...] = jnp.where(row < keys, value, jnp.zeros_like(value))


def blank_8(values, keys) -> None:
    """The same for a page of 8-bit values [H, 64], whose columns are keys."""
    layout = plgpu.Layout.WGMMA_8BIT
    for row in range(0, values.shape[0], 64):
        part = values.at[pl.ds(row, 64)]
        value = plgpu.load(part, layout=layout).astype(jnp.float32)
        column = plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=layout)
        part[...] = jnp.where(column < keys, value, jnp.zeros_like(value)).astype(part.dtype)

"""Reference implementations of the rotation of queries and keys, and of the append of keys and values to
pages.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.pointwise.norm.reference import rms_norm
from pallas_kernels.pointwise.quantize.reference import to_e4m3
from pallas_kernels.quantized import Quantized

_INT8_MAX = 127.0
_SMALLEST = 1e-20  # a head of zeros needs a nonzero scale
Pages = Shaped[Array, "P K _ _"] | Quantized


def rope(
    x: Float[Array, "T N H"], positions: Int[Array, " T"], inv_freq: Float[Array, " H2"]
) -> Float[Array, "T N H"]:
    """Return x with its halves (x[..., :H/2], x[..., H/2:]) rotated by position · inv_freq radians."""
    return rotate(x, *cos_and_sin(positions, inv_freq))


def cos_and_sin(
    positions: Int[Array, " T"], inv_freq: Float[Array, " H2"]
) -> tuple[Float[Array, "T 1 H2"], Float[Array, "T 1 H2"]]:
    """Return the cosine and the sine of position · inv_freq, in float32."""
    angle = positions.astype(jnp.float32)[:, None, None] * inv_freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "T N H"], cos: Float[Array, "T 1 H2"], sin: Float[Array, "T 1 H2"]
) -> Float[Array, "T N H"]:
    """Return x with its halves rotated by the angles of these cosines and sines."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def append(
    pages: Shaped[Array, "P K S H"], new: Shaped[Array, "T K H"], slots: Int[Array, " T"]
) -> Shaped[Array, "P K S H"]:
    """Write token t's heads at flat slot `slots[t]` (page · S + place).

    Slots outside the cache are dropped.
    """
    p, k, s, h = pages.shape
    # Each index is one row of H in a flat view. A scatter over only the two outer axes would make XLA
    # transpose the cache.
    page, place = slots // s, slots % s
    rows = (page[:, None] * k + jnp.arange(k)) * s + place[:, None]
    rows = jnp.where((slots < 0)[:, None] | (slots >= p * s)[:, None], p * k * s, rows)
    flat = pages.reshape(p * k * s, h)
    flat = flat.at[rows.reshape(-1)].set(
        new.reshape(-1, h).astype(pages.dtype), mode="drop", unique_indices=False, wrap_negative_indices=False
    )
    return flat.reshape(p, k, s, h)


def append_transposed(
    pages: Shaped[Array, "P K H S"], new: Shaped[Array, "T K H"], slots: Int[Array, " T"]
) -> Shaped[Array, "P K H S"]:
    """Append to pages with contiguous keys [P, K, H, S], where a token is a column."""
    p, k, h, s = pages.shape
    rows = (slots // s)[:, None] * k + jnp.arange(k)
    rows = jnp.where((slots < 0)[:, None] | (slots >= p * s)[:, None], p * k, rows)
    flat = pages.reshape(p * k, h, s)
    flat = flat.at[rows[:, :, None], jnp.arange(h), (slots % s)[:, None, None]].set(
        new.astype(pages.dtype), mode="drop", wrap_negative_indices=False
    )
    return flat.reshape(p, k, h, s)


def rope_append(
    fused: Float[Array, "T A"],
    k_pages: Pages,
    v_pages: Pages,
    positions: Int[Array, " T"],
    slots: Int[Array, " T"],
    *,
    head_dim: int,
    inv_freq: Float[Array, " H2"] | None,
    q_norm: Float[Array, " H"] | None = None,
    k_norm: Float[Array, " H"] | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    k_scale: Float[Array, " K"] | None = None,
    v_scale: Float[Array, " K"] | None = None,
    sms: int | None = None,
    cos_and_sin: Callable[..., tuple[Array, Array]] = cos_and_sin,
) -> tuple[Float[Array, "T N H"], Pages, Pages]:
    """Split the heads, norm (optional) and rotate queries and keys, and write keys and values to their
    pages.

    Args:
      fused: for each of the K KV heads its query heads, its key and its value.
      k_pages, v_pages: both [P, K, S, H]; or e4m3, with values [P, K, H, S]; or int8, a `Quantized` with
        scales [P, K, S] and values [P, K, H, S].
      slots: flat slot of each token, page · S + place; tokens with a slot outside the cache are padding and
        not written.
      inv_freq: radians a position of each of the H/2 planes; None: no rotation.
      q_norm, k_norm: both or none.
      k_scale, v_scale: for an e4m3 cache, whose numbers times the head's scale are the keys and values;
        both or none.
      sms: number of SMs that a kernel may occupy; the result does not depend on it.
      cos_and_sin: computes the factors of the rotation.
    Returns:
      The queries, and both page arrays, which alias donated inputs.
    Raises:
      ValueError: as `check_given`.
    """
    del sms
    t, heads = fused.shape[0], k_pages.shape[1]
    check_given(
        k_pages, t, head_dim,
        positions=positions, slots=slots, inv_freq=inv_freq, q_norm=q_norm, k_norm=k_norm, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    split = fused.reshape(t, heads, -1, head_dim)
    q, k, v = split[:, :, :-2].reshape(t, -1, head_dim), split[:, :, -2], split[:, :, -1]
    if q_norm is not None and k_norm is not None:
        q = rms_norm(q, q_norm, eps=eps, offset=norm_offset)
        k = rms_norm(k, k_norm, eps=eps, offset=norm_offset)
    if inv_freq is not None:
        cos, sin = cos_and_sin(positions, inv_freq)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, _put(k_pages, k, slots, k_scale, append), _put(v_pages, v, slots, v_scale, append_transposed)


def check_given(k_pages: Pages, t: int, h: int, **given: Array | None) -> None:
    """Check the arguments of `rope_append` for T tokens with heads of width H and these pages.

    given: all arrays but `fused` and the pages, by name. Raises: ValueError for a wrong shape, one array of
    a pair, or scales that the cache does not accept.
    """
    k, dtype = k_pages.shape[1], (k_pages.values if isinstance(k_pages, Quantized) else k_pages).dtype
    shapes = {name: None if x is None else list(x.shape) for name, x in given.items()}
    for one, other in (("q_norm", "k_norm"), ("k_scale", "v_scale")):
        if (given[one] is None) != (given[other] is None):
            raise ValueError(f"{one} {shapes[one]}, {other} {shapes[other]}: accepted are both or none")
    if given["k_scale"] is not None and dtype != jnp.float8_e4m3fn:
        raise ValueError(
            f"k_scale and v_scale for a cache of {dtype}: accepted is a cache of float8_e4m3fn (int8 pages "
            "compute their scales)"
        )
    wanted = {
        "positions": t,
        "slots": t,
        "inv_freq": h // 2,
        "q_norm": h,
        "k_norm": h,
        "k_scale": k,
        "v_scale": k,
    }
    for name, shape in shapes.items():
        if shape not in (None, [wanted[name]]):
            raise ValueError(
                f"{name} {shape}: accepted is [{wanted[name]}], for {t} tokens and {k} KV heads of {h}"
            )


def _put(pages: Pages, new: Array, slots: Array, scale: Array | None, append_8bit) -> Pages:
    """Write new keys or values [T, K, H] in the form of the cache."""
    if isinstance(pages, Quantized):
        found = jnp.maximum(jnp.abs(new.astype(jnp.float32)).max(-1), _SMALLEST) / _INT8_MAX
        rounded = jnp.round(new.astype(jnp.float32) / found[..., None])
        return Quantized(
            append_8bit(pages.values, rounded, slots),
            append(pages.scale[..., None], found[..., None], slots)[..., 0],
        )
    if pages.dtype == jnp.float8_e4m3fn:
        return append_8bit(pages, to_e4m3(new, jnp.ones(()) if scale is None else scale[:, None]), slots)
    return append(pages, new, slots)

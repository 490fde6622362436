"""From the fused projection to queries, keys and values in one pass, for Hopper: heads split, normed and rotated, pages written in place.

The copy engine does the moving: it brings a token's queries, keys and values into shared memory apart, and takes the keys and values to
their place in the pages, so that threads touch only what is rotated or quantised. Every warpgroup is a pipeline of its own: the next token
comes while one is turned. The pages are references that the kernel writes through: a donated cache is not copied.

Transposed values [P, K, H, S] (8-bit caches) are written byte by byte, since a token is one column of them.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import memref

from pallas_kernels.quantized import Quantized
from pallas_kernels.tiles import SMS

_STAGES = 2  # of a worker: a token that comes, a token that is turned and goes
_WORKERS = 4  # warpgroups a CTA, each with tokens of its own
_RING_BYTES = 220 << 10  # of an SM's shared memory for the tokens that come and are turned
_E4M3_MAX = 448.0
_INT8_MAX = 127.0


def rope_append(
    fused: jax.Array,
    k_pages: jax.Array | Quantized,
    v_pages: jax.Array | Quantized,
    positions: jax.Array,
    slots: jax.Array,
    *,
    head_dim: int,
    inv_freq: jax.Array | None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sms: int | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array | Quantized, jax.Array | Quantized]:
    """Queries for attention, and the pages with the tokens' keys and values in them, of the same meaning as its twin.

    Args:
      fused: [T, K · (G + 2) · H] bfloat16; for each KV head its G query heads, its key, its value. H a multiple of 64.
      k_pages, v_pages: bfloat16 [P, K, S, H] both; e4m3 [P, K, S, H] and [P, K, H, S], of true values over k_scale, v_scale; or
        `Quantized` int8 of these two shapes with scales [P, K, S], which are written too. Donate them: they are written in place.
      positions, slots: [T] int32. A slot is page · S + place; a token with one outside the cache is not written.
      inv_freq: [H / 2] float32, radians a position; None: no rotation.
      q_norm, k_norm: [H], RMSNorm of each head by norm_offset + weight before the rotation; both or none.
      k_scale, v_scale: [K] float32, for an e4m3 cache; both or none.
      sms: SMs the kernel may take; None: all.
    Returns:
      queries [T, K · G, H] bfloat16, and both page arrays.
    Raises:
      ValueError: for a shape or dtype that the kernel does not take.
    """
    k_values, v_values = (pages.values if isinstance(pages, Quantized) else pages for pages in (k_pages, v_pages))
    _check(fused, k_values, v_values, head_dim, isinstance(k_pages, Quantized))
    t, kv, h = fused.shape[0], k_values.shape[1], head_dim
    group = fused.shape[1] // (kv * h) - 2
    sms = min(SMS if sms is None else sms, t)
    token_bytes = fused.shape[1] * fused.dtype.itemsize + (2 * kv * (h + 4) if k_values.dtype != fused.dtype else 0)
    workers = max(1, min(_WORKERS, -(-t // sms), _RING_BYTES // (_STAGES * token_bytes)))  # a token of 56 heads of their own is 43 KB
    inputs = {"fused": fused.reshape(t, kv, group + 2, h), "slots": slots.astype(jnp.int32)}
    if inv_freq is not None:  # the same for all layers of a step: XLA makes it once
        angle = positions.astype(jnp.float32)[:, None] * inv_freq
        inputs |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    if q_norm is not None and k_norm is not None:
        inputs |= {"q_norm": q_norm, "k_norm": k_norm}
    if k_scale is not None and v_scale is not None:
        inputs |= {"k_scale": k_scale, "v_scale": v_scale}
    kernel = plgpu.kernel(
        functools.partial(_tokens, eps=eps, norm_offset=norm_offset, sms=sms, workers=workers, interpret=interpret is not None),
        out_type=jax.ShapeDtypeStruct((t, kv, group, h), fused.dtype),
        grid=(sms,),
        grid_names=("cta",),
        num_threads=workers,
        thread_name="wg",
        scratch_types=(_scratch(workers, kv, group, h, fused.dtype, k_values.dtype),),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True),
        kernel_name="rope_append",
        interpret=interpret,
    )
    pages = jax.tree.map(jax.new_ref, {"k": k_pages, "v": v_pages})
    q = kernel(inputs, pages)
    pages = jax.tree.map(jax.freeze, pages)
    return q.reshape(t, kv * group, h), pages["k"], pages["v"]


def _check(fused: jax.Array, k_values: jax.Array, v_values: jax.Array, h: int, scaled_by_token: bool) -> None:
    (p, kv, s, width), (_, columns), name = k_values.shape, fused.shape, k_values.dtype.name
    if fused.dtype != jnp.bfloat16 or width != h or h % 64 or columns % (kv * h) or columns < 3 * kv * h:
        given = f"{fused.dtype}{list(fused.shape)} for {kv} KV heads of {width}"
        raise ValueError(f"the projection is {given}: bfloat16 [T, K · (G + 2) · H], H a multiple of 64")
    shapes = {"bfloat16": (p, kv, s, h), "float8_e4m3fn": (p, kv, h, s), "int8": (p, kv, h, s)}
    if (v_values.shape, v_values.dtype) != (shapes.get(name), k_values.dtype) or scaled_by_token != (name == "int8"):
        given = [f"{x.dtype}{list(x.shape)}" for x in (k_values, v_values)]
        raise ValueError(f"pages are {given}: bfloat16 [P, K, S, H], or e4m3 or Quantized int8 [P, K, S, H] and [P, K, H, S]")
    if name == "int8" and kv % 2:
        raise ValueError(f"{kv} KV heads for a cache of int8: an even number of them")


def _scratch(workers: int, kv: int, group: int, h: int, dtype, kv_dtype) -> dict:
    ring = (workers, _STAGES)
    scratch = {
        "q": plgpu.SMEM((*ring, kv, group, h), dtype),
        "k": plgpu.SMEM((*ring, kv, h), dtype),
        "v": plgpu.SMEM((*ring, kv, h), dtype),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=workers * _STAGES),
    }
    if kv_dtype != dtype:
        scratch |= {name: plgpu.SMEM((*ring, kv, h), kv_dtype) for name in ("k8", "v8")}
    if kv_dtype == jnp.int8:
        scratch |= {name: plgpu.SMEM((*ring, kv), jnp.float32) for name in ("k_scale", "v_scale")}
    return scratch


def _rows_layout(rows: int, columns: int) -> tuple:
    """(rows a tile, whether several warps hold the same numbers, how a warpgroup's threads share a tile of [rows, columns]).

    A row is always within one warp: sums across warps meet in one scratch of the whole CTA, where warpgroups would overwrite each other.
    """
    tile = math.gcd(rows, 16)
    warps = min(4, tile)
    vector = tile // warps * columns // 32
    tiles = ((tile, columns), (tile // warps, columns), (1, vector))
    warp_dims = (-6,) if warps == 4 else (plgpu.Replicated(4 // warps), -6)
    made = mgpu.TiledLayout(plgpu.Tiling(tiles), warp_dims, (-4, -3), -1, _check_canonical=False).canonicalize()
    layout = plgpu.Layout.TILED(made.tiling, warp_dims=made.warp_dims, lane_dims=made.lane_dims, vector_dim=made.vector_dim)
    return tile, warps < 4, layout


def _turn(source, target, *, angles=None, norm=None, norm_offset=0.0, eps=0.0, scale=None, scales=None):
    """Norms, rotates and quantises rows [rows, H] in shared memory, from `source` to `target`, which may be the same.

    angles: the token's (cos, sin) [H/2]. norm: the weight [H]. scale: [rows] of a cache with given scales; scales: [rows], where the scale
    found for each row is put.
    """
    (rows, h), half = source.shape, source.shape[1] // 2
    tile, repeated, layout = _rows_layout(rows, half)
    halves = (0, half)

    def spread(x, axis):
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (tile, half), [axis]), layout)

    def column_values(ref):
        return spread(plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32), 1)

    if angles is not None:
        cos, sin = (column_values(ref) for ref in angles)
    if norm is not None:
        weights = [column_values(norm.at[pl.ds(at, half)]) + norm_offset for at in halves]
    for row in range(0, rows, tile):
        here = pl.ds(row, tile)
        values = [plgpu.load(source.at[here, pl.ds(at, half)], layout=layout, optimized=False).astype(jnp.float32) for at in halves]
        if repeated:  # all have read it before one writes
            plgpu.commit_smem()
        if norm is not None:
            mean = jnp.sum(values[0] * values[0] + values[1] * values[1], axis=1) * (1.0 / h)
            factor = spread(lax.rsqrt(mean + eps), 0)
            values = [x * factor * w for x, w in zip(values, weights, strict=True)]
        if angles is not None:
            a, b = values
            values = [a * cos - b * sin, b * cos + a * sin]
        if scale is not None:
            factor = spread(1.0 / plgpu.load(scale.at[here], layout=layout.reduce(1), optimized=False), 0)
            values = [x * factor for x in values]
        if target.dtype == jnp.float8_e4m3fn:
            values = [jnp.clip(x, -_E4M3_MAX, _E4M3_MAX) for x in values]
        if scales is not None:
            largest = jnp.max(jnp.maximum(jnp.abs(values[0]), jnp.abs(values[1])), axis=1)
            found = jnp.maximum(largest, 1e-20) * (1.0 / _INT8_MAX)
            scales.at[here][...] = found
            values = [jnp.round(x * spread(1.0 / found, 0)) for x in values]
        for at, x in zip(halves, values, strict=True):
            target.at[here, pl.ds(at, half)][...] = x.astype(target.dtype)


def _put_column(target, source, interpret):
    """Copies [K, H] bytes from shared memory to a reference whose elements lie apart, which Pallas' own stores do not take."""
    layout = plgpu.Layout.WG_STRIDED(source.shape, 1)
    values = plgpu.load(source, layout=layout)
    if interpret:
        target[...] = values
        return

    put = plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    put(lambda _, values, ref: values.foreach(lambda value, at: memref.store(value, ref, list(at))))(values, target)


def _tokens(inputs, pages, q_ref, scratch, *, eps, norm_offset, sms, workers, interpret):
    """One warpgroup's tokens, every sms · workers-th, from the fused projection to the queries and the pages."""
    fused_ref, slots_ref, full = inputs["fused"], inputs["slots"], scratch["full"]
    k_ref, v_ref = (pages[name].values if isinstance(pages[name], Quantized) else pages[name] for name in ("k", "v"))
    t, kv, pitch, h = fused_ref.shape
    group, (page_count, _, page_size, _) = pitch - 2, k_ref.shape
    narrow = k_ref.dtype != fused_ref.dtype
    wg = lax.axis_index("wg")
    first, step = wg * sms + lax.axis_index("cta"), sms * workers
    ring = {name: ref.at[wg] for name, ref in scratch.items() if name != "full"}

    def load(token, stage):
        barrier = full.at[wg * _STAGES + stage]
        plgpu.copy_gmem_to_smem(fused_ref.at[token, :, pl.ds(0, group)], ring["q"].at[stage], barrier)
        plgpu.copy_gmem_to_smem(fused_ref.at[token, :, group], ring["k"].at[stage], barrier)
        plgpu.copy_gmem_to_smem(fused_ref.at[token, :, group + 1], ring["v"].at[stage], barrier)

    def turn(token, stage):
        angles = (inputs["cos"].at[token], inputs["sin"].at[token]) if "cos" in inputs else None
        given = {name: inputs.get(name) for name in ("q_norm", "k_norm", "k_scale", "v_scale")}
        found = {name: ring[name].at[stage] if name in ring else None for name in ("k_scale", "v_scale")}
        common = {"angles": angles, "norm_offset": norm_offset, "eps": eps}
        q, k, v = (ring[name].at[stage] for name in ("q", "k", "v"))
        if angles is not None or given["q_norm"] is not None:
            # The interpreter knows no reshaped references.
            for rows in [q.at[i] for i in range(kv)] if interpret else [q.reshape(kv * group, h)]:
                _turn(rows, rows, norm=given["q_norm"], **common)
            if not narrow:
                _turn(k, k, norm=given["k_norm"], **common)
        if narrow:
            _turn(k, ring["k8"].at[stage], norm=given["k_norm"], scale=given["k_scale"], scales=found["k_scale"], **common)
            _turn(v, ring["v8"].at[stage], scale=given["v_scale"], scales=found["v_scale"])

    def append(slot, stage):
        page, place = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))
        plgpu.copy_smem_to_gmem(ring["k8" if narrow else "k"].at[stage], k_ref.at[page, :, place], commit_group=False)
        if not narrow:
            plgpu.copy_smem_to_gmem(ring["v"].at[stage], v_ref.at[page, :, place], commit_group=False)
            return
        _put_column(v_ref.at[page, :, :, place], ring["v8"].at[stage], interpret)
        if "k_scale" in ring:
            for name in ("k", "v"):
                for head in range(kv):
                    pages[name].scale[page, head, place] = ring[name + "_scale"].at[stage][head]

    count = pl.cdiv(t - first, jnp.int32(step))
    pl.when(count > 0)(lambda: load(first, jnp.int32(0)))

    @pl.loop(0, count)
    def _(i):
        stage, token = lax.rem(i, jnp.int32(_STAGES)), first + i * step

        @pl.when(i + 1 < count)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load(token + step, 1 - stage)

        slot = slots_ref[token]
        plgpu.barrier_wait(full.at[wg * _STAGES + stage])
        turn(token, stage)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ring["q"].at[stage], q_ref.at[token], commit_group=False)
        pl.when((slot >= 0) & (slot < page_count * page_size))(lambda: append(slot, stage))
        plgpu.commit_smem_to_gmem_group()

    plgpu.wait_smem_to_gmem(0)

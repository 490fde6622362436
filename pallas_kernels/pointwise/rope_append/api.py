"""Rope and append for Hopper, in one pass: split the fused projection, norm and rotate heads, write pages
in place.

The copy engine moves the data: it loads a token's queries, keys and values into shared memory separately,
and stores keys and values to the pages. Threads touch only numbers that are rotated or quantized. Every
warpgroup is a separate pipeline: the next token arrives while one is processed. The kernel writes the pages
through references, so a donated cache is not copied.

In transposed values [P, K, H, S] (8-bit caches) a token is a column, stored byte by byte. A separate
warpgroup stores blocks of columns (`columns`). With fewer tokens than a block, each warpgroup stores its
token's column.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.limits import sms_of
from pallas_kernels.hopper.pdl import launch_next, wait_for_last
from pallas_kernels.pointwise.rope_append.columns import (
    BLOCKS,
    append_columns,
    block_of,
    columns_bytes,
    columns_scratch,
    put_column,
)
from pallas_kernels.pointwise.rope_append.reference import check_given
from pallas_kernels.pointwise.rope_append.rows import transform_rows
from pallas_kernels.quantized import Quantized

_STAGES = 2  # stages of a worker: one token arrives while one is processed and stored
_WORKERS = 4  # warpgroups in a CTA, on different tokens
_RING_BYTES = 220 << 10  # shared memory of an SM for the tokens
_TOGETHER = (1, *BLOCKS)  # accepted numbers of tokens in a block of transposed values
_TMA = 128  # alignment in bytes of a tensor copy in shared memory
_BOX = 256  # maximum heads of one copy


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
    together: int | None = None,
    pdl: bool = False,
    interpret=None,
) -> tuple[jax.Array, jax.Array | Quantized, jax.Array | Quantized]:
    """Return the queries, and the pages with the tokens' keys and values.

    The reference implementation is `pallas_kernels.pointwise.rope_append.reference.rope_append`.

    Args:
      fused: [T, K · (G + 2) · H] bfloat16; for each KV head its G query heads, its key, its value. H a
        multiple of 64.
      k_pages, v_pages: bfloat16 [P, K, S, H] both; or e4m3 [P, K, S, H] and [P, K, H, S], of true values
        over k_scale, v_scale; or `Quantized` int8 of these two shapes with scales [P, K, S], which the
        kernel also writes. Donate the pages, which the kernel writes in place.
      positions, slots: [T] int32. A slot is page · S + place. A token with a slot outside the cache is not
        written.
      inv_freq: [H / 2] float32, radians a position; None: no rotation.
      q_norm, k_norm: [H], RMSNorm of each head by norm_offset + weight before the rotation; both or none.
      k_scale, v_scale: [K] float32, for an e4m3 cache; both or none.
      sms: number of SMs that the kernel may occupy, 1 to 132; None: all.
      together: tokens in a block of transposed values: 1, 8, 16 or 32, up to T; None: by the shapes.
      pdl: start before the previous kernel has ended (`pallas_kernels.hopper.pdl`).
    Returns:
      Queries [T, K · G, H] bfloat16, and both page arrays.
    Raises:
      ValueError: for a shape, dtype or sms outside the limits.
    """
    k_values, v_values = (
        pages.values if isinstance(pages, Quantized) else pages for pages in (k_pages, v_pages)
    )
    _check(fused, k_values, v_values, head_dim, isinstance(k_pages, Quantized))
    if together not in (None, *_TOGETHER):
        raise ValueError(f"{together=}: accepted are {_TOGETHER}, or None")
    t, kv, h = fused.shape[0], k_values.shape[1], head_dim
    check_given(
        k_pages, t, h,
        positions=positions, slots=slots, inv_freq=inv_freq, q_norm=q_norm, k_norm=k_norm, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    group = fused.shape[1] // (kv * h) - 2
    sms = min(sms_of(sms), t)
    together = block_of(together, t, kv, sms) if k_values.dtype != fused.dtype else 1
    most = _most_workers(kv, group, h, k_values.dtype != fused.dtype, together)
    if not most:
        raise ValueError(
            f"{kv} KV heads of {h} and {group} query heads each: accepted are fewer heads, so that two "
            "tokens fit the shared memory of an SM"
        )
    workers = min(_WORKERS, -(-t // sms), most)
    inputs = {"fused": fused.reshape(t, kv, group + 2, h), "slots": slots.astype(jnp.int32)}
    if inv_freq is not None:  # equal in all layers of a step, so XLA computes it once
        angle = positions.astype(jnp.float32)[:, None] * inv_freq
        inputs |= {"cos": jnp.cos(angle), "sin": jnp.sin(angle)}
    if q_norm is not None and k_norm is not None:
        inputs |= {"q_norm": q_norm, "k_norm": k_norm}
    if k_scale is not None and v_scale is not None:
        inputs |= {"k_scale": k_scale, "v_scale": v_scale}
    kernel = plgpu.kernel(
        functools.partial(
            _tokens,
            eps=eps,
            norm_offset=norm_offset,
            sms=sms,
            workers=workers,
            together=together,
            pdl=pdl,
            interpret=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((t, kv, group, h), fused.dtype),
        grid=(sms,),
        grid_names=("cta",),
        num_threads=workers + (together > 1),
        thread_name="wg",
        scratch_types=(_scratch(workers, kv, group, h, fused.dtype, k_values.dtype, together),),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name="rope_append",
        interpret=interpret,
    )
    pages = jax.tree.map(jax.new_ref, {"k": k_pages, "v": v_pages})
    q = kernel(inputs, pages)
    pages = jax.tree.map(jax.freeze, pages)
    return q.reshape(t, kv * group, h), pages["k"], pages["v"]


def takes(kv: int, group: int, h: int, narrow: bool) -> bool:
    """Return whether the kernel supports a token of so many heads. narrow: the cache has 8-bit numbers."""
    return kv <= _BOX and all(
        _most_workers(kv, group, h, narrow, block) for block in (BLOCKS if narrow else (1,))
    )


def _most_workers(kv: int, group: int, h: int, narrow: bool, together: int) -> int:
    """Return the number of workers whose tokens fit an SM's shared memory.

    A token of 56 heads of width 128 needs 43 KB in bfloat16.
    """
    token_bytes = 2 * kv * (group + 2) * h + (2 * (kv + 1) * (h + 4) if narrow else 0)
    ring_bytes = _RING_BYTES - (columns_bytes(together, h) if together > 1 else 0)
    return ring_bytes // (_STAGES * token_bytes)


def _check(fused: jax.Array, k_values: jax.Array, v_values: jax.Array, h: int, scaled_by_token: bool) -> None:
    (p, kv, s, width), (_, columns), name = k_values.shape, fused.shape, k_values.dtype.name
    if fused.dtype != jnp.bfloat16 or width != h or h % 64 or columns % (kv * h) or columns < 3 * kv * h:
        given = f"{fused.dtype}{list(fused.shape)} for {kv} KV heads of {width}"
        raise ValueError(
            f"the projection is {given}: accepted is bfloat16 [T, K · (G + 2) · H], H a multiple of 64"
        )
    shapes = {"bfloat16": (p, kv, s, h), "float8_e4m3fn": (p, kv, h, s), "int8": (p, kv, h, s)}
    if (v_values.shape, v_values.dtype) != (shapes.get(name), k_values.dtype) or scaled_by_token != (
        name == "int8"
    ):
        given = [f"{x.dtype}{list(x.shape)}" for x in (k_values, v_values)]
        raise ValueError(
            f"pages are {given}: accepted are bfloat16 [P, K, S, H], or e4m3 or Quantized int8 "
            "[P, K, S, H] and [P, K, H, S]"
        )
    if kv > _BOX:
        raise ValueError(f"{kv} KV heads: accepted are up to {_BOX}, the heads of one copy")
    if name == "int8" and kv % 2:
        raise ValueError(f"{kv} KV heads for a cache of int8: accepted are even numbers")


def _scratch(workers: int, kv: int, group: int, h: int, dtype, kv_dtype, together: int) -> dict:
    stages, narrow, single = (workers, _STAGES), kv_dtype != dtype, together == 1
    heads = next(
        n for n in (kv, kv + 1) if n * h % _TMA == 0
    )  # an odd number of 64-byte heads is padded by one
    ring = {"q": plgpu.SMEM((*stages, kv, group, h), dtype)}
    for name in ("k", "v")[: 2 if single else 1]:
        ring[name] = plgpu.SMEM((*stages, kv, h), dtype)
        if narrow:
            ring[name + "8"] = plgpu.SMEM((*stages, heads, h), kv_dtype)
        if kv_dtype == jnp.int8:
            ring[name + "_scale"] = plgpu.SMEM((*stages, kv), jnp.float32)
    scratch = {
        "ring": ring,
        "full": plgpu.Barrier(num_arrivals=3 if single else 2, num_barriers=workers * _STAGES),
    }
    return scratch if single else scratch | {"columns": columns_scratch(together, h, dtype, kv_dtype)}


def _tokens(inputs, pages, q_ref, scratch, *, eps, norm_offset, sms, workers, together, pdl, interpret):
    """Process one warpgroup's tokens, or, in the last warpgroup, all of the CTA's blocks of transposed
    values.
    """
    launch_next(pdl)
    wait_for_last(pdl)
    wg = lax.axis_index("wg")
    move = functools.partial(
        _move_tokens,
        inputs,
        pages,
        q_ref,
        scratch,
        wg=wg,
        eps=eps,
        norm_offset=norm_offset,
        sms=sms,
        workers=workers,
        interpret=interpret,
    )
    if together == 1:
        move(with_values=True)
        return
    pl.when(wg < workers)(functools.partial(move, with_values=False))

    @pl.when(wg == workers)
    def _():
        given = inputs.get("v_scale")
        how = {"block": together, "sms": sms, "interpret": interpret}
        append_columns(inputs["fused"], inputs["slots"], pages["v"], given, scratch["columns"], **how)


def _move_tokens(
    inputs, pages, q_ref, scratch, *, wg, with_values, eps, norm_offset, sms, workers, interpret
):
    """Process a warpgroup's tokens, every sms · workers-th, from the fused projection to the queries and
    the pages.
    """
    fused_ref, slots_ref, full = inputs["fused"], inputs["slots"], scratch["full"]
    k_ref, v_ref = (
        pages[name].values if isinstance(pages[name], Quantized) else pages[name] for name in ("k", "v")
    )
    t, kv, pitch, h = fused_ref.shape
    group, (page_count, _, page_size, _) = pitch - 2, k_ref.shape
    narrow = k_ref.dtype != fused_ref.dtype
    first, step = wg * sms + lax.axis_index("cta"), sms * workers
    ring = {name: ref.at[wg] for name, ref in scratch["ring"].items()}

    def load(token, stage):
        barrier = full.at[wg * _STAGES + stage]
        plgpu.copy_gmem_to_smem(fused_ref.at[token, :, pl.ds(0, group)], ring["q"].at[stage], barrier)
        plgpu.copy_gmem_to_smem(fused_ref.at[token, :, group], ring["k"].at[stage], barrier)
        if with_values:
            plgpu.copy_gmem_to_smem(fused_ref.at[token, :, group + 1], ring["v"].at[stage], barrier)

    def heads_of(name, stage):
        """Return a stage's 8-bit heads, without padding."""
        ref = ring[name].at[stage]
        return ref if ref.shape[0] == kv else ref.at[pl.ds(0, kv)]

    def process(token, stage):
        angles = (inputs["cos"].at[token], inputs["sin"].at[token]) if "cos" in inputs else None
        given = {name: inputs.get(name) for name in ("q_norm", "k_norm", "k_scale", "v_scale")}
        common = {"angles": angles, "norm_offset": norm_offset, "eps": eps}
        q, k = ring["q"].at[stage], ring["k"].at[stage]
        if angles is not None or given["q_norm"] is not None:
            # The interpreter does not support reshaped references.
            for rows in [q.at[i] for i in range(kv)] if interpret else [q.reshape(kv * group, h)]:
                transform_rows(rows, rows, norm=given["q_norm"], **common)
            if not narrow:
                transform_rows(k, k, norm=given["k_norm"], **common)
        if narrow:
            scales = ring["k_scale"].at[stage] if "k_scale" in ring else None
            transform_rows(
                k,
                heads_of("k8", stage),
                norm=given["k_norm"],
                scale=given["k_scale"],
                scales=scales,
                **common,
            )
        if narrow and with_values:
            scales = ring["v_scale"].at[stage] if "v_scale" in ring else None
            transform_rows(ring["v"].at[stage], heads_of("v8", stage), scale=given["v_scale"], scales=scales)

    def append(slot, stage):
        page, place = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))
        keys = heads_of("k8", stage) if narrow else ring["k"].at[stage]
        plgpu.copy_smem_to_gmem(keys, k_ref.at[page, :, place], commit_group=False)
        if not narrow:
            plgpu.copy_smem_to_gmem(ring["v"].at[stage], v_ref.at[page, :, place], commit_group=False)
        elif with_values:
            put_column(v_ref.at[page, :, :, place], ring["v8"].at[stage], interpret)
        if "k_scale" in ring:
            for name in ("k", "v")[: 2 if with_values else 1]:
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
        process(token, stage)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ring["q"].at[stage], q_ref.at[token], commit_group=False)
        pl.when((slot >= 0) & (slot < page_count * page_size))(lambda: append(slot, stage))
        plgpu.commit_smem_to_gmem_group()

    plgpu.wait_smem_to_gmem(0)

"""Rope and append in the interpreter against the reference, for every form of cache, and the H200 code."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import abstract, compile_for_h200, h200_mesh
from jax.experimental.pallas import mosaic_gpu as plgpu
from ptx import misaligned

from jaxflow.config import Rope
from jaxflow.model.rope import inverse_frequencies
from pallas_kernels.pointwise.rope_append import reference
from pallas_kernels.pointwise.rope_append.api import rope_append, takes
from pallas_kernels.pointwise.rope_append.columns import block_of
from pallas_kernels.pointwise.rope_append.rows import rows_layout
from pallas_kernels.quantized import Quantized

INTERPRET = plgpu.InterpretGPUParams()
PAGES, PAGE = 3, 64


def cache(rng, kv_dtype, kv_heads, width):
    """Return pages without unwritten positions."""
    k = jnp.asarray(rng.integers(-20, 20, (PAGES, kv_heads, PAGE, width))).astype(kv_dtype)
    if kv_dtype == jnp.bfloat16:
        return k, -k
    v = k.transpose(0, 1, 3, 2)
    if kv_dtype == jnp.int8:
        scale = jnp.asarray(rng.uniform(1, 2, (PAGES, kv_heads, PAGE)), jnp.float32)
        return Quantized(k, scale), Quantized(v, 2 * scale)
    return k, v


def steps_apart(got, want):
    """Return the largest difference between two caches, in steps of their dtype."""
    if isinstance(got, Quantized):
        np.testing.assert_allclose(got.scale, want.scale, rtol=1e-2)
        return np.abs(np.asarray(got.values, int) - np.asarray(want.values, int)).max()
    bits = {1: np.int8, 2: np.int16}[got.dtype.itemsize]
    return np.abs(np.asarray(got).view(bits).astype(int) - np.asarray(want).view(bits).astype(int)).max()


@pytest.mark.parametrize(
    ("kv_dtype", "tokens", "group", "kv_heads", "width", "rope", "normed", "settings"),
    [
        (jnp.bfloat16, 5, 4, 2, 64, Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192), False, {"sms": 2}),
        (jnp.bfloat16, 3, 3, 2, 64, Rope(1e4, "linear", 4.0), True, {}),
        (jnp.bfloat16, 3, 8, 1, 256, Rope(1e4), True, {"sms": 2}),  # the heads of Gemma 4 E2B
        (jnp.bfloat16, 2, 1, 1, 128, None, False, {"sms": 1}),  # one row of queries, shared by all four warps
        (jnp.float8_e4m3fn, 5, 2, 2, 64, Rope(1e4), True, {"sms": 2}),
        (jnp.int8, 3, 2, 4, 64, Rope(1e4), False, {"sms": 1}),
        (jnp.float8_e4m3fn, 2, 1, 3, 64, None, False, {}),  # an odd number of heads of 64 bytes
        (jnp.float8_e4m3fn, 11, 1, 2, 64, None, False, {"together": 32}),  # in blocks of 8
        (jnp.int8, 9, 1, 2, 64, None, False, {"together": 8, "sms": 1}),
        (
            jnp.float8_e4m3fn,
            19,
            1,
            2,
            64,
            Rope(1e4),
            True,
            {"together": 16, "sms": 1},
        ),  # four rounds of blocks
    ],
)
def test_rope_append_equals_its_reference(kv_dtype, tokens, group, kv_heads, width, rope, normed, settings):
    rng = np.random.default_rng(tokens + group)
    fused = jnp.asarray(rng.normal(size=(tokens, kv_heads * (group + 2) * width)), jnp.bfloat16)
    k, v = cache(rng, kv_dtype, kv_heads, width)
    positions = jnp.asarray(rng.integers(0, 2000, tokens), jnp.int32)
    slots = (
        jnp.asarray(rng.permutation(PAGES * PAGE)[:tokens], jnp.int32)
        .at[0]
        .set(-1)
        .at[tokens // 2]
        .set(PAGES * PAGE)
    )
    how = {
        "head_dim": width,
        "inv_freq": None if rope is None else jnp.asarray(inverse_frequencies(rope, width)),
        "eps": 1e-6,
    }
    if normed:
        weights = jnp.asarray(rng.normal(size=(2, width)), jnp.bfloat16)
        how |= {"q_norm": weights[0], "k_norm": weights[1], "norm_offset": 1.0}
    if kv_dtype == jnp.float8_e4m3fn and normed:
        how |= {
            "k_scale": jnp.linspace(0.002, 0.1, kv_heads),
            "v_scale": jnp.linspace(0.05, 0.01, kv_heads),
        }  # some values saturate
    # One program for each function: eager operations would be a program each.
    numbers = {"head_dim": width, "eps": how.pop("eps"), "norm_offset": how.pop("norm_offset", 0.0)}
    kernel = jax.jit(functools.partial(rope_append, **numbers, **settings, interpret=INTERPRET))
    plain = jax.jit(functools.partial(reference.rope_append, **numbers))
    del how["head_dim"]
    got, want = (fn(fused, k, v, positions, slots, **how) for fn in (kernel, plain))
    # The reference implementation rounds to bfloat16 between norm and rotation. The difference is one or two
    # last bits, more for sums that cancel.
    np.testing.assert_allclose(
        *(np.asarray(x[0], np.float32) for x in (got, want)), rtol=0.02, atol=0.04 if normed else 1e-6
    )
    for new, old, plain in zip(got[1:], (k, v), want[1:], strict=True):
        written = (
            np.asarray(jax.tree.leaves(plain)[0], np.float32)
            != np.asarray(jax.tree.leaves(old)[0], np.float32)
        ).any()
        assert written == (tokens > 2)
        if normed:
            # e4m3 has steps of an eighth, and numbers here that are up to 500 times the true ones.
            rtol, atol = (0.02, 0.04) if kv_dtype == jnp.bfloat16 else (0.13, 20.0)
            np.testing.assert_allclose(
                np.asarray(new, np.float32), np.asarray(plain, np.float32), rtol=rtol, atol=atol
            )
            assert (np.asarray(new) == np.asarray(plain)).mean() > 0.98
        else:
            assert steps_apart(new, plain) <= (kv_dtype == jnp.int8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fused": (4, 500)}, "the projection is"),
        ({"fused_dtype": jnp.float32}, "the projection is float32"),
        ({"v": (3, 2, 64, 64)}, "pages are"),
        ({"dtype": jnp.int8}, "Quantized int8"),
        ({"fused": (4, 3 * 2 * 32)}, "H a multiple of 64"),
    ],
)
def test_rope_append_names_unsupported_arguments(changes, said):
    dtype = changes.get("dtype", jnp.float8_e4m3fn)
    fused = jnp.zeros(changes.get("fused", (4, 512)), changes.get("fused_dtype", jnp.bfloat16))
    k, v = jnp.zeros((3, 2, 32, 64), dtype), jnp.zeros(changes.get("v", (3, 2, 64, 32)), dtype)
    with pytest.raises(ValueError, match=said):
        rope_append(fused, k, v, jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32), head_dim=64, inv_freq=None)


@pytest.mark.parametrize(
    ("kv", "group", "fits"), [(16, 16, False), (71, 1, True), (32, 4, True), (257, 1, False)]
)
def test_a_token_that_does_not_fit_an_sm_is_refused(kv, group, fits):
    """The kernel set asks the same function."""
    h = 64 if kv in (71, 257) else 256  # 257 heads of 64 have room, but no copy takes so many
    fused = jax.ShapeDtypeStruct((4, kv * (group + 2) * h), jnp.bfloat16)
    pages, ints = jax.ShapeDtypeStruct((3, kv, 64, h), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    assert takes(kv, group, h, narrow=False) == fits
    if not fits:
        said = (
            "257 KV heads: accepted are up to 256"
            if kv == 257
            else "16 KV heads of 256 and 16 query heads each: accepted are fewer"
        )
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(
                functools.partial(rope_append, head_dim=h, inv_freq=None), fused, pages, pages, ints, ints
            )


BOTH_NORMS, BOTH_SCALES = (
    dict.fromkeys(names, jnp.ones(2)) for names in (("q_norm", "k_norm"), ("k_scale", "v_scale"))
)


@pytest.mark.parametrize(
    ("kv_dtype", "given", "said"),
    [
        (
            jnp.float8_e4m3fn,
            {"k_scale": jnp.ones(2)},
            r"k_scale \[2\], v_scale None: accepted are both or none",
        ),
        (
            jnp.float8_e4m3fn,
            {"v_scale": jnp.ones(2)},
            r"k_scale None, v_scale \[2\]: accepted are both or none",
        ),
        (jnp.bfloat16, {"q_norm": jnp.ones(64)}, r"q_norm \[64\], k_norm None: accepted are both or none"),
        (jnp.bfloat16, {"k_norm": jnp.ones(64)}, r"q_norm None, k_norm \[64\]: accepted are both or none"),
        (jnp.bfloat16, BOTH_SCALES, "for a cache of bfloat16: accepted is a cache of float8_e4m3fn"),
        (jnp.int8, BOTH_SCALES, "for a cache of int8: accepted is a cache of float8_e4m3fn"),
        (
            jnp.float8_e4m3fn,
            BOTH_SCALES | {"k_scale": jnp.ones(1)},
            r"k_scale \[1\]: accepted is \[2\], for 4 tokens and 2 KV heads of 64",
        ),
        (
            jnp.float8_e4m3fn,
            BOTH_SCALES | {"v_scale": jnp.ones((2, 1))},
            r"v_scale \[2, 1\]: accepted is \[2\]",
        ),
        (jnp.int8, BOTH_NORMS, r"q_norm \[2\]: accepted is \[64\]"),
        (jnp.bfloat16, {"inv_freq": jnp.ones(64)}, r"inv_freq \[64\]: accepted is \[32\]"),
        (jnp.bfloat16, {"slots": jnp.zeros(2, jnp.int32)}, r"slots \[2\]: accepted is \[4\]"),
        (jnp.bfloat16, {"positions": jnp.zeros((4, 1), jnp.int32)}, r"positions \[4, 1\]: accepted is \[4\]"),
    ],
)
@pytest.mark.parametrize("append", [rope_append, reference.rope_append], ids=["kernel", "plain"])
def test_kernel_and_reference_name_incomplete_arguments(append, kv_dtype, given, said):
    ints = jnp.zeros(4, jnp.int32)
    given = {"positions": ints, "slots": ints, "inv_freq": None} | given
    k, v = jax.eval_shape(lambda: cache(np.random.default_rng(0), kv_dtype, 2, 64))
    with pytest.raises(ValueError, match=said):
        append(jax.ShapeDtypeStruct((4, 512), jnp.bfloat16), k, v, head_dim=64, **given)


def test_sms_are_of_a_gpu():
    ints, pages = jnp.zeros(4, jnp.int32), jnp.zeros((3, 2, 32, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="sms=0: accepted are 1 to 132"):
        rope_append(
            jnp.zeros((4, 512), jnp.bfloat16), pages, pages, ints, ints, head_dim=64, inv_freq=None, sms=0
        )


def test_blocks_of_values_are_as_many_as_keep_all_sms_alike():
    assert [block_of(None, tokens, 8, 132) for tokens in (7, 8, 512, 2048, 8192)] == [1, 8, 8, 8, 32]
    assert block_of(None, 2048, 8, 24) == 32 and block_of(None, 2048, 1, 132) == 8
    assert [block_of(32, tokens, 8, 132) for tokens in (7, 15, 31, 32)] == [1, 8, 16, 32] and block_of(
        1, 2048, 8, 132
    ) == 1


@pytest.mark.parametrize("half", [32, 64, 128])
def test_a_row_is_within_one_warp(half):
    """Sums across warps would share one scratch, which warpgroups would overwrite."""
    for rows in range(1, 49):
        tile, repeated, layout = rows_layout(rows, half)
        made = layout.to_mgpu()
        along_a_row = made.tiling.tile_dimension(1)
        assert rows % tile == 0 and not any(along_a_row[dim] for dim in made.partitioned_warp_dims)
        assert repeated == any(isinstance(dim, plgpu.Replicated) for dim in made.warp_dims)


# (cache, KV heads, head width, tokens of a block of values, transformation of queries and keys)
COMMON_FORMS = [
    (jnp.bfloat16, 8, 128, 1, "turned"),
    (jnp.bfloat16, 8, 128, 1, "turned"),  # another layer: the table of angles is the same
    (jnp.float8_e4m3fn, 8, 128, None, "normed and turned"),
    (jnp.float8_e4m3fn, 8, 128, 1, "turned"),
    (jnp.int8, 8, 128, 16, "turned"),
    (jnp.bfloat16, 32, 64, 1, "nothing"),  # OPT's; its embeddings hold positions
]
OTHER_FORMS = [
    (jnp.int8, 8, 128, 1, "turned"),
    # As many bytes a token as OPT-30B's: shared memory holds the ring of two workers.
    (jnp.bfloat16, 28, 128, 1, "turned"),
    (jnp.bfloat16, 1, 64, 1, "turned"),
    (jnp.float8_e4m3fn, 3, 64, 1, "turned"),
    (jnp.float8_e4m3fn, 2, 256, 1, "turned"),
    (jnp.float8_e4m3fn, 8, 128, 32, "turned"),
    (jnp.float8_e4m3fn, 1, 64, 8, "turned"),
    (jnp.int8, 2, 256, 8, "turned"),
    (jnp.float8_e4m3fn, 8, 128, None, "turned"),
    (jnp.float8_e4m3fn, 32, 128, None, "nothing"),
    (jnp.bfloat16, 8, 128, 1, "normed and turned"),  # Qwen3's
    (jnp.bfloat16, 1, 256, 1, "normed and turned"),  # Gemma 3's
]


@pytest.mark.parametrize(
    "forms",
    [pytest.param(COMMON_FORMS, id="common"), pytest.param(OTHER_FORMS, id="others", marks=pytest.mark.slow)],
)
def test_for_the_h200_pages_are_written_in_place_and_no_access_is_misaligned(forms, tmp_path, monkeypatch):
    """One program holds all forms: no cache is copied, nothing spills, and
    every address is provably aligned.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def grown(x):  # 2^18 pages: beyond 2^31 elements
        return jax.ShapeDtypeStruct((2**18, *x.shape[1:]), x.dtype)

    made = [jax.eval_shape(lambda form=form: cache(np.random.default_rng(0), *form[:3])) for form in forms]
    pages = jax.tree.map(grown, made)
    fused = [jax.ShapeDtypeStruct((256, heads * 6 * width), jnp.bfloat16) for _, heads, width, *_ in forms]
    integers, floats = jax.ShapeDtypeStruct((256,), jnp.int32), jax.ShapeDtypeStruct((128,), jnp.float32)
    norm = jax.ShapeDtypeStruct((256,), jnp.bfloat16)

    def step(pages, fused, positions, slots, inv_freq, norm):
        def layer(form, kv: Any, x):
            (k, v), (width, together, done) = kv, form[2:]
            weights = dict.fromkeys(("q_norm", "k_norm"), norm[:width]) if "normed" in done else {}
            how = {
                "inv_freq": inv_freq[: width // 2] if "turned" in done else None,
                "together": together,
                **weights,
            }
            return rope_append(x, k, v, positions, slots, head_dim=width, **how)

        return [layer(*of) for of in zip(forms, pages, fused, strict=True)]

    compiled = compile_for_h200(
        step, *abstract(h200_mesh(), (pages, fused, integers, integers, floats, norm)), donate_argnums=(0,)
    )
    assert [thunk.kind for thunk in compiled.thunks].count("kCustomCall") == len(forms)
    assert len(compiled.thunks) - len(forms) <= 2 * 3  # the tables of angles, for each of three head widths
    assert compiled.memory.alias_size_in_bytes == sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(pages)
    )
    assert not any(compiled.copies(x.shape) for x in jax.tree.leaves(pages))
    logs, texts = (
        [path.read_text(errors="replace") for path in tmp_path.glob(f"rope_append*{end}")]
        for end in (".ptxas", ".ptx")
    )
    assert set(re.findall(r"(\d+) bytes spill", "".join(logs))) == {"0"}
    assert len(texts) >= len(set(forms)) and not [access for text in texts for access in misaligned(text)]


def test_what_is_misaligned_is_found():
    """`stmatrix` to rows of 136 bytes faulted on a GPU. Rows of 144 bytes are aligned."""

    def kernel(pitch):
        return f"""
.visible .entry rows(.param .u64 .ptr .align 256 out) {{
	.shared .align 16 .b8 __dynamic_shmem__0;
	mov.u32 	%r1, %tid.x;
	shr.u32 	%r2, %r1, 4;
	and.b32 	%r3, %r1, 7;
	mov.b32 	%r4, __dynamic_shmem__0;
	mad.lo.s32 	%r5, %r2, {pitch}, %r4;
	shl.b32 	%r6, %r3, 4;
	add.s32 	%r7, %r5, %r6;
	stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r7+1024], {{%r8}};
	st.shared.v2.b32 	[%r7], {{%r9, %r10}};
}}
"""

    assert misaligned(kernel(144)) == []
    (found,) = misaligned(kernel(136))
    assert found.startswith("stmatrix") and found.endswith("a multiple of 8, not of 16")

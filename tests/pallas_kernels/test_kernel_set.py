"""The backend of each op for each family of models and device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES
from pallas_kernels import kernel_set
from pallas_kernels.gemm import api as gemm
from pallas_kernels.gemm import reference
from pallas_kernels.gemm.api import E4M3_BLOCKS, HopperGemm, Product, eligible_kernels, product_of
from pallas_kernels.gemm.tuned_table import Choice, Rule, Shape, Table
from pallas_kernels.kernel_set import KERNELS, Fallback, KernelSet, kernel_set_for
from pallas_kernels.quantized import Int4, Quantized
from pallas_kernels.triton.gemm import TritonGemm

FAMILIES = {
    "llama": "llama-3.1-8b",
    "mistral": "mistral-7b",
    "qwen2": "qwen2-72b",
    "qwen3": "qwen3-8b",
    "qwen3_moe": "qwen3-30b-a3b",
    "gemma2": "gemma-2-9b",
    "gemma3": "gemma-3-1b",
    "mixtral": "mixtral-8x7b",
    "glm4_moe": "glm-4.5-air",
    "opt": "opt-6.7b",
    "tiny llama": "smollm2-135m",
}
E4M3 = "float8_e4m3fn"
FLOAT32 = {"dtype": "float32", "kv_dtype": "float32"}
PAGED = ("rope_append", "decode_attention", "chunk_attention")
MIXTURE = ("top_k", "grouped_gemm")
LATENT = {
    "latent_attention": True,
    "latent_rank": 512,
    "latent_rope_dim": 64,
    "latent_value_dim": 128,
    "queries_per_kv_head": 16,
    "kv_heads": 1,
    "head_dim": 192,
}
OPS = (*PAGED, "add_norm", "draw_filtered", "draw", "quantize_rows", *MIXTURE)
MOSAIC = dict.fromkeys(OPS, "mosaic")
REFERENCES = dict.fromkeys(OPS, "reference")
EXPERTS = {"grouped_gemm": "triton"}
TRITON = REFERENCES | EXPERTS | {"decode_attention": "triton"}


def of(model: str, platform: str, capability: str, **changes) -> KernelSet:
    config = open_checkpoint(model, load_format="dummy").model_config
    settings = {
        "head_dim": config.head_dim,
        "queries_per_kv_head": config.num_heads // config.num_kv_heads,
        "hidden_size": config.hidden_size,
        "page_size": 64,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "attention_sinks": config.attention_sinks,
    }
    return kernel_set_for(platform, capability, **(settings | changes))


def places(kernels: KernelSet) -> dict[str, str]:
    return {op: kernel_set._backend(getattr(kernels, op)) for op in OPS}


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_hopper_runs_every_family_on_mosaic(model):
    for kv_dtype in ("bfloat16", "float8_e4m3fn"):
        kernels = of(model, "gpu", "9.0", kv_dtype=kv_dtype)
        expected = MOSAIC | ({"quantize_rows": "reference"} if model == "smollm2-135m" else {})  # rows of 576
        assert places(kernels) == expected
        assert isinstance(kernels.gemm, HopperGemm)


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_the_kernels_take_what_the_family_gives_them(model):
    config = open_checkpoint(model, load_format="dummy").model_config
    n, kv, h, d = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    norms = {"q_norm": array("bfloat16", h), "k_norm": array("bfloat16", h)} if config.qk_norm else {}
    bias = [array("bfloat16", d)] if config.norm == "layer_norm" else []
    table, lengths, tokens = array("int32", 8, 4), array("int32", 8), array("int32", 16)
    for kv_dtype in ("bfloat16", E4M3, "int8"):
        kernels = of(model, "gpu", "9.0", kv_dtype=kv_dtype, kv_heads=kv)
        pages = [
            array(kv_dtype, 40, kv, 64, h),
            array(kv_dtype, 40, kv, *((64, h) if kv_dtype == "bfloat16" else (h, 64))),
        ]
        shape = {E4M3: (kv,), "int8": (40, kv, 64)}.get(kv_dtype)
        scales = {name: array("float32", *shape) for name in ("k_scale", "v_scale")} if shape else {}
        for layer in set(config.layers):
            attend = {"scale": config.scale, "window": layer.window, "soft_cap": config.attention_soft_cap}
            decode = functools.partial(kernels.decode_attention, **attend)
            chunk = functools.partial(kernels.chunk_attention, **attend)
            chunks, q = array("int32", 2, 4), array("bfloat16", 16, n, h)
            assert jax.eval_shape(chunk, q, *pages, table, chunks, **scales).shape == q.shape
            into = lambda q, *rest, decode=decode, **scales: decode(q, *rest, into=q, **scales)
            assert jax.eval_shape(into, q, *pages, table, lengths, **scales).shape == q.shape
        rope = {"inv_freq": array("float32", h // 2) if config.layers[0].rope else None}
        rotate = functools.partial(kernels.rope_append, head_dim=h)
        fused = array("bfloat16", 16, (n + 2 * kv) * h)
        if kv_dtype == "int8":
            pages, scales = [Quantized(x, array("float32", *x.shape[:2], 64)) for x in pages], {}
        q, k_pages, _ = jax.eval_shape(rotate, fused, *pages, tokens, tokens, **rope, **norms, **scales)
        assert q.shape == (16, n, h) and (k_pages.values if kv_dtype == "int8" else k_pages).dtype == kv_dtype
        assert jax.eval_shape(kernels.quantize_rows, array("bfloat16", 16, n * h)).values.shape == (16, n * h)
        x = array("bfloat16", 16, d)
        for quantize in (False, True):
            norm = functools.partial(kernels.add_norm, eps=1e-5, quantize=quantize)
            assert jax.eval_shape(norm, x, x, array("bfloat16", d), *bias)[0].shape == (16, d)


def test_attention_with_sinks_runs_on_mosaic_over_a_bfloat16_cache():
    kernels = functools.partial(of, "gpt-oss-20b")
    assert places(kernels("gpu", "9.0")) == MOSAIC
    for kv_dtype in (E4M3, "int8"):
        found = kernels("gpu", "9.0", kv_dtype=kv_dtype)
        assert places(found) == MOSAIC | dict.fromkeys(PAGED[1:], "reference")
        assert Fallback("decode_attention", "attention_sinks", True, "a cache of bfloat16") in found.fallbacks
    assert places(kernels("gpu", "8.0")) == REFERENCES | EXPERTS


def test_attention_over_latent_vectors_runs_on_mosaic():
    found = of("llama-3.1-8b", "gpu", "9.0", **LATENT)
    assert kernel_set._backend(found.latent_decode_attention) == "mosaic"
    assert kernel_set._backend(found.latent_chunk_attention) == "mosaic"
    assert {"decode_attention", "chunk_attention"} < set(found.kernel_ops)
    for name in ("list_latent_work", "list_latent_chunk_work"):
        assert getattr(found, name) is not getattr(kernel_set.REFERENCE, name)
    assert kernel_set._backend(found.latent_up_chunk_attention) == "mosaic"
    other = of("llama-3.1-8b", "gpu", "9.0", **LATENT | {"latent_value_dim": 192})
    assert other.latent_up_chunk_attention is None
    assert of("llama-3.1-8b", "cpu", "", **LATENT) is kernel_set.CPU


def test_an_int8_cache_runs_on_mosaic_but_for_odd_heads_and_wide_ones():
    kernels = functools.partial(of, "llama-3.1-8b", "gpu", "9.0", kv_dtype="int8")
    assert places(kernels()) == MOSAIC
    assert places(kernels(kv_heads=3)) == MOSAIC | {"rope_append": "reference"}
    assert places(kernels(head_dim=256)) == MOSAIC | {"chunk_attention": "reference"}


@pytest.mark.parametrize("kv_dtype", ["bfloat16", E4M3, "int8"])
def test_attention_spans_run_on_mosaic_but_for_the_append_in_8_bit_integers(kv_dtype):
    kernels = of("llama-3.1-8b", "gpu", "9.0", kv_dtype=kv_dtype, attention_spans=True)
    assert places(kernels) == MOSAIC | ({"rope_append": "reference"} if kv_dtype == "int8" else {})


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_ampere_decodes_every_family_on_triton(model):
    kernels = of(model, "gpu", "8.0")
    assert places(kernels) == TRITON
    assert kernel_set._backend(kernels.sort_rows) == kernel_set._backend(kernels.list_groups) == "triton"
    assert isinstance(kernels.gemm, TritonGemm)


def test_other_devices_run_the_references(monkeypatch):
    assert of("llama-3.1-8b", "cpu", "") is kernel_set.CPU
    monkeypatch.setattr(kernel_set, "has_triton", lambda: False)
    assert of("llama-3.1-8b", "gpu", "8.0") is kernel_set.REFERENCE


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"head_dim": 96}, dict.fromkeys(PAGED, "reference")),
        ({"page_size": 16}, dict.fromkeys(PAGED, "reference")),
        ({"queries_per_kv_head": 17, "kv_heads": 4}, dict.fromkeys(PAGED, "reference")),
        ({"hidden_size": 100}, {"add_norm": "reference"}),
        ({"kv_heads": 40}, {"quantize_rows": "reference"}),
        ({"dtype": "float32"}, dict.fromkeys(OPS, "reference")),
    ],
)
def test_only_the_unsupported_op_falls_back(change, place):
    assert places(of("llama-3.1-8b", "gpu", "9.0", **change)) == MOSAIC | place


def test_kernels_take_rows_of_an_odd_multiple_of_64_columns():
    made = of("llama-3.1-8b", "gpu", "9.0", hidden_size=2880)
    assert places(made) == MOSAIC
    assert places(of("llama-3.1-8b", "gpu", "9.0", hidden_size=64))["add_norm"] == "reference"


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_no_family_falls_back_for_a_reason_of_the_pages(model):
    """Test the engine's default settings.

    Only the smallest model falls back for another reason: three query heads for each KV head.
    """
    for kv_dtype in ("bfloat16", E4M3):
        found = {
            (fallback.op, fallback.field, fallback.value)
            for fallback in of(model, "gpu", "9.0", kv_dtype=kv_dtype).fallbacks
        }
        small = {("quantize_rows", "queries_per_kv_head", 3)}
        assert found == (small if model == "smollm2-135m" else set())
    assert of(model, "gpu", "8.0").fallbacks == of(model, "cpu", "").fallbacks == ()


@pytest.mark.parametrize(
    ("capability", "change", "fallbacks"),
    [
        ("9.0", {"page_size": 16}, [Fallback(op, "page_size", 16, "64") for op in PAGED]),
        (
            "9.0",
            {"head_dim": 96},
            [
                Fallback("rope_append", "head_dim", 96, "64, 128 or 256"),
                *(Fallback(op, "head_dim", 96, "64, 128, 256 or 512") for op in PAGED[1:]),
            ],
        ),
        ("9.0", {"head_dim": 512}, [Fallback("rope_append", "head_dim", 512, "64, 128 or 256")]),
        (
            "9.0",
            {"head_dim": 512, "kv_dtype": E4M3, "queries_per_kv_head": 16, "kv_heads": 2},
            [
                Fallback("rope_append", "head_dim", 512, "64, 128 or 256"),
                *(Fallback(op, "head_dim", 512, "64, 128 or 256 with a cache of 8 bits") for op in PAGED[1:]),
                Fallback("decode_attention", "queries_per_kv_head", 16, "up to 8 with heads of 512"),
            ],
        ),
        (
            "9.0",
            {"queries_per_kv_head": 17, "kv_heads": 4},
            [Fallback(op, "queries_per_kv_head", 17, "up to 16") for op in PAGED],
        ),
        (
            "9.0",
            {"kv_heads": 16, "queries_per_kv_head": 16, "head_dim": 256},
            [
                Fallback("rope_append", "kv_heads", 16, "fewer of 256 with 16 query heads each"),
                Fallback(
                    "quantize_rows",
                    "kv_heads",
                    16,
                    "of 256 with 16 query heads each, up to 16384 columns a device",
                ),
            ],
        ),
        ("9.0", {"kv_heads": 8, "queries_per_kv_head": 16}, []),  # 16,384 columns, as Llama-3.1-405B's
        (
            "9.0",
            {"kv_heads": 40, "queries_per_kv_head": 4},
            [
                Fallback(
                    "quantize_rows",
                    "kv_heads",
                    40,
                    "of 128 with 4 query heads each, up to 16384 columns a device",
                )
            ],
        ),
        (
            "9.0",
            {"kv_dtype": "float32"},
            [Fallback(op, "kv_dtype", "float32", "bfloat16, fp8 or int8") for op in PAGED],
        ),
        (
            "9.0",
            {"kv_dtype": "int8", "head_dim": 256},
            [Fallback("chunk_attention", "head_dim", 256, "64 or 128 with a cache of int8")],
        ),
        (
            "9.0",
            LATENT,
            [Fallback("rope_append", "latent_attention", True, "keys and values by head")],
        ),
        (
            "9.0",
            LATENT | {"latent_rank": 100, "latent_rope_dim": 32, "queries_per_kv_head": 12},
            [
                Fallback("rope_append", "latent_attention", True, "keys and values by head"),
                *(
                    Fallback(op, field, value, accepted)
                    for field, value, accepted in (
                        ("latent_rank", 100, "128, 256, 384 or 512"),
                        ("latent_rope_dim", 32, "64"),
                        (
                            "queries_per_kv_head",
                            12,
                            "multiples of 8 up to 64 a device, and multiples of 64",
                        ),
                    )
                    for op in PAGED[1:]
                ),
            ],
        ),
        ("8.0", LATENT, [Fallback("decode_attention", "latent_attention", True, "keys and values by head")]),
        ("8.0", {"page_size": 16}, [Fallback("decode_attention", "page_size", 16, "64")]),
        ("8.6", {"head_dim": 256}, []),
        (
            "8.6",
            FLOAT32 | {"head_dim": 256},
            [
                Fallback(
                    "decode_attention",
                    "head_dim",
                    256,
                    "up to 128 in float32, which fills the shared memory of 8.6",
                )
            ],
        ),
        ("8.0", FLOAT32 | {"head_dim": 256}, []),
        (
            "7.5",
            {"head_dim": 256},
            [
                Fallback(
                    "decode_attention",
                    "head_dim",
                    256,
                    "up to 128 in bfloat16, which fills the shared memory of 7.5",
                )
            ],
        ),
        (
            "7.5",
            FLOAT32,
            [
                Fallback(
                    "decode_attention",
                    "head_dim",
                    128,
                    "up to 64 in float32, which fills the shared memory of 7.5",
                )
            ],
        ),
        (
            "8.0",
            {"kv_dtype": E4M3},
            [Fallback("decode_attention", "kv_dtype", E4M3, "bfloat16, the dtype of the weights")],
        ),
    ],
)
def test_a_set_holds_the_reason_of_a_fallback(capability, change, fallbacks):
    assert of("llama-3.1-8b", "gpu", capability, **change).fallbacks == tuple(fallbacks)


@given(
    capability=st.sampled_from(["9.0", "8.0"]),
    change=st.fixed_dictionaries(
        {},
        optional={
            "head_dim": st.sampled_from([8, 32, 64, 80, 96, 128, 256, 512]),
            "queries_per_kv_head": st.integers(1, 20),
            "kv_heads": st.integers(1, 8),
            "page_size": st.sampled_from([1, 16, 32, 64, 128]),
            "hidden_size": st.sampled_from([64, 576, 2048]),
            "dtype": st.sampled_from(["bfloat16", "float32"]),
            "kv_dtype": st.sampled_from(["bfloat16", E4M3, "int8", "float32"]),
        },
    ),
)
def test_every_op_has_a_kernel_or_a_fallback_reason(capability, change):
    kernels = of("llama-3.1-8b", "gpu", capability, **change)
    why = {fallback.op for fallback in kernels.fallbacks}
    has = {"gemm", *OPS} if capability == "9.0" else {"gemm", "decode_attention", "grouped_gemm"}
    assert set(kernels.kernel_ops) | why == has and not set(kernels.kernel_ops) & why
    assert set(kernels.kernel_ops) - {"gemm"} == {
        op for op, place in places(kernels).items() if place != "reference"
    }
    values = {
        "head_dim": 128,
        "queries_per_kv_head": 4,
        "kv_heads": 8,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
    } | change
    for fallback in kernels.fallbacks:
        assert fallback.accepted and fallback.value == values[fallback.field]
    listed = {
        "decode_attention": "list_decode_work",
        "chunk_attention": "list_chunk_work",
        "grouped_gemm": "list_groups",
    }
    if capability == "9.0":
        for op, name in listed.items():
            assert (getattr(kernels, name) is getattr(kernel_set.REFERENCE, name)) == (op in why)


@pytest.mark.parametrize(
    ("kernels", "platform", "capability"),
    [("mosaic", "gpu", "8.0"), ("mosaic", "cpu", ""), ("triton", "cpu", ""), ("best", "gpu", "9.0")],
)
def test_kernels_that_cannot_run_are_refused_by_name(kernels, platform, capability):
    with pytest.raises(ValueError, match=f"kernels='{kernels}'"):
        of("llama-3.1-8b", platform, capability, kernels=kernels)
    with pytest.raises(ValueError, match=r"kernels='mosaic'.*dtype is float32"):
        of("llama-3.1-8b", "gpu", "9.0", kernels="mosaic", dtype="float32")


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_whose_kernels_can_be_kept_to_some_sms_is_known_without_it(name):
    """The search asks by the table. Other sets ignore `sms`."""
    capability = DEVICES[name].compute_capability
    assert (
        of("llama-3.1-8b", "gpu", capability).can_be_bounded
        == kernel_set.has_bounded(capability)
        == (name in ("H100", "H200"))
    )


def test_a_setting_forces_the_kernels():
    assert of("llama-3.1-8b", "gpu", "9.0", kernels="reference") is kernel_set.REFERENCE
    assert of("llama-3.1-8b", "gpu", "9.0", kernels="triton").name == "triton"
    assert set(KERNELS) == {"auto", "reference", "mosaic", "triton"}


# The dense products of a Llama 8B layer, and which kernels take them, the likely fastest first.
PRODUCTS = [
    (Product(1, Shape(6144, 4096), "bfloat16"), ("flat", "xla", "dense", "fma")),
    (Product(16, Shape(6144, 4096), "bfloat16"), ("flat", "xla", "dense")),
    (Product(65, Shape(6144, 4096), "bfloat16"), ("xla", "dense")),
    (
        Product(256, Shape(28672, 4096, gate_block=64), "bfloat16"),
        ("dense", "xla"),
    ),  # the gate's own pass over memory is saved
    (Product(256, Shape(28672, 4096), "bfloat16"), ("xla", "dense")),
    (Product(1024, Shape(28672, 4096, gate_block=64), "bfloat16"), ("xla", "dense")),
    (
        Product(8, Shape(59136, 8192, gate_block=16), "bfloat16"),
        ("xla", "dense"),
    ),  # flat takes only gates in blocks of 64
    (Product(8, Shape(128256, 4096), "bfloat16", "float32"), ("flat", "xla", "dense")),
    (Product(1024, Shape(6144, 4096), "bfloat16", bounded=True), ("dense",)),
    (Product(2, Shape(6144, 4096), "bfloat16", bounded=True), ("flat", "dense")),
    (Product(1024, Shape(100, 4096), "bfloat16", bounded=True), ("xla",)),
    (Product(8, Shape(8, 4096), "bfloat16"), ("flat", "xla")),  # a router
    (Product(16, Shape(4096, 4096), "float32"), ("xla",)),
    (Product(16, Shape(4096, 14336, "int4"), "bfloat16"), ("int4", "xla")),
    (Product(100, Shape(4096, 14336, "int4"), "bfloat16"), ("xla",)),
    (Product(16, Shape(4096, 14336, E4M3), E4M3), ("fp8_flat", "fp8", "xla")),
    (Product(1024, Shape(28672, 4096, E4M3, 64), E4M3, E4M3), ("fp8", "xla")),
    (Product(1024, Shape(4096, 14336, E4M3), "bfloat16"), ("xla",)),  # weights alone
    (Product(16, Shape(4096, 14336, E4M3_BLOCKS), E4M3), ("fp8_flat", "fp8", "xla")),
    (Product(16, Shape(4096, 14336, E4M3_BLOCKS, 32), E4M3), ("xla",)),
]


@pytest.mark.parametrize(("p", "expected"), PRODUCTS)
def test_eligible_kernels_of_a_product(p, expected):
    assert eligible_kernels(p) == expected


def test_a_product_is_known_by_its_arguments():
    plain = {"gate_block": None, "quantize": False, "out_dtype": None, "sms": None}
    x, w = jnp.zeros((3, 256), jnp.bfloat16), jnp.zeros((128, 256), jnp.bfloat16)
    assert gemm.product(x, w, **plain) == Product(3, Shape(128, 256), "bfloat16")
    qx, qw = Quantized(x.astype(E4M3), jnp.ones(3)), Quantized(w.astype(E4M3), jnp.ones(128))
    assert gemm.product(qx, qw, **plain) == Product(3, Shape(128, 256, E4M3, scales="rows"), E4M3)
    by_blocks = Quantized(qx.values, jnp.ones((3, 2)))
    assert gemm.product(by_blocks, qw, **plain) == Product(3, Shape(128, 256, E4M3, scales="blocks"), E4M3)
    told = gemm.product(qx, qw, gate_block=64, quantize=True, out_dtype=None, sms=100, residual=x)
    assert told == Product(3, Shape(128, 256, E4M3, 64, "rows"), E4M3, E4M3, bounded=True, residual=True)
    i4 = Int4(
        jnp.zeros((128, 128), jnp.uint8), jnp.zeros((128, 4), jnp.bfloat16), jnp.zeros((128, 4), jnp.bfloat16)
    )
    assert gemm.product(x, i4, **(plain | {"out_dtype": jnp.float32})) == Product(
        3, Shape(128, 256, "int4"), "bfloat16", "float32"
    )


def test_the_table_chooses_among_those_that_take_it():
    shape = Shape(6144, 4096)
    chosen = HopperGemm(Table("a GPU", (Rule(shape, (Choice(8, "fma"), Choice(64, "xla"))),)))
    assert chosen.choose(Product(4, shape, "bfloat16")).kernel == "fma"
    assert chosen.choose(Product(8, shape, "bfloat16")).kernel == "flat"  # 8 rows are too many for fma
    assert chosen.choose(Product(32, shape, "bfloat16")).kernel == "xla"
    assert chosen.choose(Product(32, shape, "bfloat16", bounded=True)).kernel == "flat"
    assert HopperGemm(Table("a GPU")).choose(Product(32, shape, "bfloat16")).kernel == "flat"


def test_a_tuned_tile_needs_all_sms():
    """Next to another kernel a pair of CTAs may not find two SMs: with sms=1 the kernel refused its tile."""
    tile = (("cluster", 2), ("depth", 128), ("rows", 64), ("stages", 8), ("warpgroups", 1))
    tuned = HopperGemm(Table("a GPU", (Rule(Shape(1024, 1024), (Choice(8, "flat", tile),)),)))
    assert tuned.choose(Product(8, Shape(1024, 1024), "bfloat16")) == Choice(8, "flat", tile)
    x, w = (jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16) for rows in (8, 1024))
    assert jax.eval_shape(functools.partial(tuned, sms=1), x, w).shape == (8, 1024)


def test_kernels_are_described_by_rows():
    shape = Shape(6144, 4096)
    kernels = dataclasses.replace(kernel_set.REFERENCE, name="some", gemm=HopperGemm(Table("a GPU")))
    down, head = product_of(Shape(4096, 14336, E4M3), 1), product_of(shape, 1, "float32")
    tuned = HopperGemm(Table("a GPU", (Rule(shape, (Choice(64, "xla"),)),)))
    assert "logits [6144, 4096] bfloat16: flat, from 65 rows xla" in dataclasses.replace(
        kernels, gemm=tuned
    ).describe({"logits": head})
    uneven = HopperGemm(
        Table("a GPU", (Rule(shape, (Choice(24, "flat"), Choice(48, "dense"), Choice(64, "xla"))),))
    )
    assert uneven.describe(product_of(shape, 1)) == "flat, from 25 rows dense, from 49 rows xla"
    text = kernels.describe({"qkv": product_of(shape, 1), "down": down})
    assert "decode_attention: reference" in text
    assert "qkv [6144, 4096] bfloat16: flat, from 65 rows xla" in text
    assert "down [4096, 14336] float8_e4m3fn: fp8_flat, from 65 rows fp8" in text
    assert "qkv [6144, 4096] bfloat16: xla" in kernel_set.REFERENCE.describe({"qkv": product_of(shape, 1)})


@pytest.mark.parametrize("rows", [1, 3])
def test_fma_gemm_equals_its_reference(rows):
    rng = np.random.default_rng(rows)
    x, w, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((rows, 96), (128, 96), (128,))
    )
    got = gemm.kernel(Choice(4, "fma"))(x, w, bias, activation="silu", gate_block=16)
    np.testing.assert_allclose(
        got, reference.gemm(x, w, bias, activation="silu", gate_block=16), rtol=1e-5, atol=1e-5
    )
    with pytest.raises(ValueError, match="5 rows"):
        gemm.kernel(Choice(4, "fma"))(jnp.zeros((5, 96)), w)
    with pytest.raises(ValueError, match="kernel='slow'"):
        gemm.kernel(Choice(4, "slow"))


def operands(p: Product):
    """Return (x, w, settings of `gemm`) of a product, as shapes."""

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    m, n, k = p.rows, p.shape.n, p.shape.k
    x: object = (
        array(p.activations, m, k)
        if p.activations != E4M3
        else Quantized(array(E4M3, m, k), array("float32", m))
    )
    w: object = array("bfloat16", n, k)
    if p.shape.weights == E4M3:
        w = Quantized(array(E4M3, n, k), array("float32", n))
    elif p.shape.weights == "int4":
        w = Int4(array("uint8", n, k // 2), array("bfloat16", n, k // 64), array("bfloat16", n, k // 64))
    settings = {"sms": 96} if p.bounded else {}
    if p.shape.gate_block:
        settings |= {"activation": "silu", "gate_block": p.shape.gate_block}
    return (
        x,
        w,
        settings | ({"quantize": True} if p.out_dtype == E4M3 else {"out_dtype": jnp.dtype(p.out_dtype)}),
    )


@settings(max_examples=30)
@given(
    rows=st.sampled_from([1, 2, 4, 5, 33, 64, 65, 200, 1000]),
    n=st.sampled_from([8, 64, 100, 128, 384, 7392, 12288]),
    k=st.sampled_from([64, 100, 128, 1792, 4096]),
    kind=st.sampled_from([("bfloat16", "bfloat16"), (E4M3, E4M3), ("bfloat16", "int4")]),
    gate_block=st.sampled_from([0, 0, 16, 64]),
    out_dtype=st.sampled_from(["bfloat16", "float32", E4M3]),
    bounded=st.booleans(),
)
def test_eligible_kernels_run_the_product(rows, n, k, kind, gate_block, out_dtype, bounded):
    activations, weights = kind
    p = Product(rows, Shape(n, k, weights, gate_block), activations, out_dtype, bounded)
    assume((k % 64 == 0 or weights != "int4") and (gate_block == 0 or n % (2 * gate_block) == 0))
    x, w, behind = operands(p)
    for name in eligible_kernels(p):
        out = jax.eval_shape(lambda x, w, name=name: gemm.kernel(Choice(rows, name))(x, w, **behind), x, w)
        assert out.shape == (rows, n // 2 if gate_block else n)
        assert (out.values if isinstance(out, Quantized) else out).dtype == out_dtype

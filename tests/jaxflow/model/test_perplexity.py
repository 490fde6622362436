"""The perplexity of the default chat model on real text, with 8-bit and 4-bit numbers.

The report under benchmarks/ covers all eight windows, through engines. This test covers the first tokens of
one window, in one step. Its ops are compiled one by one, once for all layers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from hurry import OFTEN

from jaxflow.bench.engine.perplexity import KV_4_BITS, changes
from jaxflow.kv.device_cache import cache_shapes, page_groups
from jaxflow.model import ops
from jaxflow.model.batch import Batch
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import OPS, Context, Site
from jaxflow.model.weight_spec import QUANTIZED
from jaxflow.pipeline.compiler import compile_plan
from jaxflow.pipeline.handwritten import sequential_plan
from pallas_kernels.gemm.int4.reference import quantize_int4
from pallas_kernels.kernel_set import REFERENCE
from pallas_kernels.pointwise.quantize import reference

TOKENS, PAGE = 128, 64


@pytest.fixture(scope="module")
def model(smollm2_gguf):
    """(its config, its weights)"""
    checkpoint = open_checkpoint(str(smollm2_gguf))
    return checkpoint.model_config, checkpoint.load(jnp.float32, progress=False)


@pytest.fixture(scope="module")
def text():
    return np.load(paths.PPL / "wikitext2_8x1024.npy")[0, :TOKENS].astype(np.int32)


def logprobs(model, text, *, quantize=None, kv=jnp.float32, kernels=REFERENCE):
    """Return the log-probabilities [TOKENS - 1] of all tokens but the first.

    quantize: applied to the matrices of all layers.
    """
    config, weights = model
    if quantize is not None:
        quantize = jax.jit(quantize)
        weights = weights | {
            "layers": [
                {k: quantize(w) if k in QUANTIZED else w for k, w in layer.items()}
                for layer in weights["layers"]
            ]
        }
    if kv == jnp.float8_e4m3fn:
        ones = dict.fromkeys(("k_scale", "v_scale"), jnp.ones(config.num_kv_heads))
        weights = weights | {"layers": [layer | ones for layer in weights["layers"]]}
    pages, at = TOKENS // PAGE, jnp.arange(TOKENS, dtype=jnp.int32)
    cache = jax.tree.map(
        lambda a: jnp.zeros(a.shape, a.dtype), cache_shapes(page_groups(config, kv, 1), (pages,), PAGE)
    )
    batch = Batch(
        token_ids=jnp.asarray(text),
        positions=at,
        slots=at[None],
        page_table=jnp.broadcast_to(jnp.arange(pages, dtype=jnp.int32), (1, TOKENS, pages)),
        lengths=jnp.zeros(TOKENS, jnp.int32).at[0].set(TOKENS),
        num_decodes=jnp.int32(0),
        chunks=jnp.array([[0, TOKENS, 0, 0]], jnp.int32),
        sample_tokens=at,
    )
    context = Context(config, kernels)
    forward = compile_plan(sequential_plan(config, TOKENS), config, quantized=quantize is not None)
    hidden, _, _ = forward(context, weights, cache, batch)
    found = jax.nn.log_softmax(ops.logits(Site(context, weights), hidden), axis=-1)
    return np.asarray(found)[np.arange(TOKENS - 1), text[1:]].astype(np.float64)


WAYS = {
    "fp8 KV": {"kv": jnp.float8_e4m3fn},
    "fp8": {"quantize": reference.quantize_rows},
    "fp8, fp8 KV": {"quantize": reference.quantize_rows, "kv": jnp.float8_e4m3fn},
    "4-bit KV": {"kernels": KV_4_BITS},
    "int4": {"quantize": quantize_int4},
}


def forget_jitted():
    """Make every op be jitted anew at its next call."""
    for op in OPS.values():
        op.__dict__.pop("_jitted", None)


@pytest.fixture(scope="module")
def few_and_large():
    """Ops that run over a hundred million weights, compiled with more care than the tests' programs are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=OFTEN))
        forget_jitted()
        yield
    forget_jitted()  # other tests' programs must not inherit the options


@pytest.fixture(scope="module")
def costs(model, text, few_and_large):
    wide = logprobs(model, text)
    assert np.exp(-wide.mean()) == pytest.approx(24.09, abs=0.01)  # as an engine scores these tokens
    return {
        way: changes(logprobs(model, text, **numbers), wide) | {"wide": np.exp(-wide.mean())}
        for way, numbers in WAYS.items()
    }


@pytest.mark.parametrize(
    ("way", "lost", "off"),
    [
        ("fp8 KV", 0.0, 0.03),
        ("fp8", 0.0, 0.04),
        ("fp8, fp8 KV", 0.03, 0.05),
        ("4-bit KV", 0.16, 0.08),
        ("int4", 0.18, 0.08),
    ],
)
def test_what_few_bits_cost(way, lost, off, costs):
    assert costs[way]["perplexity"] / costs[way]["wide"] - 1 == pytest.approx(lost, abs=off)


def test_it_is_few_bits_that_ran(costs):
    """Tokens moved, and the more the fewer the bits."""
    moved_by = {way: cost["mean_change"] for way, cost in costs.items()}
    eight = (
        moved_by["fp8"],
        moved_by["fp8, fp8 KV"],
    )  # with few tokens, rounding both may move the result less than rounding one
    assert (
        0.02 < moved_by["fp8 KV"] < min(eight) <= max(eight) < moved_by["4-bit KV"] < moved_by["int4"] < 0.8
    )

"""The GEMM kernel of each product of each family of models on an H200, by rows, as in
`family_products.txt`.

The file holds the lines that an engine logs at its start, for each form of weights, on one device and on
eight. Run `python tests/pallas_kernels/gemm/test_family_products.py` (with `tests` on PYTHONPATH) to write
the file again after a change of the tuned table.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.engine.dense_products import dense_products
from jaxflow.model import ops, weights
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.op_registry import Context, Site
from jaxflow.parallel.mesh import TP
from pallas_kernels.gemm import api as gemm
from pallas_kernels.gemm import reference
from pallas_kernels.gemm.api import Product
from pallas_kernels.kernel_set import REFERENCE, kernel_set_for

WRITTEN = Path(__file__).with_name("family_products.txt")
FAMILIES = (
    "llama-3.1-8b",
    "llama-3.1-70b",
    "mistral-7b",
    "qwen2-72b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "gemma-2-9b",
    "gemma-3-1b",
)
FAMILIES += ("mixtral-8x7b", "opt-6.7b", "smollm2-135m", "gpt-oss-20b")


def products(config: ModelConfig, tp: int, quantization: str | None) -> dict[str, Product]:
    """Return the products of the first layer and the head. Raises: ConfigError for an impossible number of
    devices.


    """
    mesh = AbstractMesh((tp,), (TP,))
    specs = weights.shardings(config, mesh, quantization=quantization)  # type: ignore[arg-type]
    shapes = weights.shapes(config, tp, jnp.bfloat16, quantization=quantization)
    placed = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )
    return dense_products(config, placed)


def lines(model: str) -> Iterator[str]:
    config = open_checkpoint(model, load_format="dummy").model_config
    config = dataclasses.replace(config, layers=config.layers[:1])
    heads = {
        "head_dim": config.head_dim,
        "queries_per_kv_head": config.num_heads // config.num_kv_heads,
        "hidden_size": config.hidden_size,
    }
    common = {"page_size": 64, "dtype": "bfloat16", "kv_dtype": "bfloat16", "device": "NVIDIA H200"}
    kernels = kernel_set_for("gpu", "9.0", **heads, **common)
    for quantization in (None, "fp8", "int4"):
        for tp in (1, 8):
            try:
                found = products(config, tp, quantization)
            except ConfigError as error:
                yield f"{model}, {quantization or 'bfloat16'}, tp {tp}: not cut: {error.field}"
                continue
            for line in kernels.describe(found).splitlines()[1:]:
                yield f"{model}, {quantization or 'bfloat16'}, tp {tp}: {line.removeprefix('kernels: ')}"


@pytest.mark.parametrize("model", FAMILIES)
def test_products_run_on_the_recorded_kernels(model):
    written = [line for line in WRITTEN.read_text("utf-8").splitlines() if line.startswith(f"{model}, ")]
    assert list(lines(model)) == written


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-2-9b", "opt-6.7b"])
def test_the_described_products_are_those_of_the_ops(model, quantization):
    config = open_checkpoint(model, load_format="dummy").model_config
    config, asked = dataclasses.replace(config, layers=config.layers[:1]), []

    def record(x, w, bias=None, **settings):
        given = {"gate_block": None, "quantize": False, "out_dtype": None, "sms": None}
        asked.append(
            gemm.product(x, w, **{name: settings.get(name, default) for name, default in given.items()})
        )
        return reference.gemm(x, w, bias, **settings)

    c = Context(config, dataclasses.replace(REFERENCE, gemm=record))

    def step(w, x, o):
        layer = Site(c, w["layers"][0])
        x, h = ops.attn_norm(layer, x, None)
        ops.qkv(layer, h)
        x, h = ops.mlp_norm(layer, x, ops.out_proj(layer, o))
        ops.down(layer, ops.up_gate(layer, h))
        return ops.logits(Site(c, w), x)

    x, o = (
        jax.ShapeDtypeStruct((1, *dims), jnp.bfloat16)
        for dims in ((config.hidden_size,), (config.num_heads, config.head_dim))
    )
    jax.eval_shape(step, weights.shapes(config, 1, jnp.bfloat16, quantization=quantization), x, o)
    assert dict(zip(("qkv", "out_proj", "up_gate", "down", "logits"), asked, strict=True)) == products(
        config, 1, quantization
    )


if __name__ == "__main__":
    WRITTEN.write_text("\n".join(line for model in FAMILIES for line in lines(model)) + "\n", "utf-8")

"""The one-row GEMMs of a model's dense ops, from its weights."""

from typing import Any

import jax

from jaxflow.config import ModelConfig
from jaxflow.model.ops import head_table
from pallas_kernels.gemm.api import Product, product_of, shape_of
from pallas_kernels.quantized import BlockFp8, Quantized


def dense_products(model: ModelConfig, weights: dict[str, Any]) -> dict[str, Product]:
    """Return the one-row GEMM of each dense op of the first layer and of the head, on one device.

    weights: of the model, or of its last pipeline stage.
    """
    named = {op: weights["layers"][0].get(op) for op in ("qkv", "out_proj", "up_gate", "down")}
    named["logits"] = head_table(weights)
    gates = {"up_gate": model.gate_block if model.gated_mlp else 0}
    shapes = {
        op: shape_of(_one_shard(w), gates.get(op, 0), _input_scales(op, w))
        for op, w in named.items()
        if w is not None
    }
    results = {
        "logits": "float32",
        "up_gate": "float8_e4m3fn" if isinstance(named["down"], Quantized | BlockFp8) else "bfloat16",
    }
    return {op: product_of(shape, 1, results.get(op, "bfloat16")) for op, shape in shapes.items()}


def _input_scales(op: str, weight: Any) -> str:
    """Return the form of the scales of a dense op's input, as `shape_of` takes it."""
    if isinstance(weight, BlockFp8):
        return "blocks"
    if isinstance(weight, Quantized):
        return "blocks" if op == "down" else "rows"
    return ""


def _one_shard(weight: Any) -> Any:
    """Return the shapes of one device's shard of a weight."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), weight)

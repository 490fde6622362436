"""Tiny random checkpoints with e4m3 matrices in blocks of 128 x 128, as Qwen3-MoE
and DeepSeek-V3 are published.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import paths
from safetensors.numpy import save_file

from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.weights import tensors

BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# Experts of two blocks, so that two devices share each expert, and four do not.
WIDTHS = {"hidden_size": 128, "moe_intermediate_size": 256}


def in_blocks(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (e4m3 values, factors of blocks of 128 x 128, the numbers that both stand for)."""
    values, factors = (
        np.empty(x.shape, jnp.float8_e4m3fn),
        np.empty([-(-size // 128) for size in x.shape], np.float32),
    )
    exact = np.empty(x.shape, np.float32)
    for i, j in np.ndindex(factors.shape):
        block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        factors[i, j] = np.abs(x[block]).max() / 448
        values[block] = (x[block] / factors[i, j]).astype(jnp.float8_e4m3fn)
        exact[block] = values[block].astype(np.float32) * factors[i, j]
    return values, factors, exact


def write(folder: Path, model: str, *, blocks: bool, **changes: Any) -> Path:
    """Write a random model of the shape of tests/data/models/`model` with wider experts.

    blocks: matrices of layers, all but the routers, are in blocks. Otherwise they
      are the same numbers in float32.
    """
    plain = json.loads((paths.MODELS / model / "config.json").read_text())
    keys = plain | {key: width for key, width in WIDTHS.items() if key in plain} | changes
    rng, stored = np.random.default_rng(7), {}
    for name, shape in tensors(model_config_from_hf(dict(keys))).items():
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        x = (rng.standard_normal(shape) * spread + name.endswith("norm.weight")).astype(np.float32)
        if x.ndim == 2 and ".layers." in name and not name.endswith("mlp.gate.weight"):
            # Blocks of different sizes, so that a wrong scale shows.
            x *= 2.0 ** rng.integers(-2, 2)
            values, scales, exact = in_blocks(x)
            stored |= {name: values, f"{name}_scale_inv": scales} if blocks else {name: exact}
        else:
            stored[name] = x
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(x) for name, x in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(keys | ({"quantization_config": BLOCKS} if blocks else {}))
    )
    return folder

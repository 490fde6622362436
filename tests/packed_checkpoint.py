"""Tiny random checkpoints with matrices in 4 bits, as AWQ, GPTQ and compressed-tensors publish them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import paths
from safetensors.numpy import save_file

from jaxflow.model.architectures.hf_config import model_config_from_hf
from jaxflow.model.weights import tensors

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "dynamic": False, "actorder": None}
# Two groups of 64 or one of 128 in the narrowest matrix, so that two devices share it.
WIDTHS = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
WIDTHS |= {"ffn_dim": 256, "word_embed_proj_dim": 128}
LAYOUTS = ("awq", "gptq", "gptq_v2", "symmetric", "asymmetric")
_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def scheme(layout: str, group: int) -> dict[str, Any]:
    """Return the `quantization_config` of a layout of `LAYOUTS`."""
    if layout == "awq":
        settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
        return settings | {"version": "gemm", "modules_to_not_convert": None}
    if layout.startswith("gptq"):
        settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False}
        return settings | {"checkpoint_format": layout, "meta": {"quantizer": ["gptqmodel:2.2.0"]}}
    weights = WEIGHTS | {"group_size": group, "symmetric": layout == "symmetric"}
    of_modules = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": of_modules},
        "ignore": ["lm_head"],
    }


@dataclasses.dataclass(frozen=True)
class Numbers:
    """A matrix [out, in] in 4 bits: codes uint8, zeros and float16 scales [out, in / group]."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def of(self, scales: np.ndarray) -> np.ndarray:
        """Return (code - zero) · scale in float32, where it is exact."""
        zeros, scales = (np.repeat(a.astype(np.float32), self.group, axis=1) for a in (self.zeros, scales))
        return (self.codes - zeros) * scales

    @property
    def exact(self) -> np.ndarray:
        return self.of(self.scales)

    @property
    def kept(self) -> np.ndarray:
        """Return the numbers with scales in bfloat16."""
        return self.of(self.scales.astype(jnp.bfloat16))


def draw(rng: np.random.Generator, rows: int, columns: int, group: int, layout: str) -> Numbers:
    """Return random numbers of a layout of `LAYOUTS`."""
    low, high = {"gptq": (1, 17), "symmetric": (8, 9)}.get(layout, (0, 16))
    zeros = rng.integers(low, high, (rows, columns // group))
    scales = rng.uniform(0.5, 2, zeros.shape) / 8 / columns**0.5
    return Numbers(rng.integers(0, 16, (rows, columns), np.uint8), zeros, scales.astype(np.float16))


def words(codes: np.ndarray, order: Any = range(8)) -> np.ndarray:
    """Return int32 words of eight codes of the last axis each.

    order: the code in each 4 bits, the low bits first.
    """
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    return sum(eights[..., place] << np.uint32(4 * i) for i, place in enumerate(order)).view(np.int32)


def stored(module: str, numbers: Numbers, layout: str) -> dict[str, np.ndarray]:
    """Return the tensors of a module in a layout of `LAYOUTS`."""
    codes, zeros, scales = numbers.codes, numbers.zeros, numbers.scales
    if layout == "awq":
        made = {"qweight": words(codes.T, _AWQ), "qzeros": words(zeros.T, _AWQ), "scales": scales.T}
    elif layout.startswith("gptq"):
        less = zeros - (layout == "gptq")
        g_idx = np.arange(codes.shape[1], dtype=np.int32) // numbers.group
        made = {"qweight": words(codes).T, "qzeros": words(less.T), "scales": scales.T, "g_idx": g_idx}
    else:
        made = {"weight_packed": words(codes), "weight_scale": scales.astype(np.float16)}
        made["weight_shape"] = np.array(codes.shape, np.int64)
        if layout == "asymmetric":
            made["weight_zero_point"] = words(zeros.T).T
    return {f"{module}.{name}": np.ascontiguousarray(array) for name, array in made.items()}


def is_linear(name: str) -> bool:
    """Return whether quantizers pack a tensor: matrices of layers, but not routers."""
    return (
        ".layers." in name and name.endswith(".weight") and not name.endswith((".gate.weight", "norm.weight"))
    )


def write(
    folder: Path,
    model: str,
    layout: str,
    *,
    group: int = 64,
    wide: Callable[[str], bool] = lambda name: False,
    coarse: bool = False,
    more: dict[str, np.ndarray | None] | None = None,
) -> tuple[Path, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Write a random model of the shape of tests/data/models/`model` with other widths.

    Return its folder, its exact tensors, and those with scales in bfloat16.

    wide: the matrices that stay in 32 bits. coarse: bfloat16 holds the scales. more: tensors that are added,
    or taken away.
    """
    keys = json.loads((paths.MODELS / model / "config.json").read_text())
    keys |= {key: width for key, width in WIDTHS.items() if key in keys}
    rng, files, exact, kept = np.random.default_rng(7), {}, {}, {}
    for name, shape in tensors(model_config_from_hf(dict(keys))).items():
        if len(shape) == 2 and is_linear(name) and not wide(name):
            numbers = draw(rng, *shape, group, layout)
            if coarse:
                scales = numbers.scales.astype(jnp.bfloat16).astype(np.float16)
                numbers = dataclasses.replace(numbers, scales=scales)
            files |= stored(name.removesuffix(".weight"), numbers, layout)
            exact[name], kept[name] = numbers.exact, numbers.kept
        else:
            spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
            x = (rng.standard_normal(shape) * spread + name.endswith("norm.weight")).astype(np.float32)
            files[name] = exact[name] = kept[name] = x
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: array for name, array in (files | (more or {})).items() if array is not None}
    save_file(files, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(keys | {"quantization_config": scheme(layout, group)}))
    return folder, exact, kept


def write_wide(folder: Path, packed: Path, numbers: dict[str, np.ndarray]) -> Path:
    """Write the numbers of a checkpoint in 32 bits. packed: the folder with its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(numbers, folder / "model.safetensors")
    keys = json.loads((packed / "config.json").read_text())
    del keys["quantization_config"]
    (folder / "config.json").write_text(json.dumps(keys))
    return folder

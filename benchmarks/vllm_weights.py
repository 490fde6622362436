"""Random weights for vLLM with the sizes of JaxFlow's dummy weights, as a plugin of vLLM.

vLLM's own dummy weights lie within ±0.001, and those of norms too. Two parameters of as many elements have
equal values, so all layers route a token alike. Weights that are packed in bytes are not written at all. With
this plugin matrices are normal with a variance of 1 / columns, norms are ones, biases are zeros, and bytes
are random.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.offline_rival import module

NAME = "jaxflow-random-weights"
# The scale of a group of 4-bit floats, 2 ** (byte - 127). Their products with it have a size of about 0.02.
GROUP_EXPONENT = 120
BLOCK_SCALE = 0.02  # scale of a block of 8-bit floats


def register() -> None:
    """Put `fill` in the place of vLLM's own functions. vLLM calls this in each of its processes."""
    own, loader = (
        module(f"vllm.model_executor.model_loader.{name}") for name in ("weight_utils", "dummy_loader")
    )
    own.initialize_dummy_weights = loader.initialize_dummy_weights = _fill_layer
    own.initialize_single_dummy_weight = loader.initialize_single_dummy_weight = _fill_one


def _fill_layer(layer: Any, model_config: Any, *_: Any) -> None:
    del model_config
    found: Mapping[str, Any] = layer.state_dict()
    for name, tensor in found.items():
        fill(name, tensor)


def _fill_one(tensor: Any, *_: Any) -> None:
    """Fill a tensor of a layer that vLLM quantizes at its start. These layers hold matrices and biases."""
    fill("", tensor)


def fill(name: str, tensor: Any) -> None:
    """Write random values to a tensor of PyTorch in place.

    name: of the tensor in its layer; empty for matrices and biases. A tensor without memory stays so, as do
    scales of a whole tensor.
    """
    torch = module("torch")
    if tensor.device.type == "meta" or ("scale" in name and tensor.numel() == 1):
        return
    data = tensor.data
    if not torch.is_floating_point(data):
        if data.dtype != torch.uint8:
            return
        if "scale" in name:
            data.fill_(GROUP_EXPONENT)
        else:
            data.random_(0, 256)
    elif "scale" in name:
        data.fill_(BLOCK_SCALE)
    elif "bias" in name or data.ndim < 2:
        data.fill_(float("norm" in name))
    elif torch.finfo(data.dtype).bits < 16:
        data.copy_(torch.randn(data.shape, dtype=torch.bfloat16, device=data.device).to(data.dtype))
    else:
        data.normal_(0.0, data.shape[-1] ** -0.5)

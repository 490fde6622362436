"""Whether devices hold a model, and how many requests of a workload beside it: what the steps of a search may be made of."""

import math

from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.cost import GIGA, find_device
from jaxflow.model.graph import Widths
from search.cost import BYTES
from search.op_times import Profile
from search.regimes import largest_batch, request_bytes, weight_bytes


def most_decodes(name: str, model: ModelConfig, profile: Profile, prompt: float, output: float) -> float:
    """Requests of so many prompt and output tokens that the profile's devices hold beside the weights, by their datasheet.

    An upper bound: an engine keeps some memory for itself. inf without outputs, and where the device's memory is not known.

    Raises: ConfigError where not even one fits beside the weights.
    """
    device, gpus = find_device(profile.device), profile.tensor_parallel_size
    if device is None:
        return math.inf
    widths = Widths(weights=BYTES.get(profile.dtype, 2.0), kv=BYTES.get(profile.kv_cache_dtype, 2.0))
    weights, request, had = weight_bytes(model, widths), request_bytes(model, prompt, output, widths), gpus * device.memory_bytes
    if weights + request > had:
        one = f"{request / GIGA:.1f} GB that the cache holds of one {prompt:g}/{output:g} request"
        accepted = f"enough for {name}'s {weights / GIGA:.1f} GB of weights and the {one}; {gpus} x {device.name} is {had / GIGA:.1f} GB"
        raise ConfigError("gpus", gpus, accepted)
    batch = largest_batch(model, device.datasheet, device.memory_bytes, gpus, prompt, output, widths=widths)
    return math.inf if batch is None else batch.requests

"""The choice of an engine's kernels for its device and model, and its report at start."""

import dataclasses
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tqdm import tqdm

from jaxflow.config import KV_DTYPES, ConfigError, EngineConfig, ModelConfig
from jaxflow.kv.device_cache import kv_heads
from pallas_kernels.gemm.api import Product
from pallas_kernels.kernel_set import Fallback, KernelSet, kernel_set_for
from pallas_kernels.this_device import this_device

log = logging.getLogger(__name__)
_SETTINGS = {
    "page_size": "block_size",
    "kv_dtype": "kv_cache_dtype",
}  # settings that the limits of kernels concern
_CACHES = {dtype: name for name, dtype in reversed(KV_DTYPES.items())}  # the first of several names


def choose_kernels(config: EngineConfig, model: ModelConfig) -> KernelSet:
    """Return the kernels for this device and model. config: resolved.

    A warning names each op that runs its reference although the device has a kernel for it.

    Raises:
      ConfigError: for kernels that cannot run here, and for requested kernels
        without attention for this model.
    """
    try:
        kernels = _kernels_of_all_layers(config, model)
    except ValueError as error:
        said = str(error).removeprefix(
            f"kernels={config.kernels!r}: "
        )  # the setting, which a ConfigError names
        raise ConfigError("kernels", config.kernels, said) from None
    if config.kernels != "auto":
        _check_attention(config.kernels, kernels)
    runs = {
        "quantize_rows": config.quantization == "fp8",
        "grouped_gemm": any(layer.experts for layer in model.layers),
    }
    for line in fallback_lines(fallback for fallback in kernels.fallbacks if runs.get(fallback.op, True)):
        log.warning(line)
    return kernels.with_few_kernels(config.quantization is not None) if config.enforce_eager else kernels


def _kernels_of_all_layers(config: EngineConfig, model: ModelConfig) -> KernelSet:
    """Return the kernels of the model's first layer, with those of the other layers by their head widths."""
    device, sets = this_device(), {}
    for layer in model.layers:
        own = model.for_layer(layer)
        if own.head_dim not in sets:
            asked = asked_of_kernels(config, own)
            sets[own.head_dim] = kernel_set_for(
                device.platform, device.capability, device=device.name, kernels=config.kernels, **asked
            )
    first = next(iter(sets.values()))
    if all(other == first for other in sets.values()):
        return first
    fallbacks = dict.fromkeys(fallback for kernels in sets.values() for fallback in kernels.fallbacks)
    return dataclasses.replace(first, by_head_dim=tuple(sets.items()), fallbacks=tuple(fallbacks))


def asked_of_kernels(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `kernel_set_for`: shapes on one device, dtypes and pages.

    config: resolved. model: its head width and KV heads are those of the layers in question.
    """
    latent = model.latent  # whose vectors every device has for its own query heads
    return {
        "head_dim": model.head_dim,
        "queries_per_kv_head": model.num_heads
        // (model.num_kv_heads if latent is None else config.tensor_parallel_size),
        "kv_heads": kv_heads(model, config.tensor_parallel_size) // config.tensor_parallel_size,
        "hidden_size": model.hidden_size,
        "page_size": config.block_size,
        "dtype": config.dtype,
        "kv_dtype": config.kv_cache_dtype,
        "attention_spans": bool(model.span_classes),
        "attention_sinks": model.attention_sinks,
        "latent_attention": latent is not None,
        "latent_rank": 0 if latent is None else latent.rank,
        "latent_rope_dim": 0 if latent is None else latent.rope_dim,
        "latent_value_dim": 0 if latent is None else latent.value_dim,
    }


def fallback_lines(fallbacks: Iterable[Fallback]) -> list[str]:
    """Return a line for each fallback reason: its ops, the setting, its value, and the accepted values."""
    ops: dict[tuple[str, int | str, str], list[str]] = {}
    for fallback in fallbacks:
        ops.setdefault((*_setting(fallback), fallback.accepted), []).append(fallback.op)
    return [
        (
            f"kernels: {', '.join(several)}: the slower reference runs, since {field}={value}; the "
            f"kernels take only {accepted}"
        )
        for (field, value, accepted), several in ops.items()
    ]


def tell_kernels(kernels: KernelSet, products: Mapping[str, Product], progress: bool) -> None:
    """Report the kernels of each op in the log, or without a log above the progress bars.

    products: see `KernelSet.describe`.
    """
    text = kernels.describe(products) if kernels.kernel_ops else f"kernels: {kernels.name}, for every op"
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    elif progress:
        tqdm.write(text, file=sys.stderr)


def _check_attention(asked: str, kernels: KernelSet) -> None:
    """Raise ConfigError for requested kernels if all attention would run on the reference."""
    reasons = [fallback for fallback in kernels.fallbacks if fallback.op == "decode_attention"]
    if reasons and "chunk_attention" not in kernels.kernel_ops:
        field, value = _setting(reasons[0])
        accepted = (
            f"only {reasons[0].accepted} with kernels={asked!r}; kernels='auto' takes the fastest that "
            f"there are"
        )
        raise ConfigError(field, value, accepted)


def _setting(fallback: Fallback) -> tuple[str, int | str]:
    """Return the setting and its value by their names in `EngineConfig`."""
    field = _SETTINGS.get(fallback.field, fallback.field)
    return field, _CACHES[str(fallback.value)] if field == "kv_cache_dtype" else fallback.value

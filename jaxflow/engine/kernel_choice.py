"""The kernels of an engine: chosen for its device and model, refused where they were asked for and cannot
run, told when it starts.
"""

import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from tqdm import tqdm

from jaxflow.config import KV_DTYPES, ConfigError, EngineConfig, ModelConfig
from jaxflow.kv.device_cache import kv_heads
from pallas_kernels.gemm.api import Product
from pallas_kernels.kernel_set import Fallback, KernelSet, kernel_set_for

log = logging.getLogger(__name__)
_SETTINGS = {
    "page_size": "block_size",
    "kv_dtype": "kv_cache_dtype",
}  # what the limits of kernels are about, where it is one of ours
_CACHES = {dtype: name for name, dtype in reversed(KV_DTYPES.items())}  # of several names the first


def choose_kernels(config: EngineConfig, model: ModelConfig) -> KernelSet:
    """The kernels for this device and model; ops that run on their twins although the device has kernels for
    them are warned of.

    config: resolved.

    Raises: ConfigError for kernels that cannot run here, and for a set that was asked for and has no
    attention for this model.
    """
    device = jax.devices()[0]
    try:
        kernels = kernel_set_for(
            jax.default_backend(),
            str(getattr(device, "compute_capability", "")),
            device=device.device_kind,
            kernels=config.kernels,
            **asked_of_kernels(config, model),
        )
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
    return kernels


def asked_of_kernels(config: EngineConfig, model: ModelConfig) -> dict[str, Any]:
    """What `kernel_set_for` goes by beside the device: the model's shapes on one device, and the dtypes and
    pages. config: resolved.
    """
    return {
        "head_dim": model.head_dim,
        "queries_per_kv_head": model.num_heads // model.num_kv_heads,
        "kv_heads": kv_heads(model, config.tensor_parallel_size) // config.tensor_parallel_size,
        "hidden_size": model.hidden_size,
        "page_size": config.block_size,
        "dtype": config.dtype,
        "kv_dtype": config.kv_cache_dtype,
    }


def fallback_lines(fallbacks: Iterable[Fallback]) -> list[str]:
    """A line for each reason: the ops that it keeps from their kernels, the setting and its value, and what
    the kernels take.
    """
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
    """Says what runs on what: in the log, where one is kept of such things, else above the progress, where
    that is shown.

    products: as for `KernelSet.describe`.
    """
    text = kernels.describe(products) if kernels.own else f"kernels: {kernels.name}, for every op"
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    elif progress:
        tqdm.write(text, file=sys.stderr)


def _check_attention(asked: str, kernels: KernelSet) -> None:
    """Raises: ConfigError where all attention of a set that was asked for would run on the reference. One op
    alone may.
    """
    reasons = [fallback for fallback in kernels.fallbacks if fallback.op == "decode_attention"]
    if reasons and "chunk_attention" not in kernels.own:
        field, value = _setting(reasons[0])
        accepted = (
            f"only {reasons[0].accepted} with kernels={asked!r}; kernels='auto' takes the fastest that "
            f"there are"
        )
        raise ConfigError(field, value, accepted)


def _setting(fallback: Fallback) -> tuple[str, int | str]:
    """The field and the value by the names that the settings have for them."""
    field = _SETTINGS.get(fallback.field, fallback.field)
    return field, _CACHES[str(fallback.value)] if field == "kv_cache_dtype" else fallback.value

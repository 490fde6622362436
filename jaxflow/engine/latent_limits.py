"""The settings that a model with latent attention refuses."""

from jaxflow.config import ConfigError, EngineConfig, ModelConfig


def check_latent(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse settings that have no form for latent vectors. Models with keys and values by head pass.

    config: with its dtypes resolved.

    Raises:
      ConfigError: the error names the field.
    """
    if model.latent is None:
        return
    refused = {
        "quantization": (config.quantization not in (None, "fp8_per_block"), "fp8_per_block or unset"),
        "kv_cache_dtype": (config.kv_cache_dtype != config.dtype, f"auto or {config.dtype}"),
        "attention_spans": (config.attention_spans is not None, "unset"),
        "calibration": (bool(config.calibration), "unset"),
    }
    for field, (is_refused, accepted) in refused.items():
        if is_refused:
            reason = (
                f"{accepted} for latent attention, whose pages hold 16-bit or 32-bit vectors for all heads"
            )
            raise ConfigError(field, getattr(config, field), reason)

"""Sampling defaults of a checkpoint's generation config."""

from collections.abc import Mapping

from jaxflow.config import ConfigError
from jaxflow.request import InvalidRequest, SamplingParams

# Sampling fields for which a checkpoint's generation config gives the default.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Mapping) -> dict[str, float]:
    """Return the sampling defaults of a checkpoint's generation config.

    Raises:
      ConfigError: a default that is not a valid sampling parameter.
    """
    defaults = {
        name: generation_config[name]
        for name in GENERATION_DEFAULTS
        if generation_config.get(name) is not None
    }
    try:
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError) as error:
        raise ConfigError("generation_config", defaults, str(error)) from error
    return defaults

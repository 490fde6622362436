"""The rotary settings of a Hugging Face config: the older `rope_theta` and `rope_scaling`, the newer
`rope_parameters`.
"""

from collections.abc import Mapping
from typing import Any

from jaxflow.config import ConfigError, Rope
from jaxflow.model.architectures.hf_keys import Keys


def layer_ropes(
    keys: Keys, model_type: str, default_theta: float, windows: tuple[int | None, ...]
) -> tuple[Rope, ...]:
    """The rotary embedding of each layer, given the layers' windows; Gemma 3's window layers have their own.

    Raises:
      ConfigError: a kind of scaling that is not supported, or settings that contradict each other; it names
      the field.
    """
    theta = keys.optional_number("rope_theta", None)
    newer, older = keys.mapping("rope_parameters"), keys.mapping("rope_scaling")
    if newer is not None and older is not None and newer != older:
        raise ConfigError("rope_scaling", older, "absent where rope_parameters is given")
    field = "rope_scaling" if newer is None else "rope_parameters"
    settings = newer if newer is not None else older if older is not None else {}
    if model_type != "gemma3_text":
        return (_rope(field, settings, theta, default_theta),) * len(windows)
    local_theta = keys.number("rope_local_base_freq", 10_000.0)
    if {*settings} & {"full_attention", "sliding_attention"}:
        extra = {*settings} - {"full_attention", "sliding_attention"}
        if extra or not all(isinstance(value, dict) for value in settings.values()):
            raise ConfigError(field, settings, "an object for full_attention and one for sliding_attention")
        full = _rope(f"{field}.full_attention", settings.get("full_attention", {}), theta, default_theta)
        local = _rope(f"{field}.sliding_attention", settings.get("sliding_attention", {}), None, local_theta)
    else:
        full, local = _rope(field, settings, theta, default_theta), Rope(local_theta)
    return tuple(full if window is None else local for window in windows)


def _rope(field: str, settings: Mapping[str, Any], theta: float | None, default_theta: float) -> Rope:
    keys = Keys(settings, field + ".")
    own_theta = keys.optional_number("rope_theta", None)
    if theta is not None and own_theta is not None and theta != own_theta:
        raise ConfigError(keys.name("rope_theta"), own_theta, f"the same as rope_theta={theta}")
    base = theta if own_theta is None else own_theta
    base = default_theta if base is None else base
    older, newer = keys.take("type"), keys.take("rope_type")
    if older is not None and newer is not None and older != newer:
        raise ConfigError(keys.name("type"), older, f"the same as rope_type={newer!r}")
    kind = newer or older or "default"
    if kind == "default":
        rope = Rope(base)
    elif kind == "linear":
        rope = Rope(base, "linear", keys.number("factor"))
        keys.take("original_max_position_embeddings")  # linear scaling does not depend on it
    elif kind == "llama3":
        low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
        if not low < high:
            raise ConfigError(keys.name("low_freq_factor"), low, f"less than high_freq_factor={high}")
        rope = Rope(
            base, "llama3", keys.number("factor"), low, high, keys.integer("original_max_position_embeddings")
        )
    else:
        raise ConfigError(keys.name("rope_type" if newer else "type"), kind, "default, linear or llama3")
    keys.finish()
    return rope

"""What several commands of the search refuse before they begin."""

from jaxflow.config import ConfigError, ModelConfig


def check_gpus(name: str, model: ModelConfig, gpus: int) -> None:
    """Raises: ConfigError for a number of GPUs over which a model's heads cannot be cut."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % gpus:
        raise ConfigError("gpus", gpus, f"a divisor of {name}'s {heads} heads")
    if kv_heads % gpus and gpus % kv_heads:
        raise ConfigError("gpus", gpus, f"a divisor or a multiple of {name}'s {kv_heads} key/value heads")


def check_lengths(name: str, model: ModelConfig, prompt: int, output: int) -> None:
    """Raises: ConfigError for a prompt and output, in tokens, longer together than a model was made for."""
    if prompt + output > model.max_position:
        accepted = f"with the output's {output} at most {model.max_position}, which {name} was made for"
        raise ConfigError("prompt_tokens", prompt, accepted)

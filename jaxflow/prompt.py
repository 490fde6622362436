"""What a caller may prompt with, and the token ids it stands for: refused where a model has no such tokens."""

import numbers
import operator
from collections.abc import Sequence

from jaxflow.config import EngineConfig
from jaxflow.model.checkpoints.checkpoint import Checkpoint
from jaxflow.request import InvalidRequest
from jaxflow.text.tokenizer import Tokenizer, load_tokenizer
from jaxflow.text.vocabulary import TokenizerError

Prompt = str | Sequence[int]


def open_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The one that the settings name, or the model's own; None: it brings none. Raises: TokenizerError."""
    source = config.tokenizer or checkpoint.tokenizer_path
    return None if source is None else load_tokenizer(source)


def token_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, *, add_special_tokens: bool = True
) -> list[int]:
    """A prompt's token ids, one at least, all of the model's vocabulary. Raises: InvalidRequest."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt", prompt, "token ids: this model came without a tokenizer")
        try:
            ids = tokenizer.encode(prompt, add_special_tokens)
        except TokenizerError as error:
            raise InvalidRequest("prompt", prompt, str(error)) from error
    else:
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError:
            raise InvalidRequest("prompt", prompt, "a text or a list of token ids") from None
    if not ids:
        raise InvalidRequest("prompt", [], "at least one token")
    worst = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= worst < vocab_size:
        raise InvalidRequest("prompt", worst, f"token ids 0 to {vocab_size - 1}")
    return ids


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

"""What a checkpoint says about its text, however it is stored: the common form of a Hugging Face folder and a
GGUF file.
"""

import dataclasses
from pathlib import Path

import tokenizers


class TokenizerError(ValueError):
    """A vocabulary that cannot be read, or a text or token id it has no meaning for."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A vocabulary and the settings that go with it.

    `backend` encodes; its added tokens carry the `special` flag. `vocab_size` is the largest token id plus
    one, which a model may round up. `special_tokens` holds the texts chat templates know by name
    (`bos_token`, `eos_token`, ...).
    """

    source: Path
    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends an answer; the tokenizer's own first
    special_tokens: dict[str, str]
    chat_template: str | None

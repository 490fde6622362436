"""A byte-level tokenizer of any vocabulary size, for a model without a tokenizer of its own.

Every byte is a token, and no two tokens merge, so a text of N ASCII characters has N tokens. The other tokens
are words: a server decodes every id that a model can sample. The folder that `write_tokenizer` makes is a
Hugging Face tokenizer, which every server reads. All servers of a comparison then get prompts of equal
lengths.
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxflow.config import ConfigError
from jaxflow.text.tokenizer import Tokenizer
from jaxflow.text.vocabulary import Vocabulary

BYTES = 256
END = "<|end|>"
# Only the contents, so that a prompt of one message has as many tokens as bytes.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_SPACE = "\u0120"  # of the byte alphabet
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Return the tokenizer. Raises: ConfigError for fewer tokens than the bytes and the end token."""
    backend = _backend(vocab_size)
    return Tokenizer(
        Vocabulary(
            source=Path("byte_level"),
            backend=backend,
            vocab_size=vocab_size,
            bos_token_id=None,
            eos_token_ids=(vocab_size - 1,),
            special_tokens={"eos_token": END},
            chat_template=CHAT_TEMPLATE,
        )
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the tokenizer as the files of a Hugging Face folder. Raises: ConfigError, OSError."""
    backend = _backend(vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _backend(vocab_size: int) -> tokenizers.Tokenizer:
    if vocab_size <= BYTES:
        raise ConfigError("vocab_size", vocab_size, f"at least {BYTES + 1} tokens for a byte-level tokenizer")
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"{_SPACE}{_word(i)}": i for i in range(BYTES, vocab_size - 1)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([END])
    return backend


def _word(number: int) -> str:
    """Return a word of its own for each number: its digits in base 26."""
    digits = ""
    while number:
        number, digit = divmod(number, len(_LETTERS))
        digits = _LETTERS[digit] + digits
    return digits

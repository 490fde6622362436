"""Prompts: their tokens, and the requests made of them."""

import dataclasses
import logging
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.request import MAX_BAD_WORD_TOKENS, InvalidRequest, Request, SamplingParams
from jaxflow.request_output import detokenizer
from jaxflow.structured.compiler import FormCompiler
from jaxflow.text.tokenizer import Tokenizer, load_tokenizer
from jaxflow.text.vocabulary import TokenizerError

if TYPE_CHECKING:
    from jaxflow.model.checkpoints.checkpoint import Checkpoint

log = logging.getLogger(__name__)

# A text or token ids, or one of both under vLLM's names: {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]


def open_tokenizer(config: EngineConfig, checkpoint: "Checkpoint") -> Tokenizer | None:
    """Return the configured tokenizer, or the checkpoint's; None if it has none.

    A tokenizer may have fewer tokens than the model, which rounds its vocabulary up. Added tokens may lie
    beyond the model's vocabulary: a prompt with one of them is refused.

    Raises:
      ConfigError: the configured tokenizer does not exist, or is one of another model.
      TokenizerError: a file that cannot be read.
    """
    source = config.tokenizer or checkpoint.tokenizer_path
    if source is None:
        return None
    if config.tokenizer is not None and not Path(config.tokenizer).exists():
        raise ConfigError("tokenizer", config.tokenizer, "an existing folder or .gguf file")
    tokenizer = load_tokenizer(source)
    most = checkpoint.model_config.vocab_size
    if tokenizer.text_vocab_size > most:
        raise ConfigError(
            "tokenizer",
            str(source),
            f"a tokenizer of at most {most} tokens, the vocabulary of the model; this one has "
            f"{tokenizer.text_vocab_size}",
        )
    if tokenizer.vocab_size > most:
        log.warning("tokenizer: added tokens from %d on are beyond the model's vocabulary", most)
    return tokenizer


def token_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, *, add_special_tokens: bool = True
) -> list[int]:
    """Return a prompt's token ids.

    Raises:
      InvalidRequest: for no token, a token outside the vocabulary, and a text without a tokenizer.
    """
    prompt = without_name(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt", prompt, "token ids, because this model has no tokenizer")
        try:
            ids = tokenizer.encode(prompt, add_special_tokens)
        except TokenizerError as error:
            raise InvalidRequest("prompt", prompt, str(error)) from error
    else:
        try:
            ids = list(map(operator.index, prompt))
        except TypeError:
            raise InvalidRequest("prompt", prompt, "a text or a list of token ids") from None
    if not ids:
        raise InvalidRequest("prompt", [], "at least one token")
    least = min(ids)
    worst = least if least < 0 else max(ids)
    if not 0 <= worst < vocab_size:
        raise InvalidRequest("prompt", worst, f"token ids 0 to {vocab_size - 1}")
    return ids


def make_request(
    name: str,
    prompt: Prompt,
    sampling: SamplingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    priority: int = 0,
    cache_salt: str = "",
    add_special_tokens: bool = True,
    forms: FormCompiler | None = None,
) -> Request:
    """Return a request of a text or of token ids, for an engine to accept.

    forms: of the model; None refuses structured outputs.

    Raises:
      InvalidRequest: naming the field.
    """
    sampling.check_vocabulary(vocab_size)
    ids = token_ids(prompt, tokenizer, vocab_size, add_special_tokens=add_special_tokens)
    words = bad_words_token_ids(sampling.bad_words, tokenizer)
    request = Request(
        name, ids, sampling, priority=priority, cache_salt=cache_salt, bad_words_token_ids=words
    )
    if (wanted := sampling.structured_outputs) is not None:
        if forms is None:
            accepted = "null, because this engine serves no structured outputs"
            raise InvalidRequest("structured_outputs", wanted.form, accepted)
        made = forms.compile(wanted, sampling.stop_token_ids, ids)
        request = dataclasses.replace(request, make_constraint=made)
    if not sampling.stop:
        return request
    if tokenizer is None:
        raise InvalidRequest("stop", sampling.stop, "no stop strings, because this model has no tokenizer")
    return dataclasses.replace(request, make_detokenizer=lambda: detokenizer(request, tokenizer))


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the runs of tokens that stand for words, after a space and without one.

    Raises:
      InvalidRequest: for a word of too many tokens, and without a tokenizer.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise InvalidRequest("bad_words", words, "no words, because this model has no tokenizer")
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            try:
                run = tuple(tokenizer.encode(text, add_special_tokens=False))
            except TokenizerError as error:
                raise InvalidRequest("bad_words", word, str(error)) from error
            if not 1 <= len(run) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest("bad_words", word, f"texts of 1 to {MAX_BAD_WORD_TOKENS} tokens")
            runs[run] = None
    return tuple(runs)


def without_name(prompt: Prompt) -> str | Sequence[int]:
    """Return the text or the token ids of a prompt.

    Raises:
      InvalidRequest: a mapping with another key, and a value that is no text and no list.
    """
    if isinstance(prompt, Mapping):
        accepted = '{"prompt": text} or {"prompt_token_ids": ids}'
        if len(prompt) != 1 or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise InvalidRequest("prompt", dict(prompt), accepted)
        (prompt,) = prompt.values()
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise InvalidRequest("prompt", prompt, "a text or a list of token ids")
    return prompt  # type: ignore[return-value]


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[str | Sequence[int]]:
    """Return one prompt or several as a list of texts and token ids.

    Raises:
      InvalidRequest: see `without_name`.
    """
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [without_name(prompts)]  # type: ignore[arg-type]
    many = list(prompts)
    if many and isinstance(many[0], numbers.Integral):
        return [many]  # type: ignore[list-item]
    return [without_name(prompt) for prompt in many]  # type: ignore[arg-type]

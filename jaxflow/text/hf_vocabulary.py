"""Reader of the vocabulary in a Hugging Face folder.

The vocabulary is `tokenizer.json`, or the older files `vocab.json` and `merges.txt` of GPT-2 and OPT. The
reader also uses `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json`, `config.json`
and `chat_template.jinja` if they exist. `tokenizer.json` decides if a text gets a BOS token.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from jaxflow.text.vocabulary import TokenizerError, Vocabulary

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_hf_vocabulary(folder: Path) -> Vocabulary:
    """Read the vocabulary, special tokens, end-of-sequence tokens and chat template of a folder.

    Raises:
      TokenizerError: no vocabulary, or a file that cannot be read. The error names the file.
    """
    config = _json(folder / "tokenizer_config.json")
    named = _named_tokens(folder)
    if (folder / "tokenizer.json").is_file():
        backend = _from_tokenizer_json(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _from_gpt2_files(folder, config, named.get("bos_token"))
    else:
        raise TokenizerError(
            f"{folder} has no vocabulary: neither tokenizer.json nor vocab.json with merges.txt"
        )
    _make_special(backend, named.values())
    return Vocabulary(
        source=folder,
        backend=backend,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_token_id=next(iter(_ids(folder, backend, named, "bos")), None),
        eos_token_ids=tuple(dict.fromkeys(_ids(folder, backend, named, "eos"))),
        special_tokens=named,
        chat_template=_chat_template(folder, config),
    )


def _from_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception itself
        raise TokenizerError(f"{path}: {error}") from error
    # The file may keep truncation and padding settings of a training batch.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _from_gpt2_files(folder: Path, config: dict, bos: str | None) -> tokenizers.Tokenizer:
    kind = config.get("tokenizer_class", "GPT2Tokenizer")
    if kind not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: tokenizer_class={kind!r} needs a tokenizer.json, "
            f"which is missing"
        )
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the package raises Exception itself
        raise TokenizerError(f"{folder / 'vocab.json'}, {folder / 'merges.txt'}: {error}") from error
    backend = tokenizers.Tokenizer(model)
    prefix = bool(config.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    if config.get("add_bos_token") and bos is not None:
        first = processors.TemplateProcessing(
            single=["bos", "$A"], special_tokens=[("bos", backend.token_to_id(bos))]
        )
        backend.post_processor = first
    return backend


def _named_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of `bos_token`, `eos_token`, ... A value is a string or an object with `content`."""
    found: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        values = _json(folder / file)
        for name in _NAMED:
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
            elif value is not None:
                raise TokenizerError(f"{folder / file}: {name}={value!r} is not the text of a token")
    return found


def _make_special(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Mark tokens as special that the configuration names and the vocabulary holds as plain tokens."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    plain = [
        token
        for token in dict.fromkeys(tokens)
        if token not in special and backend.token_to_id(token) is not None
    ]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in plain])


def _chat_template(folder: Path, config: dict) -> str | None:
    """Return the chat template: `chat_template.jinja`, or the template of `tokenizer_config.json`.

    A list of templates gives the one named `default`.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template is a {type(template).__name__}, not a text"
        )
    return template


def _ids(folder: Path, backend: tokenizers.Tokenizer, named: dict[str, str], which: str) -> list[int]:
    """Return the ids of `bos` or `eos`: the tokenizer's own first, then those of the generation config.

    If the generation config names none, the ids of the model's config follow.
    """
    own = backend.token_to_id(named[f"{which}_token"]) if f"{which}_token" in named else None
    ids = [] if own is None else [own]
    for file in ("generation_config.json", "config.json"):
        value = _json(folder / file).get(f"{which}_token_id")
        stated = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in stated):
            raise TokenizerError(
                f"{folder / file}: {which}_token_id={value!r} is not a token id or a list of them"
            )
        if stated:
            return ids + stated
    return ids


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise TokenizerError(f"{path}: holds a {type(values).__name__}, not an object")
    return values

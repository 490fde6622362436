"""Reader of the vocabulary in a GGUF file.

Two kinds of `tokenizer.ggml.model` are supported. `gpt2` is byte-level BPE with merges and a named
pre-tokenizer. `llama` is SentencePiece BPE, where the merges follow from the scores of the tokens. Defaults
of absent keys are those of llama.cpp.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxflow.text.gguf_metadata import GgufError, read_metadata
from jaxflow.text.vocabulary import TokenizerError, Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type

# GPT-2's words, with contractions in any letter case. %s is the grouping of digits, which differs by family.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# tokenizer.ggml.pre -> the expressions that split a text, each applied to the pieces of the one before
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}",),
    "qwen2": (_WORDS % r"\p{N}",),
}
_IGNORES_MERGES = ("llama-bpe",)  # a word that is in the vocabulary becomes one token, without merges
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>", "<|end|>")


def read_gguf_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary, special tokens and chat template of a GGUF file.

    Raises:
      TokenizerError: not a GGUF file, or a vocabulary that is missing, inconsistent or of an unknown
        kind. The error names the key.
    """
    try:
        metadata = read_metadata(path)
    except (GgufError, OSError) as error:
        raise TokenizerError(str(error)) from error
    try:
        return _vocabulary(path, metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _vocabulary(path: Path, metadata: Mapping) -> Vocabulary:
    get = functools.partial(_get, metadata)
    kind = get("model", str)
    tokens = get("tokens", list)
    types = _per_token(metadata, "token_type", len(tokens), default=[NORMAL] * len(tokens))
    usable = {
        token: i
        for i, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if token and type_ != UNUSED
    }
    if len(usable) < sum(bool(token) and type_ != UNUSED for token, type_ in zip(tokens, types, strict=True)):
        raise TokenizerError("tokenizer.ggml.tokens contains a token twice")

    if kind == "gpt2":
        pre = get("pre", str, "default")
        backend = _byte_level(usable, get("merges", list), pre)
        add_bos = get("add_bos_token", bool, pre == "llama-bpe")
    elif kind == "llama":
        backend = _sentencepiece(
            usable,
            types,
            _per_token(metadata, "scores", len(tokens)),
            space_prefix=get("add_space_prefix", bool, True),
        )
        add_bos = get("add_bos_token", bool, True)
    else:
        raise TokenizerError(f"tokenizer.ggml.model={kind!r} is not supported; accepted: gpt2, llama")
    backend.add_special_tokens(
        [_added(tokens[i], special=True) for i in usable.values() if types[i] in (CONTROL, UNKNOWN)]
    )
    backend.add_tokens(
        [_added(tokens[i], special=False) for i in usable.values() if types[i] == USER_DEFINED]
    )

    ids = {
        name: _token_id(metadata, name, len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    bos, eos = ids["bos"], ids["eos"]
    _add_around(backend, bos if add_bos else None, eos if get("add_eos_token", bool, False) else None)
    if add_bos and bos is None:
        raise TokenizerError(
            "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"
        )
    turn_ends = [
        i for i in map(usable.get, _TURN_ENDS) if i is not None and types[i] in (CONTROL, USER_DEFINED)
    ]
    ends = [i for i in (eos, ids["eot"], ids["eom"], *turn_ends) if i is not None]
    names = {"bos_token": bos, "eos_token": eos, "unk_token": ids["unknown"], "pad_token": ids["padding"]}
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        source=path,
        backend=backend,
        vocab_size=len(tokens),
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        special_tokens={name: tokens[i] for name, i in names.items() if i is not None},
        chat_template=template if isinstance(template, str) else None,
    )


def _byte_level(vocab: dict[str, int], merges: Sequence[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre={pre!r} is not supported; accepted: {', '.join(PRE_TOKENIZERS)}"
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab, pairs, ignore_merges=pre in _IGNORES_MERGES)
    except Exception as error:  # the package raises Exception itself
        raise TokenizerError(f"tokenizer.ggml.merges: {error}") from error
    backend = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(
    vocab: dict[str, int], types: Sequence[int], scores: Sequence[float], space_prefix: bool
) -> tokenizers.Tokenizer:
    unknown = next((token for token, i in vocab.items() if types[i] == UNKNOWN), None)
    byte_fallback = any(types[i] == BYTE for i in vocab.values())
    merges = _merges_by_score(
        {token: i for token, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED)}, scores
    )
    model = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    backend = tokenizers.Tokenizer(model)
    prefix = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(chain)
    return backend


def _merges_by_score(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary, highest score first.

    Every split of a token into two tokens is a merge.
    """
    merges = []
    for token, _ in sorted(vocab.items(), key=lambda entry: (-scores[entry[1]], entry[1])):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges.extend(
            sorted(
                (cut for cut in cuts if cut[0] in vocab and cut[1] in vocab),
                key=lambda cut: (vocab[cut[0]], vocab[cut[1]]),
            )
        )
    return merges


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _add_around(backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
    """Make `encode` add these tokens before and after a text."""
    around = [(name, i) for name, i in (("bos", bos), ("eos", eos)) if i is not None]
    if around:
        template = [name for name in ("bos", "$A", "eos") if name == "$A" or name in dict(around)]
        post = processors.TemplateProcessing(single=template, special_tokens=around)
        backend.post_processor = post


_MISSING = object()


def _get(metadata: Mapping, name: str, type_: type, default=_MISSING):
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is _MISSING:
        raise TokenizerError(
            f"{key} is missing: the file has no {'vocabulary' if name == 'tokens' else name}"
        )
    if not isinstance(value, type_):
        raise TokenizerError(f"{key} is a {type(value).__name__}, not a {type_.__name__}")
    return value


def _per_token(metadata: Mapping, name: str, count: int, default: Sequence | None = None) -> Sequence:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None and default is not None:
        return default
    if value is None or not hasattr(value, "tolist") or len(value) != count:
        found = (
            "is missing"
            if value is None
            else f"has {len(value)} entries"
            if hasattr(value, "__len__")
            else "is not an array"
        )
        raise TokenizerError(f"{key} {found}; tokenizer.ggml.tokens has {count}")
    return value.tolist()


def _token_id(metadata: Mapping, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < count):
        raise TokenizerError(f"{key}={value!r} is not a token id from 0 to {count - 1}")
    return value

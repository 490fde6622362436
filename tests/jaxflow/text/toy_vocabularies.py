"""GGUF files and Hugging Face folders with vocabularies small enough to reason about."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the cat sat on the mat, the cat's hat",
    "In 2024 they'll pay 1234567 dollars",
    "naïve café über 你好 😀 ☃",
    "  two  spaces\n\nlines\t",
] * 3


def byte_level_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE of some hundred tokens, trained on `CORPUS`, the first two special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    return backend


def tokens_and_merges(backend: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """The vocabulary in order of ids, and the merges as lines."""
    vocabulary = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(pair) for pair in merges]


def byte_level_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    """Return the GGUF metadata of `byte_level_bpe`."""
    tokens, merges = tokens_and_merges(byte_level_bpe())
    types = np.array([3 if token in ("<s>", "</s>") else 1 for token in tokens], np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece_metadata(tokenizer_json: Path) -> dict[str, Any]:
    """Return the GGUF metadata of the stories260K vocabulary. Scores are the negative order of the merges."""
    vocabulary = json.loads(tokenizer_json.read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Writes a GGUF file without tensors.

    Numpy arrays keep their dtype, ints become uint32, floats float32.
    """
    writer = gguf.GGUFWriter(path, arch="llama")
    kinds = {
        bool: gguf.GGUFValueType.BOOL,
        int: gguf.GGUFValueType.UINT32,
        float: gguf.GGUFValueType.FLOAT32,
        str: gguf.GGUFValueType.STRING,
    }
    arrays = {
        np.dtype(np.int32): gguf.GGUFValueType.INT32,
        np.dtype(np.float32): gguf.GGUFValueType.FLOAT32,
        np.dtype(np.int64): gguf.GGUFValueType.INT64,
        np.dtype(np.uint8): gguf.GGUFValueType.UINT8,
    }
    for key, value in metadata.items():
        if isinstance(value, np.ndarray):
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, arrays[value.dtype])
        elif isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
        else:
            writer.add_key_value(key, value, kinds[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path, files: Mapping[str, Any]) -> Path:
    """Writes a folder of JSON files (a `str` as it is, a `Tokenizer` as its own JSON)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = (
            content
            if isinstance(content, str)
            else content.to_str()
            if isinstance(content, tokenizers.Tokenizer)
            else json.dumps(content)
        )
        (folder / name).write_text(text, encoding="utf-8")
    return folder

"""Vocabularies in GGUF files: the same ids as the tokenizer they were written from."""

import json

import numpy as np
import pytest
import tokenizers
import toy_vocabularies
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from jaxflow.text.gguf_vocabulary import PRE_TOKENIZERS
from jaxflow.text.tokenizer import load_tokenizer
from jaxflow.text.vocabulary import TokenizerError

# Letters, digits, spaces and marks. Pre-tokenizers differ at their borders.
TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab'st lL 12३ ²  \n\r\t.,!?-_$é☃😀\u0308"), st.characters(exclude_categories=["Cs"])
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")

    def load(metadata, **changed):
        path = folder / "vocabulary.gguf"
        changed = {f"tokenizer.ggml.{name}": value for name, value in changed.items()}
        kept = {key: value for key, value in {**metadata, **changed}.items() if value is not None}
        return load_tokenizer(toy_vocabularies.write_gguf(path, kept))

    return load


@pytest.fixture(scope="module")
def sentencepiece(models_dir):
    return toy_vocabularies.sentencepiece_metadata(models_dir / "stories260K" / "tokenizer.json")


@pytest.fixture(scope="module")
def stories_twice(loaded, sentencepiece, models_dir):
    return loaded(sentencepiece), load_tokenizer(models_dir / "stories260K")


# Each cut by hand from the family's published expression.
@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        (
            "gpt-2",
            "I'll pay $1234, ok?  \n x",
            ["I", "'ll", " pay", " $", "1234", ",", " ok", "?", "  \n", " x"],
        ),
        (
            "smollm",
            "I'll pay $1234, ok?  \n x",
            ["I", "'ll", " pay", " $", "1", "2", "3", "4", ",", " ok", "?", "  \n", " x"],
        ),
        (
            "llama-bpe",
            "I'LL pay $1234, ok?  \n x",
            ["I", "'LL", " pay", " $", "123", "4", ",", " ok", "?", "  \n", " x"],
        ),
        ("llama-bpe", "(word)!!\n\ny's", ["(word", ")!!\n\n", "y", "'s"]),
        (
            "qwen2",
            "I'Ll pay $1234, ok?  \n x",
            ["I", "'Ll", " pay", " $", "1", "2", "3", "4", ",", " ok", "?", "  \n", " x"],
        ),
        ("default", "I'll pay 1234567 ok?", ["I", "'", "ll", " pay", " ", "123", "456", "7", " ok", "?"]),
    ],
)
def test_splits_of_each_pre_tokenizer(pre, text, words):
    cuts = [
        pre_tokenizers.Split(tokenizers.Regex(expression), "isolated") for expression in PRE_TOKENIZERS[pre]
    ]
    assert [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("pre", "theirs"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        ),
    ],
)
@given(text=TEXTS)
def test_byte_level_ids_are_those_of_the_tokenizer_it_came_from(loaded, pre, theirs, text):
    ours, original = _byte_level_pair(loaded, pre, theirs)
    assert ours.encode(text) == original.encode(text).ids
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


_PAIRS: dict = {}


def _byte_level_pair(loaded, pre, pre_tokenizer):
    if pre not in _PAIRS:
        original = toy_vocabularies.byte_level_bpe()
        original.pre_tokenizer = pre_tokenizer
        _PAIRS[pre] = loaded(toy_vocabularies.byte_level_metadata(pre)), original
    return _PAIRS[pre]


def test_qwen2_composes_characters_and_llama_takes_whole_words_first(loaded):
    metadata = toy_vocabularies.byte_level_metadata("qwen2")
    text = "cafe\u0301"
    assert normalizers.NFC().normalize_str(text) != text
    assert loaded(metadata).decode(loaded(metadata).encode(text)) == "caf\u00e9"
    # A token that no merge produces: only a tokenizer that searches complete words first finds the token.
    tokens = [*metadata["tokenizer.ggml.tokens"], "zqzq"]
    types = np.append(metadata["tokenizer.ggml.token_type"], 1).astype(np.int32)
    for pre, found in (("llama-bpe", True), ("qwen2", False)):
        ids = loaded(metadata, pre=pre, tokens=tokens, token_type=types).encode(
            "zqzq", add_special_tokens=False
        )
        assert (ids == [len(tokens) - 1]) is found


@given(text=TEXTS)
def test_sentencepiece_ids_are_those_of_the_tokenizer_it_came_from(stories_twice, text):
    ours, theirs = stories_twice
    assert ours.encode(text) == theirs.encode(text)
    # SentencePiece writes a space as U+2581, so a U+2581 of the text comes back as a space.
    assert ours.decode(ours.encode(text)) == text.replace("\u2581", " ")


@given(ids=st.lists(st.integers(0, 520), max_size=20))
def test_sentencepiece_decodes_as_the_tokenizer_it_came_from(stories_twice, ids):
    ours, theirs = stories_twice
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(text=st.text("Once upon a time, she said they", max_size=30))
def test_scores_and_not_the_order_of_tokens_say_what_is_joined_first(stories_twice, stories_shuffled, text):
    ours, theirs = stories_shuffled, stories_twice[1]
    assert [ours.token_text(i) for i in ours.encode(text)] == [
        theirs.token_text(i) for i in theirs.encode(text)
    ]


@pytest.fixture(scope="module")
def stories_shuffled(loaded, sentencepiece):
    order = [*range(259), *np.random.default_rng(0).permutation(np.arange(259, 512)).tolist()]
    tokens = [sentencepiece["tokenizer.ggml.tokens"][i] for i in order]
    return loaded(sentencepiece, tokens=tokens, scores=sentencepiece["tokenizer.ggml.scores"][order])


def test_a_user_defined_token_of_spaces_is_found_in_spaces(loaded, sentencepiece):
    tokens = [*sentencepiece["tokenizer.ggml.tokens"], "▁▁"]
    scores = np.append(sentencepiece["tokenizer.ggml.scores"], 0.0).astype(np.float32)
    types = np.append(sentencepiece["tokenizer.ggml.token_type"], 4).astype(np.int32)
    tokenizer = loaded(sentencepiece, tokens=tokens, scores=scores, token_type=types, add_space_prefix=False)
    ids = tokenizer.encode("a  b")
    assert len(tokens) - 1 in ids
    assert tokenizer.decode(ids) == "a  b"


def test_without_a_space_prefix_none_is_added_or_taken(loaded, sentencepiece):
    tokenizer = loaded(sentencepiece, add_space_prefix=False)
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert tokenizer.encode("the") != loaded(sentencepiece).encode("the")


def test_bos_and_eos_around_a_text(loaded, sentencepiece):
    byte_level = toy_vocabularies.byte_level_metadata()
    assert loaded(sentencepiece).encode("")[:1] == [
        1
    ]  # SentencePiece files mean a BOS unless they say otherwise
    assert loaded(sentencepiece, add_bos_token=False).encode("") == []
    assert loaded(sentencepiece, add_eos_token=True).encode("") == [1, 2]
    assert loaded(byte_level).encode("") == []
    assert loaded(byte_level, pre="llama-bpe").encode("") == [0]
    assert loaded(byte_level, add_bos_token=True).encode("") == [0]
    assert loaded(byte_level, add_bos_token=True).encode("", add_special_tokens=False) == []


def test_kinds_of_tokens(loaded):
    """Control tokens are special, user-defined ones are text found first, unused ones are nothing."""
    metadata = toy_vocabularies.byte_level_metadata()
    base = metadata["tokenizer.ggml.tokens"]
    tokens = [*base, "<|im_end|>", "  <tag> ", "<unused>"]
    types = np.append(metadata["tokenizer.ggml.token_type"], [3, 4, 5]).astype(np.int32)
    tokenizer = loaded(metadata, tokens=tokens, token_type=types)
    control, user, unused = len(base), len(base) + 1, len(base) + 2
    assert tokenizer.special_ids == {0, 1, control}
    assert tokenizer.eos_token_ids == (1, control)  # the end of a turn also ends an answer
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.encode("a  <tag> <|im_end|>")[1:] == [user, control]
    assert unused not in tokenizer.encode("<unused>")
    assert tokenizer.decode([user, control, unused]) == "  <tag> "
    assert tokenizer.decode([user, control, unused], skip_special_tokens=False) == "  <tag> <|im_end|>"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_template_and_the_end_of_the_turn_are_read(loaded):
    tokenizer = loaded(
        {**toy_vocabularies.byte_level_metadata(), "tokenizer.chat_template": "{{ messages }}"},
        eot_token_id=7,
    )
    assert tokenizer.chat_template == "{{ messages }}"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (0, 1, (1, 7))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported; accepted: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 3}, "tokenizer.ggml.model is a int"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre='tekken' is not supported; .*smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["t h", "th e zz"]}, "tokenizer.ggml.merges"),
        ({"merges": ["t"]}, "tokenizer.ggml.merges"),
        (
            {"token_type": np.ones(3, np.int32)},
            "tokenizer.ggml.token_type has 3 entries; tokenizer.ggml.tokens has",
        ),
        ({"tokens": ["a"] * 400, "token_type": np.ones(400, np.int32)}, "contains a token twice"),
        ({"bos_token_id": 400}, "tokenizer.ggml.bos_token_id=400 is not a token id from 0 to "),
        ({"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.bos_token_id is missing"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is a str"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused_by_key(loaded, changed, says):
    with pytest.raises(TokenizerError, match=r"vocabulary\.gguf: .*" + says):
        loaded(toy_vocabularies.byte_level_metadata(), **changed)


def test_a_broken_file_is_refused(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF is not this")
    with pytest.raises(TokenizerError, match=r"a\.gguf"):
        load_tokenizer(tmp_path / "a.gguf")


def test_merges_of_the_stories_vocabulary_follow_from_its_scores(sentencepiece, models_dir, loaded):
    model = json.loads((models_dir / "stories260K" / "tokenizer.json").read_text())["model"]
    backend = json.loads(loaded(sentencepiece)._backend.to_str())["model"]
    assert {tuple(pair) for pair in backend["merges"]} == {tuple(pair) for pair in model["merges"]}

"""Tokenizers of folders and files: goldens, round trips, and agreement with the `tokenizers` package."""

import concurrent.futures
import re

import numpy as np
import pytest
import tokenizers
import toy_vocabularies
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxflow.text.tokenizer import load_tokenizer
from jaxflow.text.vocabulary import TokenizerError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)

# Bytes that SmolLM2's vocabulary has no token for: a few control characters, and the first bytes of planes
# without characters.
UNKNOWN_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


@pytest.fixture(scope="module")
def stories(models_dir):
    return load_tokenizer(models_dir / "stories260K")


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_tokenizer(smollm2_gguf)


@pytest.mark.parametrize("name", ["stories260K", "smollm2-135m-q4"])
def test_goldens(name, goldens, stories, smollm2):
    tokenizer = stories if name == "stories260K" else smollm2
    for prompt in goldens(name)["prompts"]:
        assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"], prompt["name"]
        if "full_text" in prompt:
            assert tokenizer.decode(prompt["prompt_ids"] + prompt["greedy_ids"]) == prompt["full_text"], (
                prompt["name"]
            )
        else:
            assert (
                tokenizer.decode(prompt["greedy_ids"], skip_special_tokens=False) == prompt["greedy_text"]
            ), prompt["name"]


def test_settings_of_the_checkpoints(stories, smollm2):
    assert (stories.vocab_size, stories.bos_token_id, stories.eos_token_id, stories.eos_token_ids) == (
        512,
        1,
        2,
        (2, 1),
    )
    assert stories.special_ids == {0, 1, 2}
    assert stories.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert stories.chat_template is None
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.special_ids == set(range(17))
    assert "<|im_start|>" in smollm2.chat_template


@given(text=TEXTS)
def test_any_text_comes_back(stories, smollm2, text):
    assume(
        not {"<", "▁"} & set(text)
    )  # the names of special tokens are those tokens; SentencePiece takes ▁ for a space
    assert stories.decode(stories.encode(text)) == text
    if not UNKNOWN_BYTES & set(text.encode()):
        assert smollm2.decode(smollm2.encode(text)) == text


@pytest.fixture(scope="module")
def partial_ids(smollm2):
    """Tokens of SmolLM2 that are parts of characters."""
    return [i for i in range(49152) if isinstance(smollm2.pieces(False)[i], bytes)]


@given(data=st.data(), skip=st.booleans())
def test_byte_level_decode_is_the_package_s(smollm2, partial_ids, data, skip):
    ids = data.draw(
        st.lists(
            st.one_of(st.integers(0, 49300), st.sampled_from(partial_ids), st.integers(0, 20)), max_size=30
        )
    )
    assert smollm2.decode(ids, skip_special_tokens=skip) == smollm2._backend.decode(
        ids, skip_special_tokens=skip
    )


@given(
    ids=st.lists(st.one_of(st.integers(0, 520), st.integers(3, 258), st.integers(131, 258)), max_size=30),
    skip=st.booleans(),
)
def test_sentencepiece_decode_is_the_package_s_but_for_broken_runs(stories, ids, skip):
    shown = [i for i in ids if i < 512 and not (skip and i in stories.special_ids)]
    runs = re.findall("b+", "".join("b" if 3 <= i < 259 else "." for i in shown))
    expected, at = (
        "",
        0,
    )  # byte by byte, as SentencePiece does: whole characters stay, each stray byte is U+FFFD
    for i in shown:
        expected += chr(0x10FFFF) if 3 <= i < 259 else stories._backend.id_to_token(i).replace("▁", " ")
    values = iter([i - 3 for i in shown if 3 <= i < 259])
    for run in runs:
        at = expected.index(chr(0x10FFFF) * len(run), at)
        text = _bytewise(bytes(next(values) for _ in run))
        expected = expected[:at] + text + expected[at + len(run) :]
    assert stories.decode(ids, skip_special_tokens=skip) == expected.removeprefix(" ")
    if "\ufffd" not in expected:
        assert stories._backend.decode(ids, skip_special_tokens=skip) == expected.removeprefix(" ")


def _bytewise(data: bytes) -> str:
    """Decodes by trying, at each byte, the one length a character there could have."""
    text, at = "", 0
    while at < len(data):
        for length in (1, 2, 3, 4):
            try:
                text += data[at : at + length].decode()
                at += length
                break
            except UnicodeDecodeError:
                continue
        else:
            text, at = text + "\ufffd", at + 1
    return text


def test_ids_that_are_no_tokens(stories):
    assert stories.decode([403, 512, 2**31, 2**32, 2**70, 407]) == stories.decode([403, 407])
    assert stories.decode(np.array([403, 407], np.int32)) == stories.decode([403, 407])
    assert stories.token_text(99_999) == ""
    for call in (lambda: stories.decode([403, -1]), lambda: stories.token_text(-1)):
        with pytest.raises(TokenizerError, match="token id -1 is negative"):
            call()


@pytest.mark.parametrize(("text", "place"), [("\ud800", 0), ("ab\udfffc", 2)])
def test_a_lone_surrogate_is_refused_with_its_place(stories, text, place):
    with pytest.raises(TokenizerError, match=f"lone surrogate U\\+D.* at character {place}"):
        stories.encode(text)


def test_token_text_reads_well(stories, smollm2):
    assert (
        stories.token_text(403) == " Once"
    )  # the token's own space, though a text that starts with it has none
    assert stories.token_text(1) == "<s>"
    assert stories.token_text(13) == "\n"
    assert stories.token_text(229) == "\ufffd"
    assert smollm2.token_text(2) == "<|im_end|>"
    whole = smollm2.encode("☃")
    assert len(whole) > 1
    assert "\ufffd" in smollm2.token_text(whole[0])
    assert smollm2.token_text(smollm2.encode(" Paris")[0]) == " Paris"


@given(text=st.text("abc xyz.,!?\n", max_size=40))
def test_token_texts_join_to_the_text_where_tokens_are_whole_characters(smollm2, text):
    assert "".join(smollm2.token_text(i) for i in smollm2.encode(text)) == text


def test_threads_share_a_tokenizer(smollm2, goldens):
    prompts = goldens("smollm2-135m-q4")["prompts"] * 20
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda prompt: smollm2.encode(prompt["text"]), prompts))
        texts = list(pool.map(lambda i: smollm2.decode(i, skip_special_tokens=False), ids))
    assert ids == [prompt["prompt_ids"] for prompt in prompts]
    assert texts == [prompt["text"] for prompt in prompts]


# Folders.

BYTE_LEVEL = {"tokenizer.json": toy_vocabularies.byte_level_bpe()}


def _folder(tmp_path, **files):
    return load_tokenizer(toy_vocabularies.write_folder(tmp_path / "model", {**BYTE_LEVEL, **files}))


def test_a_folder_of_just_a_tokenizer(tmp_path):
    tokenizer = _folder(tmp_path)
    assert (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.eos_token_ids,
        tokenizer.chat_template,
    ) == (None, None, (), None)
    assert tokenizer.decode(tokenizer.encode("naïve 😀")) == "naïve 😀"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": 5}, "config.json": {"eos_token_id": 9}}, (5,)),
        ({"generation_config.json": {"eos_token_id": [5, 6, 5]}}, (5, 6)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, (9,)),
        (
            {
                "tokenizer_config.json": {"eos_token": "</s>"},
                "generation_config.json": {"eos_token_id": [5, 1]},
            },
            (1, 5),
        ),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>", "lstrip": False}}}, (1,)),
        (
            {"special_tokens_map.json": {"eos_token": "</s>"}, "tokenizer_config.json": {"eos_token": None}},
            (1,),
        ),
        ({"tokenizer_config.json": {"eos_token": "no such token"}}, ()),
    ],
)
def test_sources_of_the_end_tokens(tmp_path, files, expected):
    assert _folder(tmp_path, **files).eos_token_ids == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        ({"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "two é"}, "two é"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
                }
            },
            "b",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "a"}]}}, None),
    ],
)
def test_sources_of_the_chat_template(tmp_path, files, expected):
    assert _folder(tmp_path, **files).chat_template == expected


def test_a_plain_token_that_the_configuration_names_becomes_special(tmp_path):
    assert _folder(tmp_path).special_ids == {0, 1}
    tokenizer = _folder(tmp_path, **{"tokenizer_config.json": {"pad_token": "the"}})
    the = tokenizer._backend.token_to_id("the")
    assert tokenizer.special_ids == {0, 1, the}
    assert tokenizer.decode([the]) == ""
    assert tokenizer.decode([the], skip_special_tokens=False) == "the"


def test_settings_for_batches_are_dropped(tmp_path):
    backend = toy_vocabularies.byte_level_bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = _folder(tmp_path, **{"tokenizer.json": backend})
    assert tokenizer.encode("a longer text") == toy_vocabularies.byte_level_bpe().encode("a longer text").ids


@pytest.mark.parametrize("add_bos", [True, False])
def test_gpt2_s_older_files(tmp_path, add_bos):
    backend = toy_vocabularies.byte_level_bpe()
    tokens, merges = toy_vocabularies.tokens_and_merges(backend)
    files = {
        "vocab.json": {token: i for i, token in enumerate(tokens)},
        "merges.txt": "#version: 0.2\n" + "\n".join(merges),
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": "</s>",
            "eos_token": "</s>",
            "add_bos_token": add_bos,
        },
    }
    tokenizer = load_tokenizer(toy_vocabularies.write_folder(tmp_path, files))
    text = "They'll pay 123 for the naïve cat"
    assert tokenizer.encode(text) == [1] * add_bos + backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text + "</s>")) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (1,))


def _with_decoder(decoder) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoder
    return backend


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer.json": "{"}, r"tokenizer\.json: "),
        ({"tokenizer.json": "[]"}, r"tokenizer\.json: "),
        ({"tokenizer_config.json": "{,"}, r"tokenizer_config\.json: "),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json: holds a list"),
        ({"tokenizer_config.json": {"eos_token": 7}}, r"tokenizer_config\.json: eos_token=7"),
        ({"tokenizer_config.json": {"chat_template": 7}}, r"chat_template is a int"),
        ({"generation_config.json": {"eos_token_id": "2"}}, r"generation_config\.json: eos_token_id='2'"),
        ({"generation_config.json": {"eos_token_id": [2, None]}}, r"generation_config\.json: eos_token_id="),
        ({"config.json": {"eos_token_id": -1}}, r"config\.json: eos_token_id=-1"),
        (
            {"tokenizer.json": _with_decoder(decoders.WordPiece())},
            "decoder WordPiece is not supported; accepted: ByteLevel,",
        ),
        (
            {
                "tokenizer.json": _with_decoder(
                    decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)])
                )
            },
            "decoder .*Strip",
        ),
        (
            {"tokenizer.json": tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))},
            "tokenizer has no decoder",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path, files, says):
    with pytest.raises(TokenizerError, match="model.*" + says):
        _folder(tmp_path, **files)


def test_a_path_with_no_tokenizer(tmp_path, models_dir):
    with pytest.raises(TokenizerError, match=r"tiny-llama has no vocabulary: neither tokenizer\.json nor"):
        load_tokenizer(models_dir / "tiny-llama")
    with pytest.raises(TokenizerError, match="nothing is neither a folder"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match=r"tokenizer_class='LlamaTokenizer' needs a tokenizer\.json"):
        files = {
            "vocab.json": {},
            "merges.txt": "",
            "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"},
        }
        load_tokenizer(toy_vocabularies.write_folder(tmp_path / "old", files))

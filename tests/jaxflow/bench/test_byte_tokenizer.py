"""The byte-level tokenizer: a token a byte, at every size of vocabulary, in this server and in its files."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.__main__ import main
from jaxflow.bench.workload.backend import LETTERS
from jaxflow.bench.workload.byte_tokenizer import byte_tokenizer, write_tokenizer
from jaxflow.config import ConfigError
from jaxflow.text.tokenizer import load_tokenizer

SIZE = 5000
TOKENIZER = byte_tokenizer(SIZE)


@pytest.fixture
def bench(no_flags):
    return lambda *arguments: main(["bench", *arguments])


@given(st.text(max_size=40))
def test_a_text_has_a_token_a_byte(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text.encode()) and max(ids, default=0) < 256
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, SIZE - 2), min_size=1, max_size=20))
def test_every_token_of_the_vocabulary_has_text(ids):
    assert TOKENIZER.decode(ids)


def test_the_files_hold_the_same_tokenizer(tmp_path):
    write_tokenizer(tmp_path, SIZE)
    read = load_tokenizer(tmp_path)
    assert read.encode(LETTERS) == TOKENIZER.encode(LETTERS)
    ids = list(range(0, SIZE, 7))
    assert read.decode(ids) == TOKENIZER.decode(ids)
    assert tuple(read.eos_token_ids) == (SIZE - 1,)
    assert read.chat_template == TOKENIZER.chat_template


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="257"):
        byte_tokenizer(256)


def test_the_command_takes_the_size_from_the_model(bench, tmp_path):
    assert bench("tokenizer", "--model", "llama-3.1-8b", "--folder", str(tmp_path)) == 0
    assert tuple(load_tokenizer(tmp_path).eos_token_ids) == (128255,)


def test_the_command_needs_a_model_or_a_size(bench, tmp_path, capsys):
    assert bench("tokenizer", "--folder", str(tmp_path)) == 1
    assert "--vocab_size" in capsys.readouterr().err

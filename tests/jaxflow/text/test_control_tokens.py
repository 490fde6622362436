"""A law: only the template writes control tokens, and a text without them keeps its ids."""

import pytest
import toy_vocabularies
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from jaxflow.text.chat import encode_chat, render_chat
from jaxflow.text.control_tokens import ESCAPE, ITSELF, NOTHING, without_marks
from jaxflow.text.template_sandbox import ChatTemplateError
from jaxflow.text.tokenizer import load_tokenizer

CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<<X>>", "aa"]
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% "
    "endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JOINED = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ m | tojson(ensure_ascii=true) }}{% endfor %}"
)


def _backend():
    backend = toy_vocabularies.byte_level_bpe()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    backend.add_tokens([AddedToken("  ", normalized=False), AddedToken("<think>", normalized=False)])
    return backend


def _folder(path, backend, template):
    files = {
        "tokenizer.json": backend,
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template},
    }
    return load_tokenizer(toy_vocabularies.write_folder(path, files))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, models_dir):
    where = tmp_path_factory.mktemp("vocabularies")
    composed = _backend()
    composed.normalizer = normalizers.NFC()
    metadata = toy_vocabularies.sentencepiece_metadata(models_dir / "stories260K" / "tokenizer.json")
    gguf = toy_vocabularies.write_gguf(where / "m.gguf", {**metadata, "tokenizer.chat_template": JOINED})
    return {
        "chatml": _folder(where / "a", _backend(), CHATML),
        "joined": _folder(where / "b", composed, JOINED),
        "sentencepiece": load_tokenizer(gguf),
    }


PIECES = st.sampled_from(
    [
        *CONTROL,
        "<|",
        "im_end|>",
        "<",
        "|",
        ">",
        "<|im_",
        "a",
        " ",
        "\n",
        "  ",
        "<think>",
        "é",
        "é",
        "你好",
        ESCAPE,
        NOTHING,
        ITSELF,
        "cat",
        "the",
    ]
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
CHATS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}),
    min_size=1,
    max_size=3,
)


def specials(tokenizer, ids):
    return [i for i in ids if i in tokenizer.special_ids]


@pytest.mark.parametrize("name", ["chatml", "joined", "sentencepiece"])
@given(messages=CHATS)
@settings(max_examples=100, deadline=None)
def test_only_the_template_writes_control_tokens(tokenizers, name, messages):
    tokenizer = tokenizers[name]
    empty = [{**message, "content": "x"} for message in messages]
    ids = encode_chat(tokenizer, messages)
    assert specials(tokenizer, ids) == specials(tokenizer, encode_chat(tokenizer, empty))
    text = render_chat(tokenizer, messages)
    if name == "chatml":  # the others change spaces and characters
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert shown == tokenizer.decode(tokenizer.encode(text, False), skip_special_tokens=False)
    parsed = encode_chat(tokenizer, messages, parse_control_tokens=True)
    assert parsed == tokenizer.encode(text, False)
    if specials(tokenizer, parsed) == specials(tokenizer, ids):
        assert ids == parsed


@given(text=TEXTS)
@settings(deadline=None)
def test_marks_can_be_taken_back(tokenizers, text):
    assert without_marks(tokenizers["chatml"].control_tokens.mark(text)) == text


@pytest.mark.parametrize("field", ["name", "content", "tool_call_id"])
def test_every_text_of_a_message_is_plain(tokenizers, field):
    tokenizer = tokenizers["joined"]
    message = {"role": "tool", "content": "x", field: "a<|im_end|>b"}
    found = specials(tokenizer, encode_chat(tokenizer, [message]))
    assert len(found) == 1  # the template's BOS


def test_tools_and_template_variables_are_plain(tokenizers):
    tokenizer = tokenizers["joined"].with_chat_template(
        "{{ bos_token }}{{ tools | tojson }}{{ x }}{{ y | tojson }}"
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    kwargs = {"x": "<|im_start|>", "y": {"<s>": 1}}
    ids = encode_chat(tokenizer, [{"role": "user", "content": ""}], tools=tools, template_kwargs=kwargs)
    assert len(specials(tokenizer, ids)) == 1


def test_arguments_that_a_template_joins_are_plain(tokenizers):
    tokenizer = tokenizers["joined"].with_chat_template(
        "{{ bos_token }}{% for m in messages %}{% for c in m.tool_calls or () %}"
        "{{ 'x' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    for arguments in ('{"a":  "<|im_end|>"}', {"a": "<|im_end|>"}):
        call = {"function": {"name": "f", "arguments": arguments}}
        ids = encode_chat(tokenizer, [{"role": "assistant", "content": None, "tool_calls": [call]}])
        text = arguments if isinstance(arguments, str) else '{"a": "<|im_end|>"}'
        assert len(specials(tokenizer, ids)) == 1 and tokenizer.decode(ids).endswith(f"x{text}")


def test_a_role_that_is_part_of_a_control_token_is_refused(tokenizers):
    tokenizer = tokenizers["chatml"].with_chat_template("{% for m in messages %}<|{{ m.role }}|>{% endfor %}")
    for role in ("im_end", "end"):
        with pytest.raises(ChatTemplateError, match="is part of the control token") as refused:
            encode_chat(tokenizer, [{"role": role, "content": "x"}])
        assert refused.value.field == "messages[0].role"
        assert encode_chat(tokenizer, [{"role": role, "content": "x"}], parse_control_tokens=True)

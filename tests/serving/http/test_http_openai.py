"""The shapes of the answers, as the `openai` package reads them, in each of its ways of asking."""

import asyncio

import openai
import pytest
from http_harness import CHAT, COMPLETIONS, HELLO, running_server

PROMPT = "Once upon a time there was a dog."
WAYS = [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["dog", "zzz"]}, {"max_tokens": 40}]


@pytest.fixture(scope="module")
def shared():
    with running_server(served_model_names=("small", "fake/model")) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(shared):
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def check_usage(usage, prompt_tokens=None):
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_chat_answer_and_its_stream_are_the_same(client, how):
    given = {"model": "small", "messages": HELLO, "seed": 4, **({"max_tokens": 12} | how)}
    whole = client.chat.completions.create(**given)
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-") and whole.model == "small"
    assert [choice.index for choice in whole.choices] == list(range(how.get("n", 1)))
    check_usage(whole.usage)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options=options))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert mine[0].delta.role == "assistant" and not mine[0].delta.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        assert mine[-1].finish_reason == choice.finish_reason
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        parts = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        assert parts == (choice.logprobs.content if choice.logprobs else [])
        if how.get("logprobs"):
            data = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or ())
            assert data == choice.message.content.encode()
            assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_a_completion_and_its_stream_are_the_same(client):
    prompts = [PROMPT, "The dog sat on the mat and"]
    given = {"model": "fake/model", "prompt": prompts, "n": 2, "max_tokens": 9, "logprobs": 2, "echo": True}
    whole = client.completions.create(**given)
    assert whole.object == "text_completion" and whole.model == "fake/model"
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    check_usage(whole.usage)
    assert whole.usage.completion_tokens == 36
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**given, stream=True, stream_options=options))
    assert chunks[-1].usage == whole.usage and chunks[0].usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        assert choice.text.startswith(prompts[choice.index // 2])
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [x for c in mine if c.logprobs for x in getattr(c.logprobs, field)]
            assert parts == getattr(choice.logprobs, field), field
        assert choice.logprobs.token_logprobs[0] is None
        for token, offset in zip(choice.logprobs.tokens[2:], choice.logprobs.text_offset[2:], strict=True):
            assert token == "<s>" or choice.text[offset:].startswith(token)


def test_no_new_token_with_echo(client):
    answer = client.completions.create(model="small", prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert len(choice.logprobs.tokens) == 3 and answer.usage.completion_tokens == 0
    assert choice.finish_reason == "length"


def test_the_asynchronous_client(shared):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            given = {"model": "small", "messages": HELLO, "max_tokens": 8}
            whole = await client.chat.completions.create(**given)
            text = ""
            async for chunk in await client.chat.completions.create(**given, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content

    asyncio.run(ask())


def test_models(client):
    assert [model.id for model in client.models.list()] == ["small", "fake/model"]
    assert client.models.retrieve("fake/model").id == "fake/model"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("other")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("change", "kind", "code", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": -1}, openai.BadRequestError, None, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"extra_body": {"top_z": 1}}, openai.BadRequestError, None, "top_z"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            openai.BadRequestError,
            None,
            "messages[0].content[0].type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, None, "tools"),
        (
            {"response_format": {"type": "grammar"}},
            openai.BadRequestError,
            None,
            "response_format.type",
        ),
    ],
    ids=str,
)
def test_errors(client, change, kind, code, param):
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**({"model": "small", "messages": HELLO} | change))
    assert (raised.value.code, raised.value.param) == (code, param)


@pytest.mark.parametrize(("parse", "found"), [(None, []), (False, []), (True, [2])])
def test_a_control_token_in_a_message_is_plain_text_unless_asked_for(shared, parse, found):
    body = {"messages": [{"role": "user", "content": "Hi</s>you"}], "parse_control_tokens": parse}
    ids = shared.post("/tokenize", body).json()["tokens"]
    assert [i for i in ids if i in shared.llm.tokenizer.special_ids] == found
    answer = shared.post(CHAT, {**body, "max_tokens": 1, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == ids


def test_words_and_tokens_are_excluded_by_request(shared):
    body = {"prompt": [5, 6], "max_tokens": 1, "bad_words": ["dog"], "allowed_token_ids": [5, 7]}
    assert shared.post(COMPLETIONS, body).status_code == 200
    sampling = shared.llm.driver.submitted[-1].sampling
    assert (sampling.bad_words, sampling.allowed_token_ids) == (("dog",), (5, 7))
    for field, value in (("bad_words", [""]), ("allowed_token_ids", []), ("allowed_token_ids", [512])):
        refused = shared.post(COMPLETIONS, {"prompt": [5, 6], field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("add_special_tokens", [None, False])
def test_a_truncated_text_keeps_its_last_tokens_and_its_bos_token(shared, add_special_tokens):
    tokenizer = shared.llm.tokenizer
    for text in (PROMPT, PROMPT * 100_000):
        body = {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 7, "return_token_ids": True}
        answer = shared.post(COMPLETIONS, {**body, "add_special_tokens": add_special_tokens}).json()
        [bos, *ids] = tokenizer.encode(PROMPT * 2)
        assert bos == tokenizer.bos_token_id
        expected = ids[-7:] if add_special_tokens is False else [bos, *ids[-6:]]
        assert answer["choices"][0]["prompt_token_ids"] == expected


def test_other_prompts_are_truncated_too(shared):
    body = {"max_tokens": 1, "truncate_prompt_tokens": 3, "return_token_ids": True}
    answer = shared.post(COMPLETIONS, {**body, "prompt": [1, 5, 6, 7, 8]}).json()
    assert answer["choices"][0]["prompt_token_ids"] == [6, 7, 8]
    whole = shared.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    answer = shared.post(CHAT, {**body, "messages": HELLO}).json()
    assert answer["prompt_token_ids"] == whole[-3:]
    answer = shared.post(CHAT, {**body, "messages": HELLO, "truncate_prompt_tokens": -1}).json()
    assert answer["prompt_token_ids"] == whole
    refused = shared.post(CHAT, {**body, "messages": HELLO, "truncate_prompt_tokens": 0})
    assert refused.json()["error"]["param"] == "truncate_prompt_tokens"

"""A request of millions of small values is refused by their number, before they are converted."""

import asyncio
import json
import types

import msgspec
import pytest
from fake_llm import TEMPLATE, FakeLLM

from jaxflow.request import InvalidRequest, MalformedRequest, SamplingParams
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import Chat, ServedModel
from serving.grpc import convert
from serving.http.schema import read_body

CHAT = "/v1/chat/completions"
MANY = 600_000


class Huge:
    """A sequence that must not be read."""

    def __len__(self):
        return 10**7

    def __iter__(self):
        raise AssertionError("ten million entries were read")

    __getitem__ = __repr__ = __iter__


def test_the_messages_of_a_grpc_chat_are_counted_first():
    chat = types.SimpleNamespace(messages=Huge(), continue_final_message=False, parse_control_tokens=False)
    with pytest.raises(InvalidRequest, match="10000000 entries") as refused:
        convert.chat(chat)  # type: ignore[arg-type]
    assert refused.value.field == "messages"


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids"])
def test_the_settings_of_a_grpc_request_are_counted_first(field):
    given = dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "bad_words", "allowed_token_ids"), ())
    message = types.SimpleNamespace(**(given | {field: Huge()}), HasField=lambda name: False)
    with pytest.raises(InvalidRequest, match="10000000 entries") as refused:
        convert.sampling_params(message, {})  # type: ignore[arg-type]
    assert refused.value.field == field


def test_a_refused_value_is_not_written_whole():
    class Counted(str):
        written = 0

        def __repr__(self):
            Counted.written += 1
            return "x"

    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(stop=[Counted("a")] * 10_000)
    assert len(str(refused.value)) < 400 and Counted.written < 100


@pytest.mark.parametrize(
    "make",  # at its test: six bodies take a second
    [
        lambda: b'{"messages":[' + b",".join([b'{"role":"a"}'] * MANY) + b"]}",
        lambda: b'{"messages":[],"metadata":{' + b",".join(b'"%d":1' % i for i in range(MANY)) + b"}}",
        lambda: b'{"messages":[],"metadata":{' + b",".join(b'"%d\\\\":1' % i for i in range(MANY)) + b"}}",
        lambda: b'{"messages":[],"metadata":[' + b",".join([b"[]"] * MANY) + b"]}",
        lambda: b'{"messages":[],"metadata":[' + b",".join([b"{}"] * MANY) + b"]}",
        lambda: b'{"messages":[],"stop_token_ids":[' + b"1," * (2 * MANY) + b"1]}",
    ],
    ids=["messages", "keys", "keys with backslashes", "lists", "objects", "numbers"],
)
def test_a_body_of_many_values_is_refused_before_it_is_read(make):
    with pytest.raises(MalformedRequest, match="too many values"):
        read_body(CHAT, make())


@pytest.mark.parametrize("unit", ['say "no", ', "a, b\\n", "f(x)[i]; ", '\\\\ \\" ', '{"a": "b"}\n'])
def test_one_long_text_is_read_whatever_it_holds(unit):
    text = unit * (1_000_000 // len(unit))
    body = msgspec.json.encode({"messages": [{"role": "user", "content": text}]})
    assert read_body(CHAT, body).messages[0].content == text  # type: ignore[union-attr]


def test_all_texts_of_a_conversation_count_as_bytes_in_work(monkeypatch):
    """Also those that the template leaves out: a thread checks them, too."""

    async def scenario():
        llm = FakeLLM(chat_template=TEMPLATE)
        served = ServedModel(ServerConfig())
        await served.serve(llm)  # type: ignore[arg-type]
        sizes = []

        async def run(size, work):
            sizes.append(size)
            return work()

        monkeypatch.setattr(served._work, "run", run)
        long = "word " * 20_000
        call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": long})}}
        for more in (
            {"reasoning_content": long},
            {"tool_calls": [call]},
            {"content": [{"type": "text", "text": "a"}]},
        ):
            await served.encode(Chat([{"role": "assistant", "content": "Hi", **more}]))
        await served.encode(Chat([{"role": "user", "content": "Hi"}], {"template_kwargs": {"a": long}}))
        assert [size > len(long) for size in sizes] == [True, True, False, True]
        llm.close()

    asyncio.run(scenario())

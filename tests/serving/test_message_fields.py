"""A large message of many small fields is refused before it is parsed. Large prompts are not."""

import hypothesis.strategies as st
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given

from jaxflow.text.chat import MAX_MESSAGES
from serving.grpc import generate_pb2 as pb
from serving.grpc.interceptor import _parser, _Unreadable
from serving.grpc.message_fields import LARGE_BYTES, MAX_FIELDS, check_fields
from serving.grpc.server import MAX_REQUEST_BYTES

KIND = pb.GenerateRequest.DESCRIPTOR
parse = _parser(pb.GenerateRequest.FromString)


def field(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    size, n = b"", len(data)
    while n > 127:
        size, n = size + bytes([n & 127 | 128]), n >> 7
    return bytes([number << 3 | 2]) + size + bytes([n]) + data


# two or three bytes a field: submessages, texts, map entries, unknown fields, and one field again and again
HOSTILE = {
    "messages": lambda n: field(5, b"\x0a\x00" * n),
    "roles": lambda n: field(5, b"\x0a\x02\x0a\x00" * (n // 2)),
    "stop": lambda n: field(6, b"\x4a\x00" * n),
    "logit_bias": lambda n: field(6, b"\x7a\x00" * n),
    "chats": lambda n: b"\x2a\x00" * n,
    "prompts": lambda n: b"\x2a\x00\x1a\x00" * (n // 2),
    "unknown": lambda n: b"\xf8\x01\x01" * n,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_many_fields_are_refused_before_they_are_parsed(name):
    refused = parse(HOSTILE[name](LARGE_BYTES))
    assert isinstance(refused, _Unreadable)
    assert refused.error.field == "request" and f"more than {MAX_FIELDS} fields" in str(refused.error)
    assert isinstance(parse(HOSTILE[name](1000)), pb.GenerateRequest)


@pytest.mark.parametrize(
    "request_",
    [
        pb.GenerateRequest(text="\n\n" * LARGE_BYTES),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(MAX_REQUEST_BYTES // 4))),
        pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="\n" * 300)] * MAX_MESSAGES),
            sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0), temperature=0.5, seed=-1),
        ),
    ],
    ids=["text", "token_ids", "chat"],
)
def test_a_large_prompt_is_parsed(request_):
    data = request_.SerializeToString()
    assert len(data) > LARGE_BYTES
    assert parse(data) == request_


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(head):
    """Cut-off numbers and lengths past the end are errors of the message, not of the server."""
    for data in (head + bytes(LARGE_BYTES - 20), bytes([0x1A, 0xF0, 0xFF, 0x3F]) + bytes(LARGE_BYTES) + head):
        try:
            check_fields(data, KIND)  # type: ignore[arg-type]  # of protobuf's other implementation
        except DecodeError:
            assert isinstance(parse(data), _Unreadable)

"""The servers and clients of the transport bench."""

import asyncio

import pytest

from jaxflow.bench.transport import first_token
from jaxflow.bench.transport.bare_server import application
from jaxflow.bench.transport.measure import (
    answer_to,
    body,
    chunks,
    load,
    running,
    whole_answers,
)


@pytest.mark.parametrize(("stream", "expected"), [(False, b"plain"), (True, b"chunk" * 7)])
def test_the_bare_application_answers_with_the_given_bytes(stream, expected):
    data = body(10, 5, stream)
    parts = [
        {"type": "http.request", "body": data[:20], "more_body": True},
        {"type": "http.request", "body": data[20:]},
    ]
    sent: list[dict] = []

    async def receive():
        return parts.pop(0)

    async def send(message):
        sent.append(message)

    async def ask() -> None:
        await application(7, b"plain", b"chunk")({"type": "http"}, receive, send)

    asyncio.run(ask())
    assert sent[0]["status"] == 200
    assert b"".join(message["body"] for message in sent[1:]) == expected
    assert not sent[-1].get("more_body", False)


def test_the_clients_count_the_answers_of_both_servers():
    """Every figure of the bench comes from a server process; the bare one repeats the paced one's bytes."""
    with running("paced_server", -1, 8, 0.05) as paced:  # long steps, because a late server joins tokens
        whole = answer_to(paced.url, body(20, 4, stream=False))
        streamed = answer_to(paced.url, body(20, 4, stream=True))
        found = first_token.delays(paced.url, 2, 3, paced.first_tokens)
    assert chunks(streamed.encode()) == 6  # the role, four tokens and the end
    assert whole_answers(whole.encode()) == 1
    for delay in found.values():
        assert 0 < delay["median"] <= delay["p99"]
    assert found["added_ms"]["p99"] >= found["to_engine_ms"]["median"]
    with running("bare_server", -1, 6, whole, "data: {}\n\n") as bare:
        assert answer_to(bare.url, body(20, 4, stream=False)) == whole
        assert chunks(answer_to(bare.url, body(20, 4, stream=True)).encode()) == 6
        figures = asyncio.run(load(bare.url, 4, body(20, 4, True), chunks, 0.1, bare.cpu_s))
    assert figures["per_s"] > 0

"""A client in a process of its own: many streams of known answers, and a count of every other end.

  python soak_client.py grpc|http TARGET STREAMS CALLERS MAX_TOKENS SEED

Prints JSON: `ends` counts the streams by their end, and `tokens` their tokens.
"""

import asyncio
import collections
import contextlib
import json
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from jaxflow.bench.workload.http_connection import HttpClient
from serving.grpc import generate_pb2 as pb
from serving.grpc import generate_pb2_grpc

WHOLE = "whole"
Ask = Callable[[list[int], int], Awaitable[str]]  # (prompt, tokens) -> the end of the stream


def verdict(prompt: list[int], tokens: int, ids: list[int], ends: int) -> str:
    """Return WHOLE, or what is wrong with an answer. The server repeats the prompt."""
    if ends != 1:
        return f"{ends} ends"
    return WHOLE if ids == [prompt[i % len(prompt)] for i in range(tokens)] else "other tokens"


@contextlib.asynccontextmanager
async def over_grpc(target: str) -> AsyncIterator[Ask]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)

        async def ask(prompt: list[int], tokens: int) -> str:
            sampling = pb.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            call = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling))
            ids: list[int] = []
            ends = 0
            try:
                async for message in call:
                    if message.HasField("delta"):
                        ids += message.delta.token_ids
                    elif message.HasField("finished"):
                        ends += message.finished.reason == pb.FINISH_REASON_LENGTH
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                return "CancelledError in the client"
            return verdict(prompt, tokens, ids, ends)

        yield ask


@contextlib.asynccontextmanager
async def over_http(target: str) -> AsyncIterator[Ask]:
    client = HttpClient(target)
    fields = {"stream": True, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    async def ask(prompt: list[int], tokens: int) -> str:
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, **fields}).encode()
        parts: list[bytes] = []
        try:
            status = await client.stream("/v1/completions", body, parts.append)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        text = b"".join(parts).decode()
        if status != 200:
            return f"{status}: {text}"
        *events, done, nothing = text.split("\n\n")
        if (done, nothing) != ("data: [DONE]", ""):
            return f"no end: {text[-300:]}"
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        ends = sum(choice["finish_reason"] == "length" for choice in choices)
        return verdict(prompt, tokens, ids, ends)

    yield ask
    client.close()


async def run(kind: str, target: str, streams: int, callers: int, max_tokens: int, seed: int) -> dict:
    rng = random.Random(seed)
    lengths = ((rng.randint(1, 8), rng.randint(1, max_tokens)) for _ in range(streams))
    work = iter([(rng.choices(range(256), k=prompt), tokens) for prompt, tokens in lengths])
    ends: collections.Counter[str] = collections.Counter()
    sent = 0
    async with {"grpc": over_grpc, "http": over_http}[kind](target) as ask:

        async def caller() -> None:
            nonlocal sent
            for prompt, tokens in work:
                ends[await ask(prompt, tokens)] += 1
                sent += tokens

        await asyncio.gather(*(caller() for _ in range(callers)))
    return {"ends": dict(ends), "tokens": sent}


if __name__ == "__main__":
    numbers = map(int, sys.argv[3:])
    print(json.dumps(asyncio.run(run(sys.argv[1], sys.argv[2], *numbers))))

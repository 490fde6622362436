"""A real checkpoint behind the services: its golden texts, many callers at once, and 500 requests of every
shape.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator

import grpc
import httpx
import hypothesis.strategies as st
import paths
import pytest
from drawn_requests import REFUSALS, requests
from harness import client_of, read, serving, stubs_of
from hurry import OFTEN, compiled_with
from hypothesis import given, settings

from jaxflow import LLM, SamplingParams
from serving.client import Client, RequestFailed
from serving.frontend.access import BearerTokens
from serving.grpc import generate_pb2 as pb
from serving.grpc.server import Server
from serving.http.app import HttpApp
from serving.http.endpoints import Endpoints
from serving.http.server import HttpServer
from serving.operations import Operations

GOLDEN = paths.golden("stories260K")
PROMPTS = GOLDEN["prompts"]


@pytest.fixture(scope="module")
def llm():
    """Small steps and few pages, so that requests queue, chunk, share and pre-empt one another.

    Thousands: compiled with some care.
    """
    with compiled_with(OFTEN):
        made = LLM(
            str(paths.MODELS / "stories260K"),
            max_num_batched_tokens=32,
            step_sizes="8",
            max_num_seqs=8,
            max_model_len=256,
            block_size=16,
            num_kv_pages=48,
            progress=False,
        )
    with made as llm:
        llm.close, close = (
            lambda: None,
            llm.close,
        )  # this server is shared, so the harness must not end the server
        yield llm
        llm.close = close


def greedy(prompt: dict) -> dict:
    return {"max_tokens": len(prompt["greedy_ids"]), "temperature": 0.0, "ignore_eos": True}


def check_golden(answer, prompt: dict) -> None:
    assert answer.token_ids == [prompt["greedy_ids"]]
    assert answer.text == prompt["greedy_text"]


async def statistics(server: Server) -> pb.GetStatsResponse:
    async with stubs_of(server) as (_, _, admin):
        return await admin.GetStats(pb.GetStatsRequest())


async def check_nothing_is_left(server: Server) -> None:
    """All pages free, nothing queued, nothing compiled since warm-up."""
    async with asyncio.timeout(30):
        while (
            (stats := await statistics(server)).running_requests
            or stats.waiting_requests
            or stats.kv_pages_free != stats.kv_pages
        ):
            await asyncio.sleep(0.02)
    assert stats.compilations_after_warmup == 0


def test_many_callers_at_once_stream_the_golden_texts(llm):
    async def scenario():
        async with serving(llm) as (server, _), client_of(server) as client:
            prompts = PROMPTS * 4
            asked = [client.generate(prompt["prompt_ids"], **greedy(prompt)) for prompt in prompts]
            asked += [
                client.generate(prompt["text"], **greedy(prompt)) for prompt in PROMPTS if prompt["text"]
            ]
            prompts += [prompt for prompt in PROMPTS if prompt["text"]]
            for answer, prompt in zip(
                await asyncio.gather(*(answer.read_all() for answer in asked)), prompts, strict=True
            ):
                check_golden(answer, prompt)
                assert answer.started.prompt_tokens == len(prompt["prompt_ids"])
                assert len(answer.arrivals) > 1, "it came as a stream"
            await check_nothing_is_left(server)

    asyncio.run(scenario())


def test_an_answer_has_its_form(llm):
    async def scenario():
        form = pb.StructuredOutputs(choice=pb.Choice(texts=["yes", "no"]))
        async with serving(llm) as (server, _), client_of(server) as client:
            for prompt in ([5, 6, 7], "Once upon a time"):
                answer = await client.generate(prompt, structured_outputs=form, seed=1).read_all()
                assert answer.text in ("yes", "no")
            with pytest.raises(RequestFailed, match=r"sampling\.structured_outputs\.regex"):
                await client.generate("a", structured_outputs=pb.StructuredOutputs(regex="(")).read_all()
            await check_nothing_is_left(server)

    asyncio.run(scenario())


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text_and_keeps_the_tokens(llm, include):
    """As in vLLM, `token_ids` end with the token that completes the stop string. Python and gRPC agree."""
    prompt = next(prompt for prompt in PROMPTS if prompt["text"])
    words = prompt["greedy_text"].split(" ")
    stop = " ".join(words[3:5])[:-1]  # ends within a word

    async def ask():
        async with serving(llm) as (server, _), client_of(server) as client:
            settings = greedy(prompt) | {"stop": stop, "include_stop_string": include}
            return await client.generate(prompt["prompt_ids"], **settings).read_all()

    answer = asyncio.run(ask())
    params = SamplingParams(**greedy(prompt), stop=stop, include_stop_str_in_output=include)
    [output] = llm.generate([prompt["prompt_ids"]], params, use_tqdm=False)
    [sequence] = output.outputs
    before = prompt["greedy_text"].partition(stop)[0]
    assert answer.text == sequence.text == (before + stop if include else before)
    assert answer.token_ids[0] == list(sequence.token_ids)
    tokens = len(sequence.token_ids)
    assert list(sequence.token_ids) == prompt["greedy_ids"][:tokens]
    assert stop in llm.tokenizer.decode(prompt["prompt_ids"] + prompt["greedy_ids"][:tokens])
    assert stop not in llm.tokenizer.decode(prompt["prompt_ids"] + prompt["greedy_ids"][: tokens - 1])


def test_logprobs_arrive_with_their_text(llm):
    async def scenario():
        async with serving(llm) as (server, _), client_of(server) as client:
            prompt = max(PROMPTS, key=lambda prompt: prompt["prompt_len"])
            call = client.generate(prompt["prompt_ids"], **greedy(prompt), logprobs=5, prompt_logprobs=0)
            messages = [message async for message in call]
            told = messages[0].started.prompt_logprobs
            assert [entry.candidates[0].logprob for entry in told[1:]] == pytest.approx(
                prompt["prompt_logprobs"], abs=1e-3
            )
            steps = [step for message in messages for step in message.delta.logprobs]
            for step, token, top in zip(steps, prompt["greedy_ids"], prompt["top_ids"], strict=True):
                assert (step.candidates[0].token_id, step.candidates[0].rank) == (token, 1)
                assert [candidate.token_id for candidate in step.candidates] == top
                assert all(
                    candidate.text == llm.tokenizer.token_text(candidate.token_id)
                    for candidate in step.candidates
                )

    asyncio.run(scenario())


def test_the_reported_seed_draws_the_same_answer(llm):
    async def scenario():
        async with serving(llm) as (server, _), client_of(server) as client:
            settings = {"max_tokens": 40, "temperature": 1.0}
            asked = [client.generate("Once", **settings).read_all() for _ in range(8)]
            drawn = await asyncio.gather(*asked)
            assert (
                len({answer.started.seed for answer in drawn}) == len({answer.text for answer in drawn}) == 8
            )
            assert min(answer.started.seed for answer in drawn) < 0, (
                "seeds are 64 bits wide: some are negative"
            )
            seeds = [answer.started.seed for answer in drawn]
            asked = [client.generate("Once", **settings, seed=seed).read_all() for seed in seeds]
            for answer, again in zip(drawn, await asyncio.gather(*asked), strict=True):
                assert (again.token_ids, again.started.seed) == (answer.token_ids, answer.started.seed)

    asyncio.run(scenario())


def test_any_concurrent_requests(llm):
    """Whatever is asked at once, of the real engine: it is served or refused by name, and leaves nothing
    behind.
    """
    outcomes = set()
    plain = pb.GenerateRequest(text="Once", sampling=pb.SamplingParams(max_tokens=4))

    async def outcome(generate, request) -> grpc.StatusCode:
        try:
            await read(generate.Generate(request, timeout=30.0 if request is plain else 1.0))
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    @settings(max_examples=4)
    @given(st.lists(requests, min_size=11, max_size=11))
    def check(drawn):
        async def scenario():
            async with serving(llm) as (server, _), stubs_of(server) as (generate, _, _):
                outcomes.update(
                    await asyncio.gather(*(outcome(generate, request) for request in (*drawn, plain)))
                )
                await check_nothing_is_left(server)

        asyncio.run(scenario())

    check()
    assert (
        {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= outcomes <= {grpc.StatusCode.OK, *REFUSALS}
    )


@contextlib.asynccontextmanager
async def http_of(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an HTTP server of the same model."""
    app = HttpApp(Endpoints(server.served), Operations(server.served), BearerTokens())
    opened = HttpServer(app, server.served.config, 0)
    await opened.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{opened.port}", timeout=60) as client:
            yield client
    finally:
        await opened.stop()


async def over_grpc(client: Client, ids: list[int], settings: dict) -> list:
    answer = await client.generate(ids, **settings).read_all()
    return [[text, tokens] for text, tokens in zip(answer.texts, answer.token_ids, strict=True)]


async def over_http(web: httpx.AsyncClient, ids: list[int], settings: dict) -> list:
    answer = await web.post("/v1/completions", json={"prompt": ids, "return_token_ids": True, **settings})
    assert answer.status_code == 200, answer.text
    return [[choice["text"], choice["token_ids"]] for choice in answer.json()["choices"]]


async def streamed_over_http(web: httpx.AsyncClient, ids: list[int], settings: dict) -> list:
    body = {"prompt": ids, "return_token_ids": True, "stream": True, **settings}
    found: list = [["", []] for _ in range(settings.get("n", 1))]
    async with web.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                found[choice["index"]][0] += choice["text"]
                found[choice["index"]][1] += choice.get("token_ids", [])
    return found


def test_http_and_grpc_give_the_same_answers(llm):
    """Law: plain = streamed = gRPC for the same seed, also beside other requests, pre-emption and aborts."""

    async def scenario():
        rng = random.Random(7)
        asked = []
        for _ in range(16):
            ids = [rng.randrange(3, 512) for _ in range(rng.randint(1, 60))]
            settings = draw(rng) | {"seed": rng.randrange(2**40)}
            settings.pop("priority", None)
            asked.append((ids, settings))
        async with (
            serving(llm) as (server, _),
            client_of(server) as client,
            http_of(server) as web,
        ):
            ways = [
                work
                for ids, settings in asked
                for work in (
                    over_grpc(client, ids, settings),
                    over_http(web, ids, settings),
                    streamed_over_http(web, ids, settings),
                )
            ]
            leaving = [asyncio.create_task(over_http(web, [5, 6], {"max_tokens": 200})) for _ in range(6)]
            running = asyncio.gather(*ways)
            await asyncio.sleep(0.05)
            for task in leaving:
                task.cancel()
            found = await running
            await asyncio.gather(*leaving, return_exceptions=True)
            for i, (ids, settings) in enumerate(asked):
                grpc_answer, plain, streamed = found[3 * i : 3 * i + 3]
                assert grpc_answer == plain == streamed, settings
                if i % 4 == 0:
                    assert await over_http(web, ids, settings) == plain, "alone"
            await check_nothing_is_left(server)

    asyncio.run(scenario())


def draw(rng: random.Random) -> dict:
    """The settings of one request, of any shape the engine takes."""
    settings = {"max_tokens": rng.randint(1, 24), "temperature": rng.choice([0.0, 0.7, 1.3])}
    optional = {
        "seed": rng.randrange(2**40),
        "n": rng.randint(2, 3),
        "top_k": rng.randint(1, 50),
        "top_p": rng.uniform(0.3, 1.0),
        "min_p": rng.uniform(0.0, 0.3),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "logit_bias": {rng.randrange(512): 5.0},
        "logprobs": rng.randint(0, 20),
        "prompt_logprobs": rng.randint(0, 3),
        "stop": [" the", "."],
        "stop_token_ids": [rng.randrange(512)],
        "min_tokens": 1,
        "ignore_eos": True,
        "priority": rng.randint(-1, 1),
        "cache_salt": rng.choice(["a", "b"]),
    }
    return settings | {name: value for name, value in optional.items() if rng.random() < 0.15}


async def one_request(rng: random.Random, server: Server, shared: Client) -> str:
    """Asks for something, perhaps leaves early, and returns how it ended."""
    fate = rng.choices(
        ["golden", "complete", "cancel", "disconnect", "deadline", "refused"], [1, 5, 2, 1, 1, 1]
    )[0]
    if fate == "golden":
        prompt = rng.choice(PROMPTS)
        check_golden(await shared.generate(prompt["prompt_ids"], **greedy(prompt)).read_all(), prompt)
        return fate
    ids = [rng.randrange(3, 512) for _ in range(rng.randint(1, 100))]
    if rng.random() < 0.3:
        ids = PROMPTS[1]["prompt_ids"] * 8 + ids[:20]  # a shared prefix
    settings = draw(rng)
    if fate == "refused":
        with pytest.raises(RequestFailed) as failed:
            await shared.generate(ids, **(settings | {"top_p": 2.0})).read_all()
        assert failed.value.code == grpc.StatusCode.INVALID_ARGUMENT
        return fate
    if fate == "deadline":
        with contextlib.suppress(RequestFailed):
            await shared.generate(ids, **settings, timeout_s=rng.uniform(0.001, 0.1)).read_all()
        return fate
    async with client_of(server) if fate == "disconnect" else contextlib.nullcontext(shared) as client:
        answer = client.generate(ids, **settings)
        if fate == "complete":
            await answer.read_all()
            assert sorted(answer.finished) == list(range(settings.get("n", 1)))
            return fate
        left = rng.randint(0, 8)
        async for _ in answer:
            left -= 1
            if left <= 0:
                break
    return fate


@pytest.mark.slow
def test_soak(llm):
    """500 requests with random cancels, disconnects and deadlines: nothing leaks, and no shape is new to the
    compiler.
    """

    async def scenario():
        async with serving(llm, allow_priority=True) as (server, _), client_of(server) as client:
            room = asyncio.Semaphore(24)

            async def one(seed: int) -> str:
                async with room:
                    return await one_request(random.Random(seed), server, client)

            fates = await asyncio.gather(*(one(seed) for seed in range(500)))
            assert len(set(fates)) == 6
            await check_nothing_is_left(server)
            check_golden(
                await client.generate(PROMPTS[1]["prompt_ids"], **greedy(PROMPTS[1])).read_all(), PROMPTS[1]
            )

    asyncio.run(scenario())

"""Answers of the services without faults, over a real connection to an engine without a model."""

import asyncio

import grpc
import pytest
from fake_llm import PAGES, TEMPLATE, FakeLLM
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from harness import client_of, failure, read, serving, stubs_of, token_request

import jaxflow
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc import generate_pb2 as pb
from serving.grpc.server import Server

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def test_the_answer_to_a_text_streams():
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            ids = llm.tokenizer.encode("Once upon a time there was")
            answer = await client.generate(
                "Once upon a time there was", max_tokens=len(ids), request_id="mine"
            ).read_all()
            assert answer.token_ids == [ids]  # the fake repeats its prompt
            assert answer.text == llm.tokenizer.decode(ids + ids).removeprefix(llm.tokenizer.decode(ids))
            assert answer.started.prompt_tokens == len(ids)
            finished = answer.finished[0]
            assert (finished.reason, finished.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, len(ids))
            assert finished.timings.total_s >= finished.timings.time_to_first_token_s > 0
            assert answer.total_s >= answer.time_to_first_token_s > 0
            assert sum(tokens for _, _, tokens in answer.arrivals) == len(ids)

    asyncio.run(scenario())


@pytest.mark.parametrize(("given", "meant"), [("girl", ("girl",)), (["girl", "boy"], ("girl", "boy"))])
def test_a_single_stop_string_is_not_split_into_characters(given, meant):
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            await client.generate("Once upon a time", max_tokens=2, stop=given).read_all()
            assert llm.driver.submitted[0].sampling.stop == meant

    asyncio.run(scenario())


def test_the_stream_is_started_then_deltas_then_a_finished_for_each_sequence():
    async def scenario():
        async with serving() as (server, _), stubs_of(server) as (generate, _, _):
            messages = await read(
                generate.Generate(token_request(n=3, max_tokens=4, logprobs=2, prompt_logprobs=0))
            )
            kinds = [message.WhichOneof("event") for message in messages]
            assert kinds[0] == "started" and kinds.count("started") == 1 and kinds.count("finished") == 3
            assert len({message.request_id for message in messages}) == 1 and messages[0].request_id
            for index in range(3):
                mine = [
                    message.delta
                    for message in messages
                    if message.HasField("delta") and message.delta.index == index
                ]
                assert [token for delta in mine for token in delta.token_ids] == [5, 6, 7, 5]
                assert all(len(delta.logprobs) == len(delta.token_ids) for delta in mine)
                assert (
                    len(mine[0].logprobs[0].candidates) == 3
                    and mine[0].logprobs[0].candidates[0].token_id == 5
                )
            assert [len(entry.candidates) for entry in messages[0].started.prompt_logprobs] == [0, 1, 1]

    asyncio.run(scenario())


def test_every_request_field_reaches_the_engine():
    async def scenario():
        llm = FakeLLM(generation_config={"temperature": 0.25, "top_k": 9})
        async with serving(llm, allow_priority=True) as (server, _), client_of(server) as client:
            asked = client.generate(
                [5, 6],
                priority=-3,
                cache_salt="salt",
                session="chat",
                top_k=2,
                stop=["xyz"],
                stop_token_ids=[6],
                model="fake",
            )
            answer = await asked.read_all()
            request = llm.driver.submitted[0]
            assert (request.priority, request.cache_salt, list(request.prompt_token_ids)) == (
                -3,
                "salt",
                [5, 6],
            )
            assert request.session == ":chat"  # the caller has no name
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_k, sampling.stop, sampling.max_tokens) == (
                0.25,
                2,
                ("xyz",),
                None,
            )
            assert answer.finished[0].WhichOneof("stopped_by") == "stop_token_id"
            assert answer.token_ids == [[5, 6]]

    asyncio.run(scenario())


def test_two_callers_may_use_the_same_request_id():
    async def scenario():
        async with serving() as (server, llm), client_of(server) as client:
            llm.driver.gate.clear()
            answers = [
                client.generate([5, 6, 7 + i], request_id="same", max_tokens=6).read_all() for i in range(5)
            ]
            tasks = [asyncio.create_task(answer) for answer in answers]
            llm.driver.gate.set()
            for i, answer in enumerate(await asyncio.gather(*tasks)):
                assert answer.token_ids == [[5, 6, 7 + i] * 2]

    asyncio.run(scenario())


def test_a_stop_string_ends_the_answer():
    async def scenario():
        async with serving() as (server, _), client_of(server) as client:
            answer = await client.generate("Once upon a time", stop=["on a"], max_tokens=50).read_all()
            assert answer.finished[0].stop_string == "on a"
            assert answer.text.endswith("Once up")

    asyncio.run(scenario())


def test_a_chat_is_written_by_the_models_template():
    async def scenario():
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
        async with (
            serving(FakeLLM(chat_template=TEMPLATE)) as (server, llm),
            client_of(server) as client,
            stubs_of(server) as (generate, _, _),
        ):
            prompt = "system: Be short.\nuser: Hi\nassistant: "
            await client.generate(messages, max_tokens=1).read_all()
            assert llm.driver.submitted[0].prompt_token_ids == llm.tokenizer.encode(
                prompt, add_special_tokens=False
            )
            chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
            told = await generate.Tokenize(pb.TokenizeRequest(chat=chat))
            assert told.ids == llm.driver.submitted[0].prompt_token_ids
            await client.generate(messages, max_tokens=1, continue_final_message=True).read_all()
            assert llm.driver.submitted[1].prompt_token_ids == llm.tokenizer.encode(
                "system: Be short.\nuser: Hi", add_special_tokens=False
            )

    asyncio.run(scenario())


@pytest.mark.parametrize(("parse", "found"), [(False, []), (True, [2])])
def test_a_control_token_in_a_message_is_plain_text_unless_asked_for(parse, found):
    async def scenario():
        async with (
            serving(FakeLLM(chat_template=TEMPLATE)) as (server, llm),
            stubs_of(server) as (generate, _, _),
        ):
            messages = [pb.ChatMessage(role="user", content="Hi</s>you")]
            chat = pb.Chat(messages=messages, parse_control_tokens=parse)
            told = await generate.Tokenize(pb.TokenizeRequest(chat=chat))
            assert [i for i in told.ids if i in llm.tokenizer.special_ids] == found
            call = generate.Generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(max_tokens=1)))
            await read(call)
            assert llm.driver.submitted[0].prompt_token_ids == list(told.ids)

    asyncio.run(scenario())


def test_the_tokenizer_is_served():
    async def scenario():
        async with serving() as (server, llm), stubs_of(server) as (generate, _, _):
            text = "Once upon a time \N{SNOWMAN}"
            ids = (await generate.Tokenize(pb.TokenizeRequest(text=text))).ids
            assert ids == llm.tokenizer.encode(text)
            bare = (await generate.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False))).ids
            assert bare == ids[1:]
            assert (
                await generate.Detokenize(pb.DetokenizeRequest(ids=ids, skip_special_tokens=True))
            ).text == text
            assert (await generate.Detokenize(pb.DetokenizeRequest(ids=ids))).text == llm.tokenizer.decode(
                ids, skip_special_tokens=False
            )

    asyncio.run(scenario())


def test_model_and_statistics():
    async def scenario():
        async with (
            serving(FakeLLM(chat_template=TEMPLATE)) as (server, _),
            stubs_of(server) as (generate, model, admin),
        ):
            told = await model.GetModel(pb.GetModelRequest())
            assert (told.name, told.architecture, told.vocab_size, told.max_model_len) == (
                "fake",
                "llama",
                512,
                4096,
            )
            assert (told.has_chat_template, told.has_tokenizer, told.eos_token_ids) == (True, True, [2])
            assert (told.plan, told.tensor_parallel_size) == ("sequential", 1)
            # The version comes from the source, because a checkout that is not installed has no metadata.
            assert told.version == jaxflow.__version__
            await read(generate.Generate(token_request(max_tokens=3)))
            stats = await admin.GetStats(pb.GetStatsRequest())
            assert (stats.kv_pages, stats.kv_pages_free, stats.running_requests) == (PAGES, PAGES, 0)
            assert stats.steps == stats.steps_by_plan["sequential"] == 3

    asyncio.run(scenario())


def test_the_operations_are_on_their_own_listener():
    async def scenario():
        async with serving() as (server, _):
            for port, calls in (
                (server.port, ["/jaxflow.v1.AdminService/GetStats", "/jaxflow.v1.AdminService/Drain"]),
                (
                    server.admin_port,
                    ["/jaxflow.v1.GenerateService/Generate", "/jaxflow.v1.ModelService/GetModel"],
                ),
            ):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    for call in calls:
                        error = await failure(channel.unary_unary(call)(b""))
                        assert error.code() == grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(scenario())


def test_health_says_serving_only_once_warm_and_no_longer_once_draining():
    async def scenario():
        server, llm = Server(ServedModel(ServerConfig(port=0, admin_port=0))), FakeLLM()
        await server.start()
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            stubs_of(server) as (generate, model, _),
        ):
            health = health_pb2_grpc.HealthStub(channel)
            names = ("", "jaxflow.v1.GenerateService", "jaxflow.v1.ModelService")

            async def states():
                return {
                    (await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names
                }

            assert await states() == {NOT_SERVING}
            for call in (generate.Generate(token_request()), model.GetModel(pb.GetModelRequest())):
                assert (await failure(call)).code() == grpc.StatusCode.UNAVAILABLE
            await server.served.serve(llm)
            assert await states() == {SERVING}
            await server.served.drain(1.0)
            assert await states() == {NOT_SERVING}
            assert (
                await failure(health.Check(health_pb2.HealthCheckRequest(service="else")))
            ).code() == grpc.StatusCode.NOT_FOUND
        await server.stop()
        llm.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("listener", ["main", "admin"])
def test_reflection_describes_every_service(listener):
    async def scenario():
        async with serving() as (server, _):
            port = server.port if listener == "main" else server.admin_port

            def look() -> tuple[
                set[str], set[str]
            ]:  # grpc's own client of reflection, which is not of asyncio
                with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                    database = ProtoReflectionDescriptorDatabase(channel)
                    names = set(database.get_services())
                    pool = DescriptorPool(database)
                    methods = {
                        method.full_name
                        for name in names
                        if name.startswith("jaxflow")
                        for method in pool.FindServiceByName(name).methods
                    }
                    return names, methods

            names, methods = await asyncio.to_thread(look)
            if listener == "main":
                assert {
                    "jaxflow.v1.GenerateService",
                    "jaxflow.v1.ModelService",
                    "grpc.health.v1.Health",
                } < names
                assert "jaxflow.v1.GenerateService.Generate" in methods
            else:
                assert methods == {"jaxflow.v1.AdminService.GetStats", "jaxflow.v1.AdminService.Drain"}

    asyncio.run(scenario())

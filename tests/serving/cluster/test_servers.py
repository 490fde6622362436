"""Both servers in front of a router over fake replicas: streams, errors, health, metrics and status."""

import asyncio
import json

import grpc
import httpx
import pytest
from harness import failure, read, stubs_of, token_request
from http_harness import COMPLETIONS, RunningServer
from replicas import cluster, until

from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc.server import Server
from serving.operations import Operations

BODY = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "seed": 1, "return_token_ids": True}
STEP_S = 0.01


def test_http_streams_go_on_and_operation_tells_the_truth():
    with cluster(step_s=STEP_S) as (model, links):
        opened = RunningServer(model)
        opened.operations = Operations(opened.served, fleet=model.driver)
        opened.open()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{opened.server.port}") as client:

                def metrics() -> dict[str, float]:
                    lines = client.get("/metrics").text.splitlines()
                    return {
                        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
                        for line in lines
                        if line[0] != "#"
                    }

                whole = client.post(COMPLETIONS, json=BODY).json()
                assert whole["usage"]["completion_tokens"] == 12
                lost, ids = None, []
                with client.stream(
                    "POST", COMPLETIONS, json=BODY | {"max_tokens": 60, "stream": True}
                ) as stream:
                    for line in stream.iter_lines():
                        if not line.startswith("data: {"):
                            continue
                        ids += json.loads(line[6:])["choices"][0].get("token_ids") or []
                        if lost is None and len(ids) > 3:
                            lost = next(
                                one
                                for one in links.started
                                if one.llm.driver.steps and one.llm.driver._running
                            )
                            lost.die()
                assert ids[:12] == whole["choices"][0]["token_ids"] and len(ids) == 60
                until(lambda: metrics()['jaxflow_replicas{state="serving"}'] == 2)
                found = metrics()
                assert found["jaxflow_requests_moved_total"] == 1
                assert found[f'jaxflow_replica_losses_total{{replica="{lost.index}"}}'] == 1
                assert found['jaxflow_requests_total{outcome="length"}'] == 2
                assert found["jaxflow_generation_tokens_total"] >= 60
                assert client.get("/health/ready").status_code == 200

                links.prepare = lambda link: link.start_gate.clear()
                body = BODY | {"max_tokens": 500, "n": 2}
                with client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as stream:
                    lines = stream.iter_lines()
                    next(lines)
                    for index in range(2):
                        links.running(index).die()
                    rest = "".join(lines)
                assert '"code":"replica_lost"' in rest and "[DONE]" not in rest
                until(lambda: client.get("/health/ready").status_code == 503)
                assert client.get("/health/live").status_code == 200
                status = opened.operations.status.now()
                assert status["state"] == "no replica"
                assert [one["state"] for one in status["replicas"]] == ["starting"] * 2
                assert metrics()["jaxflow_ready"] == 0
                links.prepare = lambda link: None
                for link in links.started:
                    link.start_gate.set()
                until(lambda: client.get("/health/ready").status_code == 200)
        finally:
            opened.close()


def test_grpc_streams_cancels_and_errors():
    async def ask(model, links) -> None:
        server = Server(ServedModel(ServerConfig(port=0, admin_port=0)))
        await server.start()
        await server.served.serve(model)
        async with stubs_of(server) as (generate, _, _):
            messages = await read(generate.Generate(token_request(max_tokens=9, ignore_eos=True, seed=1)))
            assert messages[-1].finished.usage.completion_tokens == 9
            error = await failure(generate.Generate(token_request(top_p=7)))
            assert error.code().name == "INVALID_ARGUMENT"
            call = generate.Generate(token_request(max_tokens=2000, ignore_eos=True))
            await call.read()
            call.cancel()
            await asyncio.to_thread(until, lambda: any(link.llm.driver.aborted for link in links.started))
            call = generate.Generate(token_request(max_tokens=500, ignore_eos=True, n=2))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                async for _ in call:
                    for index in range(2):
                        links.running(index).die()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.stop()

    with cluster(step_s=STEP_S) as (model, links):
        asyncio.run(ask(model, links))

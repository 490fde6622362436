"""Batches on the engine of a server, over restarts."""

import asyncio
import json

import openai
import pytest
from fake_llm import FakeLLM
from http_harness import RunningServer, wait_for

from jaxflow.config import ConfigError
from jaxflow.request import BATCH_PRIORITY
from serving.batch.batches import Batches
from serving.batch.store import Store
from serving.http.batch_mount import BatchConfig, batch_routes, open_batches


def opened(folder, **settings) -> tuple[RunningServer, Batches]:
    made = RunningServer(FakeLLM(), **settings)
    made._thread.start()

    async def batches() -> Batches:
        opened = open_batches(BatchConfig(folder), made.endpoints, made.operations, "fake")
        assert opened is not None
        return opened

    found = made.call(batches())
    made.app["more_routes"] = batch_routes(found)
    made.call(made._start())
    return made, found


async def started(batches: Batches) -> None:
    batches.start()


def client(made: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{made.url}/v1", api_key=key, max_retries=0)


def upload(api: openai.OpenAI, count: int) -> str:
    body = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
    lines = [
        {"custom_id": f"r-{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(count)
    ]
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    return api.files.create(file=("in.jsonl", data), purpose="batch").id


def create(api: openai.OpenAI, file_id: str) -> str:
    return api.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h").id


@pytest.fixture
def tokens(tmp_path):
    made, batches = opened(tmp_path / "store", auth_tokens=("one", "two"), max_requests_per_token=8)
    made.call(started(batches))
    yield made
    made.call(batches.close())
    made.close()


def test_a_batch_runs_on_the_engine_below_online_requests(tokens):
    api = client(tokens, "one")
    batch_id = create(api, upload(api, 60))
    wait_for(lambda: api.batches.retrieve(batch_id).status == "completed")
    batch = api.batches.retrieve(batch_id)
    lines = [json.loads(each) for each in api.files.content(batch.output_file_id or "").text.splitlines()]
    assert [each["custom_id"] for each in lines] == [f"r-{i}" for i in range(60)]
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 3 for each in lines)
    submitted = tokens.llm.driver.submitted
    assert {request.priority for request in submitted} == {BATCH_PRIORITY}
    assert len({request.cache_salt for request in submitted}) == 1 and submitted[0].cache_salt
    with pytest.raises(openai.NotFoundError):
        client(tokens, "two").batches.retrieve(batch_id)
    with pytest.raises(openai.AuthenticationError):
        client(tokens, "three").files.list()


def test_a_batch_that_comes_before_the_model_waits_and_a_drain_stops_it(tmp_path):
    made, batches = opened(tmp_path / "store", load=False, drain_timeout_s=5.0)
    try:
        made.llm.driver.step_s = 0.01
        api = client(made)
        batch_id = create(api, upload(api, 1500))
        assert api.batches.retrieve(batch_id).status == "validating"
        made.call(made.served.serve(made.llm))
        made.call(started(batches))
        wait_for(lambda: api.batches.retrieve(batch_id).request_counts.completed > 0)
        made.call(batches.close())
        made.call(made.served.drain())
        assert made.llm.driver.stats().running_requests == 0
    finally:
        made.close()

    async def left() -> int:
        store = Store(tmp_path / "store")
        store.close()
        return store.batches[batch_id].request_counts.completed

    assert asyncio.run(left()) < 1500
    made, batches = opened(tmp_path / "store")
    api = client(made)
    made.call(started(batches))
    try:
        wait_for(lambda: api.batches.retrieve(batch_id).status == "completed")
        assert api.batches.retrieve(batch_id).request_counts.completed == 1500
        assert len(made.llm.driver.submitted) < 1500
        with pytest.raises(ConfigError):
            open_batches(BatchConfig(tmp_path / "store"), made.endpoints, made.operations, "fake")
    finally:
        made.call(batches.close())
        made.close()

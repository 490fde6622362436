"""Faults 34 and 35 over HTTP: a full disk, and a server that is killed within a batch.

One process cannot kill itself. A killed server's folder is a copy of the folder of a running server, because
a kill keeps what was written. `tests/serving/batch` kills real processes, and cuts a journal at every byte.
"""

import json
import os
import random
import shutil

import openai
import pytest
from fake_llm import FakeLLM
from http_harness import RunningServer, running_batches, wait_for

from serving.batch import batches as batches_module
from serving.batch.journal import SUFFIX

URL = "/v1/completions"
LINES = 40


def served(folder, *, step_s: float = 0.001):
    """A server of a fake model that runs the batches of a folder."""
    return running_batches(FakeLLM(step_s=step_s), folder)


def client(opened: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{opened.url}/v1", api_key="none", max_retries=0)


def body_of(i: int) -> dict:
    return {"prompt": [5 + i, 6, 7], "max_tokens": 3 + i % 5, "ignore_eos": True}


def upload(api: openai.OpenAI) -> str:
    lines = [{"custom_id": f"r-{i}", "method": "POST", "url": URL, "body": body_of(i)} for i in range(LINES)]
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    return api.files.create(file=("in.jsonl", data), purpose="batch").id


def create(api: openai.OpenAI) -> str:
    return api.batches.create(input_file_id=upload(api), endpoint=URL, completion_window="24h").id


def check_whole(opened: RunningServer, batch_id: str) -> None:
    """Every line has one answer, in the order of the input, and the server serves."""
    api = client(opened)
    wait_for(lambda: api.batches.retrieve(batch_id).status == "completed")
    batch = api.batches.retrieve(batch_id)
    lines = [json.loads(line) for line in api.files.content(batch.output_file_id or "").text.splitlines()]
    assert [line["custom_id"] for line in lines] == [f"r-{i}" for i in range(LINES)]
    tokens = [line["response"]["body"]["usage"]["completion_tokens"] for line in lines]
    assert tokens == [3 + i % 5 for i in range(LINES)]
    api.close()
    opened.check_serves()
    opened.check_idle()


def test_34_an_upload_to_a_full_disk_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with served(tmp_path / "store") as opened:
        api = client(opened)
        before = sorted((tmp_path / "store").rglob("*"))
        with monkeypatch.context() as patch:
            patch.setattr("serving.batch.routes.write_all", full)
            with pytest.raises(openai.APIStatusError) as found:
                upload(api)
        assert found.value.status_code == 507
        assert sorted((tmp_path / "store").rglob("*")) == before
        check_whole(opened, create(api))


def test_34_a_batch_waits_for_room_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(batches_module, "RETRY_DISK_S", 0.01)
    real, left = os.write, [0]

    def limited(descriptor, data):
        if left[0] > 0 and b"r-" in bytes(data):
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with served(tmp_path / "store") as opened:
        api = client(opened)
        monkeypatch.setattr("serving.batch.journal.os.write", limited)
        file_id = upload(api)
        left[0] = 3
        batch = api.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h")
        wait_for(lambda: left[0] == 0)
        assert opened.get("/health/live").status_code == 200
        check_whole(opened, batch.id)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a server that was killed within a batch, and the batch."""
    folder = tmp_path_factory.mktemp("killed")
    with served(folder / "store", step_s=0.01) as opened:
        api = client(opened)
        batch_id = create(api)

        def completed() -> int:
            counts = api.batches.retrieve(batch_id).request_counts
            return 0 if counts is None else counts.completed

        wait_for(lambda: completed() >= LINES // 4)
        opened.llm.driver.gate.clear()
        shutil.copytree(folder / "store", folder / "image")
        opened.llm.driver.gate.set()
        wait_for(lambda: api.batches.retrieve(batch_id).status == "completed")
    return folder / "image", batch_id


@pytest.mark.parametrize("seed", range(6))
def test_35_a_killed_server_continues_and_repeats_no_finished_line(killed, tmp_path, seed):
    image, batch_id = killed
    store = tmp_path / "store"
    shutil.copytree(image, store)
    (segment,) = store.rglob(f"*{SUFFIX}")
    data = segment.read_bytes()
    assert 0 < data.count(b'"r-') < LINES
    cut = len(data) if seed == 0 else random.Random(seed).randrange(len(data))
    segment.write_bytes(data[:cut])
    with served(store) as opened:
        check_whole(opened, batch_id)
        asked = [request.prompt_token_ids[0] - 5 for request in opened.llm.driver.submitted]
    finished = data[:cut].count(b'"r-')  # the last one may be incomplete
    lines = [i for i in asked if i >= 0]
    # `check_serves` asks with the prompt of line 0.
    assert LINES - finished <= len(lines) - 1 <= LINES - finished + 1

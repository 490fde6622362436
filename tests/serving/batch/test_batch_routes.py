"""Files and batches through the `openai` package, over real HTTP, with a fake engine."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from batch_fakes import URL, FakeEndpoints, request, text_of, write_input
from batch_server import BatchServer

from jaxflow.config import ConfigError
from serving.batch import batches as batches_module
from serving.batch import runner
from serving.batch.input_file import FileLimits
from serving.batch.store import Store, StoreLimits

LIMITS = FileLimits(file_bytes=200_000, lines=1000, line_bytes=10_000)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(runner, "COMMIT_INTERVAL_S", 0.0)
    monkeypatch.setattr(batches_module, "RETRY_DISK_S", 0.01)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with BatchServer(tmp_path_factory.mktemp("store"), FakeEndpoints(0.001), limits=LIMITS) as server:
        yield server


def client(server: BatchServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


def upload(api: openai.OpenAI, folder: Path, count: int, **body) -> str:
    path = write_input(folder / "in.jsonl", count, **body)
    with open(path, "rb") as file:
        return api.files.create(file=file, purpose="batch").id


def create(api: openai.OpenAI, file_id: str, **settings) -> Any:
    return api.batches.create(
        input_file_id=file_id, endpoint=settings.pop("endpoint", URL), completion_window="24h", **settings
    )


def counts(api: openai.OpenAI, batch_id: str) -> Any:
    return api.batches.retrieve(batch_id).request_counts


def ended(api: openai.OpenAI, batch_id: str, *statuses: str) -> Any:
    statuses = statuses or ("completed", "failed", "expired", "cancelled")
    deadline = time.monotonic() + 30  # only ends a broken test
    while (batch := api.batches.retrieve(batch_id)).status not in statuses:
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def answers(api: openai.OpenAI, file_id: str | None) -> dict[str, dict]:
    if file_id is None:
        return {}
    lines = [json.loads(line) for line in api.files.content(file_id).text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def check_answers(found: dict[str, dict], numbers) -> None:
    assert list(found) == [f"r-{i}" for i in numbers]
    for i in numbers:
        assert found[f"r-{i}"]["response"]["body"]["choices"][0]["text"] == text_of(f"p{i}")


def test_a_batch_from_upload_to_download(server, tmp_path):
    api = client(server)
    file_id = upload(api, tmp_path, 50)
    file = api.files.retrieve(file_id)
    assert (file.filename, file.purpose, file.bytes) == (
        "in.jsonl",
        "batch",
        (tmp_path / "in.jsonl").stat().st_size,
    )
    assert api.files.content(file_id).content == (tmp_path / "in.jsonl").read_bytes()
    batch = create(api, file_id, metadata={"kind": "test"})
    assert batch.status in ("validating", "in_progress") and batch.expires_at == batch.created_at + 86400
    batch = ended(api, batch.id)
    assert batch.status == "completed" and batch.metadata == {"kind": "test"} and batch.error_file_id is None
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        50,
        50,
        0,
    )
    stages = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert None not in stages and stages == sorted(stages)  # type: ignore[type-var]
    check_answers(answers(api, batch.output_file_id), range(50))
    output = api.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    while (server._folder / "batches" / batch.id / "journal").exists():
        time.sleep(0.005)


def test_failed_lines_go_to_the_file_of_errors(server, tmp_path):
    api = client(server)
    server.endpoints.faults = {"p1": [400], "p3": [404]}
    batch = ended(api, create(api, upload(api, tmp_path, 5)).id)
    assert batch.status == "completed" and batch.request_counts.failed == 2
    check_answers(answers(api, batch.output_file_id), (0, 2, 4))
    errors = answers(api, batch.error_file_id)
    assert [line["response"]["status_code"] for line in errors.values()] == [400, 404]


def test_a_refused_input_fails_with_line_numbers(server, tmp_path):
    api = client(server)
    path = write_input(tmp_path / "in.jsonl", 3)
    path.write_text(path.read_text("utf-8") + "{\n" + json.dumps(request(1)) + "\n", "utf-8")
    with open(path, "rb") as file:
        file_id = api.files.create(file=file, purpose="batch").id
    asked = len(server.endpoints.asked)
    batch = ended(api, create(api, file_id).id)
    assert batch.status == "failed" and batch.failed_at is not None and batch.output_file_id is None
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (4, "invalid_json_line"),
        (5, "duplicate_custom_id"),
    ]
    assert len(server.endpoints.asked) == asked


def test_a_line_of_another_endpoint_fails_the_batch(server, tmp_path):
    api = client(server)
    batch = create(api, upload(api, tmp_path, 1), endpoint="/v1/chat/completions")
    assert ended(api, batch.id).errors.data[0].code == "invalid_url"


def test_cancellation_keeps_what_is_done(tmp_path):
    endpoints = FakeEndpoints(0.005)
    with BatchServer(tmp_path / "store", endpoints) as server:
        api = client(server)
        batch = create(api, upload(api, tmp_path, 500))
        while counts(api, batch.id).completed < 20:
            time.sleep(0.005)
        assert api.batches.cancel(batch.id).status in ("cancelling", "finalizing", "cancelled")
        batch = ended(api, batch.id)
        assert batch.status == "cancelled" and None not in (batch.cancelling_at, batch.cancelled_at)
        done, errors = answers(api, batch.output_file_id), answers(api, batch.error_file_id)
        assert 20 <= len(done) == batch.request_counts.completed < 500
        assert sorted([*done, *errors], key=lambda name: int(name[2:])) == [f"r-{i}" for i in range(500)]
        assert {line["error"]["code"] for line in errors.values()} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError):
            api.batches.cancel(batch.id)
        assert endpoints.running == 0


def test_an_expired_batch_keeps_what_is_done(tmp_path):
    with BatchServer(tmp_path / "store", FakeEndpoints(0.005)) as server:
        api = client(server)
        created = create(api, upload(api, tmp_path, 2000))
        while counts(api, created.id).completed < 20:
            time.sleep(0.005)
    path = tmp_path / "store" / "batches" / created.id / "batch.json"
    path.write_text(
        path.read_text("utf-8").replace(str(created.expires_at), str(int(time.time()) - 1)), "utf-8"
    )
    with BatchServer(tmp_path / "store", FakeEndpoints()) as server:
        api = client(server)
        batch = ended(api, created.id)
        assert batch.status == "expired" and batch.expired_at is not None
        done, errors = answers(api, batch.output_file_id), answers(api, batch.error_file_id)
        assert len(done) >= 20 and len(done) + len(errors) == 2000
        assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}


def test_a_restarted_server_continues_and_repeats_nothing(tmp_path):
    first = FakeEndpoints(0.003)
    with BatchServer(tmp_path / "store", first) as server:
        api = client(server)
        batches = [create(api, upload(api, tmp_path, 150)).id for _ in range(2)]
        while counts(api, batches[1]).completed < 20:
            time.sleep(0.005)
    second = FakeEndpoints()
    with BatchServer(tmp_path / "store", second) as server:
        api = client(server)
        for batch_id in batches:
            batch = ended(api, batch_id)
            assert batch.status == "completed" and batch.request_counts.completed == 150
            check_answers(answers(api, batch.output_file_id), range(150))
    # The last answers of the first server may have come between its last fsync and its end.
    assert 300 <= len(first.asked) + len(second.asked) <= 300 + 8 + 8


def test_a_crash_while_finalizing_writes_the_same_files(tmp_path, monkeypatch):
    written = []

    async def crash(self, batch, source, journal):
        written.append((batch.output_file_id, batch.error_file_id))
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(batches_module.Batches, "_write", crash)
        with BatchServer(tmp_path / "store", FakeEndpoints()) as server:
            api = client(server)
            created = create(api, upload(api, tmp_path, 20))
            ended(api, created.id, "finalizing")
            while not written:
                time.sleep(0.005)
    rest = FakeEndpoints()
    with BatchServer(tmp_path / "store", rest) as server:
        api = client(server)
        batch = ended(api, created.id)
        assert batch.status == "completed" and batch.output_file_id == written[0][0]
        check_answers(answers(api, batch.output_file_id), range(20))
    assert not rest.asked


def test_a_full_disk_is_waited_for(tmp_path, monkeypatch):
    real, left = os.write, [0]

    def limited(descriptor, data):
        if left[0] > 0 and b"r-" in bytes(data):
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with BatchServer(tmp_path / "store", FakeEndpoints()) as server:
        api = client(server)
        file_id = upload(api, tmp_path, 100)
        left[0] = 3
        monkeypatch.setattr(os, "write", limited)
        batch = ended(api, create(api, file_id).id)
        assert batch.status == "completed" and left[0] == 0
        check_answers(answers(api, batch.output_file_id), range(100))


def test_an_upload_to_a_full_disk_is_refused(server, tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    before = sorted(server._folder.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr("serving.batch.routes.write_all", full)
        with pytest.raises(openai.APIStatusError) as found:
            upload(client(server), tmp_path, 3)
    assert found.value.status_code == 507 and "No space" in str(found.value)
    assert sorted(server._folder.rglob("*")) == before


def test_owners_see_only_their_own(server, tmp_path):
    mine, theirs = client(server, "alice"), client(server, "bob")
    file_id = upload(mine, tmp_path, 2)
    batch_id = create(mine, file_id).id
    ended(mine, batch_id)
    assert [file.id for file in theirs.files.list()] == [] and list(theirs.batches.list()) == []
    for call in (
        lambda: theirs.files.retrieve(file_id),
        lambda: theirs.files.content(file_id),
        lambda: theirs.files.delete(file_id),
        lambda: create(theirs, file_id),
        lambda: theirs.batches.retrieve(batch_id),
        lambda: theirs.batches.cancel(batch_id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert {batch.id for batch in mine.batches.list()} == {batch_id}


def test_lists_have_pages(server, tmp_path):
    api = client(server, "pages")
    ids = [upload(api, tmp_path, 1) for _ in range(5)]
    assert [file.id for file in api.files.list(limit=2)] == ids[::-1]  # the client follows the pages
    assert [file.id for file in api.files.list(limit=2, order="asc")] == ids
    assert [file.id for file in api.files.list(purpose="batch_output")] == []
    batches = [create(api, file_id).id for file_id in ids[:3]]
    assert [batch.id for batch in api.batches.list(limit=2)] == batches[::-1]
    for batch_id in batches:
        ended(api, batch_id)
    assert api.files.delete(ids[4]).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.content(ids[4])


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input_file_id": "../../etc/passwd"}, "id"),
        ({"unknown": 1}, None),
        ({"metadata": {"k": 1}}, None),
    ],
)
def test_a_wrong_batch_is_refused(server, tmp_path, settings, param):
    api = client(server)
    body = {"input_file_id": upload(api, tmp_path, 1), "endpoint": URL, "completion_window": "24h"} | settings
    answer = httpx.post(f"{server.url}/batches", json=body, headers={"authorization": "Bearer one"})
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param
    if param is None:
        assert next(iter(settings)) in answer.json()["error"]["message"]


def form(*parts: tuple[str, str], end: str = "--b--\r\n") -> bytes:
    text = "".join(f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n{body}\r\n" for head, body in parts)
    return (text + end).encode()


PURPOSE, FILE = ('name="purpose"', "batch"), ('name="file"; filename="x"', "{}")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (form(PURPOSE, FILE), 200),
        (form(FILE, PURPOSE), 200),
        (form(PURPOSE), 400),
        (form(FILE), 400),
        (form(('name="purpose"', "fine-tune"), FILE), 400),
        (form(PURPOSE, FILE, FILE), 400),
        (form(PURPOSE, FILE, ('name="other"', "x")), 400),
        (form(PURPOSE, FILE, end=""), 400),
        (form(PURPOSE, ("filename=x", "y")), 400),
        (b"nonsense", 400),
        (b"--b\r\n" + b"x" * 20_000, 400),
        (form(('name="purpose"', "x" * 70_000), FILE), 413),
        (form(PURPOSE, ('name="file"; filename="x"', "x" * 200_001)), 413),
        (form(PURPOSE, ('name="file"; filename="x"', "x" * 500_000)), 413),
    ],
)
def test_uploads_are_checked(server, body, status):
    headers = {"authorization": "Bearer form", "content-type": "multipart/form-data; boundary=b"}
    before = {path for path in server._folder.rglob("*") if "files" not in path.parts}
    answer = httpx.post(f"{server.url}/files", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert status == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert {path for path in server._folder.rglob("*") if "files" not in path.parts} == before


def test_an_upload_that_breaks_off_leaves_nothing(server):
    place = urlsplit(server.url)
    head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(head.encode() + form(PURPOSE, FILE, end="")[:-10])
        deadline = time.monotonic() + 10
        while not list((server._folder / "uploads").iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    while list((server._folder / "uploads").iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_limits_of_the_store(tmp_path):
    with BatchServer(
        tmp_path / "store", FakeEndpoints(), store_limits=StoreLimits(files=2, batches=1)
    ) as server:
        api = client(server)
        ids = [upload(api, tmp_path, 1), upload(api, tmp_path, 1)]
        with pytest.raises(openai.RateLimitError, match="Delete files first"):
            upload(api, tmp_path, 1)
        api.files.delete(ids[0])
        batch = create(api, ids[1])
        with pytest.raises(openai.RateLimitError):
            create(api, ids[1])
        ended(api, batch.id)


def test_a_file_of_a_running_batch_is_kept(tmp_path):
    with BatchServer(tmp_path / "store", FakeEndpoints(0.01)) as server:
        api = client(server)
        file_id = upload(api, tmp_path, 200)
        batch = create(api, file_id)
        with pytest.raises(openai.ConflictError):
            api.files.delete(file_id)
        api.batches.cancel(batch.id)
        ended(api, batch.id)
        assert api.files.delete(file_id).deleted


def test_one_server_a_folder(tmp_path):
    store = Store(tmp_path / "store")
    with pytest.raises(ConfigError, match="no other server"):
        Store(tmp_path / "store")
    store.close()
    Store(tmp_path / "store").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        Store(tmp_path / "file")

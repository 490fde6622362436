"""`bench serve` over OpenAI's API: against this server, and against servers that break off in every way."""

import asyncio
import json
import time

import httpx
import numpy as np
import pytest
from http_harness import running_batches, running_server, wait_for
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.__main__ import main
from jaxflow.bench.report.requests import Record
from jaxflow.bench.transport.measure import body, chunks, load, whole_answers
from jaxflow.bench.transport.paced_engine import PacedLLM
from jaxflow.bench.workload.batch_load import batch_file
from jaxflow.bench.workload.http_connection import HttpClient
from jaxflow.bench.workload.lengths import Item
from jaxflow.bench.workload.openai_backend import OpenAiBackend, spread

TOKENS, PROMPT = 6, 40


@pytest.fixture
def bench(no_flags):
    return lambda *arguments: main(["bench", *arguments])


@pytest.fixture(scope="module")
def url():
    with running_server(PacedLLM(rows=64, step_s=0.001)) as opened:
        yield opened.url


def serve(bench, tmp_path, url: str, *more: str) -> tuple[int, dict]:
    path = tmp_path / "out.json"
    lengths = ["--input_len", str(PROMPT), "--output_len", str(TOKENS), "--wait_s", "5"]
    status = bench("serve", "--target", url, *lengths, *more, "--output_json", str(path))
    return status, json.loads(path.read_text())


@pytest.mark.parametrize("backend", [["openai-chat"], ["openai", "--text_prompts"]])
def test_serve_measures_a_server_of_openais_api(bench, tmp_path, url, backend):
    status, found = serve(bench, tmp_path, url, "--backend", *backend, "--num-prompts", "20")
    assert (status, found["completed"], found["failed"], found["errors"]) == (0, 20, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20 * PROMPT, 20 * TOKENS)
    assert 0 < found["mean_ttft_ms"] <= found["mean_e2el_ms"]


def test_failed_requests_are_counted_by_reason_and_fail_the_command(bench, tmp_path, url, capsys):
    other = ["--served_model_name", "other"]
    status, found = serve(bench, tmp_path, url, "--backend", "openai-chat", "--num_requests", "5", *other)
    [(reason, count)] = found["errors"].items()
    assert status == 1 and count == found["failed"] == 5
    assert reason.startswith("HTTP 404: ") and reason in capsys.readouterr().err


def test_token_ids_of_a_known_vocabulary(bench, tmp_path, url):
    model = ["--model", "llama-3.1-8b", "--num_requests", "3"]
    status, found = serve(bench, tmp_path, url, "--backend", "openai", *model)
    assert status == 1 and found["failed"] == 3  # the ids are of a larger vocabulary than the server's


@pytest.mark.parametrize(
    "flags",
    [
        ["--backend", "openai", "--rounds", "2"],
        ["--backend", "openai", "--admin_target", "127.0.0.1:1"],
        ["--backend", "openai"],  # the size of the vocabulary is not known
        ["--backend", "openai-chat", "--target", "http://"],
        ["--backend", "openai-chat", "--target", "http://127.0.0.1:1", "--wait_s", "0"],
    ],
)
def test_settings_that_cannot_work_are_errors(bench, url, flags):
    target = [] if "--target" in flags else ["--target", url]
    assert bench("serve", *flags, *target) == 1


# ---- servers of canned bytes

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def plain(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Oh\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


def event(body: dict) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": piece}}]})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})


DONE, END = b"data: [DONE]\n\n", b"0\r\n\r\n"


def ask(answer: bytes, pause_s: float = 0.0) -> Record:
    """Return the record of one request to a server that sends `answer` and closes after `pause_s`."""

    async def handle(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(pause_s)
        writer.close()

    async def run() -> Record:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            http = HttpClient(f"127.0.0.1:{port}")
            record = Record(3, 0.0)
            backend = OpenAiBackend(http, chat=True, name="m")
            await backend.ask(record, np.arange(3), 4, timeout_s=0.5)
            http.close()
            return record

    return asyncio.run(run())


@pytest.mark.parametrize(
    "parts",
    [
        [HEAD, chunked(text("ab"), text("cdef"), usage(12), DONE), END],
        [HEAD, chunked(*(bytes([byte]) for byte in text("ab") + text("cdef") + usage(12) + DONE)), END],
        [
            b"HTTP/1.1 102 Processing\r\n\r\n",
            HEAD,
            chunked(b": ping\n\n", text("ab") + text("cdef"), (usage(12) + DONE).replace(b"\n", b"\r\n")),
            END,
        ],
    ],
)
def test_tokens_are_spread_over_the_chunks(parts):
    record = ask(b"".join(parts))
    assert record.completed and record.prompt_tokens == 9
    assert [count for _, count in record.deliveries] == [4, 8]


def test_a_server_without_usage_counts_a_token_a_chunk():
    record = ask(HEAD + chunked(text("abc"), text("d"), DONE) + END)
    assert record.completed and [count for _, count in record.deliveries] == [1, 1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "ConnectionResetError: "),
        (b"SSH-2.0-OpenSSH\r\n", "ConnectionError: "),
        (HEAD + chunked(text("ab")), "ConnectionResetError: "),
        (HEAD + chunked(text("ab")) + END, "the stream ended without [DONE]"),
        (HEAD + chunked(DONE) + END, "the answer has no text"),
        (
            HEAD + chunked(text("ab"), event({"error": {"message": "why"}})) + END,
            "error within the stream: why",
        ),
        (HEAD + chunked(b"data: {]\n\n", DONE) + END, "error within the stream: "),
        (plain(429, b'{"error":{"message":"too many"}}'), "HTTP 429: too many"),
        (plain(422, b'{"detail":"wrong"}'), "HTTP 422: wrong"),
        (plain(500, b"oops"), "HTTP 500: oops"),
    ],
)
def test_every_broken_answer_has_a_reason(answer, reason):
    record = ask(answer)
    assert not record.completed and record.error is not None and record.error.startswith(reason), record.error


def test_a_deadline_ends_a_server_that_says_nothing_more():
    record = ask(HEAD + chunked(text("ab")), pause_s=1.0)
    assert record.error == "no whole answer within 0.5 s" and len(record.deliveries) == 1


@given(st.integers(0, 10_000), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_spread_keeps_the_sum(total, weights):
    counts = spread(total, weights)
    assert sum(counts) == total and min(counts) >= 0
    assert all(abs(c - total * w / sum(weights)) <= 1 for c, w in zip(counts, weights, strict=True))


# ---- the transport bench's load


@pytest.mark.parametrize(("stream", "count"), [(True, chunks), (False, whole_answers)])
def test_the_transport_load_counts_answers(url, stream, count):
    found = asyncio.run(load(url, 8, body(20, 5, stream), count, 0.3, time.process_time))
    assert found["per_s"] > 0 and found["per_cpu_s"] > 0


# ---- a batch beside the load


def test_a_batch_runs_beside_the_load_and_is_cancelled(bench, tmp_path):
    with running_batches(PacedLLM(rows=8, step_s=0.001), tmp_path / "batches", "paced") as opened:
        beside = ["--text_prompts", "--backend", "openai", "--num_requests", "20", "--request_rate", "100"]
        status, found = serve(bench, tmp_path, opened.url, *beside, "--batch_requests", "3000")
        [batch] = httpx.get(f"{opened.url}/v1/batches").json()["data"]
        wait_for(lambda: httpx.get(f"{opened.url}/v1/batches").json()["data"][0]["status"] == "cancelled")
    assert (status, found["completed"], found["batch_status"]) == (0, 20, "in_progress")
    # a line gives TOKENS tokens; the counts of a batch may be a moment late
    assert 0 < found["batch_output_throughput"] <= 8 / 0.001
    assert batch["request_counts"]["total"] == 3000


def test_a_server_without_batches_is_an_error(bench, url, capsys):
    flags = ["--backend", "openai", "--text_prompts", "--target", url, "--batch_requests", "5"]
    assert bench("serve", *flags) == 1 and "/v1/files" in capsys.readouterr().err


def test_a_batch_needs_openais_api(bench):
    assert bench("serve", "--batch_requests", "5") == 1


def test_a_batch_file_repeats_the_items():
    items, prompts = [Item(2, 3), Item(1, 4)], [np.array([5, 6]), np.array([7])]
    lines = [json.loads(line) for line in batch_file("m", items, prompts, 3, text=False).splitlines()]
    assert [line["body"]["prompt"] for line in lines] == [[5, 6], [7], [5, 6]]
    assert [line["body"]["max_tokens"] for line in lines] == [3, 4, 3]
    assert len({line["custom_id"] for line in lines}) == 3

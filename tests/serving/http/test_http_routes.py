"""Who may use which route, and the routes that generate nothing."""

import base64
import io
import json
import re
import ssl

import httpx
import msgspec
import openai
import pytest
from certificates import issue
from fake_llm import TEMPLATE, FakeLLM
from http_harness import (
    CHAT,
    COMPLETIONS,
    HELLO,
    RunningServer,
    read_to_end,
    request_bytes,
    running_server,
    wait_for,
)

import jaxflow
from serving.http.batch_mount import BatchConfig, batch_routes, open_batches
from serving.http.openapi import document
from serving.http.schema import KINDS

TOKENS = ("s3cret", "other")
PROTECTED = (
    "/metrics",
    "/experts",
    "/status",
    "/status/events",
    "/docs",
    "/openapi.json",
    "/v1/models",
    "/version",
    "/nowhere",
)
OPEN = ("/health", "/health/live", "/health/ready", "/health/startup")
NOT_SERVED = (
    *("/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    *("/completion", "/generate", "/api/chat", "/v1/messages", "/v1/load_lora_adapter", "/infill"),
)


@pytest.fixture(scope="module")
def shared():
    with running_server(app={"allowed_origins": ["https://example.org"], "root_path": "/models/a"}) as opened:
        yield opened


@pytest.fixture(scope="module")
def guarded():
    with running_server(auth_tokens=TOKENS) as opened:
        yield opened


def basic(password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


# ---- tokens


@pytest.mark.parametrize("path", PROTECTED)
def test_without_a_token_a_route_is_closed(guarded, path):
    refused = guarded.get(path)
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"].startswith("Basic ")


@pytest.mark.parametrize("path", OPEN)
def test_health_is_open(guarded, path):
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/experts", "/status", "/docs", "/openapi.json", "/version"])
def test_a_browser_opens_a_page_with_the_token_as_its_password(guarded, path):
    assert guarded.get(path, headers=basic("s3cret")).status_code == 200
    assert guarded.get(path, headers=bearer("other")).status_code == 200
    assert guarded.get(path, headers=basic("wrong")).status_code == 401
    assert guarded.get(path, headers={"authorization": "Basic !!!"}).status_code == 401


@pytest.mark.parametrize("path", [*KINDS, *NOT_SERVED, "/v1/files", "/v1/batches", "/ping"])
def test_a_post_needs_a_bearer_token(guarded, path):
    """A browser adds Basic credentials to a request that another site's page makes."""
    for headers in ({}, basic("s3cret"), bearer("S3CRET"), bearer("s3cret, Bearer s3cret")):
        assert guarded.post(path, {"prompt": [5]}, headers=headers).status_code == 401
    assert guarded.post(path, {}, headers=bearer("s3cret")).status_code != 401


@pytest.mark.parametrize(
    "line",
    [
        "GET /metrics?x=/health HTTP/1.1",
        "GET //health/../metrics HTTP/1.1",
        "GET /health/../metrics HTTP/1.1",
        "GET /health%2f..%2fmetrics HTTP/1.1",
        "GET http://x/health@y/metrics HTTP/1.1",
        "GET /metrics;/health HTTP/1.1",
    ],
)
@pytest.mark.parametrize("host", ["x", "x/health?", "x/health#"])
def test_no_spelling_of_a_path_or_a_host_opens_a_route(guarded, line, host):
    with guarded.connect() as connection:
        connection.sendall(f"{line}\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        status = int(read_to_end(connection).split(b" ", 2)[1])
    assert status in (400, 401)


def test_two_authorization_headers_are_refused(guarded):
    with guarded.connect() as connection:
        headers = ("authorization: Bearer s3cret", "authorization: Bearer s3cret", "connection: close")
        connection.sendall(request_bytes(COMPLETIONS, {"prompt": [5]}, *headers))
        assert b" 401 " in read_to_end(connection).partition(b"\r\n")[0]


# ---- models, tokens, versions


def test_tokenize_and_detokenize(shared):
    asked = shared.post("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}).json()
    assert asked["tokens"] == shared.llm.tokenizer.encode("Once upon a time")
    assert asked["count"] == len(asked["tokens"]) == len(asked["token_strs"])
    assert asked["max_model_len"] == shared.llm.max_model_len
    back = shared.post("/detokenize", {"tokens": asked["tokens"][1:]}).json()
    assert back["prompt"].strip() == "Once upon a time"
    chat = shared.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    told = shared.post(CHAT, {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}).json()
    assert told["prompt_token_ids"] == chat
    wrong = shared.post("/detokenize", {"tokens": [1, 512]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tokens"
    assert shared.post("/tokenize", {}).status_code == 400


def test_the_special_tokens(shared):
    told = shared.get("/tokenizer_info").json()
    for name in ("bos_token", "eos_token"):
        [token] = shared.post("/tokenize", {"prompt": told[name], "add_special_tokens": False}).json()[
            "tokens"
        ]
        assert token == getattr(shared.llm.tokenizer, f"{name}_id")
    assert told["chat_template"] == TEMPLATE


def test_versions_models_and_routes(shared):
    assert shared.get("/version").json() == {"version": jaxflow.__version__}
    [model] = shared.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["root"]) == ("fake", 4096, "fake")
    assert shared.get("/ping").status_code == 200
    missing = shared.get("/v1/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "not_found"
    wrong = shared.get(CHAT)
    assert wrong.status_code == 405 and "POST" in wrong.json()["error"]["message"]
    assert "openai" not in shared.get("/metrics").text and "jaxflow_ready" in shared.get("/metrics").text


@pytest.mark.parametrize("path", [*NOT_SERVED, "/v1/responses"])
def test_an_endpoint_that_the_model_has_no_head_for_says_so(shared, path):
    refused = shared.post(path, {"input": "x"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "not_supported"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "must"),
        ("structured_outputs", {}),
        ("best_of", 2),
        ("logits_processors", ["x"]),
        ("prompt_embeds", "x"),
        ("chat_template", "{{ 1 }}"),
        ("nonsense", 1),
        ("prompt_cache_key", "x" * 257),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(shared, field, value):
    refused = shared.post(CHAT, {"messages": HELLO, field: value})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_fields_that_ask_for_nothing_are_accepted(shared):
    inert = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tools": []}
    inert |= {
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "safety_identifier": "x",
        "seed": None,
    }
    asked = shared.post(CHAT, {"messages": HELLO, "max_tokens": 2} | inert)
    assert asked.status_code == 200
    assert asked.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_cache_key_of_a_prompt_is_its_session(shared):
    for body in ({"prompt_cache_key": "chat"}, {}):
        assert shared.post(CHAT, {"messages": HELLO, "max_tokens": 1} | body).status_code == 200
    keyed, plain = list(shared.llm.driver.submitted)[-2:]
    assert keyed.session.endswith(":chat") and plain.session == ""


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (COMPLETIONS, {"prompt": [5] * 4090, "max_tokens": 50}),
        (COMPLETIONS, {"prompt": [5] * 5000}),
        (COMPLETIONS, {"prompt": "a " * 100_000}),
        (CHAT, {"messages": HELLO, "max_tokens": 4096}),
    ],
)
def test_a_request_beyond_the_context_has_the_words_that_clients_look_for(shared, path, change):
    error = shared.post(path, change).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    assert "maximum context length is 4096 tokens. However," in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_limit_of_a_tokenization_is_not_that_of_the_context(shared, path):
    """A prompt of 5,000 tokens is accepted here, and the error of a longer one names the number that is."""
    field = {"/tokenize": "prompt", "/detokenize": "tokens"}[path]
    most = 100_000
    given = {"prompt": "a " * 3 * most, "tokens": [5] * (most + 1)}[field]
    assert shared.post(path, {field: given[:5000]}).status_code == 200
    answer = shared.post(path, {field: given})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, None)
    assert str(most) in error["message"] and "context" not in error["message"]


def test_options_of_a_stream_need_a_stream(shared):
    error = shared.post(COMPLETIONS, {"prompt": [5], "stream_options": {"include_usage": True}}).json()[
        "error"
    ]
    assert error["param"] == "stream_options" and "'include_usage': True" in error["message"]


def test_a_prompt_can_be_cut_to_what_fits(shared):
    body = {"prompt": [5] * 4090 + [6, 7], "max_tokens": 50, "truncate_prompt_tokens": -1}
    usage = shared.post(COMPLETIONS, body).json()["usage"]
    assert usage["prompt_tokens"] == 4096 - 50 and usage["completion_tokens"] == 50


# ---- proxies and browsers


def test_a_proxy_may_keep_or_remove_the_root_path(shared):
    for path in ("/version", "/models/a/version"):
        assert shared.get(path).status_code == 200
    assert shared.get("/openapi.json").json()["servers"] == [{"url": "/models/a"}]


def test_only_the_allowed_origins_may_read_an_answer(shared):
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origin, allowed in (("https://example.org", True), ("https://evil.example", False)):
        headers = {"origin": origin, **asks}
        preflight = httpx.options(shared.url + CHAT, headers=headers)
        assert (preflight.headers.get("access-control-allow-origin") == origin) is allowed
        asked = shared.post(CHAT, {"messages": HELLO, "max_tokens": 1}, headers={"origin": origin})
        assert (asked.headers.get("access-control-allow-origin") == origin) is allowed


def test_a_request_id_comes_back_unless_it_could_break_a_log_line(shared):
    assert shared.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("two words", "x" * 257, "é".encode().decode("latin-1")):
        given = shared.get("/version", headers={b"x-request-id": bad.encode("latin-1")}).headers[
            "x-request-id"
        ]
        assert re.fullmatch("[0-9a-f]{32}", given)


# ---- the document and the page


def test_the_document_describes_every_route(shared):
    spec = shared.get("/openapi.json").json()
    assert spec == json.loads(msgspec.json.encode(document("/models/a")))
    assert set(KINDS) <= set(spec["paths"])
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(spec)))
    assert names <= set(spec["components"]["schemas"])
    chat = spec["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and "best_of" not in chat["properties"]
    assert chat["additionalProperties"] is False
    for path, methods in spec["paths"].items():
        for method in methods:
            asked = shared.get(path.replace("{id}", "x")) if method == "get" else shared.post(path, {})
            assert asked.status_code != 405, (method, path)
            error = asked.json().get("error", {}) if asked.status_code == 404 else {}
            assert not error.get("message", "").startswith("no route"), (method, path)


def test_the_page_needs_no_network(shared):
    page = shared.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=\"(https?:)?//", page.text)
    assert "default-src 'none'" in page.headers["content-security-policy"]


# ---- batches


def test_without_a_folder_batches_are_not_found(shared):
    refused = shared.get("/v1/batches")
    assert refused.status_code == 404


def test_a_batch_runs_and_each_token_sees_its_own(tmp_path):
    made = RunningServer(FakeLLM(chat_template=TEMPLATE), auth_tokens=TOKENS)
    lines = []
    observed = made.operations.observe

    def observe(opened: str, method: str, traceparent: str = ""):
        lines.append((opened, method))
        return observed(opened, method, traceparent)

    made.operations.observe = observe
    batches = open_batches(BatchConfig(tmp_path, window=2), made.endpoints, made.operations, "fake")
    made.app["more_routes"] = batch_routes(batches)
    made.open()
    made.loop.call_soon_threadsafe(batches.start)
    try:
        client = openai.OpenAI(base_url=f"{made.url}/v1", api_key="s3cret", max_retries=0)
        requests = [
            {"custom_id": f"r{i}", "method": "POST", "url": url, "body": {**body, "max_tokens": 3 + i}}
            for i, (url, body) in enumerate([(COMPLETIONS, {"prompt": [5, 6]})] * 5)
        ]
        data = "".join(json.dumps(line) + "\n" for line in requests)
        file = client.files.create(file=("in.jsonl", io.BytesIO(data.encode())), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        answers = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
        told = {a["custom_id"]: a["response"]["body"]["usage"]["completion_tokens"] for a in answers}
        assert told == {f"r{i}": 3 + i for i in range(5)}
        assert lines.count(("batch", COMPLETIONS)) == 5  # each line is a call of its own
        with pytest.raises(openai.NotFoundError):
            client.with_options(api_key="other").batches.retrieve(batch.id)
        made.call(batches.close())
    finally:
        made.close()


# ---- certificates


def test_certificates_of_the_server_and_of_callers(tmp_path):
    authority, stranger = issue(tmp_path, "authority"), issue(tmp_path, "stranger")
    host, caller = issue(tmp_path, "host", authority), issue(tmp_path, "caller", authority)
    impostor = issue(tmp_path, "impostor", stranger)
    files = {"tls_cert": str(host.cert), "tls_key": str(host.key), "tls_client_ca": str(authority.cert)}

    def status(identity=None) -> int | None:
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.check_hostname = False  # the certificate names no address
        if identity is not None:
            context.load_cert_chain(identity.cert, identity.key)
        try:
            url = f"https://127.0.0.1:{opened.port}{COMPLETIONS}"
            return httpx.post(url, json={"prompt": [5], "max_tokens": 1}, verify=context).status_code
        except httpx.TransportError:
            return None

    with running_server(**files) as opened:
        assert status(caller) == 200
        assert status() is None and status(impostor) is None
        with pytest.raises(httpx.TransportError):
            opened.get("/version")  # without TLS


# ---- a plain answer, which the server writes at once


ASKED = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}


def head_and_text(data: bytes) -> tuple[str, dict[str, str], str]:
    """The status line, the headers, and the text of the one choice."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    assert int(headers["content-length"]) == len(body)
    return status, headers, json.loads(body)["choices"][0]["text"]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_plain_answer_is_the_same_however_it_is_written(guarded, shared, version):
    """With allowed origins, a layer of its own adds headers. Without them, the answer is one write."""
    found = []
    for opened in (guarded, shared):
        asked = request_bytes(
            COMPLETIONS, ASKED, "connection: close", "x-request-id: mine", "authorization: Bearer s3cret"
        )
        with opened.connect() as connection:
            connection.sendall(asked.replace(b"HTTP/1.1", b"HTTP/" + version.encode()))
            status, headers, text = head_and_text(read_to_end(connection))
        assert headers.pop("date")
        assert headers.pop("vary", None) == ("Origin" if opened is shared else None)
        found.append((status, headers, text))
    assert found[0] == found[1]
    assert found[0][1]["x-request-id"] == "mine" and found[0][1]["connection"] == "close"


def test_a_body_after_100_continue_is_answered(guarded):
    asked = request_bytes(
        COMPLETIONS, ASKED, "expect: 100-continue", "connection: close", "authorization: Bearer s3cret"
    )
    head, _, body = asked.partition(b"\r\n\r\n")
    with guarded.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert head_and_text(read_to_end(connection))[0] == "HTTP/1.1 200 OK"

"""Clients of other projects against a server of a real checkpoint, as processes and as libraries.

The packages are in the dependency group `clients`. A test of a package that is not installed is skipped.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import paths
import pytest
from fake_llm import TEMPLATE

from serving.demo import start_server

pytestmark = pytest.mark.slow  # 2 minutes: a server and a dozen of clients start

MODEL = paths.MODELS / "stories260K"
GOLDEN = paths.golden("stories260K")["prompts"]
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
TOKEN = "key"
MESSAGE = "Once upon a time"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "template").write_text(TEMPLATE)
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would download its list of prices
    more = (
        f"--chat_template={folder / 'template'}",
        f"--batch_dir={folder / 'batches'}",
        f"--api_key={TOKEN}",
    )
    small = ("--max_num_seqs=4", "--max_model_len=512", "--max_num_batched_tokens=64")
    server, _, found = start_server("--model", str(MODEL), "--served_model_name=stories", *more, *small)
    yield found
    server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


@pytest.fixture(scope="module")
def answer(url):
    """The greedy answer that every client must get."""
    body = {"messages": [{"role": "user", "content": MESSAGE}], "max_tokens": 16, "temperature": 0}
    headers = {"authorization": f"Bearer {TOKEN}"}
    told = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    return told.json()["choices"][0]["message"]["content"]


def test_curl(url, answer):
    body = {"messages": [{"role": "user", "content": MESSAGE}], "max_tokens": 16, "temperature": 0}
    command = ["curl", "-sS", "-N", f"{url}/v1/chat/completions", "-H", f"authorization: Bearer {TOKEN}"]
    command += ["-H", "content-type: application/json", "-d"]
    plain = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, timeout=60)
    assert json.loads(plain.stdout)["choices"][0]["message"]["content"] == answer
    # Beyond 1,024 bytes, curl waits for the interim response 100.
    body |= {"stream": True, "user": "x" * 2000}
    streamed = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, timeout=60)
    lines = [line for line in streamed.stdout.splitlines() if line.startswith("data: {")]
    told = [
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for line in lines
    ]
    assert "".join(told) == answer and streamed.stdout.endswith("data: [DONE]\n\n")
    metrics = ["curl", "-sS", "-u", f"me:{TOKEN}", f"{url}/metrics"]
    assert "jaxflow_ready 1" in subprocess.run(metrics, capture_output=True, text=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("npm") is None, reason="node and npm are not installed")
def test_node_openai_and_ai(url, answer, tmp_path):
    """List models, and ask chat plain and streamed, with node's `openai` and `ai` at
    the versions of the lock file.
    """
    for source in (Path(__file__).parent / "node").iterdir():
        if source.is_file():
            shutil.copy(source, tmp_path)
    install = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0"]
    installed = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    if re.search("ENOTFOUND|ECONNREFUSED|ETIMEDOUT|EAI_AGAIN", installed.stderr):
        pytest.skip("the npm registry cannot be reached")
    assert installed.returncode == 0, installed.stderr
    command = ["node", "ask.mjs", url, TOKEN, MESSAGE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"models": ["stories"], "answers": [answer] * 4}


def test_langchain(url, answer):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{url}/v1", api_key=TOKEN, model="stories", max_tokens=16, temperature=0, max_retries=0
    )
    told = model.invoke(MESSAGE)
    assert told.content == answer and told.usage_metadata["output_tokens"] == 16
    assert "".join(chunk.content for chunk in model.stream(MESSAGE)) == answer
    assert [found.content for found in model.batch([MESSAGE] * 3)] == [answer] * 3
    assert asyncio.run(model.ainvoke(MESSAGE)).content == answer
    plain = langchain.OpenAI(
        base_url=f"{url}/v1", api_key=TOKEN, model="stories", max_tokens=4, temperature=0
    )
    assert plain.invoke(MESSAGE)


def test_litellm(url, answer):
    litellm = pytest.importorskip("litellm")
    given = {
        "model": "hosted_vllm/stories",
        "api_base": f"{url}/v1",
        "api_key": TOKEN,
        "messages": [{"role": "user", "content": MESSAGE}],
        "max_tokens": 16,
        "temperature": 0,
    }
    assert litellm.completion(**given).choices[0].message.content == answer
    chunks = litellm.completion(**given, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    with pytest.raises(litellm.ContextWindowExceededError):  # by the words of the message
        litellm.completion(**given | {"max_tokens": 4000})
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**given | {"api_key": "wrong"})


def test_litellm_runs_a_batch(url, tmp_path, answer):
    litellm = pytest.importorskip("litellm")
    body = {"messages": [{"role": "user", "content": MESSAGE}], "max_tokens": 16, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line) + "\n")
    at = {"api_base": f"{url}/v1", "api_key": TOKEN, "custom_llm_provider": "openai"}
    with path.open("rb") as data:
        file = litellm.create_file(file=data, purpose="batch", **at)
    batch = litellm.create_batch(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **at
    )
    headers = {"authorization": f"Bearer {TOKEN}"}
    while (found := litellm.retrieve_batch(batch_id=batch.id, **at)).status not in ("completed", "failed"):
        pass
    content = httpx.get(f"{url}/v1/files/{found.output_file_id}/content", headers=headers).json()
    assert content["response"]["body"]["choices"][0]["message"]["content"] == answer


def test_lm_eval_scores_a_text_as_prompt_logprobs_do(url):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    os.environ["OPENAI_API_KEY"] = TOKEN
    model = LocalCompletionsAPI(
        model="stories",
        base_url=f"{url}/v1/completions",
        tokenizer_backend="remote",
        auth_token=TOKEN,
        max_length=512,
    )
    parts = [(TEXT[:cut], TEXT[cut:]) for cut in (17, 53)]
    asked = [Instance("loglikelihood", {}, part, 0) for part in parts]
    scores = [score for score, _ in model.loglikelihood(asked)]
    headers = {"authorization": f"Bearer {TOKEN}"}
    for (context, rest), score in zip(parts, scores, strict=True):
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            ids, before = (
                client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
                for text in (context + rest, context)
            )
            body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
            told = client.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
        own = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], told[1:], strict=True)]
        assert score == pytest.approx(sum(own[len(before) - 1 :]), abs=1e-3)
    answers = model.generate_until(
        [Instance("generate_until", {}, (MESSAGE, {"until": ["."], "max_gen_toks": 32, "temperature": 0}), 0)]
    )
    assert answers[0] and "." not in answers[0]


def test_schemathesis(url, tmp_path):
    """Requests that fit the document and requests that do not: no fault, and each answer as documented."""
    pytest.importorskip("schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"]
    if shutil.which("schemathesis", path=Path(sys.executable).parent):
        command[:3] = [str(Path(sys.executable).parent / "schemathesis")]
    command += [
        f"--header=Authorization: Bearer {TOKEN}",
        "--header=x-request-timeout-ms: 60000",
        f"--checks={checks}",
        "--max-examples=25",
        "--seed=1",
    ]
    command += [
        "--phases=examples,coverage,fuzzing",
        "--exclude-path-regex=^/(status|v1/files|v1/batches)",
        "--no-color",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed")
def test_the_docs_page_in_chromium(url, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    pictures = Path(os.environ.get("JAXFLOW_SCREENSHOTS", tmp_path))
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(
            http_credentials={"username": "me", "password": TOKEN}, viewport={"width": 1100, "height": 900}
        )
        page, problems, asked = context.new_page(), [], []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{url}/docs")
        page.wait_for_selector("details")
        page.fill("#token", TOKEN)
        entry = page.locator("details", has=page.locator("code", has_text="/v1/completions")).first
        entry.locator("summary").focus()
        page.keyboard.press("Enter")
        page.screenshot(path=pictures / "docs-page.png")
        entry.locator("button").click()
        page.locator("details[open] pre", has_text="text_completion").first.wait_for()
        assert page.locator("#base").text_content() == f"{url}/v1"
        browser.close()
    assert [found for found in asked if not found.startswith(url)] == [] and problems == []

"""The two commands as processes: their output and their exit."""

import asyncio
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import grpc
import httpx
import paths
import pytest
from absl import flags
from fake_llm import TEMPLATE, FakeLLM
from harness import serving
from own_flags import own_flags

from serving import client
from serving.frontend.config import ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc.server import Server

MODEL = str(paths.MODELS / "stories260K")
SMALL = (
    "--max_num_batched_tokens=16",
    "--step_sizes=16",
    "--max_num_seqs=4",
    "--max_model_len=512",
    "--num_kv_pages=64",
    "--block_size=16",
)
PROMPT = paths.golden("stories260K")["prompts"][1]


def run(module: str, *arguments: str, stdin: str | None = None, env=None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command,
        cwd=paths.ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def ask(*arguments: str) -> int:
    """Return the exit status of the client, run in this process."""
    with own_flags():
        client.define_flags()
        return client.main(flags.FLAGS(["serving.client", *arguments]))


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "serving", "--port=0", "--admin_port=0", "--http_port=0", *arguments]
    with subprocess.Popen(
        command, cwd=paths.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server
        finally:
            server.kill()


def ready(server: subprocess.Popen[str]) -> str:
    """Return the address of the ready line."""
    for line in server.stdout:
        if found := re.fullmatch(r"ready on (\S+) and (http://\S+)\n", line):
            server.url = found.group(2)
            return found.group(1)
    raise AssertionError(f"it ended: {server.stderr.read()}")


def test_serve_ask_and_end(tmp_path, monkeypatch, capsys):
    """The whole way: a token, a question from each side, SIGTERM while an answer runs, exit 0."""
    (tmp_path / "tokens").write_text("s3cret\n")
    more = (f"--auth_token_file={tmp_path / 'tokens'}", "--api_key=key", "--served_model_name=small,other")
    more += (f"--batch_dir={tmp_path / 'batches'}",)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with process("--model", MODEL, *SMALL, *more) as server:
        target = f"--target={ready(server)}"
        greedy = (
            "--temperature=0",
            f"--max_tokens={len(PROMPT['greedy_ids'])}",
            "--ignore_eos",
            "--timeout_s=inf",
        )
        asked = run("serving.client", target, "--auth_token=s3cret", *greedy, PROMPT["text"])
        assert (asked.returncode, asked.stdout) == (0, PROMPT["greedy_text"] + "\n")
        assert re.search(r"\[\d+ tokens, prompt \d+ \(\d+ cached\), first after .* tokens/s", asked.stderr)
        piped = run(
            "serving.client",
            target,
            *greedy,
            "--nostats",
            stdin=PROMPT["text"],
            env={"JAXFLOW_AUTH_TOKEN": "s3cret"},
        )
        assert (piped.stdout, piped.stderr) == (PROMPT["greedy_text"] + "\n", "")
        for arguments, says in (
            ((target, "hi"), "authorization: Bearer"),
            ((target, "--auth_token=s3cret", "--top_p=7", "hi"), "sampling.top_p=7"),
            ((target, "--auth_token=s3cret", "--chat"), "no chat template"),
            ((target, "--auth_token=s3cret", "--tls_ca=/no/such/file", "hi"), "/no/such/file"),
            (
                (
                    target,
                    "--auth_token=s3cret",
                    "--timeout_s=0.001",
                    "--max_tokens=400",
                    "--ignore_eos",
                    "hi",
                ),
                "eadline",
            ),
        ):
            assert ask(*arguments) == 1
            assert says in capsys.readouterr().err
        body = {"prompt": PROMPT["prompt_ids"], "max_tokens": len(PROMPT["greedy_ids"]), "temperature": 0}
        body |= {"ignore_eos": True, "model": "small", "return_token_ids": True}
        for token, status in (("s3cret", 200), ("key", 200), ("other", 401)):
            headers = {"authorization": f"Bearer {token}"}
            asked = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
            assert asked.status_code == status, asked.text
            if status == 200:
                [choice] = asked.json()["choices"]
                assert choice["text"].strip() == PROMPT["greedy_text"].strip()
                assert choice["token_ids"] == PROMPT["greedy_ids"]
            listed = httpx.get(f"{server.url}/v1/batches", headers=headers)
            assert (listed.status_code, listed.json().get("data", [])) == (status, [])
        # An answer is running when the signal comes: it has time to finish.
        command = [
            sys.executable,
            "-m",
            "serving.client",
            target,
            "--auth_token=s3cret",
            "--max_tokens=200",
            "--ignore_eos",
            "Once",
        ]
        with subprocess.Popen(
            command, cwd=paths.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running:
            assert running.stdout.read(1)
            server.send_signal(signal.SIGTERM)
            text, errors = running.communicate(timeout=60)
        assert running.returncode == 0 and "[200 tokens" in errors and len(text) > 200
        output, errors = server.communicate(timeout=60)
        assert server.returncode == 0 and "drained, 0 aborted" in output and "Traceback" not in errors
        told = re.findall("^.*kernels:.*$", output + errors, re.MULTILINE)
        assert len(told) == 1 and told[0].endswith("kernels: cpu, for every op")


def test_an_interrupt_while_loading_ends_the_server():
    with process("--model", MODEL, *SMALL) as server:
        assert "loading the model" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        output, errors = server.communicate(timeout=60)
        assert server.returncode == 0 and "stopped while loading" in output and "Traceback" not in errors


@pytest.mark.parametrize("taken_by", ["port", "http_port"])
def test_a_port_in_use_is_one_line_and_an_exit_code(taken_by):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"port": 0, "admin_port": 0, "http_port": 0, taken_by: port}
        done = run("serving", "--model", MODEL, *(f"--{name}={number}" for name, number in ports.items()))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"127.0.0.1:{port}: Address already in use" in done.stderr and done.stderr.count("\n") == 1


def test_one_port_for_both_protocols_names_both_flags():
    done = run("serving", MODEL, "--port=8000", "--admin_port=0", "--http_port=8000")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "--port=8000" in done.stderr and "--http_port=8000" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model=/no/such/model",), "/no/such/model"),
        (("--model", MODEL, "--quantization=int3"), "quantization='int3'"),
        (("--model", MODEL, "--auth_token_file=/nope"), "auth_token_file='/nope'"),
        (("--model", MODEL, "--chat_template=/nope"), "chat_template='/nope'"),
        (("--model", MODEL, "--nohttp", "--nogrpc"), "--nogrpc"),
        (("--host", "localhost", MODEL, "--nohttp", "--nogrpc"), "--nogrpc"),
        (("--model", MODEL, "--batch_dir=/dev/null/batches"), "batch_dir='/dev/null/batches'"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line_and_an_exit_code(arguments, says):
    done = run("serving", "--port=0", "--admin_port=0", "--http_port=0", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: [^\n]*\n", done.stderr) and says in done.stderr


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("serving", ("--port", "--model", "--tls_cert", "ready on")),
        ("serving.client", ("--chat", "--temperature", "--target")),
        ("serving.demo", ("--max_tokens", "keep")),
    ],
)
def test_help_reads_well(module, says):
    done = run(module, "--help")
    assert done.returncode == 0
    usage, flags = done.stdout.split("flags:")
    assert f"python -m {module}" in usage and all(word in done.stdout for word in says)
    assert "absl" not in flags, "only flags of this command"


@pytest.mark.parametrize(
    ("module", "flag", "accepted"),
    [
        ("serving.client", "--seed=99999999999999999999", "[-9223372036854775808, 9223372036854775807]"),
        ("serving.client", "--timeout_s=nan", "a number of seconds"),
        ("serving.client", "--port=1", "--target"),
        ("serving", "--drain_timeout_s=nan --model=x", "a finite number"),
        ("serving", "--modle=x", "model"),
    ],
)
def test_a_wrong_flag_names_itself_and_what_is_accepted(module, flag, accepted):
    done = run(module, *flag.split(), "hi")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert flag.partition("=")[0].strip("-") in done.stderr and accepted in done.stderr


def test_a_prompt_that_is_not_utf8_is_one_line():
    async def scenario():
        async with serving(FakeLLM()) as (server, _):
            command = [sys.executable, "-m", "serving.client", f"--target=127.0.0.1:{server.port}"]
            pipes = {
                "stdin": asyncio.subprocess.PIPE,
                "stdout": asyncio.subprocess.PIPE,
                "stderr": asyncio.subprocess.PIPE,
            }
            for arguments, encoding in (
                ([b"\xe1\xff"], "utf-8"),
                ([], "utf-8:strict"),
                ([], "utf-8:surrogateescape"),
            ):
                environment = {**os.environ, "PYTHONIOENCODING": encoding}
                asked = await asyncio.create_subprocess_exec(
                    *command, *arguments, cwd=paths.ROOT, env=environment, **pipes
                )
                _, errors = await asked.communicate(None if arguments else b"\xe1\xff")
                assert (asked.returncode, errors) == (
                    1,
                    b"error: the prompt is not UTF-8: text is accepted\n",
                )

    asyncio.run(scenario())


def test_a_closed_standard_output_is_no_error():
    async def scenario():
        async with serving(FakeLLM()) as (server, _):
            command = [
                sys.executable,
                "-m",
                "serving.client",
                f"--target=127.0.0.1:{server.port}",
                "--max_tokens=9",
                "--nostats",
            ]
            read, write = os.pipe()
            os.close(read)
            asked = await asyncio.create_subprocess_exec(
                *command, "Once upon a time", cwd=paths.ROOT, stdout=write, stderr=asyncio.subprocess.PIPE
            )
            os.close(write)
            _, errors = await asked.communicate()
            assert (asked.returncode, errors) == (128 + signal.SIGPIPE, b"")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("target", "reason"),
    [("http://127.0.0.1:8000", "errors resolving"), ("127.0.0.1:8000", "Failed parsing HTTP/2")],
)
def test_an_address_of_http_is_explained(target, reason, capsys):
    failure = client.RequestFailed(grpc.StatusCode.UNAVAILABLE, reason, from_server=False)
    assert client.report_failure(failure, target) == 1
    said = capsys.readouterr().err
    assert "--target HOST:PORT" in said and "start one" not in said


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = f"--target=127.0.0.1:{port}"
    done = run("serving.client", target, "hi")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"error: no server answers at 127\.0\.0\.1:{port}; start one with: python -m serving [^\n]*\n",
        done.stderr,
    )
    waited = run("serving.client", target, "--wait_s=0.2", "hi")
    assert (waited.returncode, waited.stderr) == (
        1,
        f"error: no server was ready at 127.0.0.1:{port} within 0.2 s\n",
    )


def test_a_server_that_is_loading_says_so_and_can_be_waited_for():
    async def scenario():
        server, llm = Server(ServedModel(ServerConfig(port=0, admin_port=0))), FakeLLM()
        await server.start()
        ask = ("serving.client", f"--target=127.0.0.1:{server.port}", "--max_tokens=3", "Once upon")
        early = await asyncio.to_thread(run, *ask)
        assert (early.returncode, early.stderr) == (
            1,
            "error: the model is still loading; try again in 5 s, or with --wait_s\n",
        )
        patient = asyncio.create_task(asyncio.to_thread(run, *ask, "--wait_s=60"))
        await asyncio.sleep(0.5)  # the request is waiting by now or comes later: both must work
        await server.served.serve(llm)
        assert (await patient).stdout == " Once upon\n"
        await server.stop()
        llm.close()

    asyncio.run(scenario())


def test_a_conversation_has_a_history():
    """Ask an engine that repeats its prompt, so that the answer shows the request."""

    async def scenario():
        llm = FakeLLM(chat_template=TEMPLATE)
        async with serving(llm) as (server, _):
            command = [
                sys.executable,
                "-m",
                "serving.client",
                "--chat",
                f"--target=127.0.0.1:{server.port}",
                "--system=Be kind.",
                "--max_tokens=9",
            ]
            pipes = {
                "stdin": asyncio.subprocess.PIPE,
                "stdout": asyncio.subprocess.PIPE,
                "stderr": asyncio.subprocess.PIPE,
            }
            talk = await asyncio.create_subprocess_exec(*command, cwd=paths.ROOT, **pipes)
            _, errors = await talk.communicate(b"hello\n\nand then?\n/clear\nanew\n/exit\nnever sent\n")
            assert talk.returncode == 0 and errors.count(b"[9 tokens") == 3
            asked = [llm.tokenizer.decode(request.prompt_token_ids) for request in llm.driver.submitted]
            first = "system: Be kind.\nuser: hello\nassistant: "
            answer = llm.tokenizer.decode(llm.driver.submitted[0].prompt_token_ids[:9])
            assert asked[0] == first
            assert (
                asked[1].startswith(first)
                and asked[1].endswith("user: and then?\nassistant: ")
                and answer.strip() in asked[1][len(first) :]
            )
            assert asked[2] == "system: Be kind.\nuser: anew\nassistant: "

    asyncio.run(scenario())

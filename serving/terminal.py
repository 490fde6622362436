"""The client's command line (`python -m serving.client`): one question, or a conversation."""

import asyncio
import contextlib
import math
import os
import sys
from typing import Any

import grpc
from absl import app, flags

from serving import command
from serving.grpc import generate_pb2 as pb
from serving.grpc.connection import DEFAULT_TARGET, Answer, Client, Prompt, RequestFailed

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (gives input() its editing and history)

_TOKEN_VARIABLE = "JAXFLOW_AUTH_TOKEN"
_NO_TEXT = RequestFailed(
    grpc.StatusCode.INVALID_ARGUMENT, "the prompt is not UTF-8: text is accepted", from_server=False
)

TARGET = flags.DEFINE_string("target", DEFAULT_TARGET, "The server, as host:port.")
CHAT = flags.DEFINE_bool(
    "chat",
    False,
    "Hold a conversation: each answer sees what was said before. /clear forgets it, /exit ends.",
)
SYSTEM = flags.DEFINE_string("system", None, "The system message: how the model should behave.")
RAW = flags.DEFINE_bool("raw", False, "Send the text as it is, without the model's chat template.")
STATS = flags.DEFINE_bool(
    "stats", True, "After an answer, write its token count and speed to standard error."
)
TIMEOUT_S = flags.DEFINE_float(
    "timeout_s", None, "Give an answer up after this many seconds.", lower_bound=0.0
)
WAIT_S = flags.DEFINE_float(
    "wait_s", 0.0, "Wait up to this many seconds for the server to be ready.", lower_bound=0.0
)
TLS_CA = flags.DEFINE_string(
    "tls_ca",
    None,
    "PEM file of the authority that signed the server's certificate; makes the connection TLS.",
)
TLS_CERT = flags.DEFINE_string(
    "tls_cert", None, "PEM file of this client's certificate, for a server that wants one."
)
TLS_KEY = flags.DEFINE_string("tls_key", None, "PEM file of its private key.")
AUTH_TOKEN = flags.DEFINE_string(
    "auth_token", None, f"The server's bearer token; default: the environment's {_TOKEN_VARIABLE}."
)

for _name in ("timeout_s", "wait_s"):
    flags.register_validator(
        _name, lambda value: value is None or not math.isnan(value), "a number of seconds is accepted"
    )

# The bounds are those of the numbers in the proto; what a model can do, the server says.
_SAMPLING = (
    flags.DEFINE_integer(
        "max_tokens", 512, "Tokens to generate at most.", lower_bound=0, upper_bound=2**32 - 1
    ),
    flags.DEFINE_integer(
        "min_tokens", None, "Tokens to generate at least.", lower_bound=0, upper_bound=2**32 - 1
    ),
    flags.DEFINE_float("temperature", None, "0 takes the likeliest token always; higher is wilder."),
    flags.DEFINE_float("top_p", None, "Draw from the likeliest tokens that together have this probability."),
    flags.DEFINE_integer(
        "top_k",
        None,
        "Draw from this many of the likeliest tokens; 0: from all.",
        lower_bound=-1,
        upper_bound=2**31 - 1,
    ),
    flags.DEFINE_float("min_p", None, "Draw from tokens at least this likely, relative to the likeliest."),
    flags.DEFINE_float(
        "repetition_penalty",
        None,
        "Above 1: tokens that have occurred, in the prompt too, become less likely.",
    ),
    flags.DEFINE_float("presence_penalty", None, "Above 0: tokens that were generated become less likely."),
    flags.DEFINE_float("frequency_penalty", None, "The same, for each time they were generated."),
    flags.DEFINE_integer(
        "seed", None, "The same seed draws the same answer.", lower_bound=-(2**63), upper_bound=2**63 - 1
    ),
    flags.DEFINE_multi_string("stop", None, "End the answer before this text."),
    flags.DEFINE_bool("ignore_eos", None, "Go on after the model's end token."),
)


def run() -> None:
    """The command; ends the process."""
    command.run(_main)


def _main(argv: list[str]) -> int:
    prompt = " ".join(argv[1:])
    if not prompt and not CHAT.value and sys.stdin.isatty():
        raise app.UsageError('give a prompt, as in: python -m serving.client "Once upon a time", or --chat')
    try:
        prompt = prompt if prompt or CHAT.value else sys.stdin.read()
        with asyncio.Runner() as runner:
            return _converse(runner, prompt) if CHAT.value else runner.run(_ask_once(prompt))
    except RequestFailed as error:
        return _complain(error)
    except UnicodeDecodeError:
        return _complain(_NO_TEXT)
    except BrokenPipeError:
        raise
    except OSError as error:  # a certificate that is not there
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _client() -> Client:
    token = AUTH_TOKEN.value or os.environ.get(_TOKEN_VARIABLE)
    return Client(
        TARGET.value, tls_ca=TLS_CA.value, tls_cert=TLS_CERT.value, tls_key=TLS_KEY.value, auth_token=token
    )


async def _ask_once(text: str) -> int:
    async with _client() as client:
        await _wait(client)
        use_chat = not RAW.value and (SYSTEM.value is not None or (await client.model()).has_chat_template)
        await _print(_ask(client, [*_system(), {"role": "user", "content": text}] if use_chat else text))
    return 0


def _converse(runner: asyncio.Runner, first: str) -> int:
    """Reads questions until the end of the input; an interrupt ends an answer, or at the question the
    conversation.
    """
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
            messages.append({"role": "user", "content": text})
            answer = runner.run(_begin(client, messages))
            try:
                runner.run(_print(answer))
            except KeyboardInterrupt:
                print()
            except RequestFailed as error:
                _complain(error)
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
                "the served model has no chat template: ask it without --chat",
            )
    except BaseException:
        await client.close()
        raise
    return client


async def _wait(client: Client) -> None:
    if WAIT_S.value:
        await client.wait_until_ready(WAIT_S.value)


async def _begin(client: Client, messages: list[dict[str, str]]) -> Answer:
    return _ask(client, messages)


def _ask(client: Client, prompt: Prompt) -> Answer:
    sampling: dict[str, Any] = {flag.name: flag.value for flag in _SAMPLING if flag.value is not None}
    try:
        return client.generate(prompt, timeout_s=TIMEOUT_S.value, **sampling)
    except (
        UnicodeEncodeError
    ) as error:  # of bytes on the command line that are no text Python makes lone surrogates, on input too
        raise _NO_TEXT from error


def _system() -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM.value}] if SYSTEM.value else []


async def _print(answer: Answer) -> None:
    async for message in answer:
        kind = message.WhichOneof("event")
        if kind in ("delta", "finished"):
            print(getattr(message, kind).text, end="", flush=True)
    print(flush=True)
    if STATS.value:
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


def _complain(error: RequestFailed) -> int:
    if error.from_server or error.code != grpc.StatusCode.UNAVAILABLE:
        retry = (
            f"; try again in {error.retry_after_s:.0f} s, or with --wait_s"
            if error.retry_after_s is not None
            else ""
        )
        print(f"error: {error.message or error.code.name}{retry}", file=sys.stderr)
    else:
        print(
            (
                f"error: no server answers at {TARGET.value}; start one with: python -m serving --model "
                f"...  ({error.message})"
            ),
            file=sys.stderr,
        )
    return 1

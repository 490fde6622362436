"""Serves a model over gRPC: `python -m serving --model FOLDER_OR_FILE_OR_HUB_ID --port 50051`.

Prints "ready on host:port" once the model is loaded and warm. SIGTERM or an interrupt lets running requests
finish, refuses new ones, and exits with 0; a second one exits at once. Operations (statistics, draining) are
on --admin_port.
"""

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from absl import app, flags

import jaxflow.cli.engine_flags
from jaxflow.config import ConfigError, EngineConfig
from serving import command
from serving.grpc.server import ListenError, Server, ServerConfig

if TYPE_CHECKING:
    from jaxflow.llm import LLM

HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 or [::] for every network.")
PORT = flags.DEFINE_integer(
    "port", 50051, "Port of the services; 0: the system chooses.", lower_bound=0, upper_bound=65535
)
ADMIN_HOST = flags.DEFINE_string("admin_host", "127.0.0.1", "Address of the admin service.")
ADMIN_PORT = flags.DEFINE_integer(
    "admin_port", 50052, "Port of the admin service; 0: the system chooses.", lower_bound=0, upper_bound=65535
)
TLS_CERT = flags.DEFINE_string(
    "tls_cert", None, "PEM file of the server's certificate (chain); both listeners then speak TLS."
)
TLS_KEY = flags.DEFINE_string("tls_key", None, "PEM file of its private key.")
TLS_CLIENT_CA = flags.DEFINE_string(
    "tls_client_ca", None, "PEM file of an authority; callers must show a certificate it signed."
)
AUTH_TOKEN_FILE = flags.DEFINE_string(
    "auth_token_file", None, "File of bearer tokens, one a line; callers must bring one of them."
)
DRAIN_TIMEOUT_S = flags.DEFINE_float(
    "drain_timeout_s", 30.0, "How long running requests may go on after SIGTERM.", lower_bound=0.0
)
MAX_PENDING_TOKENS = flags.DEFINE_integer(
    "max_pending_tokens",
    1024,
    "Unread tokens of a sequence, beyond which its slow caller is dropped.",
    lower_bound=1,
)


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        engine = jaxflow.cli.engine_flags.engine_config_from_flags()
        config = ServerConfig(
            host=HOST.value.strip("[]"),
            port=PORT.value,
            admin_host=ADMIN_HOST.value.strip("[]"),
            admin_port=ADMIN_PORT.value,
            tls_cert=TLS_CERT.value,
            tls_key=TLS_KEY.value,
            tls_client_ca=TLS_CLIENT_CA.value,
            auth_tokens=read_tokens(AUTH_TOKEN_FILE.value),
            drain_timeout_s=DRAIN_TIMEOUT_S.value,
            max_pending_tokens=MAX_PENDING_TOKENS.value,
        )
    except (ConfigError, ListenError, OSError) as error:
        return fail(error)
    return asyncio.run(serve(config, lambda: load(engine)))


def read_tokens(path: str | None) -> tuple[str, ...]:
    """The tokens of the file. Raises: ConfigError, if there are none: the server would be open."""
    if path is None:
        return ()
    tokens = tuple(
        line.strip() for line in Path(path).read_bytes().decode("latin-1").splitlines() if line.strip()
    )
    if not tokens or not all(token.isascii() for token in tokens):
        raise ConfigError("auth_token_file", path, "a file with at least one token, one a line, in ASCII")
    return tokens


def load(config: EngineConfig) -> "LLM":
    from jaxflow.llm import LLM  # JAX takes seconds to import: the port is bound, or found taken, before

    return LLM.from_config(config)


async def serve(config: ServerConfig, load: Callable[[], "LLM"]) -> int:
    """Serves what `load` returns until a signal comes, or the engine dies; returns the exit status."""
    # The engine's thread gets the interpreter back within half a millisecond of wanting it, however busy the
    # streams are.
    sys.setswitchinterval(0.0005)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            os._exit(130)  # the second: whoever sends it does not want to wait
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = Server(config)
    try:
        await server.start()
    except ListenError as error:
        return fail(error)
    say(
        f"listening on {config.host}:{server.port}, admin on "
        f"{config.admin_host}:{server.admin_port}; loading the model"
    )
    for warning in warnings(config):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    try:
        return await until_asked(server, load, asyncio.create_task(asked.wait()))
    finally:
        await server.stop()


async def until_asked(server: Server, load: Callable[[], "LLM"], asked: asyncio.Task) -> int:
    """Loads, serves, and once `asked` is done drains; returns the exit status."""
    loading = in_thread(load)
    await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        say("stopped while loading")
        os._exit(0)  # XLA cannot be interrupted, and there is nothing to finish
    llm = loading.result()
    if isinstance(llm, Exception):
        return fail(llm)
    try:
        await server.serve(llm)
    except ConfigError as error:
        return fail(error)
    say(f"ready on {server.config.host}:{server.port}")
    dying = asyncio.create_task(server.engine_death())
    await asyncio.wait({asked, dying}, return_when=asyncio.FIRST_COMPLETED)
    if dying.done():
        print("error: the engine has stopped after a fault; the log says more", file=sys.stderr, flush=True)
        return 1
    say(f"draining: running requests have {server.config.drain_timeout_s:g} s to finish")
    say(f"drained, {await server.drain()} aborted")
    await asyncio.to_thread(llm.close)
    return 0


def fail(error: Exception) -> int:
    """Says what went wrong: in one line if the setting or file at fault is named, else with the traceback of
    a bug.
    """
    if isinstance(error, ListenError | OSError) or type(error).__module__.startswith("jaxflow."):
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return 1


def in_thread[T](work: Callable[[], T]) -> asyncio.Future[T | Exception]:
    """What `work` returns, or raises, on a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T | Exception] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            result = error
        loop.call_soon_threadsafe(future.set_result, result)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


def warnings(config: ServerConfig) -> list[str]:
    """What an operator may not have meant."""
    result = []
    for flag, host in (("--host", config.host), ("--admin_host", config.admin_host)):
        if host not in ("127.0.0.1", "::1", "localhost"):
            if not config.auth_tokens and not config.tls_client_ca:
                result.append(
                    f"{flag}={host}: whoever reaches this port may use it; see --auth_token_file and "
                    f"--tls_client_ca"
                )
            elif not config.tls_cert:
                result.append(f"{flag}={host}: tokens and prompts travel unencrypted; see --tls_cert")
    return result


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    jaxflow.cli.engine_flags.define_engine_flags()
    flags.adopt_module_key_flags(jaxflow.cli.engine_flags)
    command.run(main)

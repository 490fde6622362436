"""Serve a model over HTTP, with OpenAI's API, and over gRPC.

  python -m serving FOLDER_OR_FILE_OR_HUB_ID --http_port 8000 --port 50051

The command prints "ready on HOST:PORT and http://HOST:PORT" when the model is loaded and warm: the addresses
of gRPC and of HTTP. SIGTERM or an interrupt starts draining: the server refuses new requests, finishes the
running ones, and exits with status 0. A second signal ends the process at once. The gRPC admin service with
statistics and draining listens on --admin_port.
"""

import asyncio
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from absl import flags

import jaxflow.cli.engine_flags
from jaxflow.cli.exit_status import run_command, usage_error
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.heap import collector_paused, freeze_heap
from jaxflow.model.checkpoints.model_names import check_name
from jaxflow.model.checkpoints.source import CheckpointError
from jaxflow.parallel.launch import launch_of
from jaxflow.text.chat import read_chat_template
from serving.batch.batches import Batches
from serving.frontend.answer_reader import PARSERS, TOOL_CALL_PARSERS
from serving.frontend.config import ListenError, ServerConfig
from serving.frontend.served_model import ServedModel
from serving.grpc.server import Server
from serving.http import http_flags
from serving.http.batch_mount import open_batches
from serving.http.config import HttpConfig
from serving.http.endpoints import Endpoints
from serving.operations import operations_flags
from serving.operations.health import make_first_token
from serving.operations.operations import Operations
from serving.operations.request_log import RequestLogError
from serving.operations.tracing import TracingError
from serving.supervise import supervise

if TYPE_CHECKING:
    from jaxflow.llm import LLM

HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen on. 0.0.0.0 or [::] accepts every network."
)
GRPC = flags.DEFINE_boolean("grpc", True, "Open the gRPC ports --port and --admin_port.")
PORT = flags.DEFINE_integer(
    "port",
    50051,
    "Port of the gRPC generation and model services. 0: a free port.",
    lower_bound=0,
    upper_bound=65535,
)
ADMIN_HOST = flags.DEFINE_string("admin_host", "127.0.0.1", "Address of the admin service.")
ADMIN_PORT = flags.DEFINE_integer(
    "admin_port", 50052, "Port of the admin service. 0: a free port.", lower_bound=0, upper_bound=65535
)
TLS_CERT = flags.DEFINE_string(
    "tls_cert", None, "PEM file of the server's certificate chain. Enables TLS on all ports."
)
TLS_KEY = flags.DEFINE_string("tls_key", None, "PEM file of the private key of --tls_cert.")
TLS_CLIENT_CA = flags.DEFINE_string(
    "tls_client_ca", None, "PEM file of an authority. Clients must show a certificate that it signed."
)
AUTH_TOKEN_FILE = flags.DEFINE_string(
    "auth_token_file", None, "File of bearer tokens, one a line. Clients must send one of the tokens."
)
API_KEY = flags.DEFINE_multi_string(
    "api_key",
    [],
    "A bearer token that clients may send, beside those of --auth_token_file. Other users of this machine "
    "can read it in the list of processes; --auth_token_file hides the tokens.",
)
SERVED_MODEL_NAME = flags.DEFINE_list(
    "served_model_name",
    [],
    "Names of the model in requests, separated by commas. Default: the model's own name.",
)
CHAT_TEMPLATE = flags.DEFINE_string(
    "chat_template", None, "File of a Jinja chat template, instead of the checkpoint's."
)
REASONING_PARSER = flags.DEFINE_enum(
    "reasoning_parser",
    "auto",
    ["auto", *PARSERS],
    "Form of the reasoning in answers over HTTP. auto: the form that the chat template shows. none: all text "
    "is content. deepseek_r1: an answer begins within the reasoning, unless the prompt ends it.",
)
TOOL_CALL_PARSER = flags.DEFINE_enum(
    "tool_call_parser",
    "auto",
    TOOL_CALL_PARSERS,
    "Form of the tool calls in answers over HTTP. auto: the form that the chat template shows.",
)
ADMIN_TOKEN_FILE = flags.DEFINE_string(
    "admin_token_file",
    None,
    "File of bearer tokens of the admin service, one a line. Without the file, the service takes the tokens "
    "of --auth_token_file.",
)
MAX_REQUESTS_PER_TOKEN = flags.DEFINE_integer(
    "max_requests_per_token",
    0,
    "Most requests of one bearer token that run or wait at once. 0: no limit.",
    lower_bound=0,
)
MAX_TOKENS_PER_TOKEN = flags.DEFINE_integer(
    "max_tokens_per_token",
    0,
    "Most tokens, prompt and longest output, of the requests of one bearer token that run or wait at once. "
    "0: no limit.",
    lower_bound=0,
)
ISOLATE_TOKENS = flags.DEFINE_boolean(
    "isolate_tokens", True, "Share no prefixes between requests of different bearer tokens."
)
ALLOW_PRIORITY = flags.DEFINE_boolean(
    "allow_priority", False, "Accept priorities below 0, which run before the requests of other callers."
)
DRAIN_TIMEOUT_S = flags.DEFINE_float(
    "drain_timeout_s",
    30.0,
    "Seconds that running requests have to finish after SIGTERM. Then they are aborted.",
    lower_bound=0.0,
)
MAX_PENDING_TOKENS = flags.DEFINE_integer(
    "max_pending_tokens",
    1024,
    "Most unread tokens of a sequence. A client that reads more slowly loses its request.",
    lower_bound=1,
)
MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts",
    0,
    "Times that a lost server is started again, in a process of its own. A server that ran for ten minutes "
    "counts anew. With --coordinator, give it to every process.",
    lower_bound=0,
)


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    return run(argv, prepare, other_role=supervise_or_follow)


def prepare(engine: EngineConfig, template: str | None) -> Callable[[], "LLM"]:
    """Return the function that loads the model.

    template: a chat template instead of the checkpoint's, if not None.
    Raises: CheckpointError for a name that cannot be a model's, before a port is open.
    """
    check_name(engine.model, dummy=engine.load_format == "dummy")
    return lambda: load(engine, template)


def run(
    argv: list[str],
    prepare: Callable[[EngineConfig, str | None], Callable[[], "LLM"]],
    make_operations: Callable[[ServedModel], Operations] = operations_flags.operations_from_flags,
    other_role: Callable[[EngineConfig], int | None] = lambda engine: None,
) -> int:
    """Serve the model of the flags and return the exit status.

    prepare: takes the engine's settings and the chat template, and returns the function that loads the model.
    other_role: returns the exit status of a process that does something else than serving, or None.
    """
    if len(argv) > 1:
        return usage_error(f"unexpected arguments: {' '.join(argv[1:])}; accepted: one model, and flags")
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
            auth_tokens=(*read_tokens(AUTH_TOKEN_FILE.value), *read_api_keys(API_KEY.value)),
            admin_tokens=read_tokens(ADMIN_TOKEN_FILE.value, "admin_token_file"),
            served_model_names=tuple(SERVED_MODEL_NAME.value),
            reasoning_parser=REASONING_PARSER.value,
            tool_call_parser=TOOL_CALL_PARSER.value,
            allow_priority=ALLOW_PRIORITY.value,
            isolate_tokens=ISOLATE_TOKENS.value,
            max_requests_per_token=MAX_REQUESTS_PER_TOKEN.value,
            max_tokens_per_token=MAX_TOKENS_PER_TOKEN.value,
            drain_timeout_s=DRAIN_TIMEOUT_S.value,
            max_pending_tokens=MAX_PENDING_TOKENS.value,
        )
        template = None if CHAT_TEMPLATE.value is None else read_chat_template(CHAT_TEMPLATE.value)
        http = http_flags.http_from_flags()
        if http is None and not GRPC.value:
            raise ListenError("--nohttp and --nogrpc leave no port to serve")
        if http is not None and GRPC.value and http.port == config.port != 0:
            raise ListenError(
                f"--port={config.port} is the port of gRPC and --http_port={http.port} that of HTTP: "
                "give two ports, or --nogrpc for HTTP only"
            )
        load_model = prepare(engine, template)
        status = other_role(engine)
    except (CheckpointError, ConfigError, ListenError, OSError) as error:
        return report_error(error)
    if status is not None:
        return status
    work = serve(
        config,
        load_model,
        make_operations,
        http,
        grpc=GRPC.value,
        model_name=engine.model,
    )
    status = uvloop.run(work)
    compiling = sys.modules.get("jaxflow.engine.deferred")
    if compiling is not None and compiling.is_compiling():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # an XLA compilation cannot be interrupted, and nobody needs its program
    return status


def supervise_or_follow(engine: EngineConfig) -> int | None:
    """Start lost servers again, or follow process 0.

    Return None for a process that serves. Raises: ConfigError.
    """
    launch = launch_of(engine, os.environ)
    if MAX_RESTARTS.value:
        return supervise(sys.argv[1:], MAX_RESTARTS.value)
    return follow(engine) if launch is not None and launch.process_id > 0 else None


def follow(engine: EngineConfig) -> int:
    """Follow process 0 of the engine until its end, without a port. Return the exit status."""
    with collector_paused():
        from jaxflow.llm import LLM

    try:
        LLM.from_config(engine)
    except Exception as error:
        return report_error(error)
    except SystemExit:  # process 0 has ended in order
        return 0
    raise AssertionError("a follower returned")


def read_tokens(path: str | None, flag: str = "auth_token_file") -> tuple[str, ...]:
    """Return the tokens in the file at `path`; none if `path` is None. Errors name `flag`.

    Raises:
      ConfigError: the file has no token. A server without tokens would be open to everyone.
    """
    if path is None:
        return ()
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(flag, path, f"a file that can be read ({error.strerror})") from error
    tokens = tuple(line.strip() for line in content.decode("latin-1").splitlines() if line.strip())
    if not tokens or not all(token.isascii() for token in tokens):
        raise ConfigError(flag, path, "a file with at least one token, one a line, in ASCII")
    return tokens


def read_api_keys(keys: list[str]) -> list[str]:
    """Return the tokens of --api_key. Raises: ConfigError."""
    if not all(key.strip() and key.isascii() for key in keys):
        raise ConfigError("api_key", "...", "a token in ASCII, not empty")
    return [key.strip() for key in keys]


def load(config: EngineConfig, chat_template: str | None = None) -> "LLM":
    """Return the loaded and warm model. `chat_template`: instead of the checkpoint's, if not None.

    Raises:
      ConfigError: a chat template for a model without a tokenizer, and settings that cannot work.
    """
    with collector_paused():
        from jaxflow.llm import LLM  # imports JAX, which takes seconds: the ports are bound first

    llm = LLM.from_config(config)
    if chat_template is not None:
        if llm.tokenizer is None:
            raise ConfigError("chat_template", "a file", "no file, because the model has no tokenizer")
        llm.tokenizer = llm.tokenizer.with_chat_template(chat_template)
    make_first_token(llm)
    freeze_heap()
    return llm


async def serve(
    config: ServerConfig,
    load: Callable[[], "LLM"],
    make_operations: Callable[[ServedModel], Operations] = Operations,
    http: HttpConfig | None = None,
    *,
    grpc: bool = True,
    model_name: str = "",
) -> int:
    """Serve the model that `load` returns until a signal comes or the engine fails. Return the exit status.

    Args:
      http: settings of the HTTP server; None for none.
      grpc: open the gRPC ports.
      model_name: of the journals of batches. Another model continues no batch.
    """
    raise_file_limit()
    # The engine's thread gets the interpreter lock within 0.5 ms, even while many streams are written.
    sys.setswitchinterval(0.0005)
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()

    def on_signal() -> None:
        if stop_requested.is_set():
            os._exit(130)  # the second signal ends the process at once
        stop_requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    served = ServedModel(config)
    try:
        operations = make_operations(served)
    except (RequestLogError, TracingError) as error:
        return report_error(error)
    grpc_server = Server(served, operations.observe) if grpc else None
    http_server, batches = None, None
    if http is not None:
        endpoints = Endpoints(served)
        try:
            batches = open_batches(http.batch, endpoints, operations, model_name)
        except ConfigError as error:
            return report_error(error)
        http_server = http.server(endpoints, operations, batches)
    servers = [server for server in (grpc_server, http_server) if server is not None]
    try:
        try:
            for server in servers:
                await server.start()
        except ListenError:
            await asyncio.gather(*(server.stop() for server in servers))
            raise
        ready = None if grpc_server is None else grpc_server.show_ready
        watching = asyncio.create_task(operations.run(ready))
        addresses = []
        if grpc_server is not None:
            addresses.append(address(config.host, grpc_server.port))
        if http_server is not None:
            scheme = "https" if config.tls_cert else "http"
            addresses.append(f"{scheme}://{address(config.host, http_server.port)}")
        names = " and ".join(addresses)
        admin = (
            "" if grpc_server is None else f", admin on {address(config.admin_host, grpc_server.admin_port)}"
        )
        log(f"listening on {names}{admin}; loading the model")
        for warning in warnings(config):
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        try:
            stopped = asyncio.create_task(stop_requested.wait())
            return await serve_until_stopped(served, load, stopped, names, batches)
        finally:
            if batches is not None:
                await batches.close()
            await asyncio.gather(*(server.stop() for server in servers))
            watching.cancel()
    except ListenError as error:
        return report_error(error)
    finally:
        operations.close()


def address(host: str, port: int) -> str:
    """Return an address as an URL writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the highest allowed one. Each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve_until_stopped(
    served: ServedModel,
    load: Callable[[], "LLM"],
    stop_requested: asyncio.Task,
    addresses: str,
    batches: Batches | None = None,
) -> int:
    """Load the model, serve it, and drain once `stop_requested` is done. Return the exit status."""
    loading = in_thread(load)
    await asyncio.wait({loading, stop_requested}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log("stopped while loading")
        os._exit(0)  # an XLA compilation cannot be interrupted, and no request needs to finish
    llm = loading.result()
    if isinstance(llm, Exception):
        return report_error(llm)
    try:
        await served.serve(llm)
    except ConfigError as error:
        return report_error(error)
    if batches is not None:
        batches.start()
    log(f"ready on {addresses}")
    engine_failure = asyncio.create_task(served.engine_failure())
    await asyncio.wait({stop_requested, engine_failure}, return_when=asyncio.FIRST_COMPLETED)
    if engine_failure.done():
        print(
            "error: the engine stopped after a fault; the log has the traceback", file=sys.stderr, flush=True
        )
        return 1
    if batches is not None:
        await batches.close()  # the next server continues them
    log(f"draining: running requests have {served.config.drain_timeout_s:g} s to finish")
    log(f"drained, {await served.drain()} aborted")
    await asyncio.to_thread(llm.close)
    return 0


def report_error(error: Exception) -> int:
    """Print `error` and return exit status 1.

    An error that names a setting or a file, and full memory, are printed as one line. Any other error is a
    bug and is printed with its traceback.
    """
    expected = isinstance(error, ListenError | RequestLogError | TracingError | OSError)
    if expected or type(error).__module__.startswith(("jaxflow.", "serving.cluster.")):
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif "RESOURCE_EXHAUSTED" in str(error):  # XLA's error, of several lines on a GPU
        hint = "accepted: a lower --gpu_memory_utilization or --max_num_batched_tokens, or a smaller model"
        print(f"error: the memory is full: {str(error).splitlines()[0]}; {hint}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return 1


def in_thread[T](work: Callable[[], T]) -> asyncio.Future[T | Exception]:
    """Run `work` on a daemon thread. Return a future of its result, or of the exception that it raised."""
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
    """Return warnings about settings that leave a port open to everyone or unencrypted."""
    result = []
    for flag, host, tokens in (
        ("--host", config.host, config.auth_tokens),
        ("--admin_host", config.admin_host, config.admin_tokens or config.auth_tokens),
    ):
        if host not in ("127.0.0.1", "::1", "localhost"):
            if not tokens and not config.tls_client_ca:
                result.append(
                    f"{flag}={host}: everyone who reaches this port may use it; see --auth_token_file and "
                    f"--tls_client_ca"
                )
            elif not config.tls_cert:
                result.append(f"{flag}={host}: tokens and prompts travel unencrypted; see --tls_cert")
    return result


def log(text: str) -> None:
    """Print `text` to standard output at once."""
    print(text, flush=True)


if __name__ == "__main__":
    jaxflow.cli.engine_flags.define_engine_flags()
    for module in (jaxflow.cli.engine_flags, http_flags, operations_flags):
        flags.adopt_module_key_flags(module)
    sys.argv = jaxflow.cli.engine_flags.engine_arguments(sys.argv)
    run_command(main)

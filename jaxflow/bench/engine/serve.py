"""Load on a running server over gRPC or OpenAI's API, with random arrival times or the times of a trace.

  python -m serving --model llama-3.1-8b --load_format dummy --port 50051 &
  python -m jaxflow.bench serve --request_rate 8 --input_len 1024 --output_len 512
      --goodput ttft:500 --goodput tpot:50
  python -m jaxflow.bench serve --trace azure2023_conv.csv --arrivals trace
  python -m jaxflow.bench serve --trace mooncake_conversation.jsonl --arrivals trace --num_requests 500
  python -m jaxflow.bench serve --rounds 5 --num_requests 64 --input_len 1024 --next_input_len 128
      --output_len 256 --think_time_s 10
  python -m jaxflow.bench serve --backend openai-chat --target http://127.0.0.1:8000
  python -m jaxflow.bench serve --backend openai --text_prompts --request_rate 4 --batch_requests 2000

Each request is sent at its due time, regardless of the number of running requests. Latencies are measured at
the client. With --rounds, or a trace with shared blocks, the report holds the savings from KV reuse.
--admin_target adds the savings of each KV tier.

--backend openai and openai-chat measure any server with /v1/completions or /v1/chat/completions. Such a
server reports tokens at the end of a stream, so the tokens are spread over the chunks by their characters.
Rounds and --admin_target need gRPC. --batch_requests starts a batch of as many requests of the same lengths
on /v1/batches before the load, and cancels it after the load. The report then holds the batch's tokens per
second. `errors` in the report counts the failed requests by reason. The command then exits with 1.
"""

import asyncio
import contextlib
import itertools
import math
import ssl
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from jaxflow.bench.report import machine, reuse
from jaxflow.bench.report import requests as report
from jaxflow.bench.report.optimum import optimal
from jaxflow.bench.workload import conversations
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.backend import LETTERS, ServerBackend
from jaxflow.bench.workload.conversations import Conversation
from jaxflow.bench.workload.grpc_backend import GrpcBackend
from jaxflow.bench.workload.http_connection import HttpClient
from jaxflow.bench.workload.lengths import Item, WorkloadError
from jaxflow.bench.workload.load_generator import converse
from jaxflow.bench.workload.openai_backend import OpenAiBackend
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from serving.client import DEFAULT_TARGET, Client

GRPC = "grpc"
DEFAULT_URL = "http://127.0.0.1:8000"


def define_flags() -> None:
    flags.DEFINE_enum(
        "backend",
        GRPC,
        [GRPC, "openai", "openai-chat"],
        "Protocol of the server. openai asks /v1/completions, openai-chat /v1/chat/completions.",
    )
    flags.DEFINE_string(
        "target",
        None,
        f"Server address, host:port or a URL. Default: {DEFAULT_TARGET} with gRPC, else {DEFAULT_URL}.",
    )
    flags.DEFINE_string(
        "served_model_name",
        None,
        "Model name in the requests to OpenAI's API; default: the first name that the server lists.",
    )
    flags.DEFINE_bool(
        "text_prompts",
        False,
        (
            "Send a text of one letter a token instead of token ids, for a server with the tokenizer of "
            "`bench tokenizer`. A chat always sends text."
        ),
    )
    flags.DEFINE_integer(
        "batch_requests",
        0,
        "Requests of a batch that runs beside the load. The server needs /v1/batches and /metrics.",
        lower_bound=0,
    )
    flags.DEFINE_string("dtype", None, "The model's dtype, for Eq. 5, if the server does not report it.")
    flags.DEFINE_integer(
        "tensor_parallel_size",
        1,
        "GPUs of the server, for Eq. 5 and power, if the server does not report them.",
        lower_bound=1,
    )
    flags.DEFINE_string(
        "model",
        None,
        (
            "Folder, file or name of the served model's configuration, for Eq. 5; default: the served "
            "model's name."
        ),
    )
    flags.DEFINE_float("request_rate", math.inf, "Mean requests per second; inf sends all at once.")
    flags.DEFINE_enum(
        "arrivals",
        "poisson",
        ["poisson", "trace"],
        "Arrival times: exponential intervals, or the trace's times, stretched to --request_rate if given.",
    )
    flags.DEFINE_float(
        "timeout_s", None, "Seconds until a request is abandoned; default: no limit.", lower_bound=0.0
    )
    flags.DEFINE_float("wait_s", 60.0, "Maximum seconds to wait until the server is ready.", lower_bound=0.0)
    flags.DEFINE_string(
        "admin_target",
        None,
        "Admin service address, host:port, for the figures of each KV tier.",
    )
    flags.DEFINE_string(
        "tls_ca",
        None,
        "PEM file of the authority that signed the server's certificate; enables TLS.",
    )
    flags.DEFINE_string(
        "tls_cert", None, "PEM file of this client's certificate, for a server that requires one."
    )
    flags.DEFINE_string("tls_key", None, "PEM file of the client certificate's private key.")
    flags.DEFINE_string("auth_token", None, "The server's bearer token.")
    options.define_workload()
    options.define_conversations()
    options.define_report()


def arriving(items: Sequence[Item], arrivals: str, rate: float, seed: int) -> list[Item]:
    """Return the items with the selected arrival times. Raises: WorkloadError."""
    if arrivals == "trace":
        return workload.trace_arrivals(items, None if math.isinf(rate) else rate)
    return workload.poisson_arrivals(items, rate, seed)


async def measure(
    backend: ServerBackend,
    items: Sequence[Item],
    vocab_size: int,
    *,
    seed: int = 0,
    slo: Mapping[str, float] | None = None,
    timeout_s: float | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Return the report of one load, without its head and the optimum.

    `power` is the power of this machine's GPU, if it has one.
    """
    talks = conversations.of_items(items, workload.prompts(items, vocab_size, seed))
    return await measure_conversations(backend, talks, slo=slo, timeout_s=timeout_s, progress=progress)


async def measure_conversations(
    backend: ServerBackend,
    talks: Sequence[Conversation],
    *,
    admin: Client | None = None,
    slo: Mapping[str, float] | None = None,
    timeout_s: float | None = None,
    progress: bool = False,
    devices: int = 1,
) -> dict[str, Any]:
    """Return the report of conversations, with the reused tokens, and by tier if `admin` is given.

    devices: the number of GPUs of this machine that the server uses.
    """
    before = await admin.stats() if admin is not None else None
    with machine.watch(devices) as readings:
        by_talk, duration_s = await converse(backend, talks, timeout_s=timeout_s, progress=progress)
    after = await admin.stats() if admin is not None else None
    tiers = None if before is None or after is None else reuse.tier_tokens(before.kv_tiers, after.kv_tiers)
    records = list(itertools.chain(*by_talk))
    result = report.figures(records, duration_s, slo) | reuse.figures(records, tiers)
    return result | {"steady_state": report.steady_state(records), "power": machine.power_summary(readings)}


def find_model_config(name: str) -> ModelConfig | None:
    """Return a model's configuration by folder, file or shipped name, or None if there is none on this
    machine."""
    try:
        return open_checkpoint(name, load_format="dummy").model_config
    except (ConfigError, CheckpointError, OSError):
        return None


def check_flags() -> None:
    """Check the flags before waiting for a server. Raises: WorkloadError."""
    f = flags.FLAGS
    if f.arrivals == "trace" and not f.trace:
        raise WorkloadError("--arrivals trace: accepted only together with --trace, which gives the times")
    options.check_workload(math.inf)
    if f.backend != GRPC and f.rounds > 1 and not f.trace:
        raise WorkloadError(
            f"--rounds {f.rounds}: accepted only with --backend {GRPC}, which returns token ids"
        )
    if f.backend != GRPC and f.admin_target:
        raise WorkloadError(f"--admin_target {f.admin_target}: accepted only with --backend {GRPC}")
    if f.backend == GRPC and f.batch_requests:
        raise WorkloadError(
            f"--batch_requests {f.batch_requests}: accepted only with a backend of OpenAI's API"
        )
    arriving([Item(1, 1), Item(1, 1, arrival_s=1.0)], f.arrivals, f.request_rate, seed=0)


def _access() -> dict[str, str | None]:
    f = flags.FLAGS
    return {"tls_ca": f.tls_ca, "tls_cert": f.tls_cert, "tls_key": f.tls_key, "auth_token": f.auth_token}


async def _connect(stack: contextlib.AsyncExitStack) -> ServerBackend:
    """Return the server that the flags name. Raises: ConfigError, OSError."""
    f = flags.FLAGS
    if f.backend == GRPC:
        client = await stack.enter_async_context(Client(f.target or DEFAULT_TARGET, **_access()))
        return GrpcBackend(client, f.text_prompts)
    tls = ssl.create_default_context(cafile=f.tls_ca)
    if f.tls_cert:
        tls.load_cert_chain(f.tls_cert, f.tls_key)
    headers = {"authorization": f"Bearer {f.auth_token}"} if f.auth_token else {}
    http = HttpClient(f.target or DEFAULT_URL, headers, tls)
    stack.callback(http.close)
    return OpenAiBackend(http, chat=f.backend == "openai-chat", text=f.text_prompts, name=f.served_model_name)


async def _ready(backend: ServerBackend, wait_s: float) -> None:
    """Wait until the server is ready, and say so after 2 s. Raises: as `ServerBackend.wait_until_ready`."""
    text = f"waiting for the server, at most {wait_s:g} s (--wait_s)"
    notice = asyncio.get_running_loop().call_later(2.0, lambda: print(text, file=sys.stderr))
    try:
        await backend.wait_until_ready(wait_s)
    finally:
        notice.cancel()


async def _run() -> dict[str, Any]:
    f = flags.FLAGS
    check_flags()
    slo = report.parse_goodput(f.goodput)
    async with contextlib.AsyncExitStack() as stack:
        backend = await _connect(stack)
        admin = (
            await stack.enter_async_context(Client(f.admin_target, **_access())) if f.admin_target else None
        )
        await _ready(backend, f.wait_s)
        served = await backend.model()
        config = find_model_config(f.model or served.name)
        vocab_size = served.vocab_size or (config.vocab_size if config else None)
        if vocab_size is None:
            if f.backend == "openai" and not f.text_prompts:
                accepted = (
                    "a configuration on this machine, named by --model, for the size of the vocabulary; "
                    "or --text_prompts"
                )
                raise ConfigError("model", f.model or served.name, accepted)
            vocab_size = len(LETTERS)
        dtype = served.dtype or f.dtype
        tp = served.tensor_parallel_size or f.tensor_parallel_size
        items, described = options.items_from_flags(served.max_model_len, ordered=f.arrivals == "trace")
        items = arriving(items, f.arrivals, f.request_rate, f.workload_seed)
        result: dict[str, Any] = {
            "command_name": "serve",
            "model": served.name,
            "backend": f.backend,
            **machine.describe(),
            "workload": described,
        }
        result |= {
            "request_rate": "inf" if math.isinf(f.request_rate) else f.request_rate,
            "arrivals": f.arrivals,
        }
        talks, more = options.conversations_from_flags(items, served.max_model_len, vocab_size)
        described |= more
        batch = None
        if f.batch_requests:
            assert isinstance(backend, OpenAiBackend)  # see `check_flags`
            others = workload.prompts(items, vocab_size, f.workload_seed + 1)  # the load has other prompts
            result["batch_requests"] = f.batch_requests
            batch = await stack.enter_async_context(backend.batch(items, others, f.batch_requests))
        result |= await measure_conversations(
            backend,
            talks,
            admin=admin,
            slo=slo,
            timeout_s=f.timeout_s,
            progress=True,
            devices=tp,
        )
        result["batch_output_throughput"] = None
        if batch is not None:
            result |= await batch.figures(result["total_output_tokens"])
    tokens = result["total_input_tokens"], result["total_output_tokens"]
    if config and dtype and sum(tokens):
        result |= optimal(config, *tokens, dtype=dtype, tp=tp, device=f.optimal_device)
        result["fraction_of_optimal"] = result["total_token_throughput"] / result["optimal_token_throughput"]
    return result


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises: WorkloadError, ConfigError for invalid flags; RequestFailed if no server answers.
    """
    result = asyncio.run(_run())
    extra = {
        "Model": result["model"],
        "Request rate configured (RPS)": f"{result['request_rate']} ({result['arrivals']})",
    }
    if "batch_status" in result:
        extra["Batch output token throughput (tok/s)"] = (
            f"{result['batch_output_throughput']:.2f} ({result['batch_status']})"
        )
    print(report.text("Serving Benchmark Result", result, extra))
    if result["reusable_input_tokens"] or result["reused_input_tokens"]:
        print(reuse.text(result))
    print(machine.text(result))
    return result

"""Load on a running server over gRPC, with random arrival times or the arrival times of a trace.

  python -m serving --model llama-3.1-8b --load_format dummy --port 50051 &
  python -m jaxflow.bench serve --request_rate 8 --input_len 1024 --output_len 512
      --goodput ttft:500 --goodput tpot:50
  python -m jaxflow.bench serve --trace azure2023_conv.csv --arrivals trace
  python -m jaxflow.bench serve --trace mooncake_conversation.jsonl --arrivals trace --num_requests 500
  python -m jaxflow.bench serve --rounds 5 --num_requests 64 --input_len 1024 --next_input_len 128
      --output_len 256 --think_time_s 10

Each request is sent at its due time, regardless of the number of running requests. Latencies are measured at
the client. With --rounds, or a trace with shared blocks, the report holds the savings from KV reuse.
--admin_target adds the savings of each KV tier.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from jaxflow.bench.report import machine, reuse
from jaxflow.bench.report import requests as report
from jaxflow.bench.report.optimum import optimal
from jaxflow.bench.workload import conversations
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.conversations import Conversation
from jaxflow.bench.workload.lengths import Item, WorkloadError
from jaxflow.bench.workload.load_generator import converse
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from serving.client import DEFAULT_TARGET, Client


def define_flags() -> None:
    flags.DEFINE_string("target", DEFAULT_TARGET, "Server address, host:port.")
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
    client: Client,
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
    return await measure_conversations(client, talks, slo=slo, timeout_s=timeout_s, progress=progress)


async def measure_conversations(
    client: Client,
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
        by_talk, duration_s = await converse(client, talks, timeout_s=timeout_s, progress=progress)
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
    arriving([Item(1, 1), Item(1, 1, arrival_s=1.0)], f.arrivals, f.request_rate, seed=0)


async def _run() -> dict[str, Any]:
    f = flags.FLAGS
    check_flags()
    slo = report.parse_goodput(f.goodput)
    access = {"tls_ca": f.tls_ca, "tls_cert": f.tls_cert, "tls_key": f.tls_key, "auth_token": f.auth_token}
    async with Client(f.target, **access) as client, contextlib.AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Client(f.admin_target, **access)) if f.admin_target else None
        await client.wait_until_ready(f.wait_s)
        served = await client.model()
        items, described = options.items_from_flags(served.max_model_len, ordered=f.arrivals == "trace")
        items = arriving(items, f.arrivals, f.request_rate, f.workload_seed)
        result: dict[str, Any] = {
            "command_name": "serve",
            "model": served.name,
            **machine.describe(),
            "workload": described,
        }
        result |= {
            "request_rate": "inf" if math.isinf(f.request_rate) else f.request_rate,
            "arrivals": f.arrivals,
        }
        talks, more = options.conversations_from_flags(items, served.max_model_len, served.vocab_size)
        described |= more
        result |= await measure_conversations(
            client,
            talks,
            admin=admin,
            slo=slo,
            timeout_s=f.timeout_s,
            progress=True,
            devices=served.tensor_parallel_size,
        )
    config = find_model_config(f.model or served.name)
    tokens = result["total_input_tokens"], result["total_output_tokens"]
    if config and sum(tokens):
        result |= optimal(
            config, *tokens, dtype=served.dtype, tp=served.tensor_parallel_size, device=f.optimal_device
        )
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
    print(report.text("Serving Benchmark Result", result, extra))
    if result["reusable_input_tokens"] or result["reused_input_tokens"]:
        print(reuse.text(result))
    print(machine.text(result))
    return result

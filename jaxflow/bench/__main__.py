"""Measure JaxFlow with the commands and report layout of `vllm bench`.

  python -m jaxflow.bench COMMAND [flags]

  throughput      offline: all requests at once, until the last token; and the steady state
  latency         one batch of requests, repeated
  batch           a file of requests with a journal, in turns with the Python API
  serve           load on a running server over gRPC or HTTP, at a rate or at the times of a trace
  tokenizer       a byte-level tokenizer of a model's vocabulary, for a comparison of servers
  hierarchy       savings of each KV tier for conversations, and its cost without shared prefixes
  disk            the disk tier only: page writes, page reads, and indexing at start
  host            CPU time of a step, with a device that takes no time
  followers       host time that process 0 of an engine spends for another process
  transport       requests per second of the HTTP server on one core, without a device
  link            transfer rates between device and host, and the slowdown of a step by copies
  offload         block sizes of a model that does not fit the device; JSON and a chart
  kernels         each kernel and its rivals, on one GPU
  collectives     collectives of a mixture layer alone, over several devices
  decode_step     a decode step with each method of launching its kernels, and the time of each kernel
  plans           several plans of a step, in the steady state of workloads
  trace           utilization of each resource over one layer, from a profiler trace; JSON and a chart
  memory          temporary memory of a step's programs, and the rest of the memory for KV
  longest_prompt  the longest prompt that fits the memory, whole and in chunks
  perplexity      perplexity of a text at each precision of weights and KV, or with attention spans
  value_rows      perplexity and last-word accuracy by the share of V rows that attention reads
  pipeline        bubbles of pipeline stages, on the engine or on virtual clocks; JSON and a chart
  decode_fleet    decode steps of a mixture over many devices, by layout, simulated
  sarathi         SARATHI's tables and figures, on the engine or by the cost model; JSON and a chart
  expert_balance  balance of experts over devices, with and without copies of experts, simulated
  skewed_experts  tokens/s and balance of an engine whose router prefers some experts
  router          throughput, balance and prefix hits of several replicas behind the router, simulated
  prefill_apart   first tokens and gaps where some replicas compute prompts for the others, simulated
  sweep           rates, batch sizes or lengths of an engine; SARATHI's scheduler curves; JSON and a chart

The reports of throughput, latency, serve, engine sweeps, hierarchy and plans hold a fraction of optimal
throughput. NanoFlow's Eq. 5 gives the optimal throughput of the device. All of these reports except serve's
also hold the fraction of the bound by compute, memory, network and energy. The energy bound needs a device
with known joules. `python -m jaxflow.bench COMMAND --help` lists the flags of a command.
"""

import math
import sys
from pathlib import Path

from absl import flags

from jaxflow.cli.exit_status import exit_status
from jaxflow.cli.subcommands import Subcommands
from jaxflow.engine.heap import collector_paused

COMMANDS = {
    "throughput": "engine.throughput",
    "latency": "engine.latency",
    "batch": "engine.batch_file",
    "serve": "engine.serve",
    "tokenizer": "workload.tokenizer",
    "hierarchy": "kv.hierarchy",
    "disk": "kv.disk",
    "host": "engine.host",
    "followers": "engine.followers",
    "transport": "transport.measure",
    "link": "kv.link",
    "offload": "engine.offload",
    "kernels": "kernels.compare",
    "collectives": "kernels.collectives",
    "decode_step": "kernels.decode_step",
    "plans": "plans.compare",
    "trace": "plans.trace",
    "memory": "engine.memory",
    "longest_prompt": "context.longest_prompt",
    "perplexity": "engine.perplexity",
    "value_rows": "engine.value_rows",
    "pipeline": "pipeline.study",
    "decode_fleet": "pipeline.decode_fleet",
    "sarathi": "sarathi.command",
    "expert_balance": "engine.expert_balance",
    "skewed_experts": "engine.skewed_experts",
    "router": "router.command",
    "prefill_apart": "router.apart",
    "sweep": "engine.sweep",
}

CHARTS = ("output_png", "plot")  # flags that name a command's chart file
RENAMED = {"beside_sequential": "compare_sequential", "smallest": "min_bucket"}  # flags of earlier releases


def main(argv: list[str]) -> int:
    """Run one command and return its exit status: 2 for a wrong command line, 1 for a failed run."""
    with collector_paused():  # imports the command
        command = Subcommands("jaxflow.bench", __doc__, COMMANDS, RENAMED, _flag_help).select(argv)
    return command if isinstance(command, int) else _run(command)


def _flag_help(command) -> list[str]:
    modules = (
        command.__name__,
        "jaxflow.bench.workload.flags",
        "jaxflow.flexgen.config",
        "jaxflow.cli.engine_flags",
    )
    return [
        flags.FLAGS.module_help(sys.modules[name])
        for name in modules
        if name in flags.FLAGS.flags_by_module_dict()
    ]


def _run(command) -> int:
    from jaxflow.bench.report import machine
    from jaxflow.bench.report.requests import write_json
    from jaxflow.cli.output_files import check_outputs, check_pictures
    from jaxflow.parallel.mesh import choose_platform

    choose_platform()
    without_weights()
    try:
        check_outputs("output_json", make_folders=True)
        check_pictures(*(name for name in CHARTS if name in flags.FLAGS), make_folders=True)
        with machine.watch(_devices()) as readings:
            result = command.run()
        if flags.FLAGS.output_json:
            write_json(flags.FLAGS.output_json, machine.with_power(result, readings))
            print(f"wrote {flags.FLAGS.output_json}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except Exception as error:
        if not isinstance(error, user_errors()):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    if result.get("failed"):
        reasons = "; ".join(f"{count} x {reason}" for reason, count in result["errors"].items())
        print(f"error: {result['failed']} requests failed: {reasons}", file=sys.stderr)
        return 1
    return 0


def _devices() -> int:
    """Return the number of devices that the command's flags ask for; 1 for a command without that flag."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return math.prod(int(flags.FLAGS[size].value or 1) for size in sizes if size in flags.FLAGS)


def user_errors() -> tuple[type[Exception], ...]:
    """Return the errors that name a wrong setting, file or answer. Any other error keeps its traceback."""
    from jaxflow.bench.report.trace_events import TraceError
    from jaxflow.bench.workload.lengths import WorkloadError
    from jaxflow.config import ConfigError
    from jaxflow.flexgen.policy import PolicyError
    from jaxflow.model.checkpoints.source import CheckpointError
    from jaxflow.pipeline.plan import PlanError
    from serving.client import RequestFailed

    return (
        ConfigError,
        WorkloadError,
        CheckpointError,
        PlanError,
        PolicyError,
        TraceError,
        RequestFailed,
        OSError,
    )


def without_weights() -> None:
    """Select dummy weights for a model given by a shipped config's name, which has no checkpoint."""
    from jaxflow.model.checkpoints.checkpoint import shipped_configs

    f = flags.FLAGS
    if (
        "load_format" in f
        and f.load_format == "auto"
        and f.model in shipped_configs()
        and not Path(f.model).exists()
    ):
        f.load_format = "dummy"


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv))

"""Measures JaxFlow, in the words and layout of `vllm bench`.

  python -m jaxflow.bench COMMAND [flags]

  throughput   offline: all requests at once, till the last token; and the steady state
  latency      one batch of requests, repeated
  serve        load on a running server over gRPC, at a rate or at a trace's times
  hierarchy    what each tier of the KV hierarchy saves conversations, and costs requests that share nothing
  disk         the disk tier alone: pages down, up, and found at a start
  host         what a step costs on the CPU, with a device that takes no time
  link         between device and host: its rates, and what copies beside a step cost the step
  offload      blocks of a model that does not fit the device: latency against throughput, JSON and a picture
  kernels      each kernel beside its rivals, on one GPU
  decode_step  a step of decodes under each way to launch its kernels, and each kernel's time
  plans        plans of a step beside each other, in the steady state of workloads
  trace        what each resource does over one layer of a step, from a profiler's trace; JSON and a picture
  memory       what a step's programs need beside weights and cache, and what room that leaves for KV
  perplexity   of a text, under each way to keep a model's numbers
  sweep        rates, batch sizes or lengths of an engine; SARATHI's curves of the scheduler; JSON and a
  picture

Reports of throughput, latency, serve, sweep of an engine, hierarchy and plans hold the fraction reached of
the optimal throughput of NanoFlow's Eq. 5 for the device; all but serve's also that of the bound by compute,
memory, network and energy, where joules are known.
`python -m jaxflow.bench COMMAND --help` lists a command's flags.
"""

import importlib
import sys
from pathlib import Path

from absl import flags

from jaxflow.ending import exit_status
from jaxflow.flags import parse

COMMANDS = (
    *("throughput", "latency", "serve", "hierarchy", "disk", "host", "link", "offload", "kernels"),
    *("decode_step", "plans", "trace", "memory", "perplexity", "sweep"),
)

DRAWN = ("output_png", "plot")  # flags that name what a command draws into


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status: 2 for a wrong command line, 1 for a run that could not be."""
    if len(argv) < 2 or argv[1] in ("--help", "-h", "help"):
        print(__doc__)
        return 0 if len(argv) > 1 else 2
    if argv[1] not in COMMANDS:
        print(f"error: {argv[1]!r} is no command; {', '.join(COMMANDS)} are", file=sys.stderr)
        return 2
    command = importlib.import_module(f"jaxflow.bench.{argv[1]}")
    command.define_flags()
    if {"--help", "-h"} & set(argv[2:]):
        print(command.__doc__, *_flag_help(command), sep="\n")
        return 0
    try:
        parse(argv[1:])
    except flags.Error as error:
        print(f"error: {error}\n`python -m jaxflow.bench {argv[1]} --help` lists the flags", file=sys.stderr)
        return 2
    return _run(command)


def _flag_help(command) -> list[str]:
    modules = (command.__name__, "jaxflow.bench.options", "jaxflow.offload.options", "jaxflow.flags")
    return [
        flags.FLAGS.module_help(sys.modules[name])
        for name in modules
        if name in flags.FLAGS.flags_by_module_dict()
    ]


def _run(command) -> int:
    from jaxflow.bench.report import write_json
    from jaxflow.mesh import choose_platform
    from jaxflow.model.checkpoint import CheckpointError
    from jaxflow.outputs import check_outputs, check_pictures
    from serving.client import RequestFailed

    choose_platform()
    without_weights()
    try:
        check_outputs("output_json", make_folders=True)
        check_pictures(*(name for name in DRAWN if name in flags.FLAGS), make_folders=True)
        result = command.run()
        if flags.FLAGS.output_json:
            write_json(flags.FLAGS.output_json, result)
            print(f"wrote {flags.FLAGS.output_json}", file=sys.stderr)
    except BrokenPipeError:
        raise
    except (
        ValueError,
        OSError,
        CheckpointError,
        RequestFailed,
    ) as error:  # ConfigError and WorkloadError are ValueErrors
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def without_weights() -> None:
    """A shipped config's name has no weights to load: what is measured of it has random ones."""
    from jaxflow.model.checkpoint import shipped_configs

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

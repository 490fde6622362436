"""Serve, ask and measure a large language model.

  jaxflow COMMAND [flags]

  serve    serve a model over HTTP and gRPC                      python -m serving
  ask      ask a running server, or hold a conversation          python -m serving.client
  batch    answer a file of requests                             python -m serving.batch
  bench    measure throughput, latency, kernels and KV tiers     python -m jaxflow.bench
  search   measure a device and search plans for a model         python -m search
  compile  compile a model's programs before the first start     python -m jaxflow.compile

`jaxflow COMMAND --help` lists the flags of a command. `jaxflow --version` prints the version. The last column
names the module that runs the command.
"""

import runpy
import sys

import jaxflow

MODULES = {
    "serve": "serving",
    "ask": "serving.client",
    "batch": "serving.batch",
    "bench": "jaxflow.bench",
    "search": "search",
    "compile": "jaxflow.compile",
}


def main() -> None:
    """Run one command and end the process with its exit status."""
    command = sys.argv[1] if len(sys.argv) > 1 else None
    if command == "--version":
        print(f"jaxflow {jaxflow.__version__}")
    elif command in (None, "--help", "-h", "help"):
        print((__doc__ or "").strip())
        sys.exit(2 if command is None else 0)
    elif command in MODULES:
        sys.argv[:2] = [f"jaxflow {command}"]
        runpy.run_module(MODULES[command], run_name="__main__", alter_sys=True)
    else:
        accepted = ", ".join((*MODULES, "--version", "--help"))
        print(f"error: unknown command {command!r}; accepted: {accepted}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

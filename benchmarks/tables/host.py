"""Tables of the host's work: steps, processes and the HTTP server."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.tables.cells import Report, Row, Section, links
from benchmarks.tables.reports import of_command

TRANSPORT_FIGURES = (("per_s", 0), ("per_cpu_s", 0), ("server_cores", 2))
TRANSPORT_LOADS = ("streamed_chunks", "bare_uvicorn_chunks", "plain_requests", "bare_uvicorn_requests")
FIRST_TOKEN_DELAYS = {
    "to_engine_ms": "from the caller to the engine",
    "to_caller_ms": "from the engine to the caller",
    "added_ms": "both",
}


def host_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the CPU time of a step's host work."""
    for path, report in of_command(reports, "host"):
        for one in report["host"]:
            figures = (f"{one['mean_rows']:.0f}", f"{one['median_ms']:.2f}", f"{one['p99_ms']:.2f}")
            yield report["cpu"], f"{one['running']}", *figures, links([path])


def follower_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the host time of process 0 for the other processes of an engine, by step."""
    for path, report in of_command(reports, "followers"):
        yield (
            report.get("cpu", report["device"]),
            report["model"],
            f"{report['processes']}",
            f"{report['step_ms']:.0f}",
            f"{report['record_us']:.0f}",
            f"{report['sender_cpu_us']:.0f}",
            f"{report['overhead']:.3%}",
            f"{len(report['overheads'])}",
            links([path]),
        )


def transport_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the rates of the HTTP server without a device."""
    for path, report in of_command(reports, "transport"):
        for name in (load for load in TRANSPORT_LOADS if load in report):
            one = report[name]
            figures = (f"{one[key]:.{digits}f}" for key, digits in TRANSPORT_FIGURES)
            load = f"{max(report['load_average']):.1f}"
            yield report["cpu"], name.replace("_", " "), *figures, load, links([path])


def first_token_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the delays that the HTTP server adds to a first token while streams run."""
    for path, report in of_command(reports, "transport"):
        if "first_tokens" in report:
            for name, what in FIRST_TOKEN_DELAYS.items():
                one, work = report["first_tokens"][name], report["workload"]
                streams = f"{work['busy_streams']} of {1000 * work['busy_step_s']:.0f} ms a step"
                yield report["cpu"], streams, what, f"{one['median']:.1f}", f"{one['p99']:.1f}", links([path])


SECTIONS: tuple[Section, ...] = (
    (
        "Host time",
        "CPU milliseconds of the engine's host work in one step.",
        ("CPU", "running requests", "tokens a step", "median ms", "p99 ms", "report"),
        host_rows,
    ),
    (
        "One engine of several processes",
        "Process 0 records each step for the others, and a thread sends the record while the step runs. The "
        "overhead is a recording over a step, the median of the batches.",
        (
            *("processor", "model", "processes", "step, ms", "recording, µs", "sender's CPU, µs"),
            *("overhead", "batches", "report"),
        ),
        follower_rows,
    ),
    (
        "HTTP transport",
        "Chunks of 256 streams, and plain requests, through the HTTP server on one core, with an engine "
        "of paced steps. Bare uvicorn answers the same clients with the same bytes, without JaxFlow and "
        "without an engine. The load average counts other programs of the machine.",
        ("CPU", "what", "a second", "a CPU second of the server", "cores of the server", "load", "report"),
        transport_rows,
    ),
    (
        "First tokens over HTTP",
        "The delay that the HTTP server on one core adds to the first token of single requests while streams "
        "run.",
        ("CPU", "streams", "delay", "median, ms", "p99, ms", "report"),
        first_token_rows,
    ),
)

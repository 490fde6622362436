"""Tables of several replicas, and of batches of requests."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.tables.cells import Report, Row, Section, lengths, links, machine, model_of
from benchmarks.tables.reports import of_command


def router_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each rule of simulated replicas, and one engine with all memory."""
    for path, report in of_command(reports, "router"):
        model = f"{report['model']}, {report['cluster']['replicas']} × {report['cost_model_of']}"
        scaling = list(report["scaling"].values())[-1]["over_one_replica"]
        for name, one in report["balance"].items():
            yield (
                model,
                name,
                f"{scaling:.2f}" if name == "router" else "–",
                f"{one['hits_over_one_engine']:.3f}",
                f"{one['outstanding_max_over_mean']:.3f}",
                f"{one['median_ttft_ms']:.0f}",
                f"{one['p99_ttft_ms']:.0f}",
                links([path]),
            )


def apart_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each number of simulated prefill replicas."""
    for path, report in of_command(reports, "prefill_apart"):
        model = f"{report['model']}, {report['cluster']['replicas']} × {report['cost_model_of']}"
        for one in report["runs"]:
            yield (
                model,
                f"{report['workload']['request_rate']:g}",
                f"{one['prefill_replicas']}",
                f"{one['apart_share']:.2f}",
                *(f"{one[name]:.0f}" for name in ("median_ttft_ms", "p99_ttft_ms")),
                *(f"{one[name]:.1f}" for name in ("median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")),
                links([path]),
            )


def fault_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each fault of a replica."""
    for path, report in of_command(reports, "replica_faults"):
        for name, one in report["faults"].items():
            seconds = (one[key] for key in ("seen_s", "served_s", "again_s"))
            load = max(run["load_average"] for run in one["runs"])
            yield (
                f"{report['device']}, {report['cpu_cores']} cores",
                f"{report['model']}, {report['replicas']} replicas",
                name,
                *("–" if value is None else f"{value:.1f}" for value in seconds),
                f"{one['requests']}",
                f"{one['lost']}, {one['doubled']}",
                f"{len(one['runs'])}",
                f"{load:.1f}",
                links([path]),
            )


def message_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each way of tokens from a Ray actor to the router."""
    for path, report in of_command(reports, "ray_messages"):
        for name in ("message_a_step", "serve_stream_a_request"):
            one = report[name]
            figures = (f"{one['tokens_per_s']:,.0f}", f"{one['cpu_ms_per_1000_tokens']:.1f}")
            load = f"{max(report['load_average']):.1f}"
            yield name.replace("_", " "), f"{report['streams']}", *figures, load, links([path])


def batch_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the throughput of a batch file and that of `LLM.generate`."""
    for path, report in of_command(reports, "batch"):
        rates, one = report["total_token_throughput"], report["workload"]
        yield (
            machine(report),
            model_of(report),
            lengths(one),
            f"{one['requests']}",
            f"{rates['generate']:,.0f}",
            f"{rates['batch']:,.0f}",
            f"{report['ratio']:.3f}",
            f"{len(report['seconds']['batch'])}",
            f"{report['resume_s']:.2f}",
            links([path]),
        )


def ray_batch_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the lines a second of a batch over simulated engines on Ray."""
    for path, report in of_command(reports, "ray_batch"):
        work = report["workload"]
        for one in sorted(report["runs"], key=lambda one: one["replicas"]):
            over_one = report["speedup"] if one["replicas"] > 1 else 1.0
            engine = f"{work['sequences']} sequences, {1000 * work['step_s']:.0f} ms a step"
            figures = (f"{work['lines']}", f"{one['lines_per_s']:.1f}", f"{over_one:.2f}")
            yield f"{one['replicas']}", engine, *figures, f"{len(one['seconds'])}", links([path])


SECTIONS: tuple[Section, ...] = (
    (
        "Replicas behind a router, simulated",
        "Throughput is relative to one replica, when all requests arrive at once. Hits are relative to "
        "the prefix hits of one engine with all memory. Load is the largest mean load over the mean of "
        "all. First tokens are at 80 % of the capacity.",
        (
            *("model and replicas", "rule", "throughput", "hits", "load", "first token, ms"),
            *("p99 first token, ms", "report"),
        ),
        router_rows,
    ),
    (
        "Prefill apart from decode, simulated",
        "The replicas of both kinds together stay the same. A part of the prompts is computed apart. "
        "Milliseconds of first tokens, of the mean gap between the tokens of a request, and of all gaps.",
        (
            *("model and replicas", "requests/s", "of them prefill", "apart", "TTFT", "p99 TTFT", "TPOT"),
            *("p99 TPOT", "p99 gap", "report"),
        ),
        apart_rows,
    ),
    (
        "Faults of a replica",
        "Medians of seconds. `known` begins at the fault and ends when the router knows of the fault. "
        "`served` begins then, and ends when the replica's requests have their next token from another "
        "replica. `again` begins at the fault and ends when the replica serves. The load is that of the "
        "machine. A slow replica stays, and others serve new requests.",
        (
            *("device", "model", "fault", "known, s", "served, s", "again, s", "requests", "lost, doubled"),
            *("runs", "load", "report"),
        ),
        fault_rows,
    ),
    (
        "Tokens from a Ray actor to the router",
        "Medians, without an engine. CPU is that of the router's process.",
        ("way", "streams", "tokens/s", "CPU ms for 1,000 tokens", "load", "report"),
        message_rows,
    ),
    (
        "Batch files",
        "A file of requests and `LLM.generate` of the same requests, in turns, medians of tokens/s. Resume "
        "is the time to read a finished journal.",
        (
            *("device", "model", "tokens in / out", "requests", "generate", "batch", "ratio", "turns"),
            *("resume, s", "report"),
        ),
        batch_rows,
    ),
    (
        "Batches over replicas",
        "One file through a journal, over replicas on Ray on one machine. The steps of an engine take a "
        "fixed time by sleeping, so the figures show what Ray and the journal cost.",
        ("replicas", "engine", "lines", "lines a second", "over one", "runs", "report"),
        ray_batch_rows,
    ),
)

"""Writes the README's tables of measurements from the reports beside this file.

  python benchmarks/table.py      rewrites the tables in README.md; a test holds the two together

A report is what `python -m jaxflow.bench … --output_json benchmarks/NAME.json` wrote; `rivals.json` has what
other engines reached under the same protocol.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxflow.bench.report import optimum
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BLOCK = re.compile(r"(?<=<!-- benchmarks -->\n).*?(?=<!-- /benchmarks -->)", re.S)
THROUGHPUT = (
    *(
        "machine",
        "model",
        "in / out tokens",
        "total tokens/s",
        "of the optimum",
        "of the bound, by what",
        "watts at MHz",
    ),
    *("beside it", "report"),
)
RATE = (
    *(
        "machine",
        "model",
        "trace: mean in / out",
        "requests/s, offered",
        "total tokens/s",
        "latency a token, ms: mean",
        "p99",
        "p99 / mean",
        "later half's mean",
        "p99 / mean",
    ),
    *("to the first token, ms", "report"),
)
HOST = ("CPU", "requests running", "tokens a step", "median ms of CPU a step", "p99", "report")

OFFLOAD = (
    *(
        "machine: GB of device, of host",
        "model: bits of weights, of KV",
        "in / out tokens",
        "sequences a block: policy",
        "generated tokens/s",
    ),
    *(
        "predicted",
        "GB/s to the device, mean",
        "link busy, in decodes",
        "tokens/s if the link were all",
        "FlexGen on a T4",
        "report",
    ),
)
PERPLEXITY = ("model, text", "numbers", "perplexity", "a token's log-probability moved by, mean", "report")


def reports(folder: Path, command: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, report) of every committed run of a bench command, by name."""
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        if report.get("command_name") == command:
            yield path.name, report


def lengths(workload: Mapping[str, Any]) -> str:
    """1024 / 512, and how they vary if they do."""
    mean = f"{workload['mean_prompt_tokens']:.0f} / {workload['mean_output_tokens']:.0f}"
    kind = Path(workload["trace"]).stem if workload.get("trace") else workload["kind"]
    return mean if kind == "constant" else f"{mean} ({kind})"


def precision(engine: Mapping[str, Any]) -> str:
    """Of weights, and of the cache where that differs: bfloat16; fp8, fp8 KV."""
    kv = engine["kv_cache_dtype"]
    cache = "" if kv in ("auto", engine["dtype"]) else f", {'fp8' if kv == 'float8_e4m3fn' else kv} KV"
    return (engine.get("quantization") or engine["dtype"]) + cache


def power(readings: Mapping[str, float] | None) -> str:
    """Means over the run; a dash where there is no card to ask."""
    return f"{readings['mean_watts']:.0f} at {readings['mean_sm_clock_mhz']:.0f}" if readings else "–"


def of_the_bound(report: Mapping[str, Any]) -> str:
    """The fraction of the bound by four resources, and which of them binds, by the function that the bench
    has it from.
    """
    found = optimum.of_report(open_checkpoint(report["model"], load_format="dummy").model_config, report)
    return (
        "–" if found["fraction_of_bound"] is None else f"{found['fraction_of_bound']:.0%}, {found['binding']}"
    )


def beside(rivals: list[dict[str, Any]], report: Mapping[str, Any]) -> str:
    """What the others reached on the same device, model, dtype and workload."""
    found = [
        f"{rival['engine']} {rival['total_token_throughput']:,.0f}"
        for rival in rivals
        if rival["device"] in report["device"]
        and rival["model"] == report["model"]
        and rival["precision"] == precision(report["engine_config"])
        and rival["workload"] == lengths(report["workload"])
    ]
    if "sequential" in report:  # the same requests by the same engine, without its plans
        found.insert(0, f"its sequential plan {report['sequential']['total_token_throughput']:,.0f}")
    return ", ".join(found) or "not measured"


def sweeps(folder: Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, a point with the report's own fields) of each point of the sweeps of a kind."""
    for name, report in reports(folder, "sweep"):
        if report["kind"] == kind:
            head = {key: value for key, value in report.items() if key != "points"}
            yield from ((name, head | point) for point in report["points"])


def ran_on(report: Mapping[str, Any]) -> tuple[str, str]:
    """The machine; the model and its numbers."""
    machines = report["engine_config"]["tensor_parallel_size"]
    of_several = f"{machines} × " if machines > 1 else ""
    return of_several + report["device"], f"{report['model']}, {precision(report['engine_config'])}"


def throughput_rows(folder: Path) -> list[tuple[str, ...]]:
    """By machine, model and lengths, whatever files they are in."""
    return sorted(_throughput_rows(folder), key=lambda row: row[:3])


def _throughput_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    rivals = json.loads((folder / "rivals.json").read_text("utf-8"))["results"]
    for name, report in (*reports(folder, "throughput"), *sweeps(folder, "length")):
        yield (
            *ran_on(report),
            lengths(report["workload"]),
            f"{report['total_token_throughput']:,.0f}",
            f"{report['fraction_of_optimal']:.0%}",
            of_the_bound(report),
            power(report["power"]),
            beside(rivals, report),
            f"[json](benchmarks/{name})",
        )


def rate_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    for name, point in sweeps(folder, "rate"):
        mean, p99 = point["mean_normalized_latency_ms"], point["p99_normalized_latency_ms"]
        later = point.get("settled")  # of those that came in the later half
        figures = (
            f"{point['request_rate']:g}",
            f"{point['total_token_throughput']:,.0f}",
            f"{mean:.0f}",
            f"{p99:.0f}",
            f"{p99 / mean:.2f}",
            *(
                (
                    f"{later['mean_normalized_latency_ms']:.0f}",
                    f"{later['p99_to_mean_normalized_latency']:.2f}",
                )
                if later
                else ("–", "–")
            ),
        )
        yield (
            *ran_on(point),
            lengths(point["workload"]),
            *figures,
            f"{point['mean_ttft_ms']:,.0f}",
            f"[json](benchmarks/{name})",
        )


def host_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    for name, report in reports(folder, "host"):
        for one in report["host"]:
            figures = (
                f"{one['running']}",
                f"{one['mean_rows']:.0f}",
                f"{one['median_ms']:.2f}",
                f"{one['p99_ms']:.2f}",
            )
            yield (report["cpu"], *figures, f"[json](benchmarks/{name})")


def perplexity_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    for name, report in reports(folder, "perplexity"):
        windows, tokens = report["windows"]
        text = (
            f"{report['model']}, {windows} × {tokens} tokens of "
            f"{Path(report['tokens']).stem.partition('_')[0]}"
        )
        for way in report["ways"]:
            wide = way["way"] == "wide"
            numbers = report["engine_config"]["dtype"] if wide else way["way"]
            yield (
                text,
                numbers,
                f"{way['perplexity']:.2f}",
                "–" if wide else f"{way['mean_moved']:.3f}",
                f"[json](benchmarks/{name})",
            )


def offload_rows(folder: Path) -> Iterator[tuple[str, ...]]:
    """Each policy that was run of a model that does not fit the device."""
    for name, report in reports(folder, "search offload"):
        machine = f"{report['device']}: {report['memory_gb']['device']:g}, {report['memory_gb']['host']:g}"
        for row in (row for row in report["rows"] if "failed" not in row):
            policy, paper = row["policy"], row["paper_tokens_per_s"]
            model = f"{report['model']}: {policy['weight_bits']}, {policy['kv_bits']}"
            block = (
                f"{policy['num_gpu_batches']} × {policy['gpu_batch_size']}: {row['name'].replace('-', ' ')}"
            )
            rate, link = row["link"]["down_bytes"] / row["latency_s"] / 1e9, row["link"]
            trains = (
                "decode_busy_share" in link
            )  # what the link gives was measured in trains of transfers, as a run has them
            shares = f"{link['busy_share']:.0%}, {link['decode_busy_share']:.0%}" if trains else "–"
            figures = (
                f"{row['tokens_per_s']:.2f}",
                f"{row['predicted']['tokens_per_s']:.2f}",
                f"{rate:.1f}",
                shares,
                f"{link['bound_tokens_per_s']:.1f}" if trains else "–",
                f"{paper:.2f}" if paper else "–",
            )
            lengths = f"{policy['prompt_tokens']} / {policy['output_tokens']}"
            yield (machine, model, lengths, block, *figures, f"[json](benchmarks/{name})")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(folder: Path = HERE) -> str:
    """The tables that there are reports for, as Markdown."""
    made = (
        (THROUGHPUT, throughput_rows),
        (RATE, rate_rows),
        (OFFLOAD, offload_rows),
        (HOST, host_rows),
        (PERPLEXITY, perplexity_rows),
    )
    found = [(head, list(rows(folder))) for head, rows in made]
    return (
        "\n"
        + (
            "\n".join(table(head, rows) for head, rows in found if rows)
            or "No measurement has been committed yet.\n"
        )
        + "\n"
    )


def rewritten(readme: str, folder: Path = HERE) -> str:
    """The README with its tables made anew. Raises ValueError if it has no place for one."""
    if not BLOCK.search(readme):
        raise ValueError("README.md lacks the lines <!-- benchmarks --> and <!-- /benchmarks -->")
    return BLOCK.sub(lambda _: render(folder), readme)


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text("utf-8")), "utf-8")

"""Tables of kernels, and of memory besides the device's."""

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.tables.cells import Report, Row, Section, links
from benchmarks.tables.reports import of_command


def kernel_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the geometric mean of each kernel group's speedup over its first rival."""
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for path, report in of_command(reports, "kernels"):
        for row in report["rows"]:
            for rival, ratio in list(row.get("ratios", {}).items())[:1]:
                found.setdefault((row["group"], rival), []).append((path, ratio))
    for (group, rival), cases in sorted(found.items()):
        ratios = [ratio for _, ratio in cases]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        yield group, rival, f"{len(ratios)}", f"{mean:.3f}", f"{min(ratios):.3f}", links(p for p, _ in cases)


def offload_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield each measured policy of a model that does not fit the device."""
    for path, report in of_command(reports, "search offload"):
        memory = f"{report['memory_gb']['device']:g}, {report['memory_gb']['host']:g}"
        for row in (row for row in report["rows"] if "failed" not in row):
            policy, paper = row["policy"], row["paper_tokens_per_s"]
            yield (
                f"{report['device']}: {memory}",
                f"{report['model']}: {policy['weight_bits']}, {policy['kv_bits']}",
                f"{policy['prompt_tokens']} / {policy['output_tokens']}",
                f"{policy['num_gpu_batches']} × {policy['gpu_batch_size']}: {row['name'].replace('-', ' ')}",
                f"{row['tokens_per_s']:.2f}",
                f"{row['predicted']['tokens_per_s']:.2f}",
                f"{row['link']['down_bytes'] / row['latency_s'] / 1e9:.1f}",
                f"{paper:.2f}" if paper else "–",
                links([path]),
            )


def tier_rows(_: Path, reports: Mapping[str, Report]) -> Iterator[Row]:
    """Yield the reuse of KV pages by conversations, for each lowest tier of the KV cache."""
    for path, report in of_command(reports, "hierarchy"):
        for name, engine in report["lowest_tiers"].items():
            found = engine["conversations"]
            yield (
                report["device"],
                report["model"],
                "none" if name == "recompute" else name,
                f"{found['reuse_hit_rate']:.0%}",
                f"{found['compute_saved']:.1%}",
                f"{found['later_rounds']['median_ttft_ms']:.0f}",
                f"{found['median_tpot_ms']:.1f}",
                f"{engine['no_reuse']['median']:,.0f}",
                links([path]),
            )


SECTIONS: tuple[Section, ...] = (
    (
        "Kernels",
        "The rival's time divided by the kernel's time. Both ran in turns in one process on one H200.",
        ("group", "rival", "cases", "geometric mean", "minimum", "reports"),
        kernel_rows,
    ),
    (
        "Offloaded inference",
        "Models that do not fit the device memory. Bits are those of weights and KV. The last rate is "
        "FlexGen's, on a T4.",
        (
            *("device: GB of device, host", "model: bits", "tokens in / out", "block and policy"),
            *("generated tokens/s", "predicted", "link GB/s", "FlexGen's paper", "report"),
        ),
        offload_rows,
    ),
    (
        "KV tiers",
        "Conversations of several rounds. The lowest tier holds the pages that the device evicts.",
        (
            *("device", "model", "lowest tier", "hit rate", "compute saved", "first token, later rounds, ms"),
            *("ms a token", "tokens/s without reuse", "report"),
        ),
        tier_rows,
    ),
)

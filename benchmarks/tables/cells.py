"""What the cells of several tables say: machines, models, medians, links."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Report = Mapping[str, Any]
Row = tuple[str, ...]
WAYS = {"stages": "pipeline", "ranks": "data"}  # ways besides tensor parallelism, and the flag of each
# Title, a sentence about the columns, the columns, and the function of the rows, which takes the folder of
# the reports and the reports by their paths.
Section = tuple[str, str, Row, Callable[[Path, Mapping[str, Report]], Iterator[Row]]]


def lengths(workload: Mapping[str, Any]) -> str:
    """Return mean prompt and output tokens, with the kind of a workload of uneven lengths."""
    mean = f"{workload['mean_prompt_tokens']:.0f} / {workload['mean_output_tokens']:.0f}"
    kind = Path(workload["trace"]).stem if workload.get("trace") else workload["kind"]
    return mean if kind == "constant" else f"{mean} ({kind})"


def precision(engine: Mapping[str, Any]) -> str:
    """Return the number format of the weights, and of the KV cache where it differs."""
    kv = engine["kv_cache_dtype"]
    cache = "" if kv in ("auto", engine["dtype"]) else f", {'fp8' if kv == 'float8_e4m3fn' else kv} KV"
    return (engine.get("quantization") or engine["dtype"]) + cache


def devices_of(report: Report) -> int:
    """Return the number of devices of an engine."""
    engine = report["engine_config"]
    return math.prod(engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))


def machine(report: Report) -> str:
    """Return the device, with the number of devices above one, how they share the work, and the processes."""
    engine, devices = report["engine_config"], devices_of(report)
    if devices == 1:
        return report["device"]
    counts = {name: engine.get(f"{kind}_parallel_size", 1) for name, kind in WAYS.items()}
    how = [f"{number} {name}" for name, number in counts.items() if number > 1]
    how += ["whole experts"] if engine.get("enable_expert_parallel") and counts["ranks"] == 1 else []
    processes = engine.get("num_processes") or 1
    how += [f"{processes} processes"] if processes > 1 else []
    return f"{devices} × {report['device']}" + (f" ({', '.join(how)})" if how else "")


def model_of(report: Report) -> str:
    """Return the model and its number formats."""
    return f"{report['model']}, {precision(report['engine_config'])}"


def millijoules(values: Iterable[float | None]) -> str:
    """Return the median of joules in mJ, or a dash without a known value."""
    known = [value for value in values if value is not None]
    return f"{1e3 * statistics.median(known):.1f}" if known else "–"


def links(paths: Iterable[str]) -> str:
    """Return a link to each report, once."""
    return ", ".join(f"[{Path(path).stem}]({path})" for path in dict.fromkeys(paths))


def table(head: Row, rows: Iterable[Row]) -> str:
    """Return a Markdown table."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *rows))

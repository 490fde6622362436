"""Figures of a run from the records of its requests, with the names and the text layout of `vllm bench`.

Times are seconds of one clock. Figures in ms count completed requests.

TTFT: time from sending to the first token. TPOT: (E2EL - TTFT) / (output tokens - 1). ITL: time between two
deliveries. E2EL: time from sending to the end. Normalized latency: E2EL / output tokens (NanoFlow §6.3).
"""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxflow.config import ConfigError

PERCENTILES = (90, 99)
MAX_REASONS = 20  # of failures that a report lists
WIDTH = 50  # of the text layout
METRICS = {  # key: (short name, header)
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "normalized_latency": ("normalized latency", "Latency per Output Token"),
}
GOODPUT_KEYS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass
class Record:
    """The times and token counts of one request.

    `deliveries`: (time, number of tokens), in order. `round`: the round of a conversation, from 1.
    `known_tokens`: leading prompt tokens that an earlier request also had.
    """

    prompt_tokens: int
    sent_s: float
    deliveries: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    finished_s: float | None = None
    error: str | None = None
    cached_prompt_tokens: int = 0
    round: int = 1
    known_tokens: int = 0

    @property
    def completed(self) -> bool:
        return self.finished_s is not None and self.error is None and bool(self.deliveries)

    @property
    def output_tokens(self) -> int:
        return sum(number for _, number in self.deliveries)

    def latencies(self) -> dict[str, float]:
        """Return the seconds of each metric except ITL, for a completed request.

        TPOT of a single token is 0.
        """
        assert self.finished_s is not None
        total, first = self.finished_s - self.sent_s, self.deliveries[0][0] - self.sent_s
        tokens = self.output_tokens
        tpot = (total - first) / (tokens - 1) if tokens > 1 else 0.0
        return {"ttft": first, "tpot": tpot, "e2el": total, "normalized_latency": total / tokens}


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return seconds by metric of pairs like `ttft:500`, in milliseconds. Raises: ConfigError."""
    slo = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            slo[name] = float(value) / 1e3
        except ValueError:
            slo[name] = math.nan
        if name not in GOODPUT_KEYS or not slo[name] >= 0:
            raise ConfigError("goodput", pair, f"KEY:MILLISECONDS with KEY one of {', '.join(GOODPUT_KEYS)}")
    return slo


def figures(
    records: Sequence[Record], duration_s: float, slo: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return the figures of a run: throughputs, and mean, median, std, p90 and p99 of each latency in ms.

    `errors`: the number of failed requests by reason.

    slo: limits in seconds by metric. Goodput counts the requests within all limits.
    """
    done = [record for record in records if record.completed]
    latencies = [record.latencies() for record in done]
    prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    good = sum(all(one[key] <= bound for key, bound in slo.items()) for one in latencies) if slo else None
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "cached_input_tokens": sum(r.cached_prompt_tokens for r in done),
        **_mean_keys(done),
        "request_throughput": len(done) / duration_s,
        "request_goodput": None if good is None else good / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
        "max_output_tokens_per_s": _peak_tokens_per_s(done),
        "max_concurrent_requests": _peak_concurrency(done),
    }
    samples = {key: [one[key] for one in latencies] for key in METRICS if key != "itl"}
    samples["tpot"] = [
        one["tpot"] for one, record in zip(latencies, done, strict=True) if record.output_tokens > 1
    ]
    samples["itl"] = [b[0] - a[0] for r in done for a, b in zip(r.deliveries, r.deliveries[1:], strict=False)]
    for key in METRICS:
        result |= _statistics(key, samples[key])
    return result | {"errors": _reasons(records)}


def _reasons(records: Sequence[Record]) -> dict[str, int]:
    """Return the reasons of the failed requests and their counts, most frequent first."""
    counts = collections.Counter(
        record.error or "the answer has no token" for record in records if not record.completed
    )
    found = dict(counts.most_common(MAX_REASONS))
    rest = counts.total() - sum(found.values())
    return found | ({"other reasons": rest} if rest else {})


def _mean_keys(done: Sequence[Record]) -> dict[str, float]:
    """Return the mean KV tokens that a computed prompt token and a decode attend to, itself included.

    A mean over no tokens is 0.
    """
    prompt = [
        (r.prompt_tokens - r.cached_prompt_tokens, (r.prompt_tokens + r.cached_prompt_tokens + 1) / 2)
        for r in done
    ]
    decodes = [(r.output_tokens - 1, r.prompt_tokens + r.output_tokens / 2) for r in done]

    def mean(pairs: Sequence[tuple[int, float]]) -> float:
        return sum(number * keys for number, keys in pairs) / max(1, sum(number for number, _ in pairs))

    return {"mean_prompt_keys": mean(prompt), "mean_decode_keys": mean(decodes)}


def _statistics(key: str, seconds: Sequence[float]) -> dict[str, float]:
    ms = np.asarray(seconds or [0.0]) * 1e3
    values = {f"mean_{key}_ms": ms.mean(), f"median_{key}_ms": np.median(ms), f"std_{key}_ms": ms.std()}
    values |= {f"p{p}_{key}_ms": np.percentile(ms, p) for p in PERCENTILES}
    return {name: float(value) for name, value in values.items()}


def _peak_tokens_per_s(done: Sequence[Record]) -> float:
    """Return the maximum output tokens in a second, counted from the first sending."""
    if not done:
        return 0.0
    start = min(record.sent_s for record in done)
    times, numbers = zip(*(delivery for record in done for delivery in record.deliveries), strict=True)
    return float(np.bincount((np.asarray(times) - start).astype(int), weights=numbers).max())


def _peak_concurrency(done: Sequence[Record]) -> int:
    """Return the maximum number of concurrent requests.

    A request ends before another starts at the same time.
    """
    changes = sorted([(r.sent_s, 1) for r in done] + [(r.finished_s or 0.0, -1) for r in done])
    return int(np.cumsum([0] + [change for _, change in changes]).max())


def steady_state(records: Sequence[Record]) -> dict[str, float] | None:
    """Return the throughput from the end of the first request to the first token of the last request.

    A prompt counts at its first output token. The result is None if no request
    starts after another has ended.
    """
    done = [record for record in records if record.completed]
    if not done:
        return None
    start = min(record.finished_s or 0.0 for record in done)
    end = max(record.deliveries[0][0] for record in done)
    if end <= start:
        return None
    prompt = sum(r.prompt_tokens for r in done if start < r.deliveries[0][0] <= end)
    output = sum(number for r in done for t, number in r.deliveries if start < t <= end)
    return {
        "start": start - min(record.sent_s for record in done),
        "duration": end - start,
        "total_token_throughput": (prompt + output) / (end - start),
        "output_throughput": output / (end - start),
    }


def later_half(records: Sequence[Record], arrivals_s: Sequence[float]) -> dict[str, float] | None:
    """Return the latencies of the requests with arrival times in the later half of all arrivals.

    These requests find no empty engine. arrivals_s: the planned arrival time of each record's request. A busy
    machine may send a request later, but two runs then still compare the same requests. The result is None if
    all requests arrive at once, or if none of the later ones completes.
    """
    start, end = min(arrivals_s), max(arrivals_s)
    late = [
        r.latencies()
        for r, due in zip(records, arrivals_s, strict=True)
        if r.completed and due > (start + end) / 2
    ]
    if not late:
        return None
    found = {"after_s": (end - start) / 2, "completed": len(late)}
    for key in ("ttft", "normalized_latency"):
        found |= _statistics(key, [one[key] for one in late])
    return found | {
        "p99_to_mean_normalized_latency": found["p99_normalized_latency_ms"]
        / found["mean_normalized_latency_ms"]
    }


def text(title: str, result: Mapping[str, Any], extra: Mapping[str, str] | None = None) -> str:
    """Return the report as text. extra: further lines of the head, label -> value."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        *((f"{label}:", value) for label, value in (extra or {}).items()),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    steady = result.get("steady_state")
    if steady:
        rows.append(("Steady-state token throughput (tok/s):", steady["total_token_throughput"]))
    lines = [
        f" {title} ".center(WIDTH, "="),
        *(line(label, value) for label, value in rows if value is not None),
    ]
    for key, (name, header) in METRICS.items():
        lines.append(header.center(WIDTH, "-"))
        for statistic in ("mean", "median", *(f"p{p}" for p in PERCENTILES)):
            lines.append(line(f"{statistic.capitalize()} {name} (ms):", result[f"{statistic}_{key}_ms"]))
    return "\n".join(lines)


def line(label: str, value: Any) -> str:
    """Return one line of the text layout, with two decimals for a float."""
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value!s:<10}"


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write a report, creating its folder if needed.

    An interruption leaves the earlier report whole. A path that is not a regular file, such as a pipe, and a
    file in a folder without write permission are written in place.

    Raises: OSError, which names the file.
    """
    target, text = Path(path).resolve(), json.dumps(result, indent=1, allow_nan=False) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        target.write_text(text)
        return
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_text(text)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk names no file
        raise

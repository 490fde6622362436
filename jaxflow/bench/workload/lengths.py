"""Workloads: prompt and output lengths, prompts of random token ids, and arrival times.

Everything is a function of its seed, so that two engines can run the same requests.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK_TOKENS = 512  # prompt tokens per Mooncake hash id
MOST_SPREAD = 100.0  # standard deviation over mean


class WorkloadError(ValueError):
    """A workload that cannot be read or made.

    The message names the file or setting and the accepted values.
    """


@dataclasses.dataclass(frozen=True)
class Item:
    """One request of a workload. `blocks`: an id for each `block_tokens` of prompt; equal ids mean equal
    tokens."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS


@dataclasses.dataclass(frozen=True)
class LengthLimits:
    """Upper limits of request lengths."""

    prompt_tokens: float
    output_tokens: float
    total_tokens: float

    def admit(self, item: Item) -> bool:
        """Return True if no length exceeds its limit."""
        total = item.prompt_tokens + item.output_tokens
        return (
            item.prompt_tokens <= self.prompt_tokens
            and item.output_tokens <= self.output_tokens
            and total <= self.total_tokens
        )


NANOFLOW = LengthLimits(3072, 1024, 4096)  # NanoFlow's limits for its traces
_NO_RATE = "rate={}: accepted is a positive number of requests per second"
UNLIMITED = LengthLimits(math.inf, math.inf, math.inf)
TRACE_FILTERS = {"auto": None, "nanoflow": NANOFLOW, "none": UNLIMITED}  # auto: those of the file's kind


def nanoflow_limits(max_tokens: float) -> LengthLimits:
    """Return NanoFlow's limits, with at most `max_tokens` of prompt plus output."""
    return dataclasses.replace(NANOFLOW, total_tokens=min(max_tokens, NANOFLOW.total_tokens))


def fitting(items: Sequence[Item], max_tokens: float) -> list[Item]:
    """Return the items of at most `max_tokens` of prompt plus output."""
    return [item for item in items if item.prompt_tokens + item.output_tokens <= max_tokens]


def constant(number: int, prompt_tokens: int, output_tokens: int) -> list[Item]:
    """Return requests of equal length that all arrive at the start."""
    return [Item(prompt_tokens, output_tokens)] * number


def lognormal(
    number: int,
    prompt_mean: float,
    output_mean: float,
    *,
    prompt_cv: float = 2.22,
    output_cv: float = 0.76,
    limits: LengthLimits = NANOFLOW,
    seed: int = 0,
) -> list[Item]:
    """Return requests with log-normal lengths, cut at the limits, with the given means after the cut.

    cv is the standard deviation over the mean before the cut. The defaults are ShareGPT's (NanoFlow, Table
    4).

    Raises:
      WorkloadError: if a mean is not below its limit, or a cv is out of range.
    """
    rng = np.random.default_rng([seed, 1])
    most_prompt = min(limits.prompt_tokens, limits.total_tokens - 1)
    prompts = _lognormal(rng, number, prompt_mean, prompt_cv, np.full(number, most_prompt))
    outputs = _lognormal(
        rng, number, output_mean, output_cv, np.minimum(limits.output_tokens, limits.total_tokens - prompts)
    )
    return [Item(int(p), int(d)) for p, d in zip(prompts, outputs, strict=True)]


def _lognormal(rng: np.random.Generator, number: int, mean: float, cv: float, most: np.ndarray) -> np.ndarray:
    """Return integers from 1 to `most` [number] with a mean within one token of `mean`."""
    if not 0 <= cv <= MOST_SPREAD:
        raise WorkloadError(f"cv={cv}: accepted are values from 0 to {MOST_SPREAD}")
    if not 1 <= mean < most.mean():
        raise WorkloadError(
            f"mean length {mean}: accepted are values from 1 to below the limit of {most.mean():.0f} tokens"
        )
    drawn = np.exp(math.sqrt(math.log1p(cv**2)) * rng.standard_normal(number))

    def lengths(scale: float) -> np.ndarray:
        return np.clip(np.rint(drawn * scale), 1, most)

    low, high = 0.0, mean
    while lengths(high).mean() < mean:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if lengths(middle).mean() > mean else (middle, high)
    return lengths(high).astype(np.int64)


def read_csv(path: str | Path, limits: LengthLimits = NANOFLOW) -> list[Item]:
    """Return the requests of a trace with columns `prompt_tokens`, `output_tokens` and optionally
    `arrival_s`.

    Requests over the limits are dropped.

    Raises:
      WorkloadError: naming the file, if a column is missing or a line has a non-number.
    """
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        missing = {"prompt_tokens", "output_tokens"} - set(rows.fieldnames or ())
        if missing:
            raise WorkloadError(
                f"{path}: missing column {' and '.join(sorted(missing))}; the columns are {rows.fieldnames}"
            )
        items = []
        for row in rows:
            try:
                items.append(
                    Item(
                        int(row["prompt_tokens"]),
                        int(row["output_tokens"]),
                        float(row.get("arrival_s") or 0.0),
                    )
                )
            except (ValueError, TypeError):
                raise WorkloadError(
                    f"{path}, line {rows.line_num}: {row} has values that are not numbers"
                ) from None
    return [item for item in items if limits.admit(item)]


def read_mooncake(path: str | Path, limits: LengthLimits = UNLIMITED) -> list[Item]:
    """Return the requests of a Mooncake trace.

    A trace is JSON lines: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    Raises:
      WorkloadError: naming the file and line, if a line has another form.
    """
    items = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            items.append(
                Item(
                    int(row["input_length"]),
                    int(row["output_length"]),
                    row["timestamp"] / 1e3,
                    tuple(row["hash_ids"]),
                )
            )
        except (ValueError, TypeError, KeyError) as error:
            raise WorkloadError(
                f"{path}, line {number}: not a request of a Mooncake trace ({error!r})"
            ) from None
        if len(items[-1].blocks) * BLOCK_TOKENS < items[-1].prompt_tokens:
            raise WorkloadError(
                f"{path}, line {number}: {len(items[-1].blocks)} hash_ids are too few for "
                f"{items[-1].prompt_tokens} prompt tokens; each stands for {BLOCK_TOKENS}"
            )
    return [item for item in items if limits.admit(item)]


def read_trace(path: str | Path, limits: LengthLimits | None = None) -> list[Item]:
    """Return the requests of a trace file, .csv or .jsonl; `limits` defaults to the file kind's limits.

    Raises: WorkloadError, OSError.
    """
    readers = {".csv": read_csv, ".jsonl": read_mooncake}
    reader = readers.get(Path(path).suffix)
    if reader is None:
        raise WorkloadError(
            f"{path}: not a trace file; accepted are .csv for lengths, and .jsonl for Mooncake's traces"
        )
    return reader(path) if limits is None else reader(path, limits)


def shrink(items: Sequence[Item], factor: int) -> list[Item]:
    """Return items with `factor` times fewer tokens and smaller blocks, rounded up, for models with a short
    context.

    Raises:
      WorkloadError: for a factor that does not divide a block.
    """
    if factor < 1 or BLOCK_TOKENS % factor:
        raise WorkloadError(
            f"shrink factor {factor}: accepted are the divisors of a block's {BLOCK_TOKENS} tokens"
        )
    return [
        dataclasses.replace(
            item,
            prompt_tokens=-(-item.prompt_tokens // factor),
            output_tokens=-(-item.output_tokens // factor),
            block_tokens=BLOCK_TOKENS // factor,
        )
        for item in items
    ]


def sample(items: Sequence[Item], number: int, seed: int = 0) -> list[Item]:
    """Return `number` items, drawn without replacement, or with replacement if there are fewer."""
    if not items:
        raise WorkloadError("the trace has no request within the limits")
    chosen = np.random.default_rng([seed, 2]).choice(len(items), number, replace=number > len(items))
    return [items[i] for i in chosen]


def poisson_arrivals(items: Sequence[Item], rate: float, seed: int = 0) -> list[Item]:
    """Return the items at exponential intervals, with a mean of `rate` per second; an infinite rate means all
    at once."""
    if not rate > 0:
        raise WorkloadError(_NO_RATE.format(rate))
    gaps = np.random.default_rng([seed, 3]).exponential(1 / rate, len(items))
    return [
        dataclasses.replace(item, arrival_s=float(t)) for item, t in zip(items, np.cumsum(gaps), strict=True)
    ]


def trace_arrivals(items: Sequence[Item], rate: float | None = None) -> list[Item]:
    """Return the items at the trace's own times, shifted to start at 0, and stretched to a mean `rate` if
    given.

    Raises:
      WorkloadError: for an invalid rate, or for times that are all the same.
    """
    if rate is not None and not rate > 0:
        raise WorkloadError(_NO_RATE.format(rate))
    ordered = sorted(items, key=lambda item: item.arrival_s)
    first, span = ordered[0].arrival_s, ordered[-1].arrival_s - ordered[0].arrival_s
    if rate is not None and span == 0:
        raise WorkloadError("the trace has no arrival times to stretch to a rate")
    stretch = 1.0 if rate is None else (len(ordered) - 1) / rate / span
    return [dataclasses.replace(item, arrival_s=(item.arrival_s - first) * stretch) for item in ordered]


def prompts(items: Sequence[Item], vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    """Return random token ids for each item, int32 [prompt_tokens]. Equal block ids give equal tokens."""
    ids = []
    for index, item in enumerate(items):
        if item.blocks:
            parts = [_random_ids(item.block_tokens, vocab_size, [seed, 4, block]) for block in item.blocks]
            ids.append(np.concatenate(parts)[: item.prompt_tokens])
        else:
            ids.append(_random_ids(item.prompt_tokens, vocab_size, [seed, 5, index]))
    return ids


def _random_ids(number: int, vocab_size: int, seed: list[int]) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, number, dtype=np.int32)

"""SARATHI's tables and figures of one device (§3.1, §4.3, §5.1, §5.4), as rows from a `Clock`.

A chunk of C tokens means a step of C tokens: C - (B - 1) prompt tokens beside B - 1 decodes (§4.4). A step's
linear part is the time of a step of as many tokens with almost no keys: decodes read one key, and chunks are
cut into prompts of `SHORT` tokens. The attention part is the rest.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxflow.bench.engine.sarathi import tile_chunk
from jaxflow.bench.sarathi.clock import Clock, EqualRequests
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.composition import Composition
from jaxflow.model.graph import model_graph

SHORT = 64
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The shapes of the figures; the defaults are near the paper's.

    Attributes:
      tp: devices of the model.
      length: P + D, tokens of a request. Tables 4 and Figure 8 also use two and three times the length.
      slots: B of the runs, the sequences that run together. Longer requests have fewer, see `slots_of`.
      requests: requests of a run, as a multiple of B.
      prefill_tokens: tokens of a prefill-only step of the baseline.
      batches: batch sizes of Figures 3, 4, 8 and 10.
      chunk_sizes: of Figures 8, 9 and 10; Table 4 uses the first.
      ablation: chunk sizes of Figure 13.
      ratios: P : D of Figure 9.
    """

    model: ModelConfig
    tp: int = 1
    length: int = 1024
    slots: int = 18
    requests: int = 3
    prefill_tokens: int = 2048
    batches: tuple[int, ...] = (1, 2, 4, 8, 18, 32, 64, 128, 256)
    chunk_sizes: tuple[int, ...] = (256, 512)
    ablation: tuple[int, ...] = (64, 128, 256, 320, 512)
    ratios: tuple[float, ...] = (4, 7, 14, 28, 56)

    def __post_init__(self) -> None:
        for field in ("batches", "chunk_sizes", "ablation", "ratios"):
            values = getattr(self, field)
            if not values or min(values) <= 0:
                raise ConfigError(field, values, "one or more positive numbers")
        if self.length < 8 or self.slots < 2 or self.requests < 1:
            raise ConfigError("length", self.length, "at least 8 tokens, with slots >= 2 and requests >= 1")
        least = min(*self.chunk_sizes, *self.ablation)
        if least < self.slots:
            raise ConfigError("slots", self.slots, f"at most {least}, the tokens of the smallest chunk")
        if self.prefill_tokens < max(*self.chunk_sizes, *self.ablation):
            raise ConfigError("prefill_tokens", self.prefill_tokens, "at least the largest chunk")

    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of Table 4 and Figure 8."""
        return tuple(factor * self.length for factor in (1, 2, 3))

    def slots_of(self, length: int) -> int:
        """Return B at a length: the paper's memory holds 18, 10 and 6 requests of 1K, 2K and 3K tokens."""
        share = {1: 1.0, 2: 10 / 18, 3: 6 / 18}[length // self.length]
        return max(2, round(self.slots * share))

    def run(self, length: int, ratio: float, chunk: int | None) -> EqualRequests:
        """Return the run at a P : D ratio. chunk: tokens of a step; None for the baseline."""
        output = max(1, round(length / (1 + ratio)))
        slots = self.slots_of(length)
        budget = self.prefill_tokens if chunk is None else chunk
        return EqualRequests(length - output, output, self.requests * slots, slots, budget, chunk is None)


def step(decodes: int = 0, keys: float = 0, chunks: Sequence[tuple[float, float]] = ()) -> Composition:
    """Return a step's composition; only decodes sample."""
    return Composition(decodes, float(keys) if decodes else 0.0, tuple(chunks), decodes)


def without_keys(full: Composition) -> Composition:
    """Return a step of as many tokens whose attention reads almost no keys."""
    short: list[tuple[float, float]] = []
    for tokens, _ in full.chunks:
        whole, rest = divmod(int(tokens), SHORT)
        short += [(SHORT, 0)] * whole + [(rest, 0)] * bool(rest)
    return step(int(full.decode_tokens), 1.0, short)


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The milliseconds of a step, and of its linear part."""

    total: float
    linear: float

    @property
    def attention(self) -> float:
        """Return the milliseconds of attention over the step's keys."""
        return max(0.0, self.total - self.linear)

    def __add__(self, other: "StepParts") -> "StepParts":
        return StepParts(self.total + other.total, self.linear + other.linear)

    def __mul__(self, factor: float) -> "StepParts":
        return StepParts(self.total * factor, self.linear * factor)


def parts(clock: Clock, steps: Mapping[str, Composition]) -> dict[str, StepParts]:
    """Return the linear and the attention part of each step."""
    both = {**steps, **{f"{name}, no keys": without_keys(one) for name, one in steps.items()}}
    found = clock.steps_s(both)
    return {name: StepParts(1e3 * found[name], 1e3 * found[f"{name}, no keys"]) for name in steps}


# ---- the figures


def table_2(clock: Clock, setting: Setting) -> list[Row]:
    """Return the time of a token in a prefill-only, a decode-only and a decode-maximal step."""
    length = setting.length
    found = parts(
        clock,
        {
            "prefill-only": step(chunks=[(length, 0)]),
            "decode-only": step(4, length),
            "decode-maximal": step(3, length, [(length - 3, 0)]),
        },
    )
    prefill = found["prefill-only"].total
    alone = found["decode-only"].total / 4
    beside = (found["decode-maximal"].total - prefill) / 3
    each = {
        "prefill-only": (prefill / length, None),
        "decode-only": (None, alone),
        "decode-maximal": (prefill / length, beside),
    }
    paper = {
        "prefill-only": (234.8, 0.229, None),
        "decode-only": (49.96, None, 12.49),
        "decode-maximal": (238.4, 0.229, 1.2),
    }
    rows = [
        {
            "scheme": name,
            "linear_ms": found[name].linear,
            "attention_ms": found[name].attention,
            "total_ms": found[name].total,
            "prefill_ms_per_token": each[name][0],
            "decode_ms_per_token": each[name][1],
            "paper_total_ms": paper[name][0],
            "paper_prefill_ms_per_token": paper[name][1],
            "paper_decode_ms_per_token": paper[name][2],
        }
        for name in found
    ]
    rows[-1] |= {"times_cheaper": _ratio(alone, beside), "paper_times_cheaper": 10.4}
    return rows


def figure_3(clock: Clock, setting: Setting) -> list[Row]:
    """Return the time of a token in prefill and in decode steps, by batch size."""
    length = setting.length
    most = max(1, setting.prefill_tokens // length)  # prompts of a prefill step
    batches = [b for b in setting.batches if clock.fits(step(b, length))]
    prompts = {b: min(b, most) for b in batches}
    steps = {f"decode {b}": step(b, length) for b in batches}
    steps |= {f"prefill {n}": step(chunks=[(length, 0)] * n) for n in sorted({*prompts.values()})}
    found = parts(clock, steps)
    rows = []
    for b in batches:
        decode, prefill = found[f"decode {b}"], found[f"prefill {prompts[b]}"]
        per_token = prefill.total / (prompts[b] * length)
        rows.append(
            {
                "batch": b,
                "prefill_ms_per_token": per_token,
                "decode_linear_ms_per_token": decode.linear / b,
                "decode_attention_ms_per_token": decode.attention / b,
                "decode_ms_per_token": decode.total / b,
                "decode_over_prefill": decode.total / b / per_token,
                "paper_decode_over_prefill": {1: 200.0, 2: 100.0, 18: 16.7}.get(b),
            }
        )
    return rows


def figure_4(clock: Clock, setting: Setting) -> list[Row]:
    """Return the throughput and the arithmetic intensity of prefill and decode steps, by their tokens.

    The paper measures one layer to fit large batches; these steps have all layers. Intensity is counted, not
    measured: FLOPs over bytes of the ops.
    """
    prefills = [n for n in (64, 128, 256, 512, 1024, 2048) if n <= setting.prefill_tokens]
    steps = {("prefill", n): step(chunks=[(n, 0)]) for n in prefills}
    steps |= {("decode", b): step(b, setting.length) for b in setting.batches}
    steps = {key: one for key, one in steps.items() if clock.fits(one)}
    found = clock.steps_s({f"{kind} {n}": one for (kind, n), one in steps.items()})
    rate = {key: key[1] / (1e3 * found[f"{key[0]} {key[1]}"]) for key in steps}
    best = {kind: max(r for (other, _), r in rate.items() if other == kind) for kind, _ in steps}
    return [
        {
            "phase": kind,
            "tokens": n,
            "tokens_per_ms": rate[kind, n],
            "of_best": rate[kind, n] / best[kind],
            "linear_flops_per_byte": intensity(setting, one, "dense"),
            "attention_flops_per_byte": intensity(setting, one, "attention"),
            "paper": {
                ("prefill", 512): "saturated, 180 tokens/ms",
                ("decode", 256): "begins to saturate",
            }.get((kind, n)),
        }
        for (kind, n), one in steps.items()
    ]


def intensity(setting: Setting, one: Composition, kind: str) -> float:
    """Return the FLOPs per byte of a step's GEMMs ("dense"), or of its attention."""
    ops = model_graph(setting.model, setting.tp).ops()
    work = [op.work(one) for op in ops if (op.kind == "dense" if kind == "dense" else "attention" in op.name)]
    read = sum(w.memory_bytes for w in work)
    return sum(w.flops for w in work) / read if read else 0.0


def figure_8(clock: Clock, setting: Setting) -> list[Row]:
    """Return the cost of a decode alone and beside a chunk, by length, batch and chunk size."""
    rows = []
    for chunk in setting.chunk_sizes:
        for length in setting.lengths():
            rows += decode_costs(clock, chunk, length, setting.batches)
    return rows


def decode_costs(clock: Clock, chunk: int, length: int, batches: Sequence[int]) -> list[Row]:
    """Return a row for each batch B that fits: B decodes alone, and B - 1 beside a chunk."""
    steps: dict[str, Composition] = {}
    for b in batches:
        prompt = tile_chunk(chunk, b)
        if b < 2 or prompt < 1 or length < chunk:
            continue
        here = [(prompt, (length - prompt) // 2)]  # in the middle of a prompt
        three = {
            f"alone {b}": step(b, length),
            f"beside {b}": step(b - 1, length, here),
            f"prefill {b}": step(chunks=here),
        }
        if all(clock.fits(one) for one in three.values()):
            steps |= three
    found = clock.steps_s(steps)
    rows = []
    for b in (b for b in batches if f"alone {b}" in steps):
        alone = 1e3 * found[f"alone {b}"] / b
        beside = 1e3 * (found[f"beside {b}"] - found[f"prefill {b}"]) / (b - 1)
        rows.append(
            {
                "chunk": chunk,
                "length": length,
                "batch": b,
                "alone_ms_per_token": alone,
                "beside_ms_per_token": beside,
                "step_ms": 1e3 * found[f"beside {b}"],
                "speedup": _ratio(alone, beside),
                "paper_speedup": "2.8 to 10",
            }
        )
    return rows


def _ratio(alone: float, beside: float) -> float | None:
    """Return alone / beside; None where the difference of two measured steps is not positive."""
    return alone / beside if beside > 0 else None


def figure_9(clock: Clock, setting: Setting) -> list[Row]:
    """Return the throughput over the baseline by P : D and chunk size, from whole runs."""
    rows = []
    length = setting.length
    for ratio in setting.ratios:
        runs = {"baseline": setting.run(length, ratio, None)}
        runs |= {str(c): setting.run(length, ratio, c) for c in setting.chunk_sizes}
        if not all(clock.run_fits(run) for run in runs.values()):
            continue
        found = clock.runs_s(runs)
        for chunk in setting.chunk_sizes:
            run = runs[str(chunk)]
            peak = _peak(setting, chunk, run.slots)
            rows.append(
                {
                    "chunk": chunk,
                    "pd_ratio": ratio,
                    "prompt_tokens": run.prompt_tokens,
                    "output_tokens": run.output_tokens,
                    "baseline_tokens_per_s": _throughput(runs["baseline"], found["baseline"]),
                    "tokens_per_s": _throughput(run, found[str(chunk)]),
                    "gain": found["baseline"] / found[str(chunk)],
                    "expected_peak": peak,
                    "paper_gain": 1.27 if (chunk, ratio) == (256, 14) else None,
                }
            )
    return rows


def _peak(setting: Setting, chunk: int, slots: int) -> float:
    """Return P : D = C / (B - 1), where all decodes run beside chunks (§5.1.3)."""
    return max(1, tile_chunk(chunk, slots)) / (slots - 1)


def _throughput(run: EqualRequests, seconds: float) -> float:
    return run.requests * (run.prompt_tokens + run.output_tokens) / seconds


# Sequence length in thousands of tokens: decode speedup and throughput gain.
TABLE_4 = {
    "LLaMA-13B, A6000": {1: (5.45, 1.33), 2: (3.26, 1.26), 3: (2.51, 1.22)},
    "LLaMA-33B, A100": {1: (3.83, 1.25), 2: (4.25, 1.22), 3: (3.51, 1.14)},
}


def table_4(clock: Clock, setting: Setting) -> list[Row]:
    """Return the decode speedup and the throughput gain at the best P : D, by length."""
    rows, chunk = [], setting.chunk_sizes[0]
    for length in setting.lengths():
        slots = setting.slots_of(length)
        ratio = _peak(setting, chunk, slots)
        runs = {c: setting.run(length, ratio, c) for c in (None, chunk)}
        costs = decode_costs(clock, chunk, length, (slots,))
        if not costs or not all(clock.run_fits(run) for run in runs.values()):
            continue
        found = clock.runs_s({str(c): run for c, run in runs.items()})
        row: Row = {
            "length": length,
            "batch": slots,
            "pd_ratio": ratio,
            "decode_speedup": costs[0]["speedup"],
            "tokens_per_s": _throughput(runs[chunk], found[str(chunk)]),
            "gain": found["None"] / found[str(chunk)],
        }
        for name, figures in TABLE_4.items():
            row[f"paper, {name}"] = "{}x, {}x".format(*figures[length // setting.length])
        rows.append(row)
    return rows


def figure_10(clock: Clock, setting: Setting) -> list[Row]:
    """Return the linear and the attention time of a request, with and without chunks, at P : D = C / (B - 1).

    The times are those of the request's share of its steps.
    """
    rows, length = [], setting.length
    for chunk in setting.chunk_sizes:
        for b in setting.batches:
            prompt = tile_chunk(chunk, b)
            if b < 2 or b > setting.slots or prompt < 1 or length < chunk:
                continue
            outputs = length / (1 + prompt / (b - 1))
            prompts = round(length - outputs)
            keys = prompts + outputs / 2
            steps = {
                "prefill": step(chunks=[(length, 0)]),  # a full step; the prompt's share of it counts
                "decode": step(b, keys),
                "mixed": step(b - 1, keys, [(prompt, max(0, prompts - prompt) // 2)]),
            }
            if not all(clock.fits(one) for one in steps.values()):
                continue
            found = parts(clock, steps)
            baseline = found["prefill"] * (prompts / length) + found["decode"] * (outputs / b)
            chunked = found["mixed"] * (prompts / prompt)
            rows.append(
                {
                    "chunk": chunk,
                    "batch": b,
                    "baseline_linear_ms": baseline.linear,
                    "linear_ms": chunked.linear,
                    "linear_speedup": baseline.linear / chunked.linear,
                    "baseline_attention_ms": baseline.attention,
                    "attention_ms": chunked.attention,
                    "total_speedup": baseline.total / chunked.total,
                    "paper_linear_speedup": "ffn 1.3 to 1.6, projections 1.05 to 1.38",
                }
            )
    return rows


# Chunk size: prefill time over the uncut prompt's, and throughput gain (§5.4).
FIGURE_13 = {
    64: ("5", "about 1"),
    128: ("over 2", "up to 1.16"),
    256: ("at most 1.2", "1.27"),
    512: ("at most 1.1", None),
}


def figure_13(clock: Clock, setting: Setting) -> list[Row]:
    """Return the cost of cutting a prompt, and the gain of whole runs, by chunk size.

    All runs have the P : D that is best for the first of `chunk_sizes`.
    """
    length, rows = setting.length, []
    steps = {"whole": step(chunks=[(length, 0)])}
    weights: dict[int, dict[str, float]] = {}
    for chunk in setting.ablation:
        chunks = chunks_of(length, chunk)
        steps |= {f"{n} at {start}": step(chunks=[(n, start)]) for n, start, _ in chunks}
        weights[chunk] = {f"{n} at {start}": weight for n, start, weight in chunks}
    found = parts(clock, steps)
    ratio = _peak(setting, setting.chunk_sizes[0], setting.slots)
    runs = {str(c): setting.run(length, ratio, c) for c in (None, *setting.ablation)}
    fitting = all(clock.run_fits(run) for run in runs.values())
    seconds = clock.runs_s(runs) if fitting else {}
    whole = found["whole"]
    for chunk in setting.ablation:
        cut = StepParts(0.0, 0.0)
        for name, weight in weights[chunk].items():
            cut += found[name] * weight
        prefill, gain = FIGURE_13.get(chunk, (None, None))
        rows.append(
            {
                "chunk": chunk,
                "us_per_token": 1e3 * cut.total / length,
                "prefill_over_whole": cut.total / whole.total,
                "attention_over_whole": _ratio(cut.attention, whole.attention),
                "linear_over_whole": cut.linear / whole.linear,
                "gain": seconds["None"] / seconds[str(chunk)] if fitting else None,
                "paper_prefill_over_whole": prefill,
                "paper_attention_over_whole": "3" if chunk == 64 else None,
                "paper_gain": gain,
            }
        )
    return rows


def chunks_of(length: int, chunk: int) -> list[tuple[int, int, float]]:
    """Return the chunks of a prompt to time, as (tokens, start, weight).

    A chunk's time is nearly linear in its start. So the full chunks are sampled at the first, the middle and
    the last one, with the weights of Simpson's rule. Up to three chunks are timed all.
    """
    full, rest = divmod(length, chunk)
    starts = dict.fromkeys(range(full), 1.0)
    if full > 3:
        starts = {0: full / 6, (full - 1) // 2: 4 * full / 6, full - 1: full / 6}
    found = [(chunk, i * chunk, weight) for i, weight in starts.items()]
    return found + [(rest, full * chunk, 1.0)] * bool(rest)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A table or figure: its rows, the paper's finding, and the axes of its chart.

    x, y: columns of the chart. by: columns whose values make one line each.
    """

    title: str
    rows: Callable[[Clock, Setting], list[Row]]
    paper: str
    x: str
    y: str
    by: tuple[str, ...] = ()
    log: bool = True


FIGURES = {
    "table2": Figure(
        "Table 2: a token's time by kind of step",
        table_2,
        "a decode costs 12.49 ms alone and 1.2 ms beside a prefill",
        "scheme",
        "total_ms",
        log=False,
    ),
    "figure8": Figure(
        "Figure 8: decodes alone and beside a chunk",
        figure_8,
        "decodes are 2.8 to 10 times cheaper beside a chunk of 256",
        "batch",
        "speedup",
        ("chunk", "length"),
    ),
    "figure9": Figure(
        "Figure 9: throughput over separate steps, by P : D",
        figure_9,
        "the gain peaks at P : D = C / (B - 1): 1.27 at 14 for C = 256, B = 18",
        "pd_ratio",
        "gain",
        ("chunk",),
    ),
    "figure13": Figure(
        "Figure 13: the cost of cutting a prompt",
        figure_13,
        "chunks of 64 prefill 5 times slower, 256 within 20 %, 512 within 10 %; 256 beats 320",
        "chunk",
        "prefill_over_whole",
    ),
    "table4": Figure(
        "Table 4: best gains by length",
        table_4,
        "1.33 (13B on A6000) and 1.25 (33B on A100) at 1K tokens",
        "length",
        "gain",
        log=False,
    ),
    "figure3": Figure(
        "Figure 3: a token's time in prefill and decode",
        figure_3,
        "a decode token costs 200, 100 and 16.7 prefill tokens at batch 1, 2 and 18",
        "batch",
        "decode_over_prefill",
    ),
    "figure4": Figure(
        "Figure 4: throughput and arithmetic intensity",
        figure_4,
        "prefill saturates at 512 tokens, decodes at a batch of 256",
        "tokens",
        "tokens_per_ms",
        ("phase",),
    ),
    "figure10": Figure(
        "Figure 10: linear and attention time of a request",
        figure_10,
        "the feed-forward GEMMs gain 1.3 to 1.6, the projections 1.05 to 1.38",
        "batch",
        "linear_speedup",
        ("chunk",),
    ),
}

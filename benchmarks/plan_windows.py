"""Measure plans of one model in long windows of full steps, and compare them with the best sequential step.

    python -m benchmarks.plan_windows --model llama-3-70b --load_format dummy --tensor_parallel_size 2
        --quantization fp8 --kv_cache_dtype fp8 --num_kv_pages 16000 --tokens 1536,2048
        --found benchmarks/plans/h200/llama-3-70b/searched/tp2-fp8.json --plans
        benchmarks/plans/h200/llama-3-70b/tp2-fp8 --workload 1024/512 --output_json report.json

First every plan and every size of the sequential step run in short windows in turns, as in `bench plans`.
This part is the ablation, if --plans has the plans of an ablation. Then three steps run in long windows in
turns: the fastest step that cuts no op, the found plan, and the fastest of the other plans. The first is the
rival of the other two; it may have another size, and any carrier of its sums over devices. Each window has
the watts and clock of each card.

A workload is either prompt/output tokens, equal for all requests (1024/512), or `lognormal:246/322`: lengths
like ShareGPT's with these means. A step of the latter has one decode of each running request. A request is
drawn in proportion to its output tokens, and its position in the output is random. The step's prefill has the
workload's share of tokens.
"""

import dataclasses
import functools
import json
import shlex
import statistics
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from jaxflow.bench.plans import compare
from jaxflow.bench.plans.bed import Bed, bed_of_flags
from jaxflow.bench.plans.steady import SteadyStep, StepWorkload, page_appends, parse_workload
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload.lengths import Item, lognormal
from jaxflow.cli.engine_flags import parse
from jaxflow.cli.flag_errors import flag_error
from jaxflow.config import ConfigError
from jaxflow.engine.layout import StepLayout
from jaxflow.model.composition import Composition
from jaxflow.pipeline.plan import Plan, digest, load
from jaxflow.scheduler.state import Chunk, StepWork
from pallas_kernels.measure.provenance import provenance
from pallas_kernels.measure.sensor import sample
from pallas_kernels.measure.timing import interleaved

DRAWN = 20_000  # requests that a workload of unlike lengths is drawn from
AHEAD = 3  # steps in flight
WARM_S = 3.0  # seconds before a window, so that clocks settle


# ---- the step of a workload


@dataclasses.dataclass(frozen=True)
class Mix:
    """Requests of unlike lengths, and their means."""

    items: tuple[Item, ...]
    name: str

    @functools.cached_property
    def means(self) -> tuple[float, float]:
        """Prompt and output tokens."""
        pairs = np.array([(item.prompt_tokens, item.output_tokens) for item in self.items], float)
        return tuple(pairs.mean(0))

    @property
    def like(self) -> StepWorkload:
        """Return the workload of equal lengths with the same number of decodes in a step."""
        prompt, output = self.means
        return StepWorkload(round(prompt), round(output))


def parse_mix(text: str) -> StepWorkload | Mix:
    """Return the workload of a text. Raises: ConfigError."""
    if not text.startswith("lognormal:"):
        return parse_workload(text, "workload")
    means = parse_workload(text.removeprefix("lognormal:"), "workload")
    return Mix(tuple(lognormal(DRAWN, means.prompt_tokens, means.output_tokens)), text)


def under_way(items: Sequence[Item], number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt tokens and drawn tokens so far of `number` decoding requests.

    A request is met as often as its output is long, anywhere in its output.
    """
    rng = np.random.default_rng(seed)
    outputs = np.array([item.output_tokens for item in items])
    met = rng.choice(len(items), number, p=outputs / outputs.sum())
    prompts = np.array([item.prompt_tokens for item in items])[met]
    return prompts, (rng.random(number) * outputs[met]).astype(int)


def prefilled(items: Sequence[Item], tokens: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return prefill pieces (tokens, first position) of `tokens` in all: whole prompts, then part of one."""
    rng, found, left = np.random.default_rng([seed, 1]), [], tokens
    while left:
        size = min(left, items[int(rng.integers(len(items)))].prompt_tokens)
        found.append((size, 0))
        left -= size
    return found


def mixed_step(mix: Mix, tokens: int, rows: int) -> tuple[Composition, np.ndarray]:
    """Return the mix's full step, and the position of each of its decodes.

    Raises: ConfigError for more rows than the executor has.
    """
    prompt, output = mix.means
    decodes = round(tokens * output / (prompt + output))
    prompts, so_far = under_way(mix.items, decodes)
    chunks = prefilled(mix.items, tokens - decodes)
    if decodes + len(chunks) > rows:
        raise ConfigError("max_num_seqs", rows, f"at least {decodes + len(chunks)}, for {mix.name}")
    positions = (prompts + so_far).astype(np.int32)
    return Composition(decodes, float(positions.mean()) + 1, tuple(chunks), decodes), positions


def work_of(step: Composition, positions: np.ndarray, layout: StepLayout, vocabulary: int) -> StepWork:
    """Return the step's work; row i is in slot i."""
    rng, n = np.random.default_rng(0), len(positions)
    chunks = tuple(
        Chunk(
            types.SimpleNamespace(token_ids=rng.integers(0, vocabulary, int(size)).astype(np.int32)),  # pyright: ignore[reportArgumentType]
            row,
            int(start),
            int(size),
            samples=False,
        )
        for row, (size, start) in enumerate(step.chunks, start=n)
    )
    nobody, slots = np.full(n, None, object), np.arange(n, dtype=np.int32)
    nothing = np.empty((0, 4), np.int32)
    return StepWork(nobody, slots, positions, chunks, (), int(step.tokens), layout.tokens, nothing)


def ready(bed: Bed, workload: StepWorkload | Mix) -> dict[str, tuple[SteadyStep, Composition]]:
    """Return the workload's step under each plan, with its pages in the page table. Raises: ConfigError."""
    if isinstance(workload, StepWorkload):
        return bed.ready(workload)
    found, largest = {}, None
    for name, (plan, _) in bed.variants.items():
        (layout,) = (layout for layout in bed.executor.layouts[plan.tokens] if layout.plan == name)
        step, positions = mixed_step(workload, plan.tokens, bed.executor.slots)
        work = work_of(step, positions, layout, bed.model.vocab_size)
        found[name] = SteadyStep.of(bed.executor, layout, work), step
        # a smaller step's rows are in other places: pages are those of the longest row in each slot
        largest = work if largest is None else longest_rows(largest, work)
    assert largest is not None
    pages = page_appends(largest, bed.executor.num_pages, bed.model.windows, bed.config.block_size)
    next(iter(found.values()))[0].place(pages)
    return found


def longest_rows(one: StepWork, other: StepWork) -> StepWork:
    """Return decodes at the last position that either step has in each slot."""
    ends = [
        np.concatenate(
            [work.decode_positions, [chunk.start + chunk.tokens - 1 for chunk in work.chunks]]
        ).astype(np.int32)
        for work in (one, other)
    ]
    rows = max(map(len, ends))
    last = np.max([np.pad(end, (0, rows - len(end))) for end in ends], axis=0).astype(np.int32)
    return dataclasses.replace(
        one,
        decodes=np.full(rows, None, object),
        decode_slots=np.arange(rows, dtype=np.int32),
        decode_positions=last,
        chunks=(),
    )


# ---- measuring


def uncut(plan: Plan) -> bool:
    """Return whether every op runs over all tokens of the step on the main stream."""
    return all((n.start, n.stop, n.stream, n.ahead) == (0, plan.tokens, 0, 0) for n in plan.nano_ops)


def contenders(rows: Sequence[Mapping[str, Any]], found: str | None) -> dict[str, str]:
    """Return the names of the plans that run in long windows, by their part.

    rows: of the survey, each with `plan`, `uncut`, `digest` and `tokens_per_s`.
    found: the found plan's digest.
    """

    def best(accepted: Callable[[Mapping[str, Any]], bool]) -> str | None:
        chosen = [row for row in rows if accepted(row)]
        return max(chosen, key=lambda row: row["tokens_per_s"])["plan"] if chosen else None

    parts = {
        "best sequential": best(lambda row: row["uncut"]),
        "found": best(lambda row: row["digest"] == found),
        "best by hand": best(lambda row: not row["uncut"] and row["digest"] != found),
    }
    return {part: name for part, name in parts.items() if name is not None}


def run_steps(enqueue: Callable[[], jax.Array], steps: int) -> float:
    """Run steps with few in flight and return their seconds."""
    begin, flying = time.perf_counter(), []
    for _ in range(steps):
        flying.append(enqueue())
        if len(flying) > AHEAD:
            flying.pop(0).block_until_ready()
    jax.block_until_ready(flying)
    return time.perf_counter() - begin


def window(enqueue: Callable[[], jax.Array], steps: int, tokens: float) -> dict[str, Any]:
    """Measure one window and return its time, rate, and each card's watts and clock."""
    one = run_steps(enqueue, 2) / 2
    run_steps(enqueue, max(1, round(WARM_S / one)))
    with sample(flags.FLAGS.tensor_parallel_size, every_s=0.1) as readings:
        seconds = run_steps(enqueue, steps)
    return {
        "steps": steps,
        "seconds": seconds,
        "step_ms": 1e3 * seconds / steps,
        "tokens_per_s": steps * tokens / seconds,
        "watts": readings.watts_by_card,
        "clock_mhz": readings.clock_mhz_by_card,
    }


def summary(
    windows: Mapping[str, Sequence[Mapping[str, Any]]],
    survey: Sequence[Mapping[str, Any]],
    parts: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Return a row for each contender: medians over its windows, its gain over the rival, its prediction."""
    known = {row["plan"]: row for row in survey}
    rates = {
        name: statistics.median(w["tokens_per_s"] for w in several)
        for name, several in windows.items()
        if several
    }
    rival = rates.get(parts.get("best sequential", ""))
    found = []
    for part, name in parts.items():
        if name not in rates:
            continue
        row, several = known[name], windows[name]
        step_ms, predicted = statistics.median(w["step_ms"] for w in several), row["predicted_ms"]
        found.append(
            {
                "part": part,
                "plan": name,
                "digest": row["digest"],
                "tokens": row["tokens"],
                "windows": len(several),
                "step_ms": step_ms,
                "tokens_per_s": rates[name],
                "spread": (max(w["tokens_per_s"] for w in several) - min(w["tokens_per_s"] for w in several))
                / rates[name],
                "against_best_sequential": None if rival is None else rates[name] / rival,
                "predicted_ms": predicted,
                "prediction_error": None if predicted is None else predicted / step_ms - 1,
                "watts": np.mean([w["watts"] for w in several], axis=0).round(1).tolist(),
                "clock_mhz": np.median([w["clock_mhz"] for w in several], axis=0).tolist(),
            }
        )
    return found


# ---- the command


def define_flags() -> None:
    options.define_bed()
    flags.DEFINE_string(
        "workload",
        "1024/512",
        "Prompt and output tokens of a request, as 1024/512, or their means, as lognormal:1024/512.",
    )
    flags.DEFINE_string("found", None, "Plan file of the found plan; --plans has the others.")
    flags.DEFINE_float("survey_seconds", 6.0, "Seconds of each plan in three short windows.", lower_bound=0.0)
    flags.DEFINE_integer("steps", 200, "Steps of a long window.", lower_bound=1)
    flags.DEFINE_integer("windows", 3, "Long windows of each contender; 0: the survey alone.", lower_bound=0)
    flags.DEFINE_float("max_minutes", 9.0, "Minutes after which no further window starts.", lower_bound=0.0)


def surveyed(
    bed: Bed,
    workload: StepWorkload | Mix,
    steps: Mapping[str, tuple[SteadyStep, Composition]],
    seconds: float,
) -> list[dict[str, Any]]:
    """Return a row for each plan, of three short windows in turns."""
    timings = interleaved(
        {name: steady.enqueue for name, (steady, _) in steps.items()},
        seconds=seconds,
        cards=bed.config.tensor_parallel_size,
    )
    measured = [(bed.variants[name], name, steps[name][1], timings[name]) for name in steps]
    like = workload if isinstance(workload, StepWorkload) else workload.like
    rows = compare.rows(bed.config, bed.model, like, measured)
    return [row | {"uncut": uncut(bed.variants[row["plan"]][0])} for row in rows]


def run(write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the command and return the report's body. Raises: ConfigError, PlanError, CheckpointError."""
    f, begun = flags.FLAGS, time.monotonic()
    workload = parse_mix(f.workload)
    f.plans = [
        *([f.found] if f.found else []),
        *f.plans,
    ]  # first: of two equal plans the found one has predictions
    bed = bed_of_flags(
        [workload if isinstance(workload, StepWorkload) else workload.like], ["usual"], "workload"
    )
    steps = ready(bed, workload)
    made_s = time.monotonic() - begun
    survey = surveyed(bed, workload, steps, f.survey_seconds)
    parts = contenders(survey, digest(load(f.found)) if f.found else None)
    windows: dict[str, list[dict[str, Any]]] = {name: [] for name in parts.values()}

    def body() -> dict[str, Any]:
        return {
            "model": Path(bed.config.model).name,
            "num_layers": bed.model.num_layers,
            "engine_config": dataclasses.asdict(bed.config),
            "kv_pages": list(bed.executor.num_pages),
            "workload": f.workload,
            "made_s": made_s,
            "took_s": time.monotonic() - begun,
            "contenders": summary(windows, survey, parts),
            "windows": windows,
            "survey": survey,
        }

    write(body())
    for turn in range(f.windows):
        for name in list(windows) if turn % 2 == 0 else list(windows)[::-1]:
            if time.monotonic() - begun > 60 * f.max_minutes:
                return body()
            steady, step = steps[name]
            windows[name].append(window(steady.enqueue, f.steps, step.tokens))
        write(body())
    return body()


def text(report: Mapping[str, Any]) -> str:
    """Return the report's main figures as text."""
    lines = [f"{report['workload']}: survey"]
    for row in report["survey"]:
        lines.append(
            f"  {row['plan'][:70]:<72}{row['decode_tokens']:>6} decodes {row['step_ms']:>9.2f} ms"
            f"{row['tokens_per_s']:>9.0f} tokens/s  {row['against_best_sequential']:.3f}"
            f"  spread {row['spread']:.3f}"
        )
    lines.append("long windows")
    for row in report["contenders"]:
        gain = row["against_best_sequential"]
        error = row["prediction_error"]
        lines.append(
            f"  {row['part']:<16}{row['plan'][:56]:<58}{row['step_ms']:>9.2f} ms"
            f"{row['tokens_per_s']:>9.0f} tokens/s  {'-' if gain is None else format(gain, '.3f')}"
            f"  error {'-' if error is None else format(error, '+.1%')}"
            f"  spread {row['spread']:.3f}  W {row['watts']}  MHz {row['clock_mhz']}  x{row['windows']}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    define_flags()
    if {"--help", "-h"} & set(arguments):
        print(f"{__doc__}\n{flags.FLAGS.get_help()}")
        return 0
    try:
        parse(arguments)
    except flags.Error as error:
        print(f"error: {flag_error(error)}", file=sys.stderr)
        return 2
    command = ["python", "-m", "benchmarks.plan_windows", *arguments[1:]]
    with sample(flags.FLAGS.tensor_parallel_size, every_s=0.1) as readings:

        def write(body: dict[str, Any]) -> None:
            power = {"watts": readings.watts_by_card, "clock_mhz": readings.clock_mhz_by_card}
            report = provenance(shlex.join(command)) | power | {"num_devices": jax.device_count()} | body
            if flags.FLAGS.output_json:
                Path(flags.FLAGS.output_json).parent.mkdir(parents=True, exist_ok=True)
                Path(flags.FLAGS.output_json).write_text(json.dumps(report, indent=1) + "\n", "utf-8")

        report = run(write)
        write(report)
    print(text(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

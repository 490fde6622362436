"""The bubbles of the engine's own pipeline stages under the step policies of SARATHI §5.3."""

import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxflow.bench.engine.policies import OrcaBest, OrcaWorst, PrefillFirst, RequestLevel
from jaxflow.bench.pipeline.stage_trace import StageTrace, stage_traces
from jaxflow.bench.report import machine
from jaxflow.bench.workload.drive import greedy_requests, run_loop
from jaxflow.bench.workload.lengths import Item, prompts
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.executor_start import make_warm
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start_times import StartTimes
from jaxflow.engine.start_times import describe as describe_start
from jaxflow.engine.step_plans import step_sizes
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.request import Request
from jaxflow.scheduler.scheduler import DecodeMaximal, StepPolicy

Run = tuple[float, StageTrace, dict[str, Any] | None]  # seconds, trace and power

POLICIES: dict[str, Callable[[], StepPolicy]] = {
    "sarathi": DecodeMaximal,
    "prefill-first": PrefillFirst,
    "orca-best": OrcaBest,
    "orca-worst": OrcaWorst,
    "request-level": RequestLevel,
}

CUTS_PROMPTS = {"sarathi"}


def measure(
    config: EngineConfig,
    items: Sequence[Item],
    *,
    slots: int,
    chunk: int,
    repeats: int,
    policies: Sequence[str] = tuple(POLICIES),
    seed: int = 0,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Run the items under each policy on pipeline stages, in turns, and return the report.

    All items wait from the start. SARATHI's steps have `chunk` tokens. The steps of the other policies hold
    the longest prompt and all decodes, because these policies do not cut prompts. Without `step_sizes`, the
    step sizes are those of `reached`.

    Args:
      slots: running sequences of a micro-batch.
      policies: the names to compare.
      keep: receives the report of the start, and the report of the runs so far after each run.
      repeats: runs of each policy. The report has each policy's run of median duration.

    Raises:
      ConfigError: for one stage, or an unknown policy.
    """
    for name in policies:
        if name not in POLICIES:
            raise ConfigError("policies", name, f"one of {', '.join(POLICIES)}")
    stages = config.pipeline_parallel_size
    if stages < 2:
        raise ConfigError(
            "pipeline_parallel_size", stages, "at least 2 stages, which bubbles can lie between"
        )
    seqs = slots * stages
    longest = max(item.prompt_tokens for item in items) if {*policies} - CUTS_PROMPTS else 0
    config = dataclasses.replace(
        config,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(chunk, longest + seqs),
        max_model_len=max(item.prompt_tokens + item.output_tokens for item in items),
        max_waiting=max(config.max_waiting, len(items)),
        enable_prefix_caching=False,
    )
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    model = checkpoint.model_config
    times = StartTimes()
    with times.phase("devices"):  # the first use of JAX's devices is here
        config = resolve(config, model)
    if config.step_sizes is None:
        found = reached(step_sizes(config), items, policies, seqs=seqs, chunk=chunk)
        config = dataclasses.replace(config, step_sizes=",".join(map(str, found)))
    tell(f"steps of {config.step_sizes} tokens on {stages} stages")
    executor = make_warm(config, checkpoint, progress=sys.stderr.isatty(), times=times)
    assert isinstance(executor, StagedExecutor)
    start = times.summary()
    tell(describe_start(start))
    requests = greedy_requests(items, prompts(items, model.vocab_size, seed))
    runs: dict[str, list[Run]] = {name: [] for name in policies}
    turns = [(repeat, name) for repeat in range(1, repeats + 1) for name in policies]
    tokens = sum(item.prompt_tokens + item.output_tokens for item in items)
    head = {
        "engine_config": dataclasses.asdict(config),
        "layers": [len(stage.weights["layers"]) for stage in executor.stages],
        "start": start,
        "requests": len(items),
        "slots": slots,
        "chunk": chunk,
        "repeats": repeats,
    }
    result: dict[str, Any] = head | {"policies": {}, "ratios": {}, "seconds": {}}
    keep(result)
    for repeat, name in turns:
        tell(f"{name}: run {repeat} of {repeats} begins")
        budget = chunk if name == "sarathi" else config.max_num_batched_tokens
        loop = make_loop(config, model, executor, policy=POLICIES[name](), token_budget=budget)
        with machine.watch(config.parallel.devices) as readings:
            seconds, trace = run_once(loop, executor, requests)
        runs[name].append((seconds, trace, machine.power_summary(readings)))
        tell(f"{name}: run {repeat} of {repeats} took {seconds:.1f} s")
        found = {name: describe(*median(several), tokens) for name, several in runs.items() if several}
        every = {name: [seconds for seconds, *_ in several] for name, several in runs.items()}
        result = head | {"policies": found, "ratios": ratios(found), "seconds": every}
        result["compilations_after_warmup"] = executor.compilations
        keep(result)
    return result


def reached(
    sizes: Sequence[int], items: Sequence[Item], policies: Collection[str], *, seqs: int, chunk: int
) -> tuple[int, ...]:
    """Return the step sizes that steps of the policies run at, and the largest size.

    A step has decodes only, or it is SARATHI's, or it has a whole prompt.

    Args:
      sizes: ascending. A step runs at the smallest one that holds its tokens.
      seqs: most decodes of a step.
      chunk: most tokens of SARATHI's steps.
    """
    few = max(seqs, chunk if CUTS_PROMPTS & {*policies} else 0)
    prompts = [item.prompt_tokens for item in items] if {*policies} - CUTS_PROMPTS else []
    whole = min(prompts, default=sizes[-1])
    return tuple(size for size, less in zip(sizes, (0, *sizes), strict=False) if less < few or whole <= size)


def tell(line: str) -> None:
    """Print a line of progress with the time of the day, so that a log shows where a cut run stood."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return SARATHI's ratios over Orca-best; empty where one of the two policies did not run."""
    if not {"sarathi", "orca-best"} <= found.keys():
        return {}
    orca, sarathi = found["orca-best"], found["sarathi"]
    return {
        "bubble_orca_best_over_sarathi": orca["median_bubble_s"] / sarathi["median_bubble_s"],
        "speedup_over_orca_best": orca["duration_s"] / sarathi["duration_s"],
    }


def run_once(loop: Any, executor: StagedExecutor, requests: Sequence[Request]) -> tuple[float, StageTrace]:
    """Run requests to their end. Return the seconds and the trace."""
    with stage_traces(executor, loop.scheduler) as traces:
        seconds = run_loop(loop, requests)
    return seconds, traces[0]


def median(runs: Sequence[Run]) -> Run:
    """Return the run of median duration; the faster of the middle two."""
    return sorted(runs, key=lambda run: run[0])[(len(runs) - 1) // 2]


def describe(seconds: float, trace: StageTrace, power: dict[str, Any] | None, tokens: int) -> dict[str, Any]:
    """Return the figures of a run of `tokens` prompt and output tokens."""
    bubbles = list(trace.bubble_s().values())
    return {
        "duration_s": seconds,
        "token_throughput": tokens / seconds,
        "steps": len(trace.requests),
        "joules_per_token": machine.joules_per_token(power, seconds, tokens),
        "busy_share": trace.busy_share(),
        "median_bubble_s": float(np.median(bubbles)),
        "power": power,
        "bubble_s_quantiles": np.quantile(bubbles, np.linspace(0, 1, 51)).tolist(),
    }


def text(report: Mapping[str, Any]) -> str:
    """Return the report as a table."""
    lines = [f"{'policy':16}{'seconds':>10}{'tokens/s':>12}{'busy':>16}{'median bubble, s':>18}{'steps':>8}"]
    for name, row in report["policies"].items():
        busy = " ".join(f"{share:.0%}" for share in row["busy_share"])
        lines.append(
            f"{name:16}{row['duration_s']:10.2f}{row['token_throughput']:12,.0f}{busy:>16}"
            f"{row['median_bubble_s']:18.3f}{row['steps']:8}"
        )
    lines += [f"{name}: {value:.2f}" for name, value in report["ratios"].items()]
    return "\n".join(lines)


def draw(report: Mapping[str, Any]) -> Figure:
    """Return the distribution of the requests' bubble time under each policy."""
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, row in report["policies"].items():
        axes.plot(row["bubble_s_quantiles"], np.linspace(0, 1, 51), label=name)
    axes.set(xlabel="bubble time of a request (s)", ylabel="share of requests", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure

"""Offline throughput of an engine in this process: all requests at once, timed until the last token.

  python -m jaxflow.bench throughput --model llama-3.1-8b --load_format dummy --input_len 1024
      --output_len 512
  python -m jaxflow.bench throughput --model llama-3.1-8b --load_format dummy --lengths lognormal
      --input_len 246 --output_len 322
  python -m jaxflow.bench throughput --model llama-3.1-8b --load_format dummy --plan searched
      --compare_sequential

The time includes ramp-up and tail. Sampling is greedy, end tokens are ignored, prompts are random token ids,
and prefix caching is off by default. A second figure is the steady state without ramp-up and tail: from the
end of the first request to the first token of the last. --compare_sequential runs the same lengths twice,
first with the sequential plan, if the engine has another plan. --repeats runs all of this several times and
reports the median run. Every run has its own token ids, so that no run finds the prompts of another in the
prefix cache. --profiled_seconds runs the requests once more under a profiler, which measures the device's
idle time.
"""

import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
from absl import flags

from jaxflow.bench.engine import gaps, steps
from jaxflow.bench.report import machine, reuse
from jaxflow.bench.report import requests as report
from jaxflow.bench.report.optimum import of_run, optimal
from jaxflow.bench.report.requests import Record
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.conversations import Conversation
from jaxflow.bench.workload.drive import converse, drive, greedy_requests
from jaxflow.bench.workload.lengths import Item
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.config import ConfigError
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.heap import freeze_heap
from jaxflow.engine.start_times import describe, process_seconds
from jaxflow.engine.step_plans import products_dtype
from jaxflow.llm import LLM

SAME = "The engine expects no plan to gain over the sequential plan, so the result is the same."
TIER_LEVELS = (
    "host_pages",
    "host_bytes",
    "host_capacity_bytes",
    "disk_pages",
    "disk_bytes",
)  # keys of `Stats.kv_tiers` that are levels, not counters


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False)
    options.define_workload()
    options.define_conversations()
    options.define_report()
    flags.DEFINE_boolean(
        "compare_sequential",
        False,
        "Run the requests twice in the same engine, first with the sequential plan, to measure the gain "
        "of --plan.",
    )
    flags.DEFINE_integer(
        "repeats",
        1,
        "Number of runs of the requests, each with other token ids. The report is that of the median run by "
        "tokens/s, `runs` has the figures of each, and `repeats` is the number of runs that ended.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "profiled_seconds",
        0.0,
        "Run the requests once more and profile this many seconds, for the share of time without a "
        "running kernel.",
        lower_bound=0.0,
    )


def measure(
    llm: LLM,
    items: Sequence[Item],
    *,
    arrive: bool = False,
    seed: int = 0,
    slo: Mapping[str, float] | None = None,
    device: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run the items through the engine and return the report without its head.

    arrive: submit items at their arrival times instead of all at once. device: name in the cost model's table
    for the peak rate of Eq. 5; None means this machine's device.
    """
    requests = greedy_requests(items, workload.prompts(items, llm.model_config.vocab_size, seed))
    arrivals = [item.arrival_s for item in items] if arrive else None
    return _measured(
        llm, lambda: drive(llm.driver, requests, arrivals, progress=progress), slo, device, arrivals
    )


def _measure(llm: LLM, items: Sequence[Item], slo: Mapping[str, float] | None, seed: int) -> dict[str, Any]:
    """Run `measure` with the command's flags. seed: of the token ids."""
    return measure(llm, items, seed=seed, slo=slo, device=flags.FLAGS.optimal_device, progress=True)


def median_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of the median run by tokens/s, with the figures of each run under `runs`.

    Of two runs in the middle the slower one counts. With runs of the sequential plan, `sequential` is the
    median of these runs, and `against_sequential` the ratio of both medians. `repeats` is the number of runs.
    `failed` and `errors` count the requests of all runs, so that a failure outside the median run is seen.
    """
    errors = sum((collections.Counter(one["errors"]) for one in reports), collections.Counter())
    failed = sum(one["failed"] for one in reports)
    found = {**_median_run(reports), "repeats": len(reports), "failed": failed, "errors": dict(errors)}
    if len(reports) > 1:
        found["runs"] = [_figures_of(one) for one in reports]
    if all("sequential" in one for one in reports):
        alone = _median_run([one["sequential"] for one in reports])
        found["sequential"] = alone
        found["against_sequential"] = found["total_token_throughput"] / alone["total_token_throughput"]
    return found


def _median_run(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    rates = [one["total_token_throughput"] for one in reports]
    return reports[rates.index(statistics.median_low(rates))]


def _figures_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of one of several runs."""
    names = ("total_token_throughput", "output_throughput", "duration", "failed", "joules_per_token")
    power = report["power"] or {}
    figures = {name: report[name] for name in names}
    figures |= {name: power.get(name) for name in ("watts_by_card", "mean_sm_clock_mhz")}
    if "sequential" in report:
        figures["sequential"] = _figures_of(report["sequential"])
    return figures


def compared(llm: LLM, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the report of a run with the engine's plans, an earlier run with the sequential plan, and the
    speedup.

    If the engine has only the sequential plan, there is only one run, because two runs would differ only by
    noise.
    """
    if steps.plans_of(llm.executor) <= {"sequential"}:
        return run()
    with steps.sequential_alone(llm.executor):
        alone = run()
    found = run()
    return found | {
        "sequential": alone,
        "against_sequential": found["total_token_throughput"] / alone["total_token_throughput"],
    }


def profiled(llm: LLM, items: Sequence[Item], seconds: float, seed: int = 0) -> dict[str, Any] | None:
    """Return `gaps.shares` for `seconds` in the middle of a run of the items, all at once; None without a
    kernel.

    The result also has the run's `failed` requests and the first `error`. On several devices the step after
    the end of XLA's profile may fail.
    """
    requests = greedy_requests(items, workload.prompts(items, llm.model_config.vocab_size, seed))
    done, half = llm.driver.stats().completion_tokens, sum(item.output_tokens for item in items) / 2
    with gaps.watch(seconds, lambda: llm.driver.stats().completion_tokens - done >= half) as watched:
        records, _ = drive(llm.driver, requests, progress=True)
    errors = [record.error for record in records if record.error is not None]
    summary = watched.summary()
    return summary and summary | {"failed": len(errors), "error": errors[0] if errors else None}


def measure_conversations(
    llm: LLM,
    talks: Sequence[Conversation],
    *,
    slo: Mapping[str, float] | None = None,
    device: str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Run conversations from their arrival times and return their report, with the reused tokens."""

    def run() -> tuple[list[Record], float]:
        by_talk, duration_s = converse(llm.driver, talks, progress=progress)
        return list(itertools.chain(*by_talk)), duration_s

    return _measured(llm, run, slo, device)


def _measured(
    llm: LLM,
    run: Callable[[], tuple[list[Record], float]],
    slo: Mapping[str, float] | None,
    device: str | None,
    arrivals_s: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the report of `run`, which returns its records and seconds.

    arrivals_s: the arrival time of each record, if the requests did not arrive at once.
    """
    before = llm.driver.stats()
    with (
        machine.watch(llm.engine_config.parallel.devices) as readings,
        steps.step_log(llm.executor) as log,
    ):
        records, duration_s = run()
    after = llm.driver.stats()
    result = report.figures(records, duration_s, slo) | reuse.figures(
        records, reuse.tier_tokens(before.kv_tiers, after.kv_tiers)
    )
    result["steady_state"] = report.steady_state(records)
    if arrivals_s:
        result["later_half"] = report.later_half(records, arrivals_s)
    result["steps"] = steps.summary(log)
    result["engine_stats"] = _difference(msgspec.to_builtins(after), msgspec.to_builtins(before))
    result["power"] = machine.power_summary(readings)
    tokens = result["total_input_tokens"] + result["total_output_tokens"]
    result["joules_per_token"] = machine.joules_per_token(result["power"], duration_s, tokens)
    return result | with_optimum(result, llm, result["engine_stats"]["steps"], device)


def with_optimum(result: Mapping[str, Any], llm: LLM, steps: int, device: str | None) -> dict[str, Any]:
    """Return Eq. 5's optimum for the run's work, and the reached fraction of the full run and of the steady
    state.

    The result also has the fraction of the bound by four resources, for the same number of steps of the run's
    mean composition.
    """
    tokens = result["total_input_tokens"], result["total_output_tokens"]
    if not sum(tokens):
        return {}
    model, engine = llm.model_config, llm.engine_config
    best = optimal(model, *tokens, dtype=products_dtype(engine), tp=engine.parallel.devices, device=device)
    optimum, steady = best["optimal_token_throughput"], result.get("steady_state")
    if steady:
        best["steady_state"] = {**steady, "fraction_of_optimal": steady["total_token_throughput"] / optimum}
    best["fraction_of_optimal"] = result["total_token_throughput"] / optimum
    return best | of_run(
        model, dataclasses.asdict(engine), device or jax.devices()[0].device_kind, result, steps
    )


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of this run. Levels (pages, running and waiting requests) are those at the end."""
    counters = (
        "steps",
        "prompt_tokens",
        "completion_tokens",
        "cached_prompt_tokens",
        "preemptions",
        "compilations_after_warmup",
    )
    found = {name: value - before[name] if name in counters else value for name, value in after.items()}
    plans = {
        plan: number - before["steps_by_plan"].get(plan, 0) for plan, number in after["steps_by_plan"].items()
    }
    tiers = {n: v if n in TIER_LEVELS else v - before["kv_tiers"][n] for n, v in after["kv_tiers"].items()}
    return found | {
        "steps_by_plan": {plan: number for plan, number in plans.items() if number},
        "kv_tiers": tiers,
    }


def head(llm: LLM) -> dict[str, Any]:
    """Return the report's description of the measured engine."""
    return {
        "model": llm.name,
        "engine_config": dataclasses.asdict(llm.engine_config),
        "warm_up_s": llm.warm_up_s,
        **machine.describe(),
    }


def time_start(llm: LLM) -> dict[str, float]:
    """Make the first token, wait for the programs that compile in the background,
    and return the start's time line.

    The keys are those of `StartTimes.summary`, and three more. `first_token_s` is the time of a request alone
    after the start, and `background_s` the wait after the token. `until_first_token_s` begins with the
    process; the key is missing if the system does not tell.
    """
    items, begin_s = workload.constant(1, 8, 1), time.perf_counter()
    drive(llm.driver, greedy_requests(items, workload.prompts(items, llm.model_config.vocab_size, 0)))
    age_s, first_s = process_seconds(), time.perf_counter()
    print(describe(llm.start), flush=True)  # before the wait, in which the command may be killed
    wait_until_compiled()
    until = {} if age_s is None else {"until_first_token_s": age_s}
    after = {"first_token_s": first_s - begin_s, "background_s": time.perf_counter() - first_s}
    return dict(llm.start) | after | until


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, WorkloadError for invalid flags."""
    f = flags.FLAGS
    slo = report.parse_goodput(f.goodput)
    config = engine_config_from_flags()
    config = dataclasses.replace(
        config, max_waiting=max(config.max_waiting, f.num_requests or max(options.PROTOCOL.values()))
    )
    talking = f.rounds > 1 or (f.trace and f.trace.endswith(".jsonl"))
    for name, only in (("compare_sequential", False), ("profiled_seconds", 0.0), ("repeats", 1)):
        if talking and f[name].value != only:
            raise ConfigError(
                name,
                f[name].value,
                "requests without conversations: no --rounds, no trace with shared blocks",
            )
    options.check_workload(options.longest(config))
    check = steps.check_plans if f.compare_sequential else None
    with LLM.from_config(config, check_plans=check) as llm:
        start = time_start(llm)
        freeze_heap()
        items, described = options.items_from_flags(llm.max_model_len)
        result = {"command_name": "throughput", **head(llm), "start": start, "workload": described}
        if f.rounds > 1 or any(item.blocks for item in items):
            items = [dataclasses.replace(item, arrival_s=0.0) for item in items]
            talks, more = options.conversations_from_flags(
                items, llm.max_model_len, llm.model_config.vocab_size
            )
            described |= more
            result |= measure_conversations(llm, talks, slo=slo, device=f.optimal_device, progress=True)
        else:
            begun, reports = result | {"compare_sequential": f.compare_sequential}, []
            seeds = itertools.count(f.workload_seed)  # a seed of each run, also of the sequential plan

            def once() -> dict[str, Any]:
                return _measure(llm, items, slo, next(seeds))

            for _ in range(f.repeats):
                reports.append(compared(llm, once) if f.compare_sequential else once())
                result = with_vllm_names(begun | median_of(reports))
                machine.keep(f.output_json, result)  # a time limit may end a later run, and so may a profiler
            if f.profiled_seconds:
                result["profile"] = profiled(llm, items, f.profiled_seconds, next(seeds))
    result = with_vllm_names(result)
    show(result)
    print(
        f"Throughput: {result['request_throughput']:.2f} requests/s, {result['total_token_throughput']:.2f} "
        "total tokens/s, "
        f"{result['output_throughput']:.2f} output tokens/s"
    )
    return result


def with_vllm_names(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with the keys of `vllm bench throughput` at its end."""
    return {**result} | {
        "elapsed_time": result["duration"],
        "num_requests": result["completed"],
        "total_num_tokens": result["total_input_tokens"] + result["total_output_tokens"],
        "requests_per_second": result["request_throughput"],
        "tokens_per_second": result["total_token_throughput"],
    }


def _idle(steps: Mapping[str, Any]) -> str:
    """Return the device's idle share as text, or its bounds if enqueueing overlaps the run."""
    least, most = (f"{steps[key]:.2%}" for key in ("device_idle_share_at_least", "device_idle_share"))
    return most if least == most else f"{least} to {most}"


def show(result: Mapping[str, Any], title: str = "Throughput Benchmark Result") -> None:
    """Print a report as text."""
    w = result["workload"]
    extra = {
        "Model": result["model"],
        "Workload": f"{w['kind']}, {w['mean_prompt_tokens']:.0f} in, {w['mean_output_tokens']:.0f} out",
    }
    print(report.text(title, result, extra))
    if result["reusable_input_tokens"] or result["reused_input_tokens"]:
        print(reuse.text(result))
    found = result.get("steps")
    if found:
        print("Steps".center(report.WIDTH, "-"))
        print(report.line("Steps:", found["steps"]))
        print(report.line("Mean step (ms):", found["mean_step_ms"]))
        print(report.line("Mean tokens a step:", found["mean_tokens"]))
        print(report.line("Device idle between steps:", _idle(found)))
        for bucket, one in found["by_bucket"].items():
            print(report.line(f"Steps of {bucket} rows (mean ms):", f"{one['steps']} ({one['mean_ms']:.2f})"))
            if one["steps_after_idle"]:
                print(report.line(f"Idle before {one['steps_after_idle']} of these steps:", _idle(one)))
    profile = result.get("profile")
    if profile:
        print(report.line("No kernel runs, profiled:", f"{profile['idle_share']:.2%}"))
        print(report.line("No kernel runs, between steps:", f"{profile['idle_share_between_steps']:.2%}"))
        for row in profile["devices"]:
            print(report.line(f"Device {row['device']} is busy, profiled:", f"{row['busy_share']:.2%}"))
            if row["collective_s"]:
                print(
                    report.line(
                        "Its collectives, of the time:", f"{row['collective_s'] / row['seconds']:.2%}"
                    )
                )
                print(report.line("Its collectives, hidden:", f"{row['hidden_share']:.2%}"))
        if profile["failed"]:
            print(report.line("Failed under the profiler:", f"{profile['failed']} ({profile['error']})"))
    for plan, number in result["engine_stats"]["steps_by_plan"].items():
        print(report.line(f"Steps by {plan!r}:", number))
    if "runs" in result:
        rates = [run["total_token_throughput"] for run in result["runs"]]
        print(report.line("Runs, median reported:", len(rates)))
        print(report.line("Least and most tokens/s of a run:", f"{min(rates):.2f} to {max(rates):.2f}"))
    if "against_sequential" in result:
        print(report.line("Against the sequential plan (x):", result["against_sequential"]))
    elif result.get("compare_sequential"):
        print(SAME)
    if "start" in result:
        print(describe(result["start"]))
    print(machine.text(result))

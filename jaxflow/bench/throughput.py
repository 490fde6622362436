"""Offline throughput of an engine in this process: all requests are handed over at once, and the clock runs
till the last token.

  python -m jaxflow.bench throughput --model llama-3.1-8b --load_format dummy --input_len 1024 --output_len
  512 python -m jaxflow.bench throughput --model llama-3.1-8b --load_format dummy --lengths lognormal
  --input_len 246 --output_len 322 python -m jaxflow.bench throughput --model llama-3.1-8b --load_format dummy
  --plan searched --beside_sequential

Ramp-up and tail are in the clock; sampling is greedy, end tokens are ignored, prompts are random token ids,
and prefix caching is off unless asked for. A second figure leaves ramp-up and tail out: the steady state,
from the first request's end to the last one's first token. With --beside_sequential the same requests run
twice, first by the sequential plan, unless the engine has no other. With --profiled_seconds they run once
more, then under a profiler that says how long the device does nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import msgspec
from absl import flags

from jaxflow.bench import gaps, machine, options, report, reuse, steps, workload
from jaxflow.bench.conversations import Conversation
from jaxflow.bench.converse import converse
from jaxflow.bench.drive import drive, greedy_requests
from jaxflow.bench.optimum import of_run
from jaxflow.bench.report import Record
from jaxflow.bench.workload import Item
from jaxflow.config import ConfigError
from jaxflow.engine.plans import products_dtype
from jaxflow.flags import engine_config_from_flags
from jaxflow.llm import LLM

SAME = "The engine has no plan that is sure to gain: by the sequential plan alone it is the same."
TIER_LEVELS = (
    "host_pages",
    "host_bytes",
    "host_capacity_bytes",
    "disk_pages",
    "disk_bytes",
)  # what is there, of `Stats.kv_tiers`


def define_flags() -> None:
    options.define_engine(enable_prefix_caching=False)
    options.define_workload()
    options.define_conversations()
    options.define_report()
    flags.DEFINE_boolean(
        "beside_sequential",
        False,
        "Run the requests twice in the same engine, first by the sequential plan: what --plan gains.",
    )
    flags.DEFINE_float(
        "profiled_seconds",
        0.0,
        "Run the requests once more and profile so long of it: the share of it in which no kernel runs.",
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
    """Runs the items through the engine, all at once or (arrive) at their times; returns the report, less its
    head.

    device: a name in the cost model's table to take Eq. 5's peak from; None: this machine's.
    """
    requests = greedy_requests(items, workload.prompts(items, llm.model_config.vocab_size, seed))
    arrivals = [item.arrival_s for item in items] if arrive else None
    return _measured(
        llm, lambda: drive(llm.driver, requests, arrivals, progress=progress), slo, device, arrivals
    )


def _measure(llm: LLM, items: Sequence[Item], slo: Mapping[str, float] | None) -> dict[str, Any]:
    """`measure` by the command's flags."""
    f = flags.FLAGS
    return measure(llm, items, seed=f.workload_seed, slo=slo, device=f.optimal_device, progress=True)


def compared(llm: LLM, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The report of a run by the engine's plans; with that of the sequential one, made before it, and how
    many times faster they are.

    One run alone where the engine has no other plan than the sequential one: two would differ by noise.
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
    """`gaps.shares` of so long in the middle of a run of the items, all at once; None without a kernel.

    With `failed` requests of that run and the first `error`: where XLA's profiler stops on several devices,
    the step after it may fail.
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
    """The same of conversations, from their times on; with what was reused."""

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
    """The report of a run, which returns its records and seconds. arrivals_s: of each record, where they did
    not come at once.
    """
    before = llm.driver.stats()
    with machine.watch() as readings, steps.step_log(llm.executor) as log:
        records, duration_s = run()
    after = llm.driver.stats()
    result = report.figures(records, duration_s, slo) | reuse.figures(
        records, reuse.tier_tokens(before.kv_tiers, after.kv_tiers)
    )
    result["steady_state"] = report.steady_state(records)
    if arrivals_s:
        result["settled"] = report.settled(records, arrivals_s)
    result["steps"] = steps.summary(log)
    result["engine_stats"] = _difference(msgspec.to_builtins(after), msgspec.to_builtins(before))
    result["power"] = readings.summary()
    return result | with_optimum(result, llm, result["engine_stats"]["steps"], device)


def with_optimum(result: Mapping[str, Any], llm: LLM, steps: int, device: str | None) -> dict[str, Any]:
    """Eq. 5's optimum for what a run computed, and the fraction that it reached: the whole run's, and the
    steady state's.

    Beside it the fraction of the bound by four resources, of as many steps of the run's mean composition.
    """
    tokens = result["total_input_tokens"], result["total_output_tokens"]
    if not sum(tokens):
        return {}
    model, engine = llm.model_config, llm.engine_config
    best = machine.optimal(
        model, *tokens, dtype=products_dtype(engine), tp=engine.tensor_parallel_size, device=device
    )
    optimum, steady = best["optimal_token_throughput"], result.get("steady_state")
    if steady:
        best["steady_state"] = {**steady, "fraction_of_optimal": steady["total_token_throughput"] / optimum}
    best["fraction_of_optimal"] = result["total_token_throughput"] / optimum
    return best | of_run(
        model, dataclasses.asdict(engine), device or jax.devices()[0].device_kind, result, steps
    )


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Counters of this run alone; what is not a counter (pages, running and waiting requests) as it is at the
    end.
    """
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
    """What a report says of the engine it measured."""
    return {
        "model": llm.name,
        "engine_config": dataclasses.asdict(llm.engine_config),
        "warm_up_s": llm.warm_up_s,
        **machine.describe(),
    }


def run() -> dict[str, Any]:
    """The command. Raises: ConfigError, WorkloadError, ValueError for flags that do not work."""
    f = flags.FLAGS
    slo = report.parse_goodput(f.goodput)
    config = engine_config_from_flags()
    config = dataclasses.replace(
        config, max_waiting=max(config.max_waiting, f.num_requests or max(options.PROTOCOL.values()))
    )
    talking = f.rounds > 1 or (f.trace and f.trace.endswith(".jsonl"))
    for name in ("beside_sequential", "profiled_seconds"):
        if talking and f[name].value:
            raise ConfigError(
                name, f[name].value, "requests without conversations: no --rounds, no trace of shared blocks"
            )
    if f.beside_sequential:
        steps.check_plan(config)
    options.check_workload(options.longest(config))
    with LLM.from_config(config) as llm:
        items, described = options.items_from_flags(llm.max_model_len)
        result = {"command_name": "throughput", **head(llm), "workload": described}
        if f.rounds > 1 or any(item.blocks for item in items):
            items = [dataclasses.replace(item, arrival_s=0.0) for item in items]
            talks, more = options.conversations_from_flags(
                items, llm.max_model_len, llm.model_config.vocab_size
            )
            described |= more
            result |= measure_conversations(llm, talks, slo=slo, device=f.optimal_device, progress=True)
        else:

            def once() -> dict[str, Any]:
                return _measure(llm, items, slo)

            result |= compared(llm, once) if f.beside_sequential else once()
            result["beside_sequential"] = f.beside_sequential
            if f.profiled_seconds:
                result["profile"] = profiled(llm, items, f.profiled_seconds, f.workload_seed)
    result |= {  # the names of vllm bench throughput
        "elapsed_time": result["duration"],
        "num_requests": result["completed"],
        "total_num_tokens": result["total_input_tokens"] + result["total_output_tokens"],
        "requests_per_second": result["request_throughput"],
        "tokens_per_second": result["total_token_throughput"],
    }
    show(result)
    print(
        f"Throughput: {result['request_throughput']:.2f} requests/s, {result['total_token_throughput']:.2f} total tokens/s, "
        f"{result['output_throughput']:.2f} output tokens/s"
    )
    return result


def _idle(steps: Mapping[str, Any]) -> str:
    """The share of the time that the device idled, or its bounds where enqueueing hides it."""
    least, most = (f"{steps[key]:.2%}" for key in ("device_idle_share_at_least", "device_idle_share"))
    return most if least == most else f"{least} to {most}"


def show(result: Mapping[str, Any], title: str = "Throughput Benchmark Result") -> None:
    """Prints a report for people."""
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
    profile = result.get("profile")
    if profile:
        print(report.line("No kernel runs, profiled:", f"{profile['idle_share']:.2%}"))
        print(report.line("No kernel runs, between steps:", f"{profile['idle_share_between_steps']:.2%}"))
        if profile["failed"]:
            print(report.line("Failed under the profiler:", f"{profile['failed']} ({profile['error']})"))
    for plan, number in result["engine_stats"]["steps_by_plan"].items():
        print(report.line(f"Steps by {plan!r}:", number))
    if "against_sequential" in result:
        print(report.line("Against the sequential plan (x):", result["against_sequential"]))
    elif result.get("beside_sequential"):
        print(SAME)
    print(machine.text(result))

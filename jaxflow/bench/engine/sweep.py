"""One report per setting of a sweep, as JSON and as a chart.

  python -m jaxflow.bench sweep --sweep rate --values 1,2,4,8 --model llama-3.1-8b --load_format dummy
      --output_png rate.png
  python -m jaxflow.bench sweep --sweep rate --values 1,2,4,8 --target 127.0.0.1:50051
  python -m jaxflow.bench sweep --sweep batch_size --values 1,8,64,256 --model llama-3.1-8b
      --load_format dummy
  python -m jaxflow.bench sweep --sweep length --values 512/512,1024/512 --model llama-3.1-8b
      --load_format dummy
  python -m jaxflow.bench sweep --sweep pd_ratio

rate: requests at random times, by mean requests per second. --compare_sequential also runs each rate with the
sequential plan, if the engine has another plan. NanoFlow's measure is the highest rate with a mean latency of
at most 200 ms per token. At an excessive rate the queue grows during all arrivals. Therefore the report gives
the measure together with the seconds of arrivals.

batch_size: a batch of this size, repeated. length: a throughput run for each PROMPT/OUTPUT. The report of an
engine's sweep is written after every value, so an interrupted sweep keeps its finished values.

The other kinds are SARATHI's curves, from the engine's scheduler and the op costs of a known device, without
running a model. pd_ratio: gain of chunked prefill by P:D ratio and chunk size. tiles: tile quantization.
policies: request-level, Orca's best and worst case, prefill-first, hybrid, decode-maximal.
"""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from jaxflow.bench.engine import latency, sarathi, serve, steps, throughput
from jaxflow.bench.report import machine, plot
from jaxflow.bench.report import requests as report
from jaxflow.bench.workload import flags as options
from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.grpc_backend import GrpcBackend
from jaxflow.bench.workload.lengths import Item, WorkloadError
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.engine.deferred import wait_until_compiled
from jaxflow.engine.heap import freeze_heap
from jaxflow.llm import LLM
from jaxflow.model.cost import DEVICES
from serving.client import Client

SIMULATED = ("pd_ratio", "tiles", "policies")
LIMIT_MS = 200.0  # limit of the mean latency per token, NanoFlow §6.3
Keep = Callable[[Mapping[str, Any]], None]


def define_flags() -> None:
    flags.DEFINE_enum(
        "sweep",
        None,
        ["rate", "batch_size", "length", *SIMULATED],
        "What varies from run to run. The kinds after length are simulated, without a model.",
        required=True,
    )
    flags.DEFINE_list(
        "values",
        None,
        "Values of the sweep: numbers; PROMPT/OUTPUT for length. Default for simulated kinds: the "
        "paper's values.",
    )
    flags.DEFINE_string(
        "target", None, "For rate: address host:port of a running server; default: an engine in this process."
    )
    flags.DEFINE_boolean(
        "compare_sequential",
        False,
        "For rate: also run each rate with only the sequential plan, first, in the same engine.",
    )
    flags.DEFINE_integer("num_iters", 3, "For batch_size: measured batches per size.", lower_bound=1)
    flags.DEFINE_string("output_png", None, "Chart file of the sweep (.png, .svg, .pdf).")
    flags.DEFINE_list("chunk_sizes", ["128", "256", "512"], "For pd_ratio: chunk sizes in tokens.")
    flags.DEFINE_integer(
        "slots", 18, "For pd_ratio, tiles, policies: requests that run at the same time.", lower_bound=2
    )
    flags.DEFINE_integer(
        "length",
        1024,
        "For pd_ratio, policies: prompt and output tokens of a request together.",
        lower_bound=2,
    )
    flags.DEFINE_integer(
        "tile_rows", 128, "For pd_ratio, tiles, policies: rows of a GEMM tile.", lower_bound=1
    )
    options.define_engine(model="", enable_prefix_caching=False)
    options.define_workload()
    options.define_report()


def rates(
    llm: LLM,
    items: Sequence[Item],
    values: Sequence[float],
    *,
    seed: int = 0,
    slo: Mapping[str, float] | None = None,
    keep: Keep = lambda sweep: None,
    compare_sequential: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run requests of the same lengths at each rate and return the sweep.

    Each run has token ids of its own, so that no run finds the prompts of another in the prefix cache.

    keep: receives the unfinished sweep after each rate. compare_sequential: also run with only the sequential
    plan, if the engine has another plan. kwargs: of `throughput.measure`.
    """
    found: dict[str, Any] = {"kind": "rate", "compare_sequential": compare_sequential, "points": []}
    seeds = itertools.count(seed)
    for rate in values:
        arriving = workload.poisson_arrivals(items, rate, seed)

        def once(arriving: Sequence[Item] = arriving) -> dict[str, Any]:
            return throughput.measure(llm, arriving, arrive=True, seed=next(seeds), slo=slo, **kwargs)

        point = throughput.compared(llm, once) if compare_sequential else once()
        found["points"].append({"request_rate": rate, "arrivals_s": arriving[-1].arrival_s, **point})
        found["highest_rate"] = highest_rate(found["points"])
        keep(found)
    return found


def highest_rate(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the highest rate up to which all measured rates have at most `LIMIT_MS` mean latency per token.

    The result is None if no rate meets the limit. The result has rates for all requests, for the requests in
    the later half of the arrivals, and, if measured, for the sequential plan.
    """

    def highest(of: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> float | None:
        found = None
        for point in sorted(points, key=lambda point: point["request_rate"]):
            one = of(point)
            if one is None or one["mean_normalized_latency_ms"] > LIMIT_MS:
                break
            found = point["request_rate"]
        return found

    result = {
        "limit_ms": LIMIT_MS,
        "requests_per_s": highest(lambda p: p),
        "later_half": highest(lambda p: p["later_half"]),
    }
    if all("sequential" in point for point in points):
        result["sequential"] = highest(lambda p: p["sequential"])
    return result | {"least_arrivals_s": min(point["arrivals_s"] for point in points)}


async def server_rates(
    client: Client,
    items: Sequence[Item],
    vocab_size: int,
    values: Sequence[float],
    *,
    seed: int = 0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run requests of the same lengths at each rate on a running server. kwargs: of `serve.measure`.

    Each rate has token ids of its own, so that no rate finds the prompts of another in the prefix cache.
    """
    points = []
    for i, rate in enumerate(values):
        arriving = workload.poisson_arrivals(items, rate, seed)
        points.append(
            {
                "request_rate": rate,
                **await serve.measure(GrpcBackend(client), arriving, vocab_size, seed=seed + i, **kwargs),
            }
        )
    return {"kind": "rate", "points": points}


def batch_sizes(
    llm: LLM,
    values: Sequence[int],
    input_len: int,
    output_len: int,
    *,
    iterations: int,
    warm_up: int = 0,
    seed: int = 0,
    keep: Keep = lambda sweep: None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run batches of each size, with token ids of their own. keep: as in `rates`. Other arguments: of
    `latency.measure`.
    """
    found: dict[str, Any] = {"kind": "batch_size", "points": []}
    seeds = itertools.count(seed, warm_up + iterations)  # a batch has the seed after that of the batch before
    for size in values:
        point = latency.measure(
            llm,
            size,
            input_len,
            output_len,
            iterations=iterations,
            warm_up=warm_up,
            seed=next(seeds),
            **kwargs,
        )
        found["points"].append({"batch_size": size, **point})
        keep(found)
    return found


def lengths(
    llm: LLM,
    values: Sequence[tuple[int, int]],
    number: int | None = None,
    *,
    seed: int = 0,
    keep: Keep = lambda sweep: None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Run requests of each (prompt, output) length, all at once, with token ids of their own.

    number: requests per length; None means the protocol's number. keep: as in `rates`. kwargs: of
    `throughput.measure`.
    """
    found: dict[str, Any] = {"kind": "length", "points": []}
    for i, (prompt, output) in enumerate(values):
        items = workload.constant(
            number or options.protocol_requests("constant", prompt, output), prompt, output
        )
        described = {
            "input_len": prompt,
            "output_len": output,
            "workload": options.describe(items, "constant"),
        }
        found["points"].append(described | throughput.measure(llm, items, seed=seed + i, **kwargs))
        keep(found)
    return found


def _simulated(kind: str) -> dict[str, Any]:
    f = flags.FLAGS
    setting = sarathi.SarathiSetting(
        tile_rows=f.tile_rows, slots=f.slots, length=f.length, requests=5 * f.slots
    )
    if f.optimal_device:
        setting = dataclasses.replace(setting, rates=DEVICES[f.optimal_device].rates)
    if f.model:
        config = serve.find_model_config(f.model)
        if config is None:
            raise WorkloadError(
                f"--model {f.model}: accepted is a shipped config's name or the path of a configuration"
            )
        setting = dataclasses.replace(setting, model=config)
    sizes = _numbers("chunk_sizes", int)
    if kind == "pd_ratio":
        return sarathi.gain_curves(setting, sizes, _numbers("values", float) if f.values else sarathi.RATIOS)
    if kind == "tiles":
        return (
            sarathi.tile_curve(setting, _numbers("values", int)) if f.values else sarathi.tile_curve(setting)
        )
    return sarathi.policy_table(setting)


def _measured(kind: str) -> dict[str, Any]:
    f = flags.FLAGS
    values = _values(kind)
    common: dict[str, Any] = {"seed": f.workload_seed, "device": f.optimal_device}
    slo = report.parse_goodput(f.goodput)
    config = engine_config_from_flags()
    if kind == "rate":
        options.check_workload(options.longest(config))
    config = dataclasses.replace(config, max_waiting=max(config.max_waiting, f.num_requests or 2000))
    check = steps.check_plans if kind == "rate" and f.compare_sequential else None
    with LLM.from_config(config, check_plans=check) as llm:
        wait_until_compiled()
        freeze_heap()
        head = {"command_name": "sweep", **throughput.head(llm)}
        common["keep"] = lambda sweep: machine.keep(f.output_json, head | sweep)
        if kind == "batch_size":
            found = batch_sizes(
                llm, values, f.input_len, f.output_len, iterations=f.num_iters, warm_up=1, **common
            )
        elif kind == "length":
            found = lengths(llm, values, f.num_requests, progress=True, **common)
        else:
            items, head["workload"] = options.items_from_flags(llm.max_model_len)
            found = rates(
                llm, items, values, slo=slo, compare_sequential=f.compare_sequential, progress=True, **common
            )
    return head | found


async def _served() -> dict[str, Any]:
    f = flags.FLAGS
    values, slo = _values("rate"), report.parse_goodput(f.goodput)
    async with Client(f.target) as client:
        await client.wait_until_ready(60.0)
        served = await client.model()
        items, _ = options.items_from_flags(served.max_model_len)
        found = await server_rates(
            client, items, served.vocab_size, values, seed=f.workload_seed, slo=slo, progress=True
        )
    return {"model": served.name, **machine.describe()} | found


def _values(kind: str) -> list[Any]:
    """Return --values in the form that the sweep's kind needs, before a model is loaded. Raises:
    WorkloadError."""
    given = flags.FLAGS.values
    if not given:
        raise WorkloadError(
            f"--values: required for --sweep {kind}; accepted are numbers, or PROMPT/OUTPUT for length"
        )
    if kind == "length":
        return [_shape(value) for value in given]
    return _numbers("values", int if kind == "batch_size" else float)


def _numbers[T: (int, float)](flag: str, kind: type[T]) -> list[T]:
    """Return the numbers of a list flag.

    Raises: WorkloadError for a number that is not positive and finite.
    """
    given: list[str] = flags.FLAGS[flag].value or []
    try:
        numbers = [kind(value) for value in given]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise WorkloadError(
            f"--{flag} {','.join(given)}: accepted are positive, finite "
            f"numbers{', integers only' if kind is int else ''}"
        )
    return numbers


def _shape(value: str) -> tuple[int, int]:
    prompt, _, output = value.partition("/")
    if not (prompt.isdecimal() and output.isdecimal() and int(prompt) and int(output)):
        raise WorkloadError(f"--values {value!r}: accepted are PROMPT/OUTPUT tokens, for example 1024/512")
    return int(prompt), int(output)


def run() -> dict[str, Any]:
    """Run the command and return its report.

    Raises: ConfigError, WorkloadError for invalid flags; RequestFailed from a server.
    """
    f = flags.FLAGS
    if f.sweep in SIMULATED:
        result = machine.describe() | _simulated(f.sweep)
    else:
        result = asyncio.run(_served()) if f.sweep == "rate" and f.target else _measured(f.sweep)
    result = {"command_name": "sweep", **result}
    for row in [*table(result), *_summary(result)]:
        print(row)
    if f.output_png:
        plot.save(result, f.output_png)
    return result


def table(sweep: Mapping[str, Any]) -> list[str]:
    """Return the sweep as lines of text."""
    kind = sweep["kind"]
    if kind == "pd_ratio":
        gains = sweep["gain_by_chunk_size"]
        columns = ["P:D", *(f"C={size}" for size in gains)]
        rows = [
            [f"{ratio:g}", *(f"{gains[size][i]:.3f}" for size in gains)]
            for i, ratio in enumerate(sweep["ratios"])
        ]
    elif kind == "tiles":
        columns = ["tokens", "step (ms)"]
        rows = [
            [str(n), f"{ms:.2f}"] for n, ms in zip(sweep["prefill_tokens"], sweep["step_ms"], strict=True)
        ]
    elif kind == "policies":
        columns = ["length, B", *sweep["rows"][0]["token_throughput"]]
        rows = [
            [f"{r['length']}, {r['slots']}", *(f"{v:.0f}" for v in r["token_throughput"].values())]
            for r in sweep["rows"]
        ]
    else:
        columns = [
            kind,
            "tok/s",
            "output tok/s",
            "of optimal",
            "of bound",
            "TTFT ms",
            "TPOT ms",
            "p99 TPOT",
            "norm. ms",
        ]
        rows = [_row(kind, point) for point in sweep["points"]]
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (columns, *rows)
    ]


def _summary(sweep: Mapping[str, Any]) -> list[str]:
    """Return the summary of a sweep of rates as lines of text."""
    if "highest_rate" not in sweep:
        return []
    found = sweep["highest_rate"]
    labels = {
        "requests_per_s": "all requests",
        "later_half": "the later half",
        "sequential": "with the sequential plan",
    }
    rates = ", ".join(
        f"{'none' if found[key] is None else format(found[key], 'g')} ({of})"
        for key, of in labels.items()
        if key in found
    )
    limit, seconds = (
        f"{found['limit_ms']:g} ms mean latency per token",
        f"at least {found['least_arrivals_s']:.0f} s of arrivals",
    )
    same = sweep["compare_sequential"] and "sequential" not in found
    return [
        f"Highest rate with at most {limit}, with {seconds}: {rates} requests/s",
        *([throughput.SAME] if same else []),
    ]


def _row(kind: str, point: Mapping[str, Any]) -> list[str]:
    varied = (
        f"{point['input_len']}/{point['output_len']}"
        if kind == "length"
        else f"{point[{'rate': 'request_rate'}.get(kind, kind)]:g}"
    )
    reached = point.get("fraction_of_optimal"), point.get("fraction_of_bound")
    numbers = ("mean_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_normalized_latency_ms")
    return [
        varied,
        f"{point['total_token_throughput']:.1f}",
        f"{point['output_throughput']:.1f}",
        *("-" if fraction is None else f"{fraction:.2%}" for fraction in reached),
        *(f"{point[key]:.2f}" for key in numbers),
    ]
